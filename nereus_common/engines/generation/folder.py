"""A model folder as a source of boxes: for a unit of a model that nobody trains."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from pathlib import Path

import torch
from safetensors import safe_open

from nereus_common.core.errors import NotFound, VerificationFailed
from nereus_common.core.ids import TensorName
from nereus_common.core.transfer import Box
from nereus_common.engines.generation import readback
from nereus_common.transport import PullItem, Sink

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


def read_boxes(folder: Path, items: tuple[PullItem, ...], dtype: torch.dtype, sink: Sink) -> tuple[int, float]:
    """Hand every box to `sink`, rounded to `dtype`; (bytes, seconds). Reads the slices only.

    NotFound names a file or tensor that is missing, VerificationFailed a box with values that are not finite.
    """
    started, moved = time.monotonic(), 0
    for path, wanted in _by_file(folder, items).items():
        with safe_open(path, framework="pt") as file:
            names = set(file.keys())
            for tensor, box in wanted:
                if tensor not in names:
                    raise NotFound(
                        f"{path} has no tensor {tensor}", remedy="give a complete model folder", tensor=tensor
                    )
                values = file.get_slice(tensor)[box.slices].to(dtype)
                if not values.isfinite().all():
                    raise VerificationFailed(f"{path}: {tensor}{box} has values that are not finite", tensor=tensor)
                words = readback.bits(values, dtype)
                sink(tensor, box, words.reshape(-1).view("u1"))
                moved += words.nbytes
    return moved, time.monotonic() - started


def _by_file(folder: Path, items: tuple[PullItem, ...]) -> dict[Path, list[tuple[TensorName, Box]]]:
    index = folder / _INDEX
    places = json.loads(index.read_text())["weight_map"] if index.is_file() else {}
    files: dict[Path, list[tuple[TensorName, Box]]] = defaultdict(list)
    for item in items:
        path = folder / places.get(item.tensor, _SINGLE)
        if not path.is_file():
            raise NotFound(f"{path} does not exist", remedy="give a model folder with safetensors", path=path)
        files[path].append((item.tensor, item.box))
    return files
