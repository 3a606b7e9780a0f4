"""Recorded samples are found by step, best first."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from nereus_controller.samples import LAST, read_samples

from nereus_common.core.errors import NotFound
from nereus_common.core.ids import JobId

pytestmark = pytest.mark.fast
JOB = JobId("j")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for step in (1, 3):
        lines = [json.dumps({"position": step, "sample": n, "reward": reward}) for n, reward in enumerate((0.5, 2, 1))]
        (tmp_path / f"step-{step:08}.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "step-00000009.jsonl.new").touch()
    return tmp_path


def test_the_best_come_first_and_each_knows_its_step(folder: Path) -> None:
    found = read_samples(JOB, folder, 1, 2)
    assert [(one["step"], one["sample"], one["reward"]) for one in found] == [(1, 1, 2), (1, 2, 1)]


def test_the_last_step_is_found_without_its_number(folder: Path) -> None:
    assert {one["step"] for one in read_samples(JOB, folder, LAST, 0)} == {3}


def test_a_step_without_samples_says_which_have_some(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"samples of step 2 .*from step 1 to step 3"):
        read_samples(JOB, folder, 2, 0)
    with pytest.raises(NotFound, match=r"no recorded samples \(.*rollouts\.samples is 0"):
        read_samples(JOB, tmp_path / "none", LAST, 0)
