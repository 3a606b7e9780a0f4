"""One job from submission to its end: place, loop, release. Whatever happens, its units are released."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nereus.spec import JobSpec
from nereus_common.core.errors import NereusError, ProcessLost, Unavailable
from nereus_common.core.ids import JobId
from nereus_common.core.plan import Plan
from nereus_common.engines.tokenizer import ChatTokenizer
from nereus_common.observe.metrics.prometheus import JobMetrics
from nereus_common.planning.default import default_plan
from nereus_common.registry import JobRecord, JobState, Registry, Versioned
from nereus_common.rl.prompts import OrderedPrompts
from nereus_common.rpc.pool import Channels

from .coordinator import Coordinator
from .loop import RlLoop
from .parts import Surrounding, build_parts
from .progress import Progress
from .scoring import Scoring
from .synced import Synced

log = logging.getLogger(__name__)

FIRST_EPOCH = 1


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What every job of this controller shares. `series`: its jobs' metrics for Prometheus. `clock` gives seconds since
    the Unix epoch."""

    registry: Registry
    channels: Channels
    jobs_folder: Path
    series: JobMetrics | None = None
    clock: Callable[[], float] = time.time


class JobRunner:
    """Runs one job. The registry's record is the truth; this is its only writer while the job lives."""

    def __init__(self, job: JobId, spec: JobSpec, surroundings: Surroundings) -> None:
        self._job = job
        self._spec = spec
        self._around = surroundings
        self._folder = surroundings.jobs_folder / job
        self._steps_done = 0

    async def run(self) -> None:
        """Returns when the job has ended, however; only a bug in this class raises."""
        try:
            await self._run()
        except asyncio.CancelledError:
            await asyncio.shield(self._end(JobState.CANCELLED, None))
            raise
        except NereusError as error:
            log.warning("job %s failed: %s", self._job, error)
            await self._end(JobState.FAILED, await explained(error, self._around.registry))
        except Exception as bug:
            log.exception("job %s failed by a fault of ours", self._job)
            await self._end(JobState.FAILED, NereusError(f"{type(bug).__name__}: {bug}"))
        else:
            await self._end(JobState.SUCCEEDED, None)

    async def _run(self) -> None:
        await self._set_state(JobState.PLACING)
        spec = self._spec
        tokenizer = await asyncio.to_thread(ChatTokenizer, Path(spec.model("actor").path))
        questions = await asyncio.to_thread(spec.prompts.open, spec.seed, spec.evaluation.size)
        prompts = OrderedPrompts(questions, tokenizer, spec.seed)
        scoring = Scoring(self._job, spec, self._folder, tokenizer)
        coordinator = await self._coordinator()
        plan = spec.explicit_plan or await self._default_plan()
        try:
            await scoring.start()
            placed, synced = await coordinator.place(self._job, FIRST_EPOCH, plan, spec, self._around.channels)
            await self._set_state(JobState.RUNNING, {"plan": json.loads(plan.to_json()), "plan_id": plan.id})
            for report in synced:
                await self._emit("sync", {"version": 0, **report.told()})
            parts = build_parts(spec, placed, self._surrounding(coordinator, prompts, scoring, tokenizer))
            await RlLoop(spec, parts).run(Progress())
        finally:
            await scoring.close()
            await asyncio.shield(self._release(coordinator))

    def _surrounding(
        self, coordinator: Coordinator, prompts: OrderedPrompts, scoring: Scoring, tokenizer: ChatTokenizer
    ) -> Surrounding:
        deadlines = self._spec.deadlines

        async def sync(model: str, version: int) -> Synced:
            return await coordinator.sync(self._job, FIRST_EPOCH, model, version, deadlines.sync)

        async def after_step(progress: Progress) -> None:
            pass

        return Surrounding(prompts, tokenizer, scoring.score, scoring.play, sync, self._emit, after_step, self._folder)

    async def _coordinator(self) -> Coordinator:
        for status in await self._around.registry.services():
            if status.service.role == "coordinator" and status.alive:
                return Coordinator(status.service.target, self._around.channels.get(status.service.target))
        raise Unavailable("no coordinator is alive", remedy="start it, or see `nereus status`")

    async def _default_plan(self) -> Plan:
        devices = sorted(device.id for device in await self._around.registry.devices())
        return default_plan(devices, self._spec.model_stages)

    async def _release(self, coordinator: Coordinator) -> None:
        try:
            await coordinator.release(self._job, self._spec.deadlines.release)
        except NereusError as error:
            log.error("job %s: its units were not released: %s", self._job, error)

    async def _emit(self, kind: str, payload: Mapping[str, Any]) -> None:
        """Tell an event: to the job's stream, and as a line to events.jsonl in its folder."""
        now = self._around.clock()
        if kind == "step":
            self._steps_done = int(payload["step"]) + 1
            await self._update(lambda record: replace(record, steps_done=self._steps_done))
        await self._around.registry.append_event(self._job, kind, payload, time=now)
        line = json.dumps({"time": now, "kind": kind, **payload})
        await asyncio.to_thread(_append, self._folder / "events.jsonl", line)

    async def _set_state(self, state: JobState, more: Mapping[str, Any] | None = None) -> None:
        await self._update(lambda record: replace(record, state=state, folder=str(self._folder)))
        await self._emit("state", {"state": str(state), **(more or {})})

    async def _end(self, state: JobState, error: NereusError | None) -> None:
        lines = tuple(error.details.get("log", "").splitlines()) if error else ()
        await self._update(
            lambda record: replace(
                record,
                state=state,
                ended=self._around.clock(),
                error_reason=error.reason if error else "",
                error_message=str(error) if error else "",
                error_log=lines,
            )
        )
        told = {"error_reason": error.reason, "error_message": str(error), "error_log": list(lines)} if error else {}
        await self._emit("state", {"state": str(state), **told})

    async def _update(self, change: Callable[[JobRecord], JobRecord]) -> None:
        stored: Versioned[JobRecord] = await self._around.registry.get_job(self._job)
        await self._around.registry.put_job(change(stored.value), expected=stored.revision)


async def explained(error: NereusError, registry: Registry) -> NereusError:
    """A target that cannot be reached is a service that is gone: say which, and how its log ends where it is here."""
    if not isinstance(error, Unavailable):
        return error
    target = error.details.get("target")
    for status in await registry.services():
        if status.service.target == target:
            return ProcessLost(
                f"the {status.service.name} service on {status.service.node} is gone: {error.message}",
                remedy="see its log, then restart the cluster and submit the job again",
                process=status.service.name,
                log="\n".join(await asyncio.to_thread(_tail, Path(status.service.log))),
            )
    return error


def _tail(path: Path, lines: int = 20) -> list[str]:
    return path.read_text(errors="replace").splitlines()[-lines:] if path.is_file() else []


def _append(path: Path, line: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(line + "\n")
