"""What can be set about the UCX transport."""

from __future__ import annotations

from dataclasses import dataclass, field

from nereus_common.transport.node import node_identity


@dataclass(frozen=True, slots=True)
class UcxSettings:
    """`host`: the name or IP under which other nodes reach this process; empty: only its own node can pull from it.

    `chunk_bytes`: size of a staging buffer and of the largest message; of megabytes, since UCX buffers what is far
    smaller on its own. `window`: messages under way per peer. `ring`: staging buffers for pulls; as many again for
    packing. `grace`: seconds that an aborted pull may take to drain before its lane is stranded. `digest` is off only
    where the bare wire is measured: nothing is verified then. `node` decides who shares memory.
    """

    host: str = ""
    chunk_bytes: int = 4 << 20
    window: int = 6
    ring: int = 12
    grace: float = 2.0
    digest: bool = True
    node: str = field(default_factory=node_identity)
