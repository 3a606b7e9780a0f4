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
"""Bytes of every tensor, parameters and optimizer slots alike, on every rank of the old units."""


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
    """Cut `program` into rounds, a parameter always together with its optimizer slots.

    No target rank receives more than `bucket_bytes` in a round, unless all of it belongs to one parameter. The same
    arguments give the same rounds, so that a move goes on from the number of the last journalled one.
    """
    families = _families(program)
    received = {name: _received(transfers, program.item_bytes) for name, transfers in families.items()}
    order = _order(received, _dropped(held), devices)
    return tuple(
        _round(number, names, families, held, program.item_bytes, bucket_bytes)
        for number, names in enumerate(_cut(order, received, bucket_bytes))
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


def parameter_of(name: TensorName) -> TensorName:
    """The parameter to which a tensor belongs: itself, or that of an optimizer slot `NAME:exp_avg`."""
    return TensorName(name.partition(":")[0])


def _families(program: TransferProgram) -> dict[TensorName, list[Transfer]]:
    """Parameter → its transfers and those of its slots, in the order of the program."""
    found: dict[TensorName, list[Transfer]] = defaultdict(list)
    for transfer in program.transfers:
        found[parameter_of(transfer.tensor)].append(transfer)
    return found


def _received(transfers: Sequence[Transfer], item_bytes: int) -> dict[RankRef, int]:
    got: dict[RankRef, int] = defaultdict(int)
    for transfer in transfers:
        got[transfer.target] += transfer.box.elements * item_bytes
    return got


def _dropped(held: HeldBytes) -> dict[TensorName, dict[RankRef, int]]:
    """Parameter → bytes that each old rank gives back with it."""
    found: dict[TensorName, dict[RankRef, int]] = defaultdict(lambda: defaultdict(int))
    for rank, tensors in held.items():
        for name, size in tensors.items():
            found[parameter_of(name)][rank] += size
    return found


def _order(
    received: Mapping[TensorName, Mapping[RankRef, int]],
    dropped: Mapping[TensorName, Mapping[RankRef, int]],
    devices: Mapping[RankRef, DeviceId],
) -> list[TensorName]:
    """All parameters. Those that change every device alike are one queue: layers repeat, so there are few."""
    number = {device: place for place, device in enumerate(dict.fromkeys(devices.values()))}

    def column(sizes: Mapping[RankRef, int]) -> NDArray[np.int64]:
        found = np.zeros(len(number), np.int64)
        for rank, size in sizes.items():
            found[number[devices[rank]]] += size
        return found

    queues: dict[bytes, deque[TensorName]] = {}
    columns: dict[bytes, NDArray[np.int64]] = {}
    old = new = np.zeros(len(number), np.int64)
    for name, got in received.items():
        gain, loss = column(got), column(dropped.get(name, {}))
        old, new = old + loss, new + gain
        columns[(gain - loss).tobytes()] = gain - loss
        queues.setdefault((gain - loss).tobytes(), deque()).append(name)
    over = old - np.maximum(old, new)
    order: list[TensorName] = []
    while queues:
        chosen = min(queues, key=lambda key: int((over + columns[key]).max()))
        over = over + columns[chosen]
        order.append(queues[chosen].popleft())
        if not queues[chosen]:
            del queues[chosen]
    return order


def _cut(
    order: Sequence[TensorName], received: Mapping[TensorName, Mapping[RankRef, int]], bucket_bytes: int
) -> list[list[TensorName]]:
    rounds: list[list[TensorName]] = []
    fill: dict[RankRef, int] = {}
    for name in order:
        after = {rank: fill.get(rank, 0) + size for rank, size in received[name].items()}
        if not rounds or max(after.values(), default=0) > bucket_bytes:
            rounds.append([])
            fill = dict(received[name])
        else:
            fill |= after
        rounds[-1].append(name)
    return rounds


def _round(
    number: int,
    names: Sequence[TensorName],
    families: Mapping[TensorName, Sequence[Transfer]],
    held: HeldBytes,
    item_bytes: int,
    bucket_bytes: int,
) -> Round:
    per_unit: dict[str, list[Transfer]] = defaultdict(list)
    fill: dict[RankRef, tuple[int, int]] = {}
    for transfer in (transfer for name in names for transfer in families[name]):
        bucket, size = fill.get(transfer.target, (0, 0))
        received = transfer.box.elements * item_bytes
        if size and size + received > bucket_bytes:
            bucket, size = bucket + 1, 0
        fill[transfer.target] = bucket, size + received
        per_unit[transfer.target.unit].append(replace(transfer, bucket=bucket))
    whole = set(names)
    moved = dict.fromkeys(transfer.tensor for name in names for transfer in families[name])
    held_too = (name for tensors in held.values() for name in tensors if parameter_of(name) in whole)
    transfers = {unit: tuple(of_unit) for unit, of_unit in per_unit.items()}
    return Round(number, tuple(dict.fromkeys((*moved, *held_too))), transfers)
