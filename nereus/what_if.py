"""Which plan would be best for a job on some cluster: the controller's own search, without a cluster and without a GPU.

Nothing is measured here. A step's seconds come from counted operations and nominal peaks, of which every class of
operations is taken to achieve a third until a running job has shown what it does; so plans can be compared with each
other better than seconds with a clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from nereus.planning import shapes_of, workload_of
from nereus.spec import JobSpec
from nereus_common.core.errors import InvalidInput
from nereus_common.core.ids import DeviceId, ModelStage, Stage
from nereus_common.core.layout import Layout
from nereus_common.core.plan import GenerationLimits, Plan, Recompute, StagePlan
from nereus_common.planning.hardware import Cluster
from nereus_common.planning.job import Job
from nereus_common.planning.memory import Footprint, footprint
from nereus_common.planning.question import Question, Searched
from nereus_common.planning.search import search
from nereus_common.state.architecture import ModelShape

PROMPT_TOKENS = 256
SEQUENCES = (256, 64, 16)
"""Sequences at once of a generation rank, of which the KV cache gets so many tokens as they have together at most."""
MOST_KV = 40 << 30
"""Bytes of a rank's KV cache."""
MICROBATCHES = (16384, 4096)
"""Tokens, where a sequence is no longer."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of a prompt, and of a response with it."""

    prompt: int
    sequence: int

    def __post_init__(self) -> None:
        if not 1 <= self.prompt < self.sequence:
            raise InvalidInput(
                f"a prompt of {self.prompt} tokens leaves none of {self.sequence} for a response",
                remedy="a prompt of at least 1 token, and a longer sequence",
                field="seq-len",
            )


@dataclass(frozen=True, slots=True)
class Asked:
    """A job file and a cluster, as one question."""

    question: Question
    lengths: Lengths

    def answer(self, top: int) -> Searched:
        return search(self.question, top)

    @property
    def sequences(self) -> int:
        return self.question.job.workload.sequences


def ask(spec: JobSpec, cluster: Cluster, lengths: Lengths, gpus: int | None = None) -> Asked:
    """The best plan is sought on the first `gpus` devices, by default on all.

    What the job's own plan says of dtypes and limits holds, and is not chosen anew.
    """
    shapes = shapes_of(spec)
    workload = workload_of(spec, float(lengths.prompt), [float(lengths.sequence - lengths.prompt)])
    job = Job(spec.workflow, shapes, workload, {})
    written = spec.explicit_plan
    knobs = {name: _knobs(shapes[name], name, written, lengths) for name in spec.model_stages}
    question = Question(job, cluster, knobs, staleness=spec.staleness or None, usable=_usable(cluster, gpus))
    return Asked(question, lengths)


def worst_rank(plan: Plan, shapes: Mapping[ModelStage, ModelShape], name: ModelStage) -> Footprint[int]:
    """Of the rank of a model-stage that needs the most."""
    stage = plan[name]
    return max(
        (footprint(shapes[name], name, stage, rank) for rank in range(stage.layout.ranks)),
        key=lambda found: found.total,
    )


def _usable(cluster: Cluster, gpus: int | None) -> frozenset[DeviceId] | None:
    if gpus is None:
        return None
    if not 1 <= gpus <= len(cluster.devices):
        raise InvalidInput(
            f"gpus is {gpus}", remedy=f"the cluster has {len(cluster.devices)} devices: 1 to all of them", field="gpus"
        )
    return frozenset(cluster.devices[:gpus])


def _knobs(shape: ModelShape, name: ModelStage, written: Plan | None, lengths: Lengths) -> tuple[StagePlan, ...]:
    if written is not None and name in written:
        return (written[name],)
    plain = StagePlan(Layout(), (DeviceId("any", "gpu0"),))
    match name.stage:
        case Stage.GENERATION:
            plans = [replace(plain, generation=_limits(shape, count, lengths.sequence)) for count in SEQUENCES]
            return tuple(plans)
        case Stage.INFERENCE:
            return tuple(replace(plain, microbatch_tokens=tokens) for tokens in _microbatches(lengths))
        case Stage.TRAINING:
            return tuple(
                replace(plain, microbatch_tokens=tokens, recompute=recompute)
                for tokens in _microbatches(lengths)
                for recompute in Recompute
            )


def _microbatches(lengths: Lengths) -> tuple[int, ...]:
    """A sequence is never cut."""
    return tuple(sorted({max(tokens, lengths.sequence) for tokens in MICROBATCHES}))


def _limits(shape: ModelShape, sequences: int, length: int) -> GenerationLimits:
    """KV bytes are a rank's, of a model that is not cut: on tp ranks the same bytes hold tp times as many tokens."""
    position = 2 * shape.kv_heads * shape.head_dim * shape.layers * 2
    return GenerationLimits(
        max_sequences=sequences,
        max_batched_tokens=max(8192, length),
        max_length=length,
        kv_bytes=min(sequences * length * position, MOST_KV),
    )
