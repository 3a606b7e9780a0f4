"""The demo's job: SmolLM2-135M-Instruct and a reasoning-gym task, by GRPO."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nereus.spec import JobSpec
from nereus.spec.moves import MoveSpec
from nereus_common.core.errors import InvalidInput
from nereus_common.core.ids import DeviceId, ModelStage, Stage
from nereus_common.core.plan import GenerationLimits, plan_from_dict, plan_to_dict
from nereus_common.planning.default import default_plan

MODEL = "demo:smollm2"
GENERATION, TRAINING = ModelStage("actor", Stage.GENERATION), ModelStage("actor", Stage.TRAINING)
KV_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class DemoTask:
    """A reasoning-gym task in a size that the model half knows; `max_tokens` leaves room for its longest answer."""

    params: Mapping[str, Any] = field(default_factory=dict)
    max_tokens: int = 8


TASKS: Mapping[str, DemoTask] = {
    "letter_counting": DemoTask({"min_words": 1, "max_words": 2}),
    "gcd": DemoTask({"min_value": 1, "max_value": 20}),
}


def demo_spec(devices: tuple[str, ...], *, task: str, steps: int, seed: int, heldout: int) -> JobSpec:
    """The job on `devices`: generation replicas on the first half, training sharded over the rest. In the middle it
    moves."""
    if task not in TASKS:
        raise InvalidInput(f"the demo has no task {task!r}", remedy=f"it has {', '.join(TASKS)}", field="task")
    chosen = TASKS[task]
    spec = {
        "name": f"demo-{task.replace('_', '-')}",
        "model": MODEL,
        "algorithm": {"groups_per_step": 16, "samples_per_group": 8},
        "sampling": {"temperature": 1.0, "max_tokens": chosen.max_tokens},
        "optimizer": {"learning_rate": 1e-5, "betas": (0.9, 0.99), "warmup_steps": 2},
        "steps": steps,
        "seed": seed,
        "prompts": {"task": task, "params": dict(chosen.params), "examples": 3, "size": 2048},
        "rewards": ["exact_answer"],
        "max_logprob_gap": 0.1,
        "evaluation": {"size": heldout},
    }
    return with_move(with_plan(JobSpec.from_dict(spec, "demo"), devices))


def with_plan(spec: JobSpec, devices: tuple[str, ...]) -> JobSpec:
    """The spec with the default plan for `devices`, and generation limits that fit its short answers."""
    limits = GenerationLimits(max_sequences=64, max_batched_tokens=2048, max_length=512, kv_bytes=KV_BYTES)
    plan = default_plan([DeviceId.parse(device) for device in devices], spec.model_stages, limits)
    return spec.model_copy(update={"plan": plan_to_dict(plan)})


def with_move(spec: JobSpec) -> JobSpec:
    """The spec with one change of plan in the middle, as when devices leave: generation hands its last device to
    training, which comes together on it and leaves its own. Unchanged where that device is the only one, or there is
    no middle."""
    assert spec.plan is not None
    devices = [str(device) for device in plan_from_dict(spec.plan)[GENERATION].devices]
    if len(devices) < 2 or spec.steps < 2:
        return spec
    left = {"layout": f"tp1.pp1.fs1 x{len(devices) - 1}", "devices": devices[:-1]}
    whole = {"layout": "tp1.pp1.fs1", "devices": devices[-1:]}
    move = MoveSpec(after_step=spec.steps // 2, plan={"stages": {str(GENERATION): left, str(TRAINING): whole}})
    return spec.model_copy(update={"moves": (move,)})


def commonest_answer(spec: JobSpec) -> float:
    """What always giving the commonest held-out answer would score: a fraction to hold the results against."""
    questions = spec.prompts.open(spec.seed, spec.evaluation.size).heldout
    counts = Counter(question.answer for question in questions)
    return max(counts.values()) / len(questions) if questions else 0.0
