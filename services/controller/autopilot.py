"""A job's own eyes on its plan: every step is measured, drift is noticed, and a better plan is found, priced and taken.

Thinking goes on beside the job, one thought at a time. What fails in it is told and changes nothing: a job never ends
because of its autopilot.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from nereus.events import BESIDE
from nereus.planning import workload_of
from nereus.spec import JobSpec
from nereus.spec.options import AdaptSpec
from nereus.v1 import transitions_pb2
from nereus_common.core.errors import NereusError
from nereus_common.core.ids import DeviceId, JobId, ModelStage
from nereus_common.core.plan import Plan, plan_to_dict
from nereus_common.core.workflow import ACTOR_GENERATION
from nereus_common.planning.admission import Decision, Target, Weighed, admit
from nereus_common.planning.cost import StepCost
from nereus_common.planning.drift import DEFAULT_THRESHOLDS, EFFICIENCY, LENGTH
from nereus_common.planning.hardware import Cluster
from nereus_common.planning.job import SYNC, Job
from nereus_common.planning.pilot import Measured, Pilot, after_step, looked, moved, predicted, targets
from nereus_common.planning.question import Found
from nereus_common.planning.registered import cluster_from
from nereus_common.planning.workload import Workload
from nereus_common.registry import Registry
from nereus_common.rl.rollouts import RolloutBatch
from nereus_common.state.architecture import ModelShape

from .checkpoints import Emit
from .step import StepData
from .synced import Synced

log = logging.getLogger(__name__)

QUANTILES = 16
"""Of a step's response lengths."""
FIRST_RATE, FIRST_OVERHEAD = 3e8, 1.0
"""Bytes per second of a move, and seconds of one beside its bytes, before any was seen."""
LEDGER = "ledger.jsonl"

Show = Callable[[Plan], Awaitable[transitions_pb2.Transition]]
Apply = Callable[[Plan], Awaitable[str]]
Undone = Callable[[str], Awaitable[tuple[bool, str]]]


@dataclass(frozen=True, slots=True)
class Hands:
    """What an autopilot may do: ask what a move would take; ask for one, and be told its id; and ask whether one has
    ended without a change of plan, and why."""

    show: Show
    apply: Apply
    undone: Undone


