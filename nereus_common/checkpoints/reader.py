"""Reading any box of a trained model from a checkpoint, whatever layout wrote it."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from safetensors import SafetensorError, safe_open

from nereus_common.checkpoints.index import Part, read_index
from nereus_common.checkpoints.manifest import Manifest, read_manifest
from nereus_common.checkpoints.rank_file import DTYPE
from nereus_common.checkpoints.safetensors_file import CODES
from nereus_common.checkpoints.state import Array, BoxState, stored_names
from nereus_common.core.errors import NotFound, VerificationFailed
from nereus_common.core.ids import TensorName
from nereus_common.core.transfer import Box

REMEDY = "the checkpoint is damaged: use another one"


class CheckpointReader:
    """One model of a complete checkpoint; only the elements asked for are read. A context manager.

    Opening raises NotFound (no checkpoint, no such model, no index) and VerificationFailed (damaged, other format).
    """

    def __init__(self, folder: Path, model: str) -> None:
        self.manifest: Manifest = read_manifest(folder)
        self.entry = self.manifest.model(model)
        self._index_file = folder / self.entry.index
        self.index = read_index(self._index_file, self.entry.index_sha256)
        self._files: dict[str, Any] = {}
        self._open = ExitStack()

    def state(self, name: TensorName, shape: tuple[int, ...], box: Box) -> BoxState:
        """A box of a parameter and of its optimizer state. NotFound or VerificationFailed name file and tensor."""
        parameter, exp_avg, exp_avg_sq = (self.read(stored, shape, box) for stored in stored_names(name))
        return BoxState(name, shape, box, parameter, exp_avg, exp_avg_sq, self.updates(name))

    def read(self, name: TensorName, shape: tuple[int, ...], box: Box) -> Array:
        """A box of one stored tensor."""
        stored = self.index.tensors.get(name)
        if stored is None:
            raise NotFound(f"{self._index_file} names no tensor {name}", remedy="is it another model's?", tensor=name)
        if (stored.shape, stored.dtype) != (shape, DTYPE):
            raise VerificationFailed(
                f"{self._index_file}: {name} is {stored.dtype} of shape {stored.shape}, the model's is {shape}",
                remedy="resume with the model that was trained",
                tensor=name,
            )
        found, filled = np.empty(box.shape, np.float32), 0
        for part in stored.parts:
            common = part.box.intersect(box)
            if common is not None:
                found[common.relative_to(box).slices] = self._slice(name, part, common)
                filled += common.elements
        if filled != box.elements:
            raise VerificationFailed(f"{self._index_file}: {name}{box} is not there whole", remedy=REMEDY, tensor=name)
        return found

    def updates(self, name: TensorName) -> int:
        if name not in self.index.updates:
            raise NotFound(f"{self._index_file} counts no updates of {name}", remedy=REMEDY, tensor=name)
        return self.index.updates[name]

    def close(self) -> None:
        self._open.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _slice(self, name: TensorName, part: Part, box: Box) -> Array:
        path = self._index_file.parent / part.file
        try:
            view = self._file(path).get_slice(name)
            shape, dtype = tuple(view.get_shape()), view.get_dtype()
            if (shape, dtype) == (part.box.shape, CODES[DTYPE]):
                values: Array = view[box.relative_to(part.box).slices]
                return values
        except SafetensorError as wrong:
            raise VerificationFailed(f"{path}: {name} cannot be read: {wrong}", remedy=REMEDY, tensor=name) from wrong
        raise VerificationFailed(
            f"{path}: {name} is {dtype} of shape {shape}, the index says {part.box.shape}", remedy=REMEDY, tensor=name
        )

    def _file(self, path: Path) -> Any:
        if path.name not in self._files:
            try:
                self._files[path.name] = self._open.enter_context(safe_open(str(path), framework="np"))
            except OSError as missing:
                raise NotFound(f"{path} cannot be read: {missing}", remedy=REMEDY) from missing
        return self._files[path.name]
