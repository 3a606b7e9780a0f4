"""A service to be signalled: it answers, drains for as long as it is told, and says when it is done."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import grpc.aio

from nereus.v1 import generation_pb2 as pb
from nereus.v1.generation_pb2_grpc import GenerationServiceServicer, add_GenerationServiceServicer_to_server
from nereus_common.rpc.server import RpcServer, run

Context = grpc.aio.ServicerContext[Any, Any]


class Generation(GenerationServiceServicer):
    async def Generate(self, request: pb.GenerateRequest, context: Context) -> Any:
        yield pb.GenerateResponse()

    async def AbortGeneration(self, request: pb.AbortGenerationRequest, context: Context) -> pb.AbortGenerationResponse:
        await asyncio.sleep(1)
        return pb.AbortGenerationResponse()


async def main(port: int, drain_seconds: float) -> None:
    server = RpcServer("signalled", port=port)
    server.add(add_GenerationServiceServicer_to_server, Generation())
    await server.start()
    print(server.target, flush=True)

    async def drain() -> None:
        print("draining", flush=True)
        await asyncio.sleep(drain_seconds)

    await server.serve(drain, grace=5)
    print("done", flush=True)


if __name__ == "__main__":
    sys.exit(run(main(int(sys.argv[1]), float(sys.argv[2])), "signalled"))
