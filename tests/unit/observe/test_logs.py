"""Every line says what it is about."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from nereus_common.observe import logs

pytestmark = pytest.mark.fast


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    for handler in set(root.handlers) - set(handlers):
        handler.close()
    root.handlers[:] = handlers
    root.setLevel(level)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_line_in_a_file_is_one_json_object_with_its_subject(tmp_path: Path) -> None:
    logs.configure("training0", file=tmp_path / "d" / "l", stream=io.StringIO())
    with logs.about(job="demo", step=3):
        try:
            raise ValueError("two\nlines")
        except ValueError:
            logging.getLogger("x").exception("bad %s", "day", extra={"bytes": 7})
    (line,) = (tmp_path / "d" / "l").read_text().splitlines()
    got = json.loads(line)
    assert {
        "level": "error",
        "process": "training0",
        "message": "bad day",
        "job": "demo",
        "step": "3",
    }.items() <= got.items()
    assert got["bytes"] == 7
    assert "ValueError: two\nlines" in got["error"]


def test_a_terminal_gets_readable_lines_and_a_pipe_json() -> None:
    for stream in (Terminal(), io.StringIO()):
        logs.configure("controller", stream=stream)
        with logs.about(job="demo"):
            logging.getLogger("x").warning("late")
        text = stream.getvalue()
        assert ("controller: late  job=demo" in text) if stream.isatty() else json.loads(text)["job"] == "demo"


async def test_subjects_nest_and_stay_within_their_task() -> None:
    async def work(unit: str) -> dict[str, str]:
        with logs.about(unit=unit):
            await asyncio.sleep(0)
            return dict(logs.subject())

    with logs.about(job="demo"):
        assert tuple(await asyncio.gather(work("a"), work("b"))) == tuple({"job": "demo", "unit": u} for u in "ab")
        assert logs.subject() == {"job": "demo"}
    assert logs.subject() == {}


async def test_a_subject_holds_to_the_end_of_its_task_only() -> None:
    async def work() -> dict[str, str]:
        logs.about_from_here(unit="a")
        await asyncio.sleep(0)
        return dict(logs.subject())

    with logs.about(job="demo"):
        assert await asyncio.create_task(work()) == {"job": "demo", "unit": "a"}
        assert logs.subject() == {"job": "demo"}


def test_a_subject_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="jobb"), logs.about(jobb=1):
        pass
