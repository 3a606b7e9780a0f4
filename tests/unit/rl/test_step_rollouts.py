"""A step's rollouts, kept and read again, are the same to the bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from nereus_common.core.errors import InvalidInput, NotFound
from nereus_common.rl.assembly import Completion, Group
from nereus_common.rl.step_rollouts import ScoredGroup, StepRollouts, rollouts_file

pytestmark = pytest.mark.fast


def completion(tokens: tuple[int, ...], versions: tuple[int, ...], mask: tuple[bool, ...] = ()) -> Completion:
    return Completion(
        tokens, tuple(-float(token) / 7 for token in tokens), versions, True, mask, 0.25 if mask else np.nan
    )


def groups(baseline: bool) -> list[ScoredGroup]:
    greedy = completion((9,), (3,)) if baseline else None
    scores = {"exact": 0.5} if baseline else {}
    first = Group(4, (1, 2), (completion((5, 6), (3, 4)), completion((7, 8, 9), (3, -1, 4), (True, False, True))))
    second = Group(5, (3,), (completion((5,), (4,)), completion((6,), (4,))))
    return [
        ScoredGroup(first, {"exact": (1.0, 0.0)}, greedy, scores),
        ScoredGroup(second, {"exact": (0.0, 0.0)}, greedy, scores),
    ]


@pytest.mark.parametrize("baseline", [False, True])
def test_what_is_kept_is_read_again(tmp_path: Path, baseline: bool) -> None:
    rollouts = StepRollouts.of(groups(baseline), 6)
    path = rollouts_file(tmp_path / "rollouts", 3)
    rollouts.save(path)
    again = StepRollouts.load(path)
    for name, column in rollouts.batch.columns().items():
        assert again.batch.columns()[name].tobytes() == column.tobytes(), name
    assert again.next_position == 6
    assert again.scores["exact"].tolist() == [1.0, 0.0, 0.0, 0.0]
    assert (again.baseline is None) is not baseline
    if baseline:
        assert again.baseline_scores["exact"].tolist() == [0.5, 0.5]
        assert [path.name for path in path.parent.iterdir()] == ["step-00000003.npz"]


def test_a_group_is_as_old_as_its_oldest_sampled_token() -> None:
    assert [group.oldest_version for group in groups(False)] == [3, 4]


def test_a_baseline_for_some_groups_only_is_refused() -> None:
    with pytest.raises(InvalidInput, match="1 of 2 groups"):
        StepRollouts.of([groups(True)[0], groups(False)[1]], 6)


def test_a_recording_that_is_not_there_or_something_else_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no rollouts were recorded"):
        StepRollouts.load(tmp_path / "none.npz")
    (tmp_path / "text.npz").write_text("no arrays")
    with pytest.raises(InvalidInput, match=r"text.npz holds no rollouts"):
        StepRollouts.load(tmp_path / "text.npz")
