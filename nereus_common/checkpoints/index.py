"""Which file holds which box: one rank's part of the index, all of it, and the check that nothing lacks."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from nereus_common.checkpoints.fields import FORMAT, Field, box_of, box_to_dict, parse_json, read_bytes
from nereus_common.checkpoints.state import Digests, stored_names
from nereus_common.core.errors import VerificationFailed
from nereus_common.core.ids import TensorName
from nereus_common.core.transfer import Box
from nereus_common.state.architecture import ModelShape
from nereus_common.state.boxes import are_disjoint, difference, elements

INDEX = "index.json"


@dataclass(frozen=True, slots=True)
class Part:
    """`file` holds exactly `box` of the tensor, under the tensor's name."""

    file: str
    box: Box


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One logical tensor, cut into disjoint parts."""

    shape: tuple[int, ...]
    dtype: str
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class ModelIndex:
    """`tensors`: parameters and their moments. `updates`: optimizer updates seen, by parameter."""

    tensors: Mapping[TensorName, StoredTensor]
    updates: Mapping[TensorName, int]

    def to_dict(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "tensors": {name: _stored_to_dict(stored) for name, stored in self.tensors.items()},
            "updates": dict(self.updates),
        }

    @classmethod
    def read(cls, field: Field) -> Self:
        return cls(
            {TensorName(name): _stored_from(one) for name, one in field["tensors"].items()},
            {TensorName(name): count.count for name, count in field["updates"].items()},
        )


@dataclass(frozen=True, slots=True)
class RankFile:
    """What one rank wrote: its file, its bytes, what is in it, and the digests of that."""

    file: str
    bytes: int
    index: ModelIndex
    digests: Digests

    def to_json(self) -> str:
        content = {"file": self.file, "bytes": self.bytes, "digests": self.digests.to_dict()}
        return json.dumps({**self.index.to_dict(), **content}, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str, origin: str) -> Self:
        """The inverse; `origin` says in errors whose answer it is."""
        field = parse_json(Path(origin), text.encode())
        return cls(field["file"].text, field["bytes"].count, ModelIndex.read(field), Digests.read(field["digests"]))


def merge(files: Iterable[RankFile]) -> ModelIndex:
    """One index of all parts; VerificationFailed when two ranks disagree about a tensor."""
    tensors: dict[TensorName, StoredTensor] = {}
    updates: dict[TensorName, int] = {}
    for file in files:
        for name, count in file.index.updates.items():
            _agree(name, "updates", updates.setdefault(name, count), count, file.file)
        for name, mine in file.index.tensors.items():
            known = tensors.get(name, StoredTensor(mine.shape, mine.dtype, ()))
            _agree(name, "shape", known.shape, mine.shape, file.file)
            _agree(name, "dtype", known.dtype, mine.dtype, file.file)
            tensors[name] = StoredTensor(mine.shape, mine.dtype, (*known.parts, *mine.parts))
    return ModelIndex(tensors, updates)


def check_coverage(index: ModelIndex, model: ModelShape) -> None:
    """Every element of every parameter and moment exactly once, every counter; VerificationFailed names what is not."""
    shapes = {name: one.shape for name, one in model.tensors().items()}
    wanted = {name: shape for parameter, shape in shapes.items() for name in stored_names(parameter)}
    _same_names("tensors", index.tensors, wanted)
    _same_names("updates", index.updates, shapes)
    for name, stored in index.tensors.items():
        _agree(name, "shape", stored.shape, wanted[name], INDEX)
        boxes = [part.box for part in stored.parts]
        whole = Box.whole(stored.shape)
        if not all(len(box.start) == len(whole.start) and whole.contains(box) for box in boxes):
            raise _refusal(name, f"a part is not inside shape {stored.shape}")
        if not are_disjoint(boxes):
            raise _refusal(name, f"two of {', '.join(map(str, boxes))} hold the same elements")
        if elements(boxes) != whole.elements:
            lacking = difference((whole,), boxes)
            raise _refusal(name, f"no part holds {', '.join(map(str, lacking))}")


def write_index(folder: Path, index: ModelIndex) -> tuple[Path, str]:
    """The file and its SHA-256; not yet synced to disk."""
    content = json.dumps(index.to_dict(), separators=(",", ":")).encode()
    (folder / INDEX).write_bytes(content)
    return folder / INDEX, hashlib.sha256(content).hexdigest()


def read_index(file: Path, sha256: str) -> ModelIndex:
    """NotFound, or VerificationFailed when it is not the file that was written."""
    content = read_bytes(file)
    if hashlib.sha256(content).hexdigest() != sha256:
        raise VerificationFailed(
            f"{file} is not the file that was written: its SHA-256 is not the manifest's",
            remedy="use another checkpoint",
            field="index_sha256",
        )
    return ModelIndex.read(parse_json(file, content))


def _stored_to_dict(stored: StoredTensor) -> dict[str, Any]:
    parts = [{"file": part.file, **box_to_dict(part.box)} for part in stored.parts]
    return {"shape": list(stored.shape), "dtype": stored.dtype, "parts": parts}


def _stored_from(field: Field) -> StoredTensor:
    parts = tuple(Part(part["file"].text, box_of(part)) for part in field["parts"])
    return StoredTensor(field["shape"].counts, field["dtype"].text, parts)


def _same_names(what: str, found: Mapping[TensorName, Any], wanted: Mapping[TensorName, Any]) -> None:
    for name in wanted.keys() - found.keys():
        raise _refusal(name, f"{what} lacks it")
    for name in found.keys() - wanted.keys():
        raise _refusal(name, f"{what} holds it, and the model has no such tensor")


def _agree(name: TensorName, what: str, known: object, found: object, where: str) -> None:
    if known != found:
        raise _refusal(name, f"its {what} is {found} in {where}, and {known} elsewhere")


def _refusal(name: TensorName, why: str) -> VerificationFailed:
    return VerificationFailed(f"checkpoint of {name}: {why}", tensor=name)
