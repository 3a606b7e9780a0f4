"""Core values ↔ protobuf. What comes in is checked by the core types themselves, which name the field."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from nereus.v1 import plan_pb2, units_pb2
from nereus_common.core.errors import InvalidPlan
from nereus_common.core.ids import DeviceId, ModelStage, TensorName
from nereus_common.core.layout import Layout
from nereus_common.core.plan import Dtypes, GenerationLimits, Plan, Recompute, Residency, StagePlan
from nereus_common.core.transfer import Box, RankRef, Transfer

_RECOMPUTE = {
    Recompute.NONE: plan_pb2.RECOMPUTE_NONE,
    Recompute.FULL: plan_pb2.RECOMPUTE_FULL,
}
_RESIDENCY = {
    Residency.DEVICE: plan_pb2.RESIDENCY_DEVICE,
    Residency.HOST: plan_pb2.RESIDENCY_HOST,
    Residency.DROPPED: plan_pb2.RESIDENCY_DROPPED,
}
_FROM_RECOMPUTE = {wire: value for value, wire in _RECOMPUTE.items()}
_FROM_RESIDENCY = {wire: value for value, wire in _RESIDENCY.items()}


def layout_to_pb(layout: Layout) -> plan_pb2.Layout:
    return plan_pb2.Layout(tp=layout.tp, pp=layout.pp, fs=layout.fs, ep=layout.ep, split=layout.split or ())


def layout_from_pb(layout: plan_pb2.Layout) -> Layout:
    return Layout(layout.tp, layout.pp, layout.fs, layout.ep, tuple(layout.split) or None)


def stage_plan_to_pb(model_stage: ModelStage, stage: StagePlan) -> plan_pb2.StagePlan:
    return plan_pb2.StagePlan(
        model_stage=str(model_stage),
        layout=layout_to_pb(stage.layout),
        replicas=stage.replicas,
        devices=[str(device) for device in stage.devices],
        microbatch_tokens=stage.microbatch_tokens,
        accumulation=stage.accumulation,
        recompute=_RECOMPUTE[stage.recompute],
        dtypes=plan_pb2.Dtypes(master=stage.dtypes.master, compute=stage.dtypes.compute, kv=stage.dtypes.kv),
        idle=_RESIDENCY[stage.idle],
        generation=None if stage.generation is None else _limits_to_pb(stage.generation),
    )


def stage_plan_from_pb(stage: plan_pb2.StagePlan) -> tuple[ModelStage, StagePlan]:
    """InvalidPlan names what is absent or contradicts itself; nothing is filled in."""
    name = ModelStage.parse(stage.model_stage)
    for field in ("layout", "dtypes"):
        if not stage.HasField(field):
            raise InvalidPlan(f"stages.{name}.{field} is missing", field=f"stages.{name}.{field}")
    if stage.recompute not in _FROM_RECOMPUTE or stage.idle not in _FROM_RESIDENCY:
        raise InvalidPlan(f"stages.{name}: recompute or idle is not set", remedy="name both", field=f"stages.{name}")
    return name, StagePlan(
        layout=layout_from_pb(stage.layout),
        devices=tuple(DeviceId.parse(device) for device in stage.devices),
        replicas=stage.replicas,
        microbatch_tokens=stage.microbatch_tokens,
        accumulation=stage.accumulation if stage.HasField("accumulation") else None,
        recompute=_FROM_RECOMPUTE[stage.recompute],
        dtypes=Dtypes(stage.dtypes.master, stage.dtypes.compute, stage.dtypes.kv),
        idle=_FROM_RESIDENCY[stage.idle],
        generation=_limits_from_pb(stage.generation) if stage.HasField("generation") else None,
    )


def _limits_to_pb(limits: GenerationLimits) -> plan_pb2.GenerationLimits:
    return plan_pb2.GenerationLimits(
        max_sequences=limits.max_sequences,
        max_batched_tokens=limits.max_batched_tokens,
        max_length=limits.max_length,
        kv_bytes=limits.kv_bytes,
        graphs=limits.graphs,
    )


def _limits_from_pb(limits: plan_pb2.GenerationLimits) -> GenerationLimits:
    return GenerationLimits(
        limits.max_sequences, limits.max_batched_tokens, limits.max_length, limits.kv_bytes, limits.graphs
    )


def plan_to_pb(plan: Plan) -> plan_pb2.Plan:
    return plan_pb2.Plan(
        stages=[stage_plan_to_pb(name, stage) for name, stage in plan.stages],
        colocated=[plan_pb2.ColocatedGroup(model_stages=map(str, group)) for group in plan.colocated],
        staleness=plan.staleness,
    )


def plan_from_pb(plan: plan_pb2.Plan) -> Plan:
    return Plan(
        stages=tuple(stage_plan_from_pb(stage) for stage in plan.stages),
        colocated=tuple(tuple(map(ModelStage.parse, group.model_stages)) for group in plan.colocated),
        staleness=plan.staleness if plan.HasField("staleness") else None,
    )


def box_to_pb(box: Box) -> units_pb2.Box:
    return units_pb2.Box(start=box.start, stop=box.stop)


def box_from_pb(box: units_pb2.Box) -> Box:
    return Box(tuple(box.start), tuple(box.stop))


def boxes_to_pb(boxes: Mapping[TensorName, Sequence[Box]]) -> list[units_pb2.TensorBoxes]:
    """What one rank holds of every tensor."""
    return [units_pb2.TensorBoxes(tensor=name, boxes=map(box_to_pb, cut)) for name, cut in boxes.items()]


def boxes_from_pb(boxes: Iterable[units_pb2.TensorBoxes]) -> dict[TensorName, tuple[Box, ...]]:
    return {TensorName(one.tensor): tuple(map(box_from_pb, one.boxes)) for one in boxes}


def rank_to_pb(rank: RankRef) -> units_pb2.RankRef:
    return units_pb2.RankRef(unit_id=rank.unit, rank=rank.rank)


def rank_from_pb(rank: units_pb2.RankRef) -> RankRef:
    return RankRef(rank.unit_id, rank.rank)


def transfer_to_pb(transfer: Transfer) -> units_pb2.Transfer:
    """The target's unit is not part of it: it is the one that the message is sent to."""
    return units_pb2.Transfer(
        tensor=transfer.tensor,
        box=box_to_pb(transfer.box),
        source=rank_to_pb(transfer.source),
        target_rank=transfer.target.rank,
        bucket=transfer.bucket,
    )


def transfer_from_pb(transfer: units_pb2.Transfer, target_unit: str) -> Transfer:
    return Transfer(
        tensor=TensorName(transfer.tensor),
        box=box_from_pb(transfer.box),
        source=rank_from_pb(transfer.source),
        target=RankRef(target_unit, transfer.target_rank),
        bucket=transfer.bucket,
    )


def digests_to_pb(digests: Mapping[str, int]) -> list[units_pb2.StateDigest]:
    return [units_pb2.StateDigest(kind=kind, digest=digest) for kind, digest in sorted(digests.items())]


def digests_from_pb(digests: Iterable[units_pb2.StateDigest]) -> dict[str, int]:
    """By kind."""
    return {one.kind: one.digest for one in digests}
