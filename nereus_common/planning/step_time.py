"""How long a step takes, from how long its tasks take: what runs side by side, and what waits for what.

A step is run wave by wave (`core.workflow`); tasks of a wave that compute on the same place, a device or the cores of a
node, run one after the other. Then every trained model's new version is brought to its other units, while all stands
still.

Asynchronous: the tasks that sample work on the next step's responses meanwhile. A version is then due every so many
seconds as the busiest place works for it, or as the longer of sampling and the rest takes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nereus_common.core.ids import DeviceId, ModelStage
from nereus_common.core.workflow import Task, Work, Workflow

Places = Mapping[ModelStage, frozenset[str]]
"""What a model-stage computes on."""


@dataclass(frozen=True, slots=True)
class Span:
    task: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class StepTime:
    """`total`: seconds from one version to the next. `spans`: the tasks of one step one after another, also where its
    sampling overlaps with the step before. `sync`: what follows them."""

    total: float
    spans: tuple[Span, ...]
    sync: float


def place_of(device: DeviceId) -> str:
    """What tasks cannot use side by side: a device, but for CPU devices their node, whose cores they all share."""
    return device.node if device.slot.startswith("cpu") else str(device)


def step_time(
    workflow: Workflow,
    seconds: Mapping[str, float],
    places: Places,
    sync: float = 0.0,
    *,
    asynchronous: bool = False,
) -> StepTime:
    """`seconds` by task; a task that is not named takes none, as arithmetic beside the models does."""
    spans: list[Span] = []
    for wave in workflow.waves():
        spans += _wave(wave, seconds, places, max((span.end for span in spans), default=0.0))
    end = max((span.end for span in spans), default=0.0)
    if not asynchronous:
        return StepTime(end + sync, tuple(spans), sync)
    sampling = [task for task in workflow.tasks if task.work is Work.SAMPLE]
    sampled = sum(seconds.get(task.name, 0.0) for task in sampling)
    busy = _busiest(workflow, seconds, places)
    return StepTime(max(sampled, end - _ends(spans, sampling), busy) + sync, tuple(spans), sync)


def _wave(wave: tuple[Task, ...], seconds: Mapping[str, float], places: Places, start: float) -> list[Span]:
    free: dict[str, float] = {}
    spans = []
    for task in wave:
        on = places.get(task.stage, frozenset()) if task.stage else frozenset()
        begun = max((free.get(place, start) for place in on), default=start)
        ended = begun + seconds.get(task.name, 0.0)
        free |= dict.fromkeys(on, ended)
        spans.append(Span(task.name, begun, ended))
    return spans


def _busiest(workflow: Workflow, seconds: Mapping[str, float], places: Places) -> float:
    """Seconds of work for a step on the place that has the most."""
    work: dict[str, float] = {}
    for task in workflow.tasks:
        for place in places.get(task.stage, ()) if task.stage else ():
            work[place] = work.get(place, 0.0) + seconds.get(task.name, 0.0)
    return max(work.values(), default=0.0)


def _ends(spans: list[Span], tasks: list[Task]) -> float:
    names = {task.name for task in tasks}
    return max((span.end for span in spans if span.task in names), default=0.0)
