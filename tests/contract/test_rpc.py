"""The gRPC boundary on a real server: errors, deadlines, columns, health, reflection, ports."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.reflection_pb2_grpc import ServerReflectionStub

from nereus.v1 import generation_pb2, inference_pb2
from nereus.v1.generation_pb2_grpc import (
    GenerationServiceServicer,
    GenerationServiceStub,
    add_GenerationServiceServicer_to_server,
)
from nereus.v1.inference_pb2_grpc import (
    InferenceServiceServicer,
    InferenceServiceStub,
    add_InferenceServiceServicer_to_server,
)
from nereus_common.core.errors import (
    DeadlineExceeded,
    InvalidInput,
    NereusError,
    NotFound,
    ProcessLost,
    ResourceExhausted,
    StaleVersion,
    Unavailable,
)
from nereus_common.observe import logs
from nereus_common.rpc import DeadlineChannel, calling, chunks_from_columns, columns_from_chunks
from nereus_common.rpc.server import RpcServer, run

Context = grpc.aio.ServicerContext[Any, Any]


class Generation(GenerationServiceServicer):
    """Does what the request id says."""

    def __init__(self) -> None:
        self.subject: Mapping[str, str] = {}
        self.remaining: float | None = None
        self.cancelled = asyncio.Event()

    async def Generate(
        self, request: generation_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[generation_pb2.GenerateResponse]:
        for sample in range(request.samples):
            yield generation_pb2.GenerateResponse(sample=sample)
        if request.request_id == "stale":
            raise StaleVersion("version 3 is gone", remedy="ask for 4", version=3)
        if request.request_id == "hang":
            try:
                await asyncio.sleep(60)
            finally:
                self.cancelled.set()
        if request.request_id == "flood":
            try:
                while True:
                    yield generation_pb2.GenerateResponse(token_ids=range(1 << 16))
            finally:
                self.cancelled.set()

    async def AbortGeneration(
        self, request: generation_pb2.AbortGenerationRequest, context: Context
    ) -> generation_pb2.AbortGenerationResponse:
        self.subject = dict(logs.subject())
        self.remaining = context.time_remaining()
        match request.request_id:
            case "lost":
                raise ProcessLost("worker a died", process="a", pid=12, log="one\ntwo")
            case "bug":
                raise ZeroDivisionError("oops")
            case "hang":
                await asyncio.sleep(60)
        return generation_pb2.AbortGenerationResponse()


class Inference(InferenceServiceServicer):
    async def Score(
        self, request_iterator: AsyncIterator[inference_pb2.ScoreRequest], context: Context
    ) -> AsyncIterator[inference_pb2.ScoreResponse]:
        header = (await anext(request_iterator)).header
        columns = await columns_from_chunks(part.chunk async for part in request_iterator)
        for chunk in chunks_from_columns({"logprobs": columns["tokens"] * np.float32(header.temperature)}):
            yield inference_pb2.ScoreResponse(chunk=chunk)


@asynccontextmanager
async def served() -> AsyncIterator[tuple[Generation, DeadlineChannel, RpcServer]]:
    generation, server = Generation(), RpcServer("test")
    server.add(add_GenerationServiceServicer_to_server, generation)
    server.add(add_InferenceServiceServicer_to_server, Inference())
    await server.start()
    try:
        async with DeadlineChannel(server.target, default=20) as channel:
            yield generation, channel, server
    finally:
        await server.stop(1)


def abort(request_id: str) -> generation_pb2.AbortGenerationRequest:
    return generation_pb2.AbortGenerationRequest(unit_id="u", request_id=request_id)


async def test_an_error_arrives_as_it_was_raised() -> None:
    async with served() as (_, channel, server):
        with pytest.raises(ProcessLost, match="worker a died") as caught, calling("AbortGeneration", server.target):
            await GenerationServiceStub(channel).AbortGeneration(abort("lost"))
        assert caught.value.details == {"process": "a", "pid": "12", "log": "one\ntwo"}


async def test_an_error_after_some_pieces_of_a_stream_arrives_after_them() -> None:
    async with served() as (_, channel, server):
        request = generation_pb2.GenerateRequest(request_id="stale", samples=3)
        seen = []
        with pytest.raises(StaleVersion) as caught, calling("Generate", server.target):
            async for piece in GenerationServiceStub(channel).Generate(request):
                seen.append(piece.sample)
        assert seen == [0, 1, 2]
        assert caught.value.remedy == "ask for 4"


async def test_a_bug_is_logged_with_its_traceback_and_arrives_as_internal(caplog: pytest.LogCaptureFixture) -> None:
    async with served() as (_, channel, server):
        with (
            caplog.at_level(logging.ERROR),
            pytest.raises(NereusError, match="ZeroDivisionError: oops") as caught,
            calling("AbortGeneration", server.target),
        ):
            await GenerationServiceStub(channel).AbortGeneration(abort("bug"))
        assert type(caught.value) is NereusError
        assert "in AbortGeneration" in caplog.text


async def test_a_late_answer_names_method_and_target() -> None:
    async with served() as (_, channel, server):
        says = f"{server.target} did not answer AbortGeneration"
        with pytest.raises(DeadlineExceeded, match=says), calling("AbortGeneration", server.target):
            await GenerationServiceStub(channel).AbortGeneration(abort("hang"), timeout=0.2)


async def test_every_call_has_a_deadline_and_a_senseless_one_is_refused() -> None:
    async with served() as (generation, channel, _):
        stub = GenerationServiceStub(channel)
        await stub.AbortGeneration(abort("x"))
        assert generation.remaining is not None
        assert 10 < generation.remaining < 21
        await stub.AbortGeneration(abort("x"), timeout=5)
        assert generation.remaining < 6
        for timeout in (0.0, -1.0, float("inf"), float("nan")):
            with pytest.raises(InvalidInput, match="deadline"):
                await stub.AbortGeneration(abort("x"), timeout=timeout)


async def test_the_subject_of_the_callers_logs_reaches_the_service() -> None:
    async with served() as (generation, channel, _):
        with logs.about(job="demo", unit="u1"):
            await GenerationServiceStub(channel).AbortGeneration(abort("x"))
        assert generation.subject == {"job": "demo", "unit": "u1"}


async def test_cancelling_a_stream_cancels_its_servicer() -> None:
    async with served() as (generation, channel, _):
        call = GenerationServiceStub(channel).Generate(generation_pb2.GenerateRequest(request_id="hang", samples=1))
        await call.read()
        call.cancel()
        await asyncio.wait_for(generation.cancelled.wait(), 5)


async def test_cancelling_a_stream_that_waits_for_its_reader_closes_its_servicer_without_a_fault() -> None:
    faults: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))
    async with served() as (generation, channel, _):
        with logs.about(job="demo"):
            call = GenerationServiceStub(channel).Generate(generation_pb2.GenerateRequest(request_id="flood"))
            await call.read()
        await asyncio.sleep(0.2)
        call.cancel()
        await asyncio.wait_for(generation.cancelled.wait(), 5)
        await asyncio.sleep(0.1)
    gc.collect()
    assert not faults


async def test_columns_pass_through_a_stream_both_ways() -> None:
    async with served() as (_, channel, server):
        tokens = np.arange(3_000_000, dtype=np.float32)

        async def parts() -> AsyncIterator[inference_pb2.ScoreRequest]:
            yield inference_pb2.ScoreRequest(header=inference_pb2.ScoreHeader(temperature=2.0))
            for chunk in chunks_from_columns({"tokens": tokens}):
                yield inference_pb2.ScoreRequest(chunk=chunk)

        with calling("Score", server.target):
            answer = InferenceServiceStub(channel).Score(parts())
            columns = await columns_from_chunks(part.chunk async for part in answer)
        np.testing.assert_array_equal(columns["logprobs"], tokens * 2)


async def test_a_target_that_is_not_there_is_unavailable_by_name() -> None:
    async with served() as (_, _, server):
        target = server.target
    async with DeadlineChannel(target) as channel:
        with pytest.raises(Unavailable, match=f"{target} cannot be reached"):
            await channel.ready(0.5)
        says = f"{target} cannot be reached for AbortGeneration"
        with pytest.raises(Unavailable, match=says), calling("AbortGeneration", target):
            await GenerationServiceStub(channel).AbortGeneration(abort("x"), timeout=5)


async def test_a_call_that_a_stopping_service_cuts_off_is_unavailable() -> None:
    async with served() as (_, channel, server):
        call = asyncio.ensure_future(GenerationServiceStub(channel).AbortGeneration(abort("hang")))
        await asyncio.sleep(0.2)
        await server.stop(0)
        with pytest.raises(Unavailable, match=server.target), calling("AbortGeneration", server.target):
            await call


async def test_a_service_that_is_not_served_is_not_found() -> None:
    server = RpcServer("empty")
    await server.start()
    async with DeadlineChannel(server.target) as channel:
        await channel.ready(5)
        with pytest.raises(NotFound, match="does not serve AbortGeneration"), calling("AbortGeneration", server.target):
            await GenerationServiceStub(channel).AbortGeneration(abort("x"))
    await server.stop(0)


@pytest.mark.parametrize("target", ["", "host", ":1", "host:", "host:port"])
async def test_a_target_is_host_and_port(target: str) -> None:
    with pytest.raises(InvalidInput, match="HOST:PORT"):
        DeadlineChannel(target)


async def test_health_and_reflection_name_the_services() -> None:
    async with served() as (_, channel, server):
        health = HealthStub(channel)
        for service in ("", "nereus.v1.GenerationService", "nereus.v1.InferenceService"):
            answer = await health.Check(health_pb2.HealthCheckRequest(service=service))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        listing = ServerReflectionStub(channel).ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        )
        names = {service.name for service in (await listing.read()).list_services_response.service}
        assert {"nereus.v1.GenerationService", "nereus.v1.InferenceService", "grpc.health.v1.Health"} <= names
        assert server.port > 0


async def test_a_taken_port_is_told_with_what_to_do() -> None:
    async with served() as (_, _, server):
        with pytest.raises(ResourceExhausted, match=f"second: port {server.port} on 127.0.0.1 is taken.*another port"):
            await RpcServer("second", port=server.port).start()


@pytest.mark.parametrize("grouped", [False, True])
def test_a_service_that_cannot_go_on_ends_in_one_line(grouped: bool, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        error = Unavailable("no registry at redis://a", remedy="start it")
        raise ExceptionGroup("tasks", [error]) if grouped else error

    with caplog.at_level(logging.ERROR):
        assert run(main(), "controller") == 1
    assert caplog.messages == ["controller: no registry at redis://a (start it)"]


def test_a_bug_beside_an_expected_error_is_raised() -> None:
    async def main() -> None:
        raise ExceptionGroup("tasks", [Unavailable("no registry"), ZeroDivisionError()])

    with pytest.raises(ExceptionGroup):
        run(main(), "controller")


async def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"cannot listen on 192\.0\.2\.1"):
        await RpcServer("elsewhere", host="192.0.2.1", port=7001).start()
