"""Reading a Hugging Face checkpoint by slice: a rank touches only the boxes it holds."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from safetensors import safe_open

from nereus_common.core.errors import InvalidInput, NotFound
from nereus_common.core.ids import TensorName
from nereus_common.engines.torch_model.shards import Shard
from nereus_common.state.architecture import SCORE

log = logging.getLogger(__name__)

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def load_shards(folder: Path, wanted: Iterable[Shard], *, new_head: bool = False) -> None:
    """Fill every shard from the folder's safetensors, one file or several with an index, casting to the shard's dtype.

    `new_head`: a score head that the folder lacks starts at zero, for a critic that is to be trained from a language
    model. NotFound when a file is missing; InvalidInput when a tensor is, or has another shape.
    """
    files = _files_of_tensors(folder)
    with ExitStack() as stack:
        opened: dict[str, Any] = {}
        for shard in wanted:
            file = files.get(shard.name, SINGLE if not files else INDEX)
            if file != INDEX and file not in opened:
                opened[file] = stack.enter_context(_open(folder / file))
            if file != INDEX and shard.name in opened[file].keys():  # noqa: SIM118 - no mapping
                _fill(folder / file, opened[file], shard)
            elif new_head and shard.name == SCORE:
                _start_at_zero(folder, shard)
            else:
                raise _lacking(folder / file, shard.name)


def _start_at_zero(folder: Path, shard: Shard) -> None:
    if shard.box.elements:
        log.info("%s has no %s: the head starts at zero", folder, shard.name)
        shard.local.zero_()


def _lacking(path: Path, name: TensorName) -> InvalidInput:
    remedy = "a reward model's folder must hold its trained head, [1, hidden]" if name == SCORE else ""
    return InvalidInput(f"{path} holds no tensor {name}", remedy=remedy, field="model")


def _files_of_tensors(folder: Path) -> dict[str, str]:
    index = folder / INDEX
    if (folder / SINGLE).exists() or not index.exists():
        return {}
    return dict(json.loads(index.read_text())["weight_map"])


def _open(path: Path) -> Any:
    if not path.is_file():
        raise NotFound(f"{path} does not exist", remedy="the model folder must hold safetensors", field="model")
    return safe_open(str(path), framework="pt")


def _fill(path: Path, file: Any, shard: Shard) -> None:
    view = file.get_slice(shard.name)
    shape = tuple(view.get_shape())
    if shape != shard.shape:
        raise InvalidInput(
            f"{path}: {shard.name} has shape {shape}, the model's config asks for {shard.shape}", field="model"
        )
    if shard.box.elements:
        shard.local.copy_(view[shard.box.slices])
