"""Errors on the wire: NereusError ↔ google.rpc.Status with ErrorInfo (domain "nereus") and ProcessLog.

Statuses travel in HTTP/2 trailers, of which a stock client reads 8 KiB: texts and logs are cut to fit, and the newest
log lines win.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NoReturn

import grpc
import grpc.aio
from google.protobuf.any_pb2 import Any
from google.rpc.error_details_pb2 import ErrorInfo
from google.rpc.status_pb2 import Status
from grpc_status import rpc_status

from nereus.v1.errors_pb2 import ProcessLog
from nereus_common.core.errors import (
    DeadlineExceeded,
    InvalidInput,
    NereusError,
    NotFound,
    ResourceExhausted,
    Unavailable,
    error_kinds,
)

DOMAIN = "nereus"
CODES: Mapping[str, grpc.StatusCode] = {
    "INVALID_INPUT": grpc.StatusCode.INVALID_ARGUMENT,
    "INVALID_PLAN": grpc.StatusCode.INVALID_ARGUMENT,
    "UNSUPPORTED_BY_ENGINE": grpc.StatusCode.INVALID_ARGUMENT,
    "NOT_FOUND": grpc.StatusCode.NOT_FOUND,
    "CONFLICT": grpc.StatusCode.ABORTED,
    "STALE_EPOCH": grpc.StatusCode.FAILED_PRECONDITION,
    "STALE_VERSION": grpc.StatusCode.FAILED_PRECONDITION,
    "ILLEGAL_TRANSITION": grpc.StatusCode.FAILED_PRECONDITION,
    "DEADLINE_EXCEEDED": grpc.StatusCode.DEADLINE_EXCEEDED,
    "UNAVAILABLE": grpc.StatusCode.UNAVAILABLE,
    "RESOURCE_EXHAUSTED": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "VERIFICATION_FAILED": grpc.StatusCode.DATA_LOSS,
    "PROCESS_LOST": grpc.StatusCode.ABORTED,
    "JOB_FAILED": grpc.StatusCode.ABORTED,
    "INTERNAL": grpc.StatusCode.INTERNAL,
}
_KINDS: Mapping[grpc.StatusCode, type[NereusError]] = {
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.CANCELLED: Unavailable,  # by the other side: it is stopping
    grpc.StatusCode.RESOURCE_EXHAUSTED: ResourceExhausted,
    grpc.StatusCode.INVALID_ARGUMENT: InvalidInput,
    grpc.StatusCode.NOT_FOUND: NotFound,
    grpc.StatusCode.UNIMPLEMENTED: NotFound,
}
"""What a status without our details means: gRPC itself, or a server that is not ours, wrote it."""

_MESSAGE_BYTES = 1000
_VALUE_BYTES = 500
_VALUES_BYTES = 1500
_LINE_BYTES = 250
_LOG_BYTES = 2000


def status_of(error: NereusError) -> Status:
    """The status that carries `error`, below 6 KiB."""
    values = {key: value for key, value in error.details.items() if key != "log"}
    if error.remedy:
        values["remedy"] = error.remedy
    info = ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=_bounded(values))
    details = [_packed(info)]
    if error.details.get("log"):
        pid = error.details.get("pid", "")
        details.append(
            _packed(
                ProcessLog(
                    process=error.details.get("process", ""),
                    pid=int(pid) if pid.isdigit() else 0,
                    lines=_newest(error.details["log"].splitlines()),
                )
            )
        )
    return Status(code=_code(error).value[0], message=_cut(error.message, _MESSAGE_BYTES), details=details)


def error_of(status: Status) -> NereusError | None:
    """The error that `status` carries, or None where it carries none of ours."""
    info, log = ErrorInfo(), ProcessLog()
    for detail in status.details:
        if detail.Is(ErrorInfo.DESCRIPTOR):
            detail.Unpack(info)
        elif detail.Is(ProcessLog.DESCRIPTOR):
            detail.Unpack(log)
    if info.domain != DOMAIN:
        return None
    values: dict[str, object] = dict(info.metadata)
    remedy = str(values.pop("remedy", ""))
    if log.lines:
        values["log"] = "\n".join(log.lines)
    kind = error_kinds().get(info.reason, NereusError)
    error = kind.__new__(kind)
    NereusError.__init__(error, status.message, remedy=remedy, **values)
    return error


def raise_from_rpc(error: grpc.aio.AioRpcError, *, method: str, target: str) -> NoReturn:
    """Raise the NereusError that `error` stands for, always; `method` and `target` name what gRPC itself reports."""
    status = rpc_status.from_call(error)
    ours = None if status is None else error_of(status)
    if ours is not None:
        raise ours from error
    code, text = error.code(), error.details() or "no details"
    kind = _KINDS.get(code, NereusError)
    what, remedy = {
        DeadlineExceeded: (f"{target} did not answer {method} in time", "look at its log, or allow more time"),
        Unavailable: (
            f"{target} cannot be reached for {method} ({code.name}: {text})",
            "check that the service runs there",
        ),
        NotFound: (f"{target} does not serve {method}: {text}", "check the target and the versions on both sides"),
    }.get(kind, (f"{method} on {target} failed with {code.name}: {text}", ""))
    raise kind(what, remedy=remedy, method=method, target=target, code=code.name) from error


@contextmanager
def calling(method: str, target: str) -> Iterator[None]:
    """Around a gRPC call: what fails inside is raised as a NereusError that names method and target."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise_from_rpc(error, method=method, target=target)


def _code(error: NereusError) -> grpc.StatusCode:
    # a reason that only this service knows is none of the contract's
    return CODES.get(error.reason, grpc.StatusCode.INTERNAL)


def _packed(message: ErrorInfo | ProcessLog) -> Any:
    packed = Any()
    packed.Pack(message)
    return packed


def _cut(text: str, limit: int, *, keep_end: bool = False) -> str:
    raw = text.encode()
    if len(raw) <= limit:
        return text
    if keep_end:
        return "…" + raw[-limit + 3 :].decode(errors="ignore")
    return raw[: limit - 3].decode(errors="ignore") + "…"


def _bounded(values: Mapping[str, str]) -> dict[str, str]:
    """Values cut one by one, and the last ones left out where all together would not fit."""
    kept: dict[str, str] = {}
    room = _VALUES_BYTES
    for key in sorted(values, key=lambda key: (key == "traceback", key)):
        value = _cut(values[key], _VALUE_BYTES, keep_end=key == "traceback")
        room -= len(key) + len(value.encode())
        if room < 0:
            break
        kept[key] = value
    return kept


def _newest(lines: list[str]) -> list[str]:
    kept: list[str] = []
    room = _LOG_BYTES
    for line in reversed(lines):
        line = _cut(line, _LINE_BYTES)
        room -= len(line.encode()) + 1
        if room < 0:
            break
        kept.insert(0, line)
    return kept
