"""The values of the unit lifecycle, to and from protobuf."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from nereus.v1 import units_pb2 as pb
from nereus_common.core.errors import InvalidInput
from nereus_common.core.ids import Head, JobId, TensorName, UnitId
from nereus_common.core.transfer import RankRef, Transfer
from nereus_common.rpc.convert import box_from_pb, box_to_pb, stage_plan_from_pb, stage_plan_to_pb
from nereus_common.stages.base import Holding, PullOrder, RankHolding, RankPulled, Rendezvous, UnitSpec


def spec_to_pb(spec: UnitSpec) -> pb.UnitSpec:
    return pb.UnitSpec(
        unit_id=spec.unit,
        job_id=spec.job,
        replica=spec.replica,
        epoch=spec.epoch,
        model=pb.Model(name=spec.model_stage.model, path=spec.model_path, head=spec.head),
        stage=stage_plan_to_pb(spec.model_stage, spec.plan),
        engine=spec.engine,
        options_json=json.dumps(dict(spec.options), sort_keys=True),
        rendezvous=pb.Rendezvous(host=spec.rendezvous.host, port=spec.rendezvous.port, prefix=spec.rendezvous.prefix),
        seed=spec.seed,
    )


def spec_from_pb(spec: pb.UnitSpec) -> UnitSpec:
    model_stage, plan = stage_plan_from_pb(spec.stage)
    return UnitSpec(
        unit=UnitId(spec.unit_id),
        job=JobId(spec.job_id),
        model_stage=model_stage,
        replica=spec.replica,
        epoch=spec.epoch,
        model_path=spec.model.path,
        plan=plan,
        engine=spec.engine,
        options=_options(spec.options_json),
        rendezvous=Rendezvous(spec.rendezvous.host, spec.rendezvous.port, spec.rendezvous.prefix),
        seed=spec.seed,
        head=head_from_pb(spec.model),
    )


def head_from_pb(model: pb.Model) -> Head:
    """`lm` where the message names none; InvalidInput for a name that is no head."""
    if model.head and model.head not in list(Head):
        raise InvalidInput(
            f"model {model.name}: head {model.head!r} is unknown",
            remedy=f"one of {', '.join(Head)}",
            field="model.head",
        )
    return Head(model.head or Head.LM)


def _options(text: str) -> Mapping[str, Any]:
    try:
        options = json.loads(text or "{}")
    except json.JSONDecodeError as wrong:
        raise InvalidInput(f"spec.options_json is not JSON: {wrong}", field="spec.options_json") from wrong
    if not isinstance(options, dict):
        raise InvalidInput("spec.options_json is not an object", field="spec.options_json")
    return options


def holding_to_pb(holding: Holding) -> pb.DescribeBoxesResponse:
    return pb.DescribeBoxesResponse(version=holding.version, ranks=_ranks_to_pb(holding))


def offer_to_pb(holding: Holding) -> pb.OfferStateResponse:
    return pb.OfferStateResponse(version=holding.version, ranks=_ranks_to_pb(holding))


def _ranks_to_pb(holding: Holding) -> list[pb.RankBoxes]:
    return [
        pb.RankBoxes(
            rank=rank.rank,
            device=rank.device,
            address=rank.address,
            tensors=[
                pb.TensorBoxes(tensor=tensor, boxes=[box_to_pb(box) for box in boxes])
                for tensor, boxes in rank.boxes.items()
            ],
        )
        for rank in holding.ranks
    ]


def holding_from_pb(answer: pb.DescribeBoxesResponse | pb.OfferStateResponse) -> Holding:
    return Holding(
        answer.version,
        tuple(
            RankHolding(
                rank.rank,
                rank.device,
                rank.address,
                {TensorName(one.tensor): tuple(box_from_pb(box) for box in one.boxes) for one in rank.tensors},
            )
            for rank in answer.ranks
        ),
    )


def pull_order_to_pb(unit: str, epoch: int, order: PullOrder) -> pb.PullStateRequest:
    sources = {move.source for move in order.transfers}
    return pb.PullStateRequest(
        unit_id=unit,
        epoch=epoch,
        version=order.version,
        wire_dtype=order.wire_dtype,
        transfers=[
            pb.Transfer(
                tensor=move.tensor,
                box=box_to_pb(move.box),
                source=pb.RankRef(unit_id=move.source.unit, rank=move.source.rank),
                target_rank=move.target.rank,
                bucket=move.bucket,
            )
            for move in order.transfers
        ],
        peers=[
            pb.Peer(rank=pb.RankRef(unit_id=ref.unit, rank=ref.rank), address=order.addresses[ref])
            for ref in sorted(sources)
        ],
        timeout_seconds=order.timeout,
        transition_id=order.transition,
        state=order.state,
        more=order.more,
        compared_whole=order.compared_whole,
    )


def pull_order_from_pb(request: pb.PullStateRequest) -> PullOrder:
    addresses = {RankRef(peer.rank.unit_id, peer.rank.rank): peer.address for peer in request.peers}
    transfers = [_transfer_from_pb(request.unit_id, move) for move in request.transfers]
    for move in transfers:
        if move.source not in addresses:
            raise InvalidInput(f"transfer of {move.tensor} names {move.source}, which is no peer", field="peers")
    return PullOrder(
        version=request.version,
        wire_dtype=request.wire_dtype,
        transfers=transfers,
        addresses=addresses,
        timeout=request.timeout_seconds,
        transition=request.transition_id,
        state=request.state,
        more=request.more,
        compared_whole=request.compared_whole,
    )


def _transfer_from_pb(unit: str, move: pb.Transfer) -> Transfer:
    return Transfer(
        tensor=TensorName(move.tensor),
        box=box_from_pb(move.box),
        source=RankRef(move.source.unit_id, move.source.rank),
        target=RankRef(unit, move.target_rank),
        bucket=move.bucket,
    )


def pulled_to_pb(ranks: Sequence[RankPulled]) -> pb.PullStateResponse:
    return pb.PullStateResponse(
        ranks=[pb.RankPull(rank=one.rank, bytes=one.bytes, seconds=one.seconds, digest=one.digest) for one in ranks]
    )


def pulled_from_pb(answer: pb.PullStateResponse) -> tuple[RankPulled, ...]:
    return tuple(RankPulled(one.rank, one.bytes, one.seconds, one.digest) for one in answer.ranks)
