"""What one rank owns, as one safetensors file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from nereus_common.checkpoints.index import ModelIndex, Part, RankFile, StoredTensor
from nereus_common.checkpoints.safetensors_file import Entry, write_safetensors
from nereus_common.checkpoints.state import BoxState, Digests

DTYPE = "float32"
"""Masters and moments are float32 whatever the compute dtype."""


def rank_file_name(rank: int) -> str:
    return f"rank-{rank:04d}.safetensors"


def write_rank_file(folder: Path, rank: int, states: Sequence[BoxState]) -> RankFile:
    """Write the boxes durably into `folder`, over what may be there; blocks. OSError as the file system raises it."""
    name = rank_file_name(rank)
    tensors = [(key, array, state) for state in states for key, array in state.tensors().items()]
    entries = [Entry(key, DTYPE, array.shape) for key, array, _ in tensors]
    size = write_safetensors(folder / name, entries, (array for _, array, _ in tensors))
    index = ModelIndex(
        {key: StoredTensor(state.shape, DTYPE, (Part(name, state.box),)) for key, _, state in tensors},
        {state.name: state.updates for state in states},
    )
    return RankFile(name, size, index, Digests.of(states))
