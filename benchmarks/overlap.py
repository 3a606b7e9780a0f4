"""Two model-stages that want each other's devices change at once: coordinated by one DAG, and each by itself.

The three kinds of the paper's Table 5, 100 seeded trials each. A device holds one rank. Layouts and devices are drawn
until one of the two changes at least comes to a device that the other is on, and some order fits memory. Every trial
places real units, makes an update, moves, and proves by digest that nothing changed.

- coordinated: one job with both model-stages; the coordinator runs the global DAG of both changes.
- alone, the peer: two jobs of one model-stage each, on the same devices under the same ledger of grants. Each runs its
  own transition, one a random moment after the other; whoever is refused asks again, until both are and nothing
  changes any more. That is a deadlock: a longer wait does not help.

`success_rate`: done, on the target's devices and no others, digests as before. The models are tiny and the ranks live
in one process per device, because starting 2,000 processes takes hours here; states move over UCX between processes.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.overlap_site import SECONDS, Site, State, site
from benchmarks.overlap_trials import DEVICES, KINDS, Draws, Trial
from benchmarks.training_units import random_batch, vocabulary_of
from nereus_common.core.errors import NereusError, ResourceExhausted
from nereus_common.core.ids import JobId, ModelStage, Stage
from nereus_common.core.plan import Plan
from nereus_common.registry import Device

TRIALS, TINY_TRIALS = 100, 1
SEED = 11
APART = 0.3
"""Seconds by which one of two transitions is asked for after the other, at most."""
ASK_AGAIN = 0.05


@dataclass(frozen=True, slots=True)
class Outcome:
    """`error`: why it did not succeed, "" when it did. `bytes`: moved by training units."""

    trial: Trial
    seconds: float
    bytes: int = 0
    error: str = ""

    @property
    def succeeded(self) -> bool:
        return not self.error


def run(*, tiny: bool = False) -> dict[str, Any]:
    from tests.tiny_models import save_tiny_model

    with TemporaryDirectory(prefix="nereus-overlap-") as folder:
        model = save_tiny_model(Path(folder) / "model")
        return asyncio.run(_measure(model, Path(folder), TINY_TRIALS if tiny else TRIALS))


async def _measure(model: Path, folder: Path, trials: int) -> dict[str, Any]:
    draws = Draws(model)
    devices = [Device(device, "cpu", draws.device_bytes) for device in DEVICES]
    batch = random_batch(vocabulary_of(model))
    found: dict[str, dict[str, list[Outcome]]] = {}
    async with site(model, batch, devices, folder, SEED) as place:
        for kind in KINDS:
            ways = found[kind] = {"coordinated": [], "alone": []}
            for number in range(trials):
                trial = draws.trial(kind, number)
                ways["coordinated"].append(await coordinated(place, trial))
                ways["alone"].append(await alone(place, trial))
    return metrics(found)


def metrics(found: dict[str, dict[str, list[Outcome]]]) -> dict[str, Any]:
    def by_kind(figure: Any, way: str) -> dict[str, Any]:
        return {kind: figure(ways[way]) for kind, ways in found.items()}

    return {
        "success_rate": by_kind(_rate, "coordinated"),
        "success_rate_alone": by_kind(_rate, "alone"),
        "seconds": by_kind(_seconds, "coordinated"),
        "seconds_alone": by_kind(_seconds, "alone"),
        "resource_edges_mean": by_kind(lambda some: statistics.mean(one.trial.edges for one in some), "coordinated"),
        "mutual": by_kind(lambda some: sum(one.trial.mutual for one in some) / len(some), "coordinated"),
        "bytes_moved": by_kind(lambda some: sum(one.bytes for one in some), "coordinated"),
        "errors": by_kind(_errors, "coordinated"),
        "errors_alone": by_kind(_errors, "alone"),
        "trials_of_each_kind": len(next(iter(found.values()))["coordinated"]),
        "processes": "pooled, one per device",
    }


async def coordinated(place: Site, trial: Trial) -> Outcome:
    job = JobId(f"{trial.kind.replace('_', '-')}-{trial.number}")
    try:
        version = await place.place(job, trial.old)
        before = await place.state(job)
        started = time.monotonic()
        try:
            record = await place.move(job, trial.new, version)
        except NereusError as error:
            return Outcome(trial, time.monotonic() - started, error=_told(error))
        seconds = time.monotonic() - started
        if not await place.reached(job, trial.new, record):
            return Outcome(trial, seconds, error=f"it ended {record.state} and did not reach its target")
        wrong = changed(before, await place.state(job))
        return Outcome(trial, seconds, record.bytes_moved, wrong)
    finally:
        await place.release([job])


def changed(before: State, after: State) -> str:
    """What is not as it was, "" when everything is. An inference unit of a trained model has, from a transition on, the
    parameters of that version."""
    for name, (version, digests) in after.items():
        trained = ModelStage(name.model, Stage.TRAINING)
        if name.stage is Stage.INFERENCE and trained in before:
            version_before, (expected) = before[trained][0], {"parameters": before[trained][1]["parameters"]}
        else:
            version_before, expected = before[name][0], dict(before[name][1])
        if version != version_before or dict(digests) != expected:
            return f"{name} is not what it was"
    return ""


@dataclass(slots=True)
class Standstill:
    """How often each transition that is left was refused since the last one was done."""

    left: set[JobId]
    refused: Counter[JobId] = field(default_factory=Counter)

    def done(self, job: JobId) -> None:
        self.left.discard(job)
        self.refused.clear()

    @property
    def reached(self) -> bool:
        """All were refused twice: the second time nothing of another's was under way."""
        return all(self.refused[job] >= 2 for job in self.left)


