"""The units of a job as the coordinator placed them, with the channel that reaches each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import grpc.aio

from nereus_common.core.ids import ModelStage
from nereus_common.core.plan import StagePlan


@dataclass(frozen=True, slots=True)
class PlacedUnit:
    """`service` is the gRPC target of the stage service that owns the unit."""

    id: str
    replica: int
    epoch: int
    service: str
    channel: grpc.aio.Channel


@dataclass(frozen=True, slots=True)
class PlacedStage:
    """The units of one model-stage, by replica."""

    name: ModelStage
    plan: StagePlan
    units: tuple[PlacedUnit, ...]


PlacedJob = Mapping[ModelStage, PlacedStage]
