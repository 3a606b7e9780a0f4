"""A plan: where every model-stage of a job runs, how it is cut, and with what limits.

A plan is a value: frozen, hashable, serialisable, with a canonical form from which its id is made. Two plans that
differ only in knobs (microbatch, recomputation, KV bytes …) move no box.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, TypeVar

from nereus_common.core.errors import InvalidPlan
from nereus_common.core.ids import DeviceId, ModelStage, Stage
from nereus_common.core.layout import Coordinate, Layout, parse_replicated


class Recompute(StrEnum):
    """Which activations the backward pass computes again."""

    NONE = "none"
    FULL = "full"


class Residency(StrEnum):
    """Where an idle unit's state waits."""

    DEVICE = "device"
    HOST = "host"
    DROPPED = "dropped"


@dataclass(frozen=True, slots=True)
class Dtypes:
    """`master`: what the optimizer updates; `compute`: forward and backward, and the wire; `kv`: the KV cache."""

    master: str = "float32"
    compute: str = "bfloat16"
    kv: str = "bfloat16"


@dataclass(frozen=True, slots=True)
class GenerationLimits:
    """Limits of one generation unit. Lengths and batches in tokens, `kv_bytes` per rank."""

    max_sequences: int = 64
    max_batched_tokens: int = 2048
    max_length: int = 1024
    kv_bytes: int = 1 << 29
    graphs: bool = False


@dataclass(frozen=True, slots=True)
class StagePlan:
    """One model-stage: `replicas` units of `layout`, on `devices` ordered by (replica, pp, fs, tp).

    `microbatch_tokens` bounds a packed microbatch; `accumulation` fixes the number of microbatches of one update,
    and None lets the batch decide.
    """

    layout: Layout
    devices: tuple[DeviceId, ...]
    replicas: int = 1
    microbatch_tokens: int = 2048
    accumulation: int | None = None
    recompute: Recompute = Recompute.NONE
    dtypes: Dtypes = field(default_factory=Dtypes)
    idle: Residency = Residency.DEVICE
    generation: GenerationLimits | None = None

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise InvalidPlan(f"replicas is {self.replicas}", remedy="at least one", field="replicas")
        needed = self.replicas * self.layout.ranks
        if len(self.devices) != needed:
            raise InvalidPlan(
                f"{self} needs {needed} devices, {len(self.devices)} are given",
                remedy="name one device per (replica, pp, fs, tp) coordinate",
                field="devices",
            )
        if len(set(self.devices)) != needed:
            raise InvalidPlan(f"{self} names a device twice", remedy="one rank per device", field="devices")
        if self.microbatch_tokens < 1:
            raise InvalidPlan("microbatch_tokens is below 1", remedy="give a token budget", field="microbatch_tokens")
        if self.accumulation is not None and self.accumulation < 1:
            raise InvalidPlan(
                "accumulation is below 1", remedy="leave it out to let the batch decide", field="accumulation"
            )

    def unit_devices(self, replica: int) -> tuple[DeviceId, ...]:
        """The devices of one unit, in rank order."""
        ranks = self.layout.ranks
        return self.devices[replica * ranks : (replica + 1) * ranks]

    def device(self, replica: int, place: Coordinate) -> DeviceId:
        return self.unit_devices(replica)[self.layout.rank(place)]

    @property
    def data_parallel(self) -> int:
        """Degree over which a batch is split: fs × replicas."""
        return self.layout.fs * self.replicas

    def __str__(self) -> str:
        return f"{self.layout} x{self.replicas}" if self.replicas > 1 else str(self.layout)


@dataclass(frozen=True, slots=True)
class Plan:
    """All model-stages of a job.

    `colocated` lists groups of model-stages that share devices, each in the order in which their phases run.
    `staleness` is None for a synchronous job, else η: how many versions a sample may lag.
    """

    stages: tuple[tuple[ModelStage, StagePlan], ...]
    colocated: tuple[tuple[ModelStage, ...], ...] = ()
    staleness: int | None = None

    def __post_init__(self) -> None:
        names = [name for name, _ in self.stages]
        if len(set(names)) != len(names):
            raise InvalidPlan("a model-stage appears twice in the plan", field="stages")
        object.__setattr__(self, "stages", tuple(sorted(self.stages, key=lambda entry: entry[0])))
        self._check_limits()
        self._check_sharing()

    def _check_limits(self) -> None:
        for name, stage in self.stages:
            if (name.stage is Stage.GENERATION) != (stage.generation is not None):
                raise InvalidPlan(
                    f"{name}: generation limits belong to generation model-stages, and to all of them",
                    remedy="set `generation` there and only there",
                    field=f"stages.{name}.generation",
                )

    def _check_sharing(self) -> None:
        for name in (name for group in self.colocated for name in group if name not in self.names):
            raise InvalidPlan(f"colocated names {name}, which the plan lacks", remedy="remove it", field="colocated")
        together = {frozenset((a, b)) for group in self.colocated for a in group for b in group if a != b}
        for index, (first, one) in enumerate(self.stages):
            for second, other in self.stages[index + 1 :]:
                shared = sorted(set(one.devices) & set(other.devices))
                if shared and frozenset((first, second)) not in together:
                    raise InvalidPlan(
                        f"{first} and {second} both use {shared[0]}, and no colocated group names both",
                        remedy="give them disjoint devices or list them in one colocated group",
                        field="colocated",
                    )

    def __getitem__(self, model_stage: ModelStage) -> StagePlan:
        for name, stage in self.stages:
            if name == model_stage:
                return stage
        raise InvalidPlan(f"the plan has no {model_stage}", remedy=f"it has {', '.join(map(str, self.names))}")

    def __contains__(self, model_stage: object) -> bool:
        return model_stage in self.names

    @property
    def names(self) -> tuple[ModelStage, ...]:
        return tuple(name for name, _ in self.stages)

    @property
    def devices(self) -> tuple[DeviceId, ...]:
        return tuple(sorted({device for _, stage in self.stages for device in stage.devices}))

    def with_stage(self, model_stage: ModelStage, stage: StagePlan) -> Plan:
        kept = tuple(entry for entry in self.stages if entry[0] != model_stage)
        return replace(self, stages=(*kept, (model_stage, stage)))

    def to_json(self) -> str:
        """Canonical text: equal plans give equal text."""
        return json.dumps(plan_to_dict(self), sort_keys=True, separators=(",", ":"))

    @property
    def id(self) -> str:
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:12]


