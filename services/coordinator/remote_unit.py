"""One unit, seen from the coordinator: the lifecycle of UnitService as plain calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import grpc.aio

from nereus.v1 import units_pb2 as pb
from nereus.v1.units_pb2_grpc import UnitServiceStub
from nereus_common.core.emu import Unit
from nereus_common.core.ids import TensorName, UnitId
from nereus_common.rpc import calling
from nereus_common.rpc.convert import digests_from_pb
from nereus_common.stages.base import Holding, PullOrder, RankPulled, UnitSpec
from nereus_common.stages.convert import (
    holding_from_pb,
    pull_order_to_pb,
    pulled_from_pb,
    spec_to_pb,
)


@dataclass(frozen=True, slots=True)
class RemoteUnit:
    """`service` is the target behind `channel`. All timeouts in seconds."""

    unit: Unit
    service: str
    channel: grpc.aio.Channel

    @property
    def id(self) -> UnitId:
        return self.unit.id

    @property
    def _stub(self) -> UnitServiceStub:
        return UnitServiceStub(self.channel)

    async def prepare(self, spec: UnitSpec, timeout: float) -> Sequence[int]:
        request = pb.PrepareUnitRequest(spec=spec_to_pb(spec), timeout_seconds=timeout)
        with calling("PrepareUnit", self.service):
            return list((await self._stub.PrepareUnit(request, timeout=timeout)).pids)

    async def load(self, version: int, timeout: float, checkpoint: str = "") -> None:
        request = pb.LoadUnitRequest(unit_id=self.id, epoch=self.unit.epoch, version=version, checkpoint=checkpoint)
        with calling("LoadUnit", self.service):
            await self._stub.LoadUnit(request, timeout=timeout)

    async def describe(self, timeout: float, state: bool = False) -> Holding:
        request = pb.DescribeBoxesRequest(unit_id=self.id, epoch=self.unit.epoch, state=state)
        with calling("DescribeBoxes", self.service):
            return holding_from_pb(await self._stub.DescribeBoxes(request, timeout=timeout))

    async def pull(self, order: PullOrder) -> Sequence[RankPulled]:
        request = pull_order_to_pb(self.id, self.unit.epoch, order)
        with calling("PullState", self.service):
            return pulled_from_pb(await self._stub.PullState(request, timeout=order.timeout))

    async def verify(
        self, version: int, wire_dtype: str, expected: Mapping[int, int], timeout: float
    ) -> Mapping[int, int]:
        request = pb.VerifyUnitRequest(
            unit_id=self.id,
            epoch=self.unit.epoch,
            version=version,
            wire_dtype=wire_dtype,
            expected=[pb.RankDigest(rank=rank, digest=digest) for rank, digest in expected.items()],
        )
        with calling("VerifyUnit", self.service):
            found = await self._stub.VerifyUnit(request, timeout=timeout)
        return {rank.rank: rank.digest for rank in found.ranks}

    async def commit(self, version: int, timeout: float) -> None:
        request = pb.CommitUnitRequest(unit_id=self.id, epoch=self.unit.epoch, version=version)
        with calling("CommitUnit", self.service):
            await self._stub.CommitUnit(request, timeout=timeout)

    async def offer(self, version: int, timeout: float) -> Holding:
        request = pb.OfferStateRequest(unit_id=self.id, epoch=self.unit.epoch, version=version)
        with calling("OfferState", self.service):
            return holding_from_pb(await self._stub.OfferState(request, timeout=timeout))

    async def withdraw(self, timeout: float) -> None:
        request = pb.WithdrawStateRequest(unit_id=self.id, epoch=self.unit.epoch)
        with calling("WithdrawState", self.service):
            await self._stub.WithdrawState(request, timeout=timeout)

    async def drop(self, tensors: Sequence[TensorName], timeout: float) -> None:
        request = pb.DropStateRequest(unit_id=self.id, epoch=self.unit.epoch, tensors=tensors)
        with calling("DropState", self.service):
            await self._stub.DropState(request, timeout=timeout)

    async def digest(self, version: int, timeout: float) -> Mapping[str, int]:
        request = pb.DigestStateRequest(unit_id=self.id, epoch=self.unit.epoch, version=version)
        with calling("DigestState", self.service):
            return digests_from_pb((await self._stub.DigestState(request, timeout=timeout)).digests)

    async def sleep(self, timeout: float) -> None:
        request = pb.SleepUnitRequest(unit_id=self.id, epoch=self.unit.epoch)
        with calling("SleepUnit", self.service):
            await self._stub.SleepUnit(request, timeout=timeout)

    async def wake(self, timeout: float) -> None:
        request = pb.WakeUnitRequest(unit_id=self.id, epoch=self.unit.epoch)
        with calling("WakeUnit", self.service):
            await self._stub.WakeUnit(request, timeout=timeout)

    async def release(self, timeout: float, *, keep_copies: bool = False) -> bool:
        """Whether copies of its state are left, where they are to be."""
        request = pb.ReleaseUnitRequest(unit_id=self.id, epoch=self.unit.epoch, keep_copies=keep_copies)
        with calling("ReleaseUnit", self.service):
            return (await self._stub.ReleaseUnit(request, timeout=timeout)).copies_kept