class Autopilot:
    """Of one attempt. `sampled()`: seconds in which responses were sampled, since the attempt began."""

    def __init__(
        self,
        job: JobId,
        spec: JobSpec,
        plan: Plan,
        shapes: Mapping[ModelStage, ModelShape],
        registry: Registry,
        hands: Hands,
        emit: Emit,
        folder: Path,
        sampled: Callable[[], float],
    ) -> None:
        self._job = job
        self._spec = spec
        self._registry = registry
        self._hands = hands
        self._emit = emit
        self._ledger = folder / LEDGER
        self._sampled = sampled
        self._sampled_before = 0.0
        first = Job(spec.workflow, shapes, _first_workload(spec), {})
        self._pilot = Pilot(first, plan, _thresholds(spec.adapt), widths=_widths(spec))
        self._refused: dict[str, str] = {}
        """Why plans cannot be moved to, by id: a move to them has failed."""
        self._overhead = FIRST_OVERHEAD
        self._expected: float | None = None
        """Seconds for which the move under way was predicted to hold the job up, its weight sync included."""
        self._thinking: asyncio.Task[None] | None = None
        self._asked: tuple[Plan, str] | None = None
        """The move that was asked for and has not ended, and its id."""

    def took(self, plan: Plan) -> None:
        """Another plan is in force."""
        self._pilot, self._asked = moved(self._pilot, plan), None

    async def after_step(self, data: StepData, synced: Mapping[str, Synced], *, changed: bool) -> None:
        """Learn from a step, and begin to think where something has drifted. `changed`: its weight sync was replaced by
        a change of plan."""
        if not data.rollouts.batch.sequences:
            return
        try:
            await self._learn(data, synced, changed=changed)
            if self._asked is not None:
                await self._follow(*self._asked)
        except (NereusError, OSError) as error:
            await self._tell(f"the step was not learned from: {error}")
            return
        thinks = self._thinking is not None and not self._thinking.done()
        if self._pilot.is_due and self._asked is None and not thinks and not changed:
            self._thinking = asyncio.create_task(self._think(data.step), name=f"{self._job}: replan")
            self._thinking.add_done_callback(_note_fault)

    async def _follow(self, plan: Plan, transition: str) -> None:
        """A move that was undone is not asked for again."""
        undone, why = await self._hands.undone(transition)
        if undone:
            self._asked = None
            self._refused[plan.id] = why

    async def close(self) -> None:
        """Whatever is being thought is forgotten."""
        if self._thinking is not None:
            self._thinking.cancel()
            await asyncio.wait([self._thinking])

    async def _learn(self, data: StepData, synced: Mapping[str, Synced], *, changed: bool) -> None:
        sampled, self._sampled_before = self._sampled() - self._sampled_before, self._sampled()
        seconds = {"rollouts": sampled, **data.task_seconds, SYNC: sum(one.seconds for one in synced.values())}
        if changed:
            self._saw_move(data.watch.seconds["sync"])
            seconds.pop(SYNC)
        cluster, usable = await self._pool()
        workload = _workload(data.rollouts.batch, self._spec)
        self._pilot = after_step(self._pilot, Measured(data.step, workload, seconds, cluster, usable))
        await asyncio.to_thread(self._write, _ledger_line(data, self._pilot, seconds))

    def _saw_move(self, seconds: float) -> None:
        if self._expected is not None:
            self._overhead = max(self._overhead + (seconds - self._expected) / 2, 0.0)
            self._expected = None

    async def _pool(self) -> tuple[Cluster, frozenset[DeviceId]]:
        devices = await self._registry.devices()
        occupied = await self._registry.occupied(self._job)
        return cluster_from(devices, occupied), frozenset(device.id for device in devices)

    async def _think(self, step: int) -> None:
        pilot, started = self._pilot, time.monotonic()
        try:
            now = predicted(pilot)
            decision, found = await self._decide(pilot, now, step)
            if self._pilot.plan != pilot.plan:
                return  # it was moved by hand meanwhile
            self._pilot = looked(self._pilot)
            taken = decision.taken if self._spec.adapt.mode == "auto" else None
            transition = await self._hands.apply(taken.plan) if taken is not None else ""
        except NereusError as error:
            self._pilot = looked(self._pilot) if self._pilot.measured is not None else self._pilot
            await self._tell(f"no other plan was looked for: {error}")
            return
        if taken is not None:
            self._asked = taken.plan, transition
            self._expected = (taken.transition_seconds or 0.0) + _sync_seconds(pilot)
        told = _told(pilot, now, decision, found, step, self._spec.adapt.mode, transition)
        told["seconds"] = time.monotonic() - started
        await asyncio.to_thread(self._write, {"kind": "decision", **told})
        await self._emit("decision", told)

    async def _decide(self, pilot: Pilot, now: StepCost | None, step: int) -> tuple[Decision, Sequence[Found]]:
        adapt = self._spec.adapt
        pinned = [ModelStage.parse(name) for name in adapt.pin]
        found = await asyncio.to_thread(targets, pilot, pinned, adapt.near)
        priced = [await self._priced(one, pilot) for one in found]
        decision = admit(
            None if now is None else now.seconds,
            priced,
            horizon=pilot.horizon(self._spec.steps - step - 1),
            gamma=adapt.gamma,
            near=adapt.near,
            urgent=pilot.urgent,
        )
        return decision, found

    async def _priced(self, found: Found, pilot: Pilot) -> Target:
        """What the job waits for, less the weight sync that the move replaces."""
        if found.plan.id in self._refused:
            return Target(found.plan, found.cost.seconds, None, self._refused[found.plan.id])
        try:
            shown = await self._hands.show(found.plan)
        except NereusError as error:
            return Target(found.plan, found.cost.seconds, None, str(error))
        known = sum(seconds for phase, seconds in shown.seconds.items() if phase not in BESIDE)
        moving = known or shown.bytes_needed / FIRST_RATE
        return Target(found.plan, found.cost.seconds, max(moving + self._overhead - _sync_seconds(pilot), 0.0))

    async def _tell(self, message: str) -> None:
        await self._emit("log", {"level": "warning", "message": f"autopilot: {message}"})

    def _write(self, line: Mapping[str, Any]) -> None:
        with self._ledger.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def _note_fault(thought: asyncio.Task[None]) -> None:
    """A fault of ours: the job goes on without this thought."""
    if not thought.cancelled() and (fault := thought.exception()) is not None:
        log.error("%s failed", thought.get_name(), exc_info=fault)