def plan_to_dict(plan: Plan) -> dict[str, Any]:
    return {
        "stages": {str(name): _stage_to_dict(stage) for name, stage in plan.stages},
        "colocated": [[str(name) for name in group] for group in plan.colocated],
        "staleness": plan.staleness,
    }


def _stage_to_dict(stage: StagePlan) -> dict[str, Any]:
    return {
        "layout": str(stage),
        "devices": [str(device) for device in stage.devices],
        "microbatch_tokens": stage.microbatch_tokens,
        "accumulation": stage.accumulation,
        "recompute": str(stage.recompute),
        "dtypes": dataclasses.asdict(stage.dtypes),
        "idle": str(stage.idle),
        "generation": None if stage.generation is None else dataclasses.asdict(stage.generation),
    }


def plan_from_json(text: str) -> Plan:
    try:
        data = json.loads(text)
    except json.JSONDecodeError as wrong:
        raise InvalidPlan(f"the plan is not JSON: {wrong}", field="plan") from wrong
    return plan_from_dict(data)


def plan_from_dict(data: Mapping[str, Any]) -> Plan:
    """The inverse of `plan_to_dict`; InvalidPlan names the field that is unknown, missing or wrong."""
    _check_keys(data, {"stages", "colocated", "staleness"}, "plan")
    if "stages" not in data:
        raise InvalidPlan("plan.stages is missing", remedy="map model-stages to their layout and devices")
    entries = _typed(data["stages"], Mapping, "plan.stages")
    stages = tuple((ModelStage.parse(name), _stage_from_dict(name, value)) for name, value in entries.items())
    groups = tuple(
        tuple(
            ModelStage.parse(_typed(name, str, "plan.colocated")) for name in _typed(group, Sequence, "plan.colocated")
        )
        for group in _typed(data.get("colocated", ()), Sequence, "plan.colocated")
    )
    staleness = data.get("staleness")
    return Plan(stages, groups, None if staleness is None else _typed(staleness, int, "plan.staleness"))


_STAGE_KEYS = {"layout", "devices", "microbatch_tokens", "accumulation", "recompute", "dtypes", "idle", "generation"}


def _stage_from_dict(name: str, data: Mapping[str, Any]) -> StagePlan:
    where = f"plan.stages.{name}"
    _check_keys(data, _STAGE_KEYS, where)
    for key in ("layout", "devices"):
        if key not in data:
            raise InvalidPlan(f"{where}.{key} is missing", field=f"{where}.{key}")
    layout, replicas = parse_replicated(_typed(data["layout"], str, f"{where}.layout"))
    devices = tuple(
        DeviceId.parse(_typed(device, str, f"{where}.devices"))
        for device in _typed(data["devices"], Sequence, f"{where}.devices")
    )
    optional: dict[str, Any] = {}
    for key in ("microbatch_tokens", "accumulation"):
        if data.get(key) is not None:
            optional[key] = _typed(data[key], int, f"{where}.{key}")
    if "recompute" in data:
        optional["recompute"] = _choice(Recompute, data["recompute"], f"{where}.recompute")
    if "idle" in data:
        optional["idle"] = _choice(Residency, data["idle"], f"{where}.idle")
    if data.get("dtypes") is not None:
        optional["dtypes"] = _record(Dtypes, data["dtypes"], f"{where}.dtypes")
    if data.get("generation") is not None:
        optional["generation"] = _record(GenerationLimits, data["generation"], f"{where}.generation")
    return StagePlan(layout, devices, replicas, **optional)


_Record = TypeVar("_Record", Dtypes, GenerationLimits)
_Choice = TypeVar("_Choice", Recompute, Residency)


def _record(kind: type[_Record], data: Any, where: str) -> _Record:
    """A flat dataclass from its fields, each of the type of its default."""
    defaults = dataclasses.asdict(kind())
    _check_keys(data, defaults, where)
    return kind(**{key: _typed(value, type(defaults[key]), f"{where}.{key}") for key, value in data.items()})


def _choice(kind: type[_Choice], value: Any, where: str) -> _Choice:
    if value not in list(kind):
        raise InvalidPlan(f"{where} is {value!r}", remedy=f"one of {', '.join(kind)}", field=where)
    return kind(value)


def _typed(value: Any, kind: type[Any], where: str) -> Any:
    """`value` when it is a `kind`; bool is no number, str no list."""
    confused = (kind is int and isinstance(value, bool)) or (kind is Sequence and isinstance(value, str))
    if confused or not isinstance(value, kind):
        raise InvalidPlan(f"{where} is {value!r}", remedy=f"it must be {_KINDS[kind]}", field=where)
    return value


_KINDS = {Mapping: "a table", Sequence: "a list", str: "a string", int: "a whole number", bool: "true or false"}


def _check_keys(data: Mapping[str, Any], known: Iterable[str], where: str) -> None:
    for key in _typed(data, Mapping, where):
        if key not in known:
            raise InvalidPlan(
                f"{where}.{key} is unknown", remedy=f"known: {', '.join(sorted(known))}", field=f"{where}.{key}"
            )
