"""The rollouts of one step with what rewarded them, and the file in which they are kept.

A file is enough to train on again without sampling: it holds the very tokens, log-probs, versions and scores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from nereus_common.core.errors import InvalidInput, NotFound
from nereus_common.rl.assembly import Completion, Group, assemble
from nereus_common.rl.rollouts import RolloutBatch

Scores = Mapping[str, NDArray[np.float32]]


@dataclass(frozen=True, slots=True)
class ScoredGroup:
    """A group as it comes from a unit. `scores`: by reward function, one per completion. `baseline`: the greedy
    response to the same prompt, and its scores, where the algorithm asks for one."""

    group: Group
    scores: Mapping[str, tuple[float, ...]]
    baseline: Completion | None = None
    baseline_scores: Mapping[str, float] = field(default_factory=dict)

    @property
    def oldest_version(self) -> int:
        return min(completion.oldest_version for completion in self.group.completions)


@dataclass(frozen=True, slots=True, eq=False)
class StepRollouts:
    """`batch`: rewards are NaN but for those of environments. `scores` [N] by reward function. `next_position`: the
    first that is still to be consumed. `baseline`: one greedy sequence per group, with its scores [G]."""

    batch: RolloutBatch
    scores: Scores
    next_position: int
    baseline: RolloutBatch | None = None
    baseline_scores: Scores = field(default_factory=dict)

    @classmethod
    def of(cls, groups: Sequence[ScoredGroup], next_position: int) -> Self:
        """InvalidInput when only some of the groups have a baseline."""
        greedy = [Group(one.group.position, one.group.prompt, (one.baseline,)) for one in groups if one.baseline]
        if len(greedy) not in (0, len(groups)):
            raise InvalidInput(f"{len(greedy)} of {len(groups)} groups have a baseline", field="baseline")
        names = tuple(groups[0].scores) if groups else ()
        return cls(
            batch=assemble([one.group for one in groups]),
            scores={name: _column([score for one in groups for score in one.scores[name]]) for name in names},
            next_position=next_position,
            baseline=assemble(greedy) if greedy else None,
            baseline_scores={name: _column([one.baseline_scores[name] for one in groups]) for name in names}
            if greedy
            else {},
        )

    def save(self, path: Path) -> None:
        """Write `path` whole or not at all."""
        arrays: dict[str, Any] = {"next_position": np.array(self.next_position)}
        arrays |= {f"batch.{name}": column for name, column in self.batch.columns().items()}
        arrays |= {f"score.{name}": column for name, column in self.scores.items()}
        if self.baseline is not None:
            arrays |= {f"baseline.{name}": column for name, column in self.baseline.columns().items()}
            arrays |= {f"baseline_score.{name}": column for name, column in self.baseline_scores.items()}
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        with partial.open("wb") as file:
            np.savez(file, **arrays)
        partial.replace(path)

    @classmethod
    def load(cls, path: Path) -> Self:
        """The inverse of `save`; NotFound, and InvalidInput for a file that is something else."""
        try:
            with np.load(path, allow_pickle=False) as file:
                arrays = dict(file)
        except FileNotFoundError as missing:
            raise NotFound(f"no rollouts were recorded in {path}", field="rollouts.replay") from missing
        except (ValueError, OSError) as wrong:
            raise InvalidInput(f"{path} holds no rollouts: {wrong}", field="rollouts.replay") from wrong
        greedy = _below("baseline", arrays)
        return cls(
            batch=RolloutBatch.from_columns(_below("batch", arrays)),
            scores=_below("score", arrays),
            next_position=int(arrays["next_position"]),
            baseline=RolloutBatch.from_columns(greedy) if greedy else None,
            baseline_scores=_below("baseline_score", arrays),
        )


def rollouts_file(folder: Path, step: int) -> Path:
    """Where the rollouts of a step are kept below `folder`."""
    return folder / f"step-{step:08d}.npz"


def _column(values: Sequence[float]) -> NDArray[np.float32]:
    return np.asarray(values, np.float32)


def _below(prefix: str, arrays: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    start = f"{prefix}."
    return {name.removeprefix(start): array for name, array in arrays.items() if name.startswith(start)}
