"""A checkpoint's model as a plain Hugging Face folder, for `transformers`, vLLM or the next job."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from nereus_common.checkpoints.casting import DTYPES, cast
from nereus_common.checkpoints.fields import read_bytes
from nereus_common.checkpoints.reader import REMEDY, CheckpointReader
from nereus_common.checkpoints.safetensors_file import Entry, write_safetensors
from nereus_common.core.errors import Conflict, InvalidInput, VerificationFailed
from nereus_common.core.ids import TensorName
from nereus_common.core.transfer import Box
from nereus_common.state.digest import combine, digest_box

SHARD_BYTES = 5_000_000_000
"""Files of this size at most, as Hugging Face's own tools write them."""
METADATA = {"format": "pt"}
"""transformers refuses safetensors that do not say so."""
COPIED = (
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "vocab.*",
    "merges.txt",
    "*.model",
)
"""What stands beside config and weights in a model folder."""
SCORE = "score.weight"


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written: `bytes` of tensors in `files`."""

    folder: Path
    step: int
    dtype: str
    files: tuple[str, ...]
    bytes: int


def export(
    checkpoint: Path, out: Path, *, model: str = "actor", dtype: str = "", shard_bytes: int = SHARD_BYTES
) -> Exported:
    """Write `model` of a complete checkpoint to the new folder `out`, whole or not at all, one tensor in memory at a
    time. `dtype` "": that of the folder the model came from.

    Conflict when `out` exists; InvalidInput for a dtype that is not one of DTYPES or too narrow; NotFound and
    VerificationFailed for a checkpoint that is not there or is damaged.
    """
    if out.exists():
        raise Conflict(f"{out} exists", remedy="name a folder that does not", field="out")
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        with CheckpointReader(checkpoint, model) as reader:
            source = _source_folder(reader, model)
            config = json.loads(read_bytes(source / "config.json"))
            chosen = _chosen_dtype(dtype, config)
            sizes = _write_weights(reader, partial, chosen, shard_bytes)
            _write_rest(source, partial, _config(config, chosen, SCORE in reader.index.tensors))
        os.rename(partial, out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return Exported(out, reader.manifest.step, chosen, tuple(sizes), sum(sizes.values()))


def _source_folder(reader: CheckpointReader, model: str) -> Path:
    spec: Any = reader.manifest.spec.get("models")
    entry = spec.get(model) if isinstance(spec, dict) else None
    path = entry.get("path") if isinstance(entry, dict) else None
    if not isinstance(path, str):
        raise VerificationFailed(f"the manifest's spec names no path of {model}", field=f"spec.models.{model}.path")
    return Path(path)


def _chosen_dtype(asked: str, config: Mapping[str, Any]) -> str:
    chosen = asked or str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    if chosen not in DTYPES:
        raise InvalidInput(f"dtype is {chosen!r}", remedy=f"one of {', '.join(DTYPES)}", field="dtype")
    return chosen


def _write_weights(reader: CheckpointReader, folder: Path, dtype: str, shard_bytes: int) -> dict[str, int]:
    """The parameters, in one file or several with an index; bytes of tensors by file. Verified while they pass."""
    entries = [Entry(name, dtype, reader.index.tensors[name].shape) for name in reader.index.updates]
    shards = _shards(entries, shard_bytes)
    digests: list[int] = []
    for file, part in shards.items():
        write_safetensors(folder / file, part, _arrays(reader, part, digests), METADATA)
    if combine(digests) != reader.entry.digests.values[0]:
        raise VerificationFailed("the parameters read are not those that were saved", remedy=REMEDY)
    sizes = {file: sum(entry.bytes for entry in part) for file, part in shards.items()}
    if len(shards) > 1:
        where = {entry.name: file for file, part in shards.items() for entry in part}
        content = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": where}
        (folder / "model.safetensors.index.json").write_text(json.dumps(content, indent=2))
    return sizes


def _shards(entries: Sequence[Entry], limit: int) -> dict[str, list[Entry]]:
    """File → entries, in order; a file is closed before it would exceed `limit`."""
    groups: list[list[Entry]] = [[]]
    for entry in entries:
        if groups[-1] and sum(one.bytes for one in groups[-1]) + entry.bytes > limit:
            groups.append([])
        groups[-1].append(entry)
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {f"model-{number:05d}-of-{len(groups):05d}.safetensors": group for number, group in enumerate(groups, 1)}


def _arrays(reader: CheckpointReader, entries: Sequence[Entry], digests: list[int]) -> Iterator[NDArray[Any]]:
    for entry in entries:
        name, box = TensorName(entry.name), Box.whole(entry.shape)
        array = reader.read(name, entry.shape, box)
        digests.append(digest_box(name, entry.shape, box, array))
        yield cast(array, entry.dtype, name)


def _config(config: Mapping[str, Any], dtype: str, scores: bool) -> dict[str, Any]:
    """The source's config; a score head that was put on a causal language model makes it a classifier."""
    found = {key: value for key, value in config.items() if key != "torch_dtype"} | {"dtype": dtype}
    if scores:
        names = [str(name).replace("ForCausalLM", "ForSequenceClassification") for name in config["architectures"]]
        found |= {"architectures": names, "num_labels": 1}
    return found


def _write_rest(source: Path, folder: Path, config: Mapping[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    for pattern in COPIED:
        for path in source.glob(pattern):
            if path.is_file():
                shutil.copyfile(path, folder / path.name)
