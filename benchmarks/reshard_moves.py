"""Our side of the benchmark `reshard`: moves between real units, measured."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nereus_coordinator.moving import MoveReport, move_state
from nereus_coordinator.sync import WeightSync

from benchmarks.memory import Peaks, pss_by_device
from benchmarks.peers.dcp import DcpReshard
from benchmarks.training_units import JOB, SAMPLER, SECONDS, Bench, Side, plan_of
from nereus_common.core.ids import DeviceId, TransitionId
from nereus_common.core.plan import GenerationLimits
from nereus_common.registry import TransitionRecord
from nereus_common.rl.rollouts import RolloutBatch
from nereus_common.rpc.together import together
from nereus_common.state.dtypes import item_bytes
from nereus_common.transitions.dag import Mode

STATE_DTYPE = "float32"
STEPS = 3
"""Updates before anything is measured but their own pace; the first one is not counted."""
LIMITS = GenerationLimits(max_sequences=8, max_batched_tokens=1024, max_length=256, kv_bytes=1 << 28)


@dataclass(frozen=True, slots=True)
class Moves:
    """Moves of one pair. `all_seconds`, `reports`: of every repetition, all at once; `in_place`: of one in rounds.

    `prepare_seconds`: of the first new units, while the old ones trained. `peaks`, `bounds`: bytes by device.
    """

    all_seconds: Sequence[float]
    reports: Sequence[MoveReport]
    in_place_seconds: float
    in_place: MoveReport
    state_bytes: int
    prepare_seconds: float
    prepare_slowdown_seconds: float
    step_seconds: float
    peaks: Mapping[DeviceId, int]
    bounds: Mapping[DeviceId, int]

    @property
    def seconds(self) -> float:
        return statistics.median(self.all_seconds)

    @property
    def lost_seconds(self) -> float:
        """What the job loses: it stands still while its state moves, and is slower while new units are prepared."""
        return self.seconds + self.prepare_slowdown_seconds

    @property
    def bytes_moved(self) -> int:
        return sum(report.bytes_moved for report in (*self.reports, self.in_place))

    @property
    def bytes_needed(self) -> int:
        return sum(report.bytes_needed for report in (*self.reports, self.in_place))

    @property
    def moved_fraction(self) -> float:
        moved: int = self.reports[0].bytes_moved
        return moved / self.state_bytes

    @property
    def peak_ratio(self) -> float:
        """Of the worst device."""
        return max(self.peaks[device] / self.bounds[device] for device in self.bounds)

    def report(self) -> dict[str, Any]:
        phases = self.reports[0].seconds
        return {
            "seconds": self.seconds,
            "seconds_spread": [min(self.all_seconds), max(self.all_seconds)],
            "phases": {name: statistics.median(one.seconds[name] for one in self.reports) for name in phases},
            "in_place_seconds": self.in_place_seconds,
            "in_place_rounds": self.in_place.rounds,
            "bytes": self.reports[0].bytes_moved,
            "moved_fraction": self.moved_fraction,
            "prepare_seconds": self.prepare_seconds,
            "prepare_slowdown_seconds": self.prepare_slowdown_seconds,
            "step_seconds": self.step_seconds,
            "peak_ratio": self.peak_ratio,
            "peak_bytes": {str(device): peak for device, peak in self.peaks.items()},
        }


@dataclass(frozen=True, slots=True)
class Engine:
    """A move of training state together with a new generation engine. Seconds: by how much preparing both held up the
    steps made meanwhile; of the move; until the engine serves the weights; and how long both take to start alone."""

    slowdown: float
    move: float
    sync: float
    start: float

    @property
    def lost_seconds(self) -> float:
        return self.slowdown + self.move + self.sync

    def restart_seconds(self, peer: DcpReshard) -> float:
        """The same by a restart: save, stop, start both, load, fill the engine."""
        return peer.seconds + peer.stop + self.start + self.sync

    def report(self) -> dict[str, float]:
        return {
            "prepare_slowdown_seconds": self.slowdown,
            "move_seconds": self.move,
            "sync_seconds": self.sync,
            "start_seconds": self.start,
        }


async def measure_pair(
    bench: Bench, old_layout: str, new_layout: str, batch: RolloutBatch, repeat: int, bucket_bytes: int
) -> Moves:
    """`repeat` moves all at once, each to new units, then one in rounds, which ends the old ones."""
    old = bench.training(old_layout)
    await old.prepare()
    idle = _memory([old])
    await old.load()
    pace = await _pace(old, batch)
    seconds: list[float] = []
    reports: list[MoveReport] = []
    for number in range(repeat):
        new = bench.training(new_layout)
        if number == 0:
            prepare, slowdown = await _prepare_beside(old, (new,), batch, pace)
        else:
            await new.prepare()
        took, report = await _move(bench, old, new, Mode.SHADOW, bucket_bytes)
        seconds.append(took)
        reports.append(report)
        await together(unit.withdraw(SECONDS) for unit in old.units)
        await new.release()
    new = bench.training(new_layout)
    await new.prepare()
    idle = _added(idle, _memory([new]))
    states = [await _state_bytes(side) for side in (old, new)]
    with Peaks(_pids([old, new])) as peaks:
        took, in_place = await _move(bench, old, new, Mode.IN_PLACE, bucket_bytes)
    await together(side.release() for side in (old, new))
    return Moves(
        all_seconds=seconds,
        reports=reports,
        in_place_seconds=took,
        in_place=in_place,
        state_bytes=sum(states[1].values()),
        prepare_seconds=prepare,
        prepare_slowdown_seconds=slowdown,
        step_seconds=pace,
        peaks={device: peaks.bytes[device] - idle[device] for device in idle},
        bounds={device: max(state.get(device, 0) for state in states) + 2 * bucket_bytes for device in idle},
    )


async def measure_engine(bench: Bench, old_layout: str, new_layout: str, batch: RolloutBatch, engine: str) -> Engine:
    """The new engine starts beside the old units, is filled from the new ones once they are committed. At last both
    start once more, with nothing beside them, as they do in a restart."""
    old = bench.training(old_layout)
    await old.prepare()
    await old.load()
    pace = await _pace(old, batch)
    new, sampler = bench.training(new_layout), _sampler(bench, engine)
    _, slowdown = await _prepare_beside(old, (new, sampler), batch, pace)
    took, _ = await _move(bench, old, new, Mode.SHADOW)
    wire = new.specs[0].plan.dtypes.compute
    sync = WeightSync("actor", wire, new.units, sampler.units)
    synced = await sync.run(old.version, SECONDS, "bench-engine")
    await together(side.release() for side in (old, new, sampler))
    again = bench.training(new_layout), _sampler(bench, engine)
    start = await _timed(together(side.prepare() for side in again))
    await together(side.release() for side in again)
    return Engine(slowdown, took, synced.seconds, start)


def _sampler(bench: Bench, engine: str) -> Side:
    return bench.side(SAMPLER, replace(plan_of("tp1.pp1.fs1"), generation=LIMITS), engine)


async def _pace(side: Side, batch: RolloutBatch) -> float:
    """Seconds of a step with nothing beside it."""
    return statistics.median([await _timed(side.train(batch)) for _ in range(STEPS)][1:])


async def _move(
    bench: Bench, old: Side, new: Side, mode: Mode, bucket_bytes: int | None = None
) -> tuple[float, MoveReport]:
    """Seconds from the safe boundary to the commit of the new units and of the plan, and what the move says."""
    record = TransitionRecord(
        TransitionId(f"t{new.specs[0].epoch}"), JOB, bench.plans, old.plan, new.plan, created=time.time()
    )
    revision = await bench.registry.put_transition(record, expected=0)
    started = time.monotonic()

    async def note(number: int) -> None:
        nonlocal revision
        revision = await bench.registry.put_transition(replace(record, rounds={0: number + 1}), expected=revision)

    report = await move_state(
        old.units,
        new.units,
        old.version,
        mode=mode,
        transition=record.id,
        timeout=SECONDS,
        after_round=note,
        **({} if bucket_bytes is None else {"bucket_bytes": bucket_bytes}),
    )
    await new.commit(old.version, new.specs[0].plan.dtypes.compute)
    bench.plans = await bench.registry.commit_plan(JOB, bench.plans, new.plan)
    return time.monotonic() - started, report


async def _prepare_beside(old: Side, new: Sequence[Side], batch: RolloutBatch, pace: float) -> tuple[float, float]:
    """Prepare `new` while `old` trains; seconds of it, and by how many seconds it held up the steps made meanwhile,
    of which each takes `pace` alone."""
    slowdown = 0.0
    async with asyncio.TaskGroup() as tasks:
        preparing = tasks.create_task(_timed(together(side.prepare() for side in new)))
        while not preparing.done():
            slowdown += await _timed(old.train(batch)) - pace
    return preparing.result(), max(slowdown, 0.0)


async def _state_bytes(side: Side) -> dict[DeviceId, int]:
    """By device, as the ranks describe their whole state."""
    size = item_bytes(STATE_DTYPE)
    found: dict[DeviceId, int] = defaultdict(int)
    for holding in await together(unit.describe(SECONDS, state=True) for unit in side.units):
        for rank in holding.ranks:
            found[DeviceId.parse(rank.device)] += size * sum(
                box.elements for region in rank.boxes.values() for box in region
            )
    return dict(found)


def _pids(sides: Sequence[Side]) -> dict[DeviceId, list[int]]:
    found: dict[DeviceId, list[int]] = defaultdict(list)
    for side in sides:
        for device, pid in side.pids.items():
            found[device].append(pid)
    return found


def _memory(sides: Sequence[Side]) -> dict[DeviceId, int]:
    return pss_by_device(_pids(sides))


def _added(one: Mapping[DeviceId, int], other: Mapping[DeviceId, int]) -> dict[DeviceId, int]:
    return {device: one.get(device, 0) + other.get(device, 0) for device in sorted(one.keys() | other.keys())}


async def _timed(work: Any) -> float:
    started = time.monotonic()
    await work
    return time.monotonic() - started
