"""On the server, around every method: what the call is about, and what its errors become."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, NoReturn

import grpc
import grpc.aio
from grpc_status import rpc_status

from nereus_common.core.errors import NereusError
from nereus_common.observe import logs
from nereus_common.rpc.errors import status_of

_log = logging.getLogger(__name__)
Context = grpc.aio.ServicerContext[Any, Any]
SUBJECT_KEY = "nereus-"
"""Prefix of the metadata in which the subject of the caller's logs travels."""


class Boundary(grpc.aio.ServerInterceptor):
    """A NereusError leaves as it is; any other exception is logged with its traceback and leaves as INTERNAL."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler = await continuation(handler_call_details)
        if handler is None:  # no such method: gRPC says UNIMPLEMENTED
            return handler
        method = str(handler_call_details.method)
        serializers = (handler.request_deserializer, handler.response_serializer)
        if handler.unary_unary:
            return grpc.unary_unary_rpc_method_handler(_answering(handler.unary_unary, method), *serializers)
        if handler.stream_unary:
            return grpc.stream_unary_rpc_method_handler(_answering(handler.stream_unary, method), *serializers)
        if handler.unary_stream:
            return grpc.unary_stream_rpc_method_handler(_streaming(handler.unary_stream, method), *serializers)
        return grpc.stream_stream_rpc_method_handler(_streaming(handler.stream_stream, method), *serializers)


def _answering(behaviour: Any, method: str) -> Any:
    async def answer(request: Any, context: Context) -> Any:
        with logs.about(**_subject(context)):
            try:
                return await behaviour(request, context)
            except (grpc.aio.AbortError, asyncio.CancelledError):
                raise
            except Exception as error:
                await _abort(context, method, error)

    return answer


def _streaming(behaviour: Any, method: str) -> Any:
    async def stream(request: Any, context: Context) -> AsyncIterator[Any]:
        logs.about_from_here(**_subject(context))  # every call has a task of its own
        try:
            async with aclosing(behaviour(request, context)) as pieces:
                async for piece in pieces:
                    yield piece
        except (grpc.aio.AbortError, asyncio.CancelledError):
            raise
        except Exception as error:
            await _abort(context, method, error)

    return stream


async def _abort(context: Context, method: str, error: Exception) -> NoReturn:
    if not isinstance(error, NereusError):
        _log.error("%s failed", method, exc_info=error)
        error = NereusError(f"{method} failed: {type(error).__name__}: {error}", remedy="the service's log has more")
    elif error.reason == NereusError.reason:
        _log.error("%s failed: %s", method, error, exc_info=error)
    await context.abort_with_status(rpc_status.to_status(status_of(error)))


def _subject(context: Context) -> dict[str, str]:
    metadata = dict(context.invocation_metadata() or ())
    keys = {name: f"{SUBJECT_KEY}{name}" for name in logs.SUBJECTS}
    return {name: str(metadata[key]) for name, key in keys.items() if key in metadata}
