"""What is inside a unit: how one replica of a model is cut over its ranks."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple, Self

from nereus_common.core.errors import InvalidPlan

_PATTERN = re.compile(r"tp(\d+)\.pp(\d+)(?:\(([\d+]+)\))?\.fs(\d+)(?:\.ep(\d+))?")


class Coordinate(NamedTuple):
    """A rank's place in its unit, outermost first; the order in which a unit's ranks are numbered."""

    pp: int
    fs: int
    tp: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Degrees inside one unit, written `tp2.pp2(16+14).fs2`; ep divides the fs × tp ranks of a pipeline stage.

    `split` holds the number of layers on each pipeline stage; None means as even as possible, the earlier stages
    taking what does not divide.
    """

    tp: int = 1
    pp: int = 1
    fs: int = 1
    ep: int = 1
    split: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "fs", "ep"):
            if getattr(self, name) < 1:
                raise InvalidPlan(f"layout.{name} is {getattr(self, name)}", remedy="degrees start at 1", field=name)
        if (self.tp * self.fs) % self.ep:
            raise InvalidPlan(
                f"ep{self.ep} does not divide the {self.fs * self.tp} ranks (fs × tp) of a pipeline stage",
                remedy="choose an ep that divides fs × tp",
                field="ep",
            )
        if self.split is not None and (len(self.split) != self.pp or min(self.split) < 1):
            raise InvalidPlan(
                f"layer split {self.split} does not give each of {self.pp} pipeline stages at least one layer",
                remedy="name one positive layer count per stage",
                field="split",
            )

    @property
    def ranks(self) -> int:
        return self.tp * self.pp * self.fs

    def coordinate(self, rank: int) -> Coordinate:
        """The place of `rank` (0 ≤ rank < ranks)."""
        if not 0 <= rank < self.ranks:
            raise InvalidPlan(f"{self} has no rank {rank}", field="rank")
        stage, inner = divmod(rank, self.fs * self.tp)
        shard, tensor = divmod(inner, self.tp)
        return Coordinate(stage, shard, tensor)

    def rank(self, place: Coordinate) -> int:
        return (place.pp * self.fs + place.fs) * self.tp + place.tp

    def layer_counts(self, layers: int) -> tuple[int, ...]:
        """Layers on each pipeline stage; their sum is `layers`, checked."""
        if self.split is None:
            even, left = divmod(layers, self.pp)
            counts = tuple(even + (stage < left) for stage in range(self.pp))
        else:
            counts = self.split
        if sum(counts) != layers or min(counts) < 1:
            raise InvalidPlan(
                f"{self} puts {'+'.join(map(str, counts))} layers on its stages; the model has {layers}",
                remedy="the split must sum to the model's layers, with at least one on each stage",
                field="split",
            )
        return counts

    def layer_ranges(self, layers: int) -> tuple[range, ...]:
        counts = self.layer_counts(layers)
        return tuple(range(sum(counts[:stage]), sum(counts[: stage + 1])) for stage in range(self.pp))

    def __str__(self) -> str:
        split = "" if self.split is None else f"({'+'.join(map(str, self.split))})"
        ep = "" if self.ep == 1 else f".ep{self.ep}"
        return f"tp{self.tp}.pp{self.pp}{split}.fs{self.fs}{ep}"

    @classmethod
    def parse(cls, text: str) -> Self:
        match = _PATTERN.fullmatch(text.strip())
        if match is None:
            raise InvalidPlan(f"layout {text!r} is not understood", remedy="write tp2.pp1.fs2", field="layout")
        tp, pp, split, fs, ep = match.groups()
        cut = tuple(int(part) for part in split.split("+") if part) if split else None
        return cls(int(tp), int(pp), int(fs), int(ep or 1), cut)


def parse_replicated(text: str) -> tuple[Layout, int]:
    """`tp2.pp1.fs2 x3` → (layout, 3); no suffix means one replica."""
    layout, _, replicas = text.partition(" x")
    if replicas and not replicas.strip().isdigit():
        raise InvalidPlan(f"replicas in {text!r} are not a number", remedy="write tp2.pp1.fs2 x3", field="layout")
    return Layout.parse(layout), int(replicas or 1)
