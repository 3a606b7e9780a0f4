"""A rank's state as checkpoints hold it: copies of what it owns, and the way back into any layout.

All state of a training rank is here: float32 masters, AdamW's moments and update counters. It draws no random numbers,
so there is no generator to save.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from nereus_common.checkpoints.rank_file import write_rank_file
from nereus_common.checkpoints.reader import CheckpointReader
from nereus_common.checkpoints.state import Array, BoxState
from nereus_common.core.errors import NotFound, ResourceExhausted
from nereus_common.engines.torch_model.ownership import owned_here
from nereus_common.engines.torch_model.shards import Shard
from nereus_common.engines.torch_model.stage import StageModel
from nereus_common.engines.training.optimizer import Moments


def owned_states(model: StageModel, shards: Sequence[Shard], moments: Mapping[str, Moments]) -> Iterator[BoxState]:
    """Copies in CPU memory of what this rank owns, one tensor at a time: 3 × 4 bytes per owned element in all."""
    for shard in shards:
        if shard.box.elements and owned_here(model, shard):
            held = moments[shard.name]
            parameter, first, second = (_copied(tensor) for tensor in (shard.local, held.exp_avg, held.exp_avg_sq))
            yield BoxState(shard.name, shard.shape, shard.box, parameter, first, second, int(held.step))


def fill(shards: Sequence[Shard], moments: Mapping[str, Moments], reader: CheckpointReader) -> None:
    """Read every box that this rank holds, owned or not, into its place. Raises what the reader raises."""
    for shard in shards:
        held = moments[shard.name]
        held.step.fill_(reader.updates(shard.name))
        if shard.box.elements:
            state = reader.state(shard.name, shard.shape, shard.box)
            for target, array in (
                (shard.local, state.parameter),
                (held.exp_avg, state.exp_avg),
                (held.exp_avg_sq, state.exp_avg_sq),
            ):
                target.copy_(torch.from_numpy(array))


@dataclass(frozen=True, slots=True)
class _Written:
    version: int
    folder: str
    report: str


class Snapshots:
    """At most one copy of the state, taken on the main thread and written on another. Calls may be repeated."""

    def __init__(self, who: str, rank: int) -> None:
        self._who, self._rank = who, rank
        self._lock = threading.Lock()
        self._version = -1
        self._states: Sequence[BoxState] = ()
        self._written: _Written | None = None

    def take(self, version: int, states: Iterator[BoxState]) -> None:
        """Keep a copy of `version`; an older one that was never written is dropped first.

        ResourceExhausted while another version is being written.
        """
        if version == self._version or (self._written is not None and self._written.version == version):
            return
        if not self._lock.acquire(blocking=False):
            raise ResourceExhausted(
                f"{self._who} still writes its snapshot of version {self._version}", remedy="wait for it"
            )
        try:
            self._drop()
            self._states = tuple(states)
            self._version = version
        finally:
            self._lock.release()

    async def write(self, version: int, folder: str) -> str:
        """Write the copy as this rank's file in `folder`, durably, and drop it; returns the RankFile as JSON.

        NotFound when there is no copy of `version`. When writing fails the copy stays, for another try.
        """
        return await asyncio.to_thread(self._write, version, folder)

    def _write(self, version: int, folder: str) -> str:
        with self._lock:  # a repeat of a call that was given up waits for the first
            if self._written is not None and (self._written.version, self._written.folder) == (version, folder):
                return self._written.report
            if version != self._version:
                raise NotFound(f"{self._who} holds no snapshot of version {version}", remedy="take it first")
            try:
                report = write_rank_file(Path(folder), self._rank, self._states).to_json()
            except OSError as failed:
                raise ResourceExhausted(
                    f"{self._who} cannot write its snapshot of version {version} to {folder}: {failed}",
                    remedy="see that the folder exists here too and has room",
                ) from failed
            self._written = _Written(version, folder, report)
            self._drop()
            return report

    def _drop(self) -> None:
        self._states, self._version = (), -1


def _copied(tensor: Tensor) -> Array:
    array: Array = tensor.to("cpu", copy=True, memory_format=torch.contiguous_format).numpy()
    return array
