"""A rank's state where it lies: offered, filled, dropped and digested without a copy of it.

Storage is taken when a tensor is first written and given back when it is dropped; tensor objects, and whatever shares
their storage, stay.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from nereus_common.checkpoints.state import PARAMETERS
from nereus_common.core.errors import InvalidInput, StaleVersion, VerificationFailed
from nereus_common.core.ids import TensorName
from nereus_common.core.transfer import Box
from nereus_common.engines.torch_model.live import Index, Served, free, materialize, served, write
from nereus_common.engines.torch_model.ownership import owned_here
from nereus_common.engines.torch_model.shards import Shard
from nereus_common.engines.torch_model.stage import StageModel
from nereus_common.state.boxes import are_disjoint, coalesce, difference, elements
from nereus_common.state.digest import combine, digest_box
from nereus_common.transport.base import Raw

NOTHING = -1


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """This rank's `box` of a logical tensor of `shape`, in `tensor`. `owned`: it counts in the unit's digest."""

    kind: str
    shape: tuple[int, ...]
    box: Box
    tensor: Tensor
    storage_bytes: int
    owned: bool


class LiveState:
    """`parts` by the names of their logical tensors. `version`: of what is here, which may be parts only; NOTHING when
    it is none. Starts without storage."""

    def __init__(self, who: str, parts: Mapping[TensorName, Part]) -> None:
        self._who = who
        self._parts = parts
        self._here: dict[TensorName, tuple[Box, ...]] = {}
        self.version = NOTHING
        for part in self._parts.values():
            free(part.tensor)

    @property
    def whole(self) -> bool:
        """Whether every element of every tensor is here."""
        return not any(self._missing(name) for name in self._parts)

    def boxes(self) -> dict[TensorName, tuple[Box, ...]]:
        """What this rank holds when it is whole; tensors of which it holds nothing are left out."""
        return {name: (part.box,) for name, part in self._parts.items() if part.box.elements}

    def materialize(self) -> None:
        """Storage for everything, for whoever fills it by other means; `replaced` says when that is done."""
        for part in self._parts.values():
            materialize(part.tensor, part.storage_bytes)

    def replaced(self, version: int) -> None:
        """Everything is here, and is `version`."""
        self.version = version
        self._here = self.boxes()

    def served(self) -> dict[TensorName, list[tuple[Box, Served]]]:
        """Every box that is here, as arrays over the live storage."""
        return {
            name: [(box, served(self._tensor(name)[self._within(name, box)])) for box in region]
            for name, region in self._here.items()
        }

    def lacking(self, version: int, asked: Sequence[tuple[TensorName, Box]]) -> list[tuple[Box, ...]]:
        """Of each box that is asked for, what is not here yet. Parts of another version are forgotten first.

        InvalidInput for a box that this rank does not hold, and for elements that are asked for twice.
        """
        by_name: dict[TensorName, list[Box]] = {}
        for name, box in asked:
            if name not in self._parts or not _inside(self._parts[name].box, box):
                raise InvalidInput(f"{self._who} does not hold {name}{box}", field="transfers")
            by_name.setdefault(name, []).append(box)
        for name, boxes in by_name.items():
            if not are_disjoint(boxes):
                raise InvalidInput(f"{self._who} is to pull elements of {name} twice", field="transfers")
        if version != self.version:
            self.version, self._here = version, {}
        return [difference((box,), self._here.get(name, ())) for name, box in asked]

    def put(self, tensor: TensorName, box: Box, data: Raw) -> None:
        """A transport's sink: one verified piece, into its place."""
        part = self._parts[tensor]
        materialize(part.tensor, part.storage_bytes)
        write(part.tensor[self._within(tensor, box)], data)
        self._here[tensor] = (*self._here.get(tensor, ()), box)

    def settle(self) -> None:
        """Join the boxes that pieces left behind."""
        self._here = {name: coalesce(region) for name, region in self._here.items()}

    def check_whole(self) -> None:
        """VerificationFailed names a tensor of which something never came."""
        wrong = [name for name in self._parts if self._missing(name)]
        if wrong:
            raise VerificationFailed(
                f"{self._who}: {len(wrong)} tensors of version {self.version} are not whole; {wrong[0]} lacks "
                f"{elements(self._missing(wrong[0]))} elements",
                remedy="the transfer program must cover every held box exactly once",
                tensor=wrong[0],
            )
        self.materialize()  # what is empty here may be padded where it is gathered

    def drop(self, tensors: Iterable[TensorName]) -> None:
        """Give the storage of these tensors back. What is not held here, or is gone already, is passed over."""
        for name in tensors:
            if name in self._parts:
                free(self._parts[name].tensor)
                self._here.pop(name, None)

    def digests(self) -> dict[str, int]:
        """By kind, of what this rank owns within its unit; those of all ranks add up to the unit's."""
        if not self.whole:
            raise StaleVersion(f"{self._who} holds only parts of version {self.version}")
        found = dict.fromkeys((part.kind for part in self._parts.values()), 0)
        owned = [(name, part) for name, part in self._parts.items() if part.owned and part.box.elements]
        with ThreadPoolExecutor(torch.get_num_threads(), "nereus-digest") as threads:
            for (_, part), digest in zip(owned, threads.map(_digest, owned), strict=True):
                found[part.kind] = combine((found[part.kind], digest))
        return found

    def _tensor(self, name: TensorName) -> Tensor:
        return self._parts[name].tensor

    def _within(self, name: TensorName, box: Box) -> Index:
        """Where `box` lies in the tensor held here."""
        return box.relative_to(self._parts[name].box).slices or ...

    def _missing(self, name: TensorName) -> tuple[Box, ...]:
        box = self._parts[name].box
        return difference((box,), self._here.get(name, ())) if box.elements else ()


def weight_parts(model: StageModel, shards: Iterable[Shard]) -> dict[TensorName, Part]:
    """The parameters of a rank."""
    return {shard.name: part_of(PARAMETERS, shard, shard.local, owned_here(model, shard)) for shard in shards}


def part_of(kind: str, shard: Shard, tensor: Tensor, owned: bool) -> Part:
    """A tensor cut as `shard` is."""
    return Part(kind, shard.shape, shard.box, tensor, tensor.untyped_storage().nbytes(), owned)


def _digest(named: tuple[TensorName, Part]) -> int:
    name, part = named
    return digest_box(name, part.shape, part.box, served(part.tensor)[...])


def _inside(outer: Box, box: Box) -> bool:
    return len(outer.start) == len(box.start) and outer.contains(box)
