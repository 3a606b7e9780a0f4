"""metrics.jsonl and TensorBoard's event files, read back from the disk."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tensorboardX.proto.event_pb2 import Event, SessionLog

from nereus_common.observe.metrics.jsonl import NAME, JsonLinesSink
from nereus_common.observe.metrics.tensorboard import FOLDER, TensorBoardSink

pytestmark = pytest.mark.fast


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / NAME).read_text().splitlines()]


def test_a_line_is_readable_as_soon_as_it_is_written(tmp_path: Path) -> None:
    sink = JsonLinesSink(tmp_path / "job")
    sink.write(0, {"loss": 0.5, "seconds.total": 2.0}, 100.0)
    assert lines(tmp_path / "job") == [{"step": 0, "time": 100.0, "loss": 0.5, "seconds.total": 2.0}]
    sink.close()


def test_every_line_is_strict_json_also_when_a_value_is_not_finite(tmp_path: Path) -> None:
    sink = JsonLinesSink(tmp_path)
    sink.write(0, {"loss": math.nan, "grad_norm": math.inf, "kl": 0.0}, 1.0)
    sink.close()
    text = (tmp_path / NAME).read_text()
    found = json.loads(text, parse_constant=lambda constant: pytest.fail(f"{constant} is no JSON"))
    assert (found["loss"], found["grad_norm"], found["kl"]) == (None, None, 0.0)


def test_no_step_stands_twice_after_a_resume(tmp_path: Path) -> None:
    first = JsonLinesSink(tmp_path)
    for step in range(5):
        first.write(step, {"loss": 1.0}, float(step))
        first.write(step + 1, {"evaluation.greedy.mean": 0.1}, step + 0.5)
    first.close()
    resumed = JsonLinesSink(tmp_path)
    resumed.rewind(3, 10.0)
    for step in range(3, 5):
        resumed.write(step, {"loss": 2.0}, 10.0 + step)
    resumed.close()
    found = lines(tmp_path)
    assert [(line["step"], line["loss"]) for line in found if "loss" in line] == [
        (0, 1),
        (1, 1),
        (2, 1),
        (3, 2),
        (4, 2),
    ]
    assert [line["step"] for line in found if "loss" not in line] == [1, 2, 3]


def test_a_line_that_a_crash_cut_short_is_dropped_on_resume(tmp_path: Path) -> None:
    (tmp_path / NAME).write_text('{"step": 0, "time": 1.0, "loss": 1.0}\n{"step": 1, "time": 2.0, "lo')
    sink = JsonLinesSink(tmp_path)
    sink.rewind(2, 3.0)
    sink.write(2, {"loss": 3.0}, 3.0)
    sink.close()
    assert [line["step"] for line in lines(tmp_path)] == [0, 2]


def events(folder: Path) -> Iterator[Event]:
    """TFRecord framing: length (8 bytes), its CRC (4), the event, its CRC (4)."""
    for path in sorted((folder / FOLDER).iterdir()):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            yield Event.FromString(data[12 : 12 + length])
            data = data[16 + length :]


def test_tensorboard_finds_each_value_under_its_group_with_step_and_time(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path, 100.0)
    sink.write(7, {"loss": 0.25, "rewards.exact_answer": 0.5}, 123.0)
    told = list(events(tmp_path))  # before it is closed
    sink.close()
    assert told[0].file_version == "brain.Event:2"
    assert (told[1].step, told[1].wall_time) == (7, 123.0)
    assert {value.tag: value.simple_value for value in told[1].summary.value} == {
        "loss": 0.25,
        "rewards/exact_answer": 0.5,
    }


def test_a_full_disk_is_heard_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nereus_common.observe.metrics.tensorboard.secrets.token_hex", lambda length: "x")
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / "events.out.tfevents.100.x").symlink_to("/dev/full")
    sink = TensorBoardSink(tmp_path, 100.0)
    with pytest.raises(OSError, match="No space left"):
        sink.write(0, {"loss": 1.0}, 100.0)
    with pytest.raises(OSError, match="No space left"):
        sink.close()


def test_two_lives_of_a_job_write_two_files_and_the_second_says_where_it_goes_on(tmp_path: Path) -> None:
    for _ in range(2):  # within the same second
        TensorBoardSink(tmp_path, 100.0).close()
    assert len(list((tmp_path / FOLDER).iterdir())) == 2
    sink = TensorBoardSink(tmp_path, 200.0)
    sink.rewind(4, 9.0)
    sink.close()
    last = list(events(tmp_path))[-1]
    assert (last.step, last.session_log.status) == (4, SessionLog.START)