async def alone(place: Site, trial: Trial) -> Outcome:
    plans = {
        JobId(f"alone-{trial.kind.replace('_', '-')}-{trial.number}-{name.model}-{name.stage}"): (
            Plan(((name, trial.old[name]),)),
            Plan(((name, trial.new[name]),)),
        )
        for name in KINDS[trial.kind]
    }
    order = list(plans)
    rng = random.Random(f"alone/{trial.kind}/{trial.number}")
    rng.shuffle(order)
    delays = dict(zip(order, (0.0, rng.uniform(0, APART)), strict=True))
    try:
        versions = {job: await place.place(job, old) for job, (old, _) in plans.items()}
        before = {job: await place.state(job) for job in plans}
        standstill = Standstill(set(plans))
        started = time.monotonic()
        errors = await asyncio.gather(
            *(_until_let(place, job, plans[job][1], versions[job], delays[job], standstill) for job in order)
        )
        seconds = time.monotonic() - started
        if any(errors):
            return Outcome(trial, seconds, error=next(filter(None, errors)))
        wrong = [changed(before[job], await place.state(job)) for job in plans]
        return Outcome(trial, seconds, error=next(filter(None, wrong), ""))
    finally:
        await place.release(list(plans))


async def _until_let(place: Site, job: JobId, target: Plan, version: int, delay: float, standstill: Standstill) -> str:
    """Ask for the transition until it is done; else why it never will be."""
    await asyncio.sleep(delay)
    end = time.monotonic() + SECONDS
    for attempt in range(10_000):
        try:
            record = await place.move(job, target, version, attempt)
        except ResourceExhausted as refused:
            standstill.refused[job] += 1
            if standstill.reached:
                return "deadlock: each waits for memory that the other holds"
            if time.monotonic() > end:
                return _told(refused)
        except NereusError as error:
            return _told(error)
        else:
            standstill.done(job)
            return "" if await place.reached(job, target, record) else "it did not reach its target"
        await asyncio.sleep(ASK_AGAIN)
    raise AssertionError("the deadline comes first")


def _rate(outcomes: Sequence[Outcome]) -> float:
    return sum(one.succeeded for one in outcomes) / len(outcomes)


def _seconds(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Of those that succeeded."""
    took = [one.seconds for one in outcomes if one.succeeded]
    return {"median": statistics.median(took), "min": min(took), "max": max(took)} if took else {}


def _errors(outcomes: Sequence[Outcome]) -> dict[str, int]:
    return dict(Counter(one.error for one in outcomes if one.error))


def _told(error: NereusError) -> str:
    return f"{error.reason}: {error}"
