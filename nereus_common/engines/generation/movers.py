"""The transport of a process that pulls weights: by name, or by the path of a factory."""

from __future__ import annotations

import importlib

from nereus_common.core.transfer import RankRef
from nereus_common.transport import Transport
from nereus_common.transport import open_transport as open_by_name


def open_transport(kind: str, holder: RankRef) -> Transport:
    """A transport of `kind`: a known name, or "module:factory" called with the rank it serves."""
    module, colon, factory = kind.partition(":")
    if not colon:
        return open_by_name(kind)
    opened: Transport = getattr(importlib.import_module(module), factory)(holder)
    return opened
