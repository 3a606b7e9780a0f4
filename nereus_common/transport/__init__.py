"""Moving tensors between processes: the interface, and its implementations by name."""

from __future__ import annotations

from nereus_common.core.errors import InvalidInput
from nereus_common.transport.base import Holder, PullItem, PullReport, PullRequest, Raw, Sink, Tensors, Transport

__all__ = [
    "Holder",
    "PullItem",
    "PullReport",
    "PullRequest",
    "Raw",
    "Sink",
    "Tensors",
    "Transport",
    "open_transport",
]


def open_transport(kind: str, *, host: str = "") -> Transport:
    """Start the transport of this process: "ucx", or "loopback" for ranks that share one process.

    `host`: where other nodes reach this process; empty: they do not. InvalidInput for another kind.
    """
    if kind == "ucx":
        from nereus_common.transport.settings import UcxSettings
        from nereus_common.transport.ucx import UcxTransport

        return UcxTransport(UcxSettings(host=host))
    if kind == "loopback":
        from nereus_common.transport.loopback import LoopbackTransport

        return LoopbackTransport()
    raise InvalidInput(f"transport {kind!r} is unknown", remedy="use ucx or loopback", field="transport")
