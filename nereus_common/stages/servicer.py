"""UnitService on the wire: nothing but translation."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
from numpy.typing import NDArray

from nereus.v1 import units_pb2 as pb
from nereus.v1.columns_pb2 import ColumnChunk
from nereus.v1.units_pb2_grpc import UnitServiceServicer
from nereus_common.core.errors import InvalidInput
from nereus_common.core.ids import TensorName, UnitId
from nereus_common.rpc import columns_from_chunks
from nereus_common.rpc.convert import digests_to_pb
from nereus_common.stages import convert
from nereus_common.stages.units import Units

Context = grpc.aio.ServicerContext[Any, Any]


def time_left(context: Context, limit: float) -> float:
    """Seconds until the caller gives up, at most `limit`."""
    remaining = context.time_remaining()
    return limit if remaining is None else min(limit, remaining)


async def header_and_columns(requests: AsyncIterator[Any], method: str) -> tuple[Any, dict[str, NDArray[Any]]]:
    """A stream of one header and then column chunks, read to its end. InvalidInput when it is anything else."""
    first = await anext(aiter(requests), None)
    if first is None or not first.HasField("header"):
        raise InvalidInput(f"{method}: the first message is not a header", field="header")

    async def chunks() -> AsyncIterator[ColumnChunk]:
        async for request in requests:
            if not request.HasField("chunk"):
                raise InvalidInput(f"{method}: a second header", remedy="send one header, then chunks", field="header")
            yield request.chunk

    return first.header, dict(await columns_from_chunks(chunks()))


class UnitServicer(UnitServiceServicer):
    """`limit`: seconds any call may take when its caller sets no deadline."""

    def __init__(self, units: Units, limit: float = 600.0) -> None:
        self._units = units
        self._limit = limit

    async def PrepareUnit(self, request: pb.PrepareUnitRequest, context: Context) -> pb.PrepareUnitResponse:
        spec = convert.spec_from_pb(request.spec)
        return pb.PrepareUnitResponse(pids=await self._units.prepare(spec, time_left(context, self._limit)))

    async def LoadUnit(self, request: pb.LoadUnitRequest, context: Context) -> pb.LoadUnitResponse:
        timeout = time_left(context, self._limit)
        unit = UnitId(request.unit_id)
        await self._units.load(unit, request.epoch, request.version, timeout, request.checkpoint)
        return pb.LoadUnitResponse()

    async def DescribeBoxes(self, request: pb.DescribeBoxesRequest, context: Context) -> pb.DescribeBoxesResponse:
        timeout = time_left(context, self._limit)
        unit = UnitId(request.unit_id)
        return convert.holding_to_pb(await self._units.describe(unit, request.epoch, timeout, request.state))

    async def PullState(self, request: pb.PullStateRequest, context: Context) -> pb.PullStateResponse:
        order = convert.pull_order_from_pb(request)
        return convert.pulled_to_pb(await self._units.pull(UnitId(request.unit_id), request.epoch, order))

    async def VerifyUnit(self, request: pb.VerifyUnitRequest, context: Context) -> pb.VerifyUnitResponse:
        found = await self._units.verify(
            UnitId(request.unit_id),
            request.epoch,
            request.version,
            request.wire_dtype,
            {rank.rank: rank.digest for rank in request.expected},
            time_left(context, self._limit),
        )
        return pb.VerifyUnitResponse(
            ranks=[pb.RankDigest(rank=rank, digest=digest) for rank, digest in sorted(found.items())]
        )

    async def CommitUnit(self, request: pb.CommitUnitRequest, context: Context) -> pb.CommitUnitResponse:
        timeout = time_left(context, self._limit)
        await self._units.commit(UnitId(request.unit_id), request.epoch, request.version, timeout)
        return pb.CommitUnitResponse()

    async def OfferState(self, request: pb.OfferStateRequest, context: Context) -> pb.OfferStateResponse:
        timeout = time_left(context, self._limit)
        unit = UnitId(request.unit_id)
        return convert.offer_to_pb(await self._units.offer(unit, request.epoch, request.version, timeout))

    async def WithdrawState(self, request: pb.WithdrawStateRequest, context: Context) -> pb.WithdrawStateResponse:
        await self._units.withdraw(UnitId(request.unit_id), request.epoch, time_left(context, self._limit))
        return pb.WithdrawStateResponse()

    async def DropState(self, request: pb.DropStateRequest, context: Context) -> pb.DropStateResponse:
        tensors = [TensorName(name) for name in request.tensors]
        await self._units.drop(UnitId(request.unit_id), request.epoch, tensors, time_left(context, self._limit))
        return pb.DropStateResponse()

    async def DigestState(self, request: pb.DigestStateRequest, context: Context) -> pb.DigestStateResponse:
        timeout = time_left(context, self._limit)
        unit = UnitId(request.unit_id)
        found = await self._units.digest(unit, request.epoch, request.version, timeout)
        return pb.DigestStateResponse(digests=digests_to_pb(found))

    async def SleepUnit(self, request: pb.SleepUnitRequest, context: Context) -> pb.SleepUnitResponse:
        await self._units.sleep(UnitId(request.unit_id), request.epoch, time_left(context, self._limit))
        return pb.SleepUnitResponse()

    async def WakeUnit(self, request: pb.WakeUnitRequest, context: Context) -> pb.WakeUnitResponse:
        await self._units.wake(UnitId(request.unit_id), request.epoch, time_left(context, self._limit))
        return pb.WakeUnitResponse()

    async def ReleaseUnit(self, request: pb.ReleaseUnitRequest, context: Context) -> pb.ReleaseUnitResponse:
        kept = await self._units.release(UnitId(request.unit_id), request.epoch, keep_copies=request.keep_copies)
        return pb.ReleaseUnitResponse(copies_kept=kept)

    async def ListUnits(self, request: pb.ListUnitsRequest, context: Context) -> pb.ListUnitsResponse:
        return pb.ListUnitsResponse(
            units=[
                pb.UnitStatus(
                    unit_id=entry.spec.unit,
                    phase=str(entry.unit.phase),
                    version=entry.unit.version,
                    pids=entry.host.pids,
                )
                for entry in self._units.entries()
                if request.job_id in ("", entry.spec.job)
            ]
        )
