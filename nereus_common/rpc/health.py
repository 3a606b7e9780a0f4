"""Whether a service answers, by its own health check."""

from __future__ import annotations

import grpc.aio
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub

CHECK_SECONDS = 2.0


async def serves(channel: grpc.aio.Channel, timeout: float = CHECK_SECONDS) -> bool:
    """Also waits for a connection, so a channel that has seen its target dead is good for calls again afterwards."""
    try:
        answer = await HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=timeout, wait_for_ready=True)
    except grpc.aio.AioRpcError:
        return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
