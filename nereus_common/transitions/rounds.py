"""An in-place move as rounds of whole tensors: pull a round, journal it, drop its tensors on the old units, go on.

Between rounds a device holds the new share of the tensors that have moved and the old share of the others. Where the
layers lie on pipeline stages, model order would fill one stage's devices before it empties another's, so the order is
chosen: always the tensor after which the fullest device, against the larger of its old and new state, is least full.
Then a device has at most this plus one round landing and one bucket staged.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from nereus_common.core.ids import DeviceId, TensorName
from nereus_common.core.transfer import RankRef, Transfer, TransferProgram
from nereus_common.transitions.needs import BUCKET_BYTES

HeldBytes = Mapping[RankRef, Mapping[TensorName, int]]
"""Bytes of every tensor on every rank of the old units."""


@dataclass(frozen=True, slots=True)
class Round:
    """`tensors`: what old units may drop once the round is durable. `transfers`: per target unit, buckets from 0."""

    number: int
    tensors: tuple[TensorName, ...]
    transfers: Mapping[str, tuple[Transfer, ...]]


def in_place_rounds(
    program: TransferProgram,
    held: HeldBytes,
    devices: Mapping[RankRef, DeviceId],
    *,
    bucket_bytes: int = BUCKET_BYTES,
) -> tuple[Round, ...]:
    """Cut `program` into rounds of whole tensors.

    No target rank receives more than `bucket_bytes` in a round, less what its device is over the larger of its states
    before it, unless all of it belongs to one tensor. The same arguments give the same rounds.
    """
    tensors: dict[TensorName, list[Transfer]] = defaultdict(list)
    for transfer in program.transfers:
        tensors[transfer.tensor].append(transfer)
    received = {name: _received(transfers, program.item_bytes) for name, transfers in tensors.items()}
    dropped: dict[TensorName, dict[RankRef, int]] = defaultdict(dict)
    for rank, sizes in held.items():
        for name, size in sizes.items():
            dropped[name][rank] = size
    order, over = _order(received, dropped, devices)
    return tuple(
        _round(number, names, tensors, program.item_bytes, bucket_bytes)
        for number, names in enumerate(_cut(order, received, bucket_bytes - over))
    )


def state_peaks(
    rounds: Sequence[Round], program: TransferProgram, held: HeldBytes, devices: Mapping[RankRef, DeviceId]
) -> dict[DeviceId, int]:
    """The most bytes of state on each device, a round's own bytes counted beside what it replaces; staging is not."""
    use: dict[DeviceId, int] = defaultdict(int)
    for rank, tensors in held.items():
        use[devices[rank]] += sum(tensors.values())
    peaks = dict(use)
    for one in rounds:
        for transfers in one.transfers.values():
            for transfer in transfers:
                use[devices[transfer.target]] += transfer.box.elements * program.item_bytes
        for device, size in use.items():
            peaks[device] = max(peaks.get(device, 0), size)
        for rank, tensors in held.items():
            use[devices[rank]] -= sum(tensors.get(name, 0) for name in one.tensors)
    return peaks


def _received(transfers: Sequence[Transfer], item_bytes: int) -> dict[RankRef, int]:
    got: dict[RankRef, int] = defaultdict(int)
    for transfer in transfers:
        got[transfer.target] += transfer.box.elements * item_bytes
    return got


def _order(
    received: Mapping[TensorName, Mapping[RankRef, int]],
    dropped: Mapping[TensorName, Mapping[RankRef, int]],
    devices: Mapping[RankRef, DeviceId],
) -> tuple[list[TensorName], int]:
    """All tensors, and by how much a device is ever over the larger of its states, between two of them.

    Those that change every device alike are one queue: layers repeat, so there are few.
    """
    number = {device: place for place, device in enumerate(dict.fromkeys(devices.values()))}

    def column(sizes: Mapping[RankRef, int]) -> NDArray[np.int64]:
        found = np.zeros(len(number), np.int64)
        for rank, size in sizes.items():
            found[number[devices[rank]]] += size
        return found

    queues: dict[bytes, deque[TensorName]] = {}
    columns: dict[bytes, NDArray[np.int64]] = {}
    old = new = np.zeros(len(number), np.int64)
    for name in dict.fromkeys((*received, *dropped)):
        gain, loss = column(received.get(name, {})), column(dropped.get(name, {}))
        old, new = old + loss, new + gain
        columns[(gain - loss).tobytes()] = gain - loss
        queues.setdefault((gain - loss).tobytes(), deque()).append(name)
    over = old - np.maximum(old, new)
    most = 0
    order: list[TensorName] = []
    while queues:
        chosen = min(queues, key=lambda key: int((over + columns[key]).max()))
        over = over + columns[chosen]
        most = max(most, int(over.max()))
        order.append(queues[chosen].popleft())
        if not queues[chosen]:
            del queues[chosen]
    return order, most


def _cut(
    order: Sequence[TensorName], received: Mapping[TensorName, Mapping[RankRef, int]], bucket_bytes: int
) -> list[list[TensorName]]:
    rounds: list[list[TensorName]] = []
    fill: dict[RankRef, int] = {}
    for name in order:
        sizes = received.get(name, {})
        after = {rank: fill.get(rank, 0) + size for rank, size in sizes.items()}
        if not rounds or max(after.values(), default=0) > bucket_bytes:
            rounds.append([])
            fill = dict(sizes)
        else:
            fill |= after
        rounds[-1].append(name)
    return rounds


def _round(
    number: int,
    names: Sequence[TensorName],
    tensors: Mapping[TensorName, Sequence[Transfer]],
    item_bytes: int,
    bucket_bytes: int,
) -> Round:
    per_unit: dict[str, list[Transfer]] = defaultdict(list)
    fill: dict[RankRef, tuple[int, int]] = {}
    for transfer in (transfer for name in names for transfer in tensors.get(name, ())):
        bucket, size = fill.get(transfer.target, (0, 0))
        received = transfer.box.elements * item_bytes
        if size and size + received > bucket_bytes:
            bucket, size = bucket + 1, 0
        fill[transfer.target] = bucket, size + received
        per_unit[transfer.target.unit].append(replace(transfer, bucket=bucket))
    return Round(number, tuple(names), {unit: tuple(of_unit) for unit, of_unit in per_unit.items()})