def _sync_seconds(pilot: Pilot) -> float:
    """Of a step under the plan in force."""
    return 0.0 if pilot.cost is None else pilot.cost.time.sync


def _thresholds(adapt: AdaptSpec) -> Mapping[str, float]:
    given = {LENGTH: adapt.length_change, EFFICIENCY: adapt.efficiency_change}
    return {**DEFAULT_THRESHOLDS, **{name: value for name, value in given.items() if value is not None}}


def _widths(spec: JobSpec) -> Mapping[ModelStage, tuple[int, ...]]:
    """The transformers engine is one process."""
    engine = spec.model(ACTOR_GENERATION.model).engines.get(ACTOR_GENERATION.stage)
    return {ACTOR_GENERATION: (1,)} if engine is not None and engine.name == "transformers" else {}


def _first_workload(spec: JobSpec) -> Workload:
    """Before a step was measured."""
    return workload_of(spec, 1.0, [float(spec.sampling.max_tokens)])


def _workload(batch: RolloutBatch, spec: JobSpec) -> Workload:
    lengths = np.maximum(batch.response_lengths, 1)
    places = (np.arange(QUANTILES) + 0.5) / QUANTILES
    asked = workload_of(spec, len(batch.prompt_tokens) / batch.groups, np.quantile(lengths, places).tolist())
    return replace(asked, groups=batch.groups, samples=max(1, round(batch.sequences / batch.groups)))


def _ledger_line(data: StepData, pilot: Pilot, seconds: Mapping[str, float]) -> Mapping[str, Any]:
    """Predicted before the step was measured, and measured."""
    cost = pilot.cost
    return {
        "kind": "step",
        "step": data.step,
        "plan_id": pilot.plan.id,
        "predicted_seconds": None if cost is None else cost.seconds,
        "predicted": {} if cost is None else {name: task.seconds for name, task in cost.tasks.items()},
        "measured_seconds": data.watch.seconds.get("total"),
        "measured": dict(seconds),
        "confidence": 0.0 if cost is None else cost.confidence,
    }


def _told(
    pilot: Pilot,
    now: StepCost | None,
    decision: Decision,
    found: Sequence[Found],
    step: int,
    mode: str,
    transition: str,
) -> dict[str, Any]:
    """See docs/events.md."""
    due = {} if pilot.drift is None else pilot.drift.due
    costs = {one.plan.id: one for one in found}
    return {
        "step": step,
        "mode": mode,
        "plan_id": pilot.plan.id,
        "urgent": decision.urgent,
        "drifted": [{"signal": one.signal, "from": one.reference, "to": one.value} for one in due.values()],
        "step_seconds": None if now is None else now.seconds,
        "task_seconds": {} if now is None else {name: task.seconds for name, task in now.tasks.items()},
        "confidence": 0.0 if now is None else now.confidence,
        "horizon": decision.horizon,
        "gamma": decision.gamma,
        "taken": "" if decision.taken is None else decision.taken.plan.id,
        "transition_id": transition,
        "targets": [_target(one, costs[one.target.plan.id]) for one in decision.weighed],
    }


def _target(weighed: Weighed, found: Found) -> dict[str, Any]:
    target = weighed.target
    return {
        "plan_id": target.plan.id,
        "verdict": str(weighed.verdict),
        "step_seconds": target.step_seconds,
        "task_seconds": {name: task.seconds for name, task in found.cost.tasks.items()},
        "confidence": found.cost.confidence,
        "transition_seconds": target.transition_seconds,
        "saving": weighed.saving if math.isfinite(weighed.saving) else None,
        "payback": weighed.payback if math.isfinite(weighed.payback) else None,
        "why": target.why,
        "plan": plan_to_dict(target.plan),
    }
