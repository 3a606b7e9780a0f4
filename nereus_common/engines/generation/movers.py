"""Transports by name, for processes that pull weights."""

from __future__ import annotations

import importlib

from nereus_common.core.errors import InvalidInput
from nereus_common.core.transfer import RankRef
from nereus_common.transport import Transport

_BY_NAME = {"ucx": "nereus_common.transport.ucx:UcxTransport"}


def open_transport(kind: str, holder: RankRef) -> Transport:
    """A transport of `kind`: a known name, or "module:factory" called with the rank it serves."""
    module, colon, factory = _BY_NAME.get(kind, kind).partition(":")
    if not colon:
        raise InvalidInput(f"transport {kind!r} is unknown", remedy=f"one of {', '.join(_BY_NAME)}", field="transport")
    opened: Transport = getattr(importlib.import_module(module), factory)(holder)
    return opened
