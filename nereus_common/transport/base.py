"""The transport interface: ranks publish versions of their boxes, other ranks pull the boxes they lack.

Invariants of every implementation, checked by one contract suite:

- bytes reach the sink only after their digest matched the one the source computed from what it holds, unless the caller
  compares digests of the whole itself;
- every byte asked for reaches the sink exactly once, or the pull raises;
- every wait ends by its deadline in an error that names the source and the transition;
- a source pins a version while it is pulled, so what arrives is of one version.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from nereus_common.core.ids import TensorName
from nereus_common.core.transfer import Box, RankRef

Raw = NDArray[np.uint8]
Boxes = Sequence[tuple[Box, NDArray[Any]]]
"""Disjoint boxes of one tensor, each with the array that holds it: `array.shape == box.shape`, strides free."""
Tensors = Mapping[TensorName, Boxes]
Sink = Callable[[TensorName, Box, Raw], None]
"""Takes one verified piece: (tensor, box, bytes in C order). The bytes are only lent until the sink returns. Calls of
one pull come one at a time, in any order of pieces, on the thread that called `pull`."""


@dataclass(frozen=True, slots=True)
class Holder:
    """A rank that holds bytes, and the address of the transport that serves them."""

    rank: RankRef
    address: bytes


@dataclass(frozen=True, slots=True)
class PullItem:
    """One box to fetch. `shape` is the logical tensor's; it is needed only for digests of tensors of three or more
    dimensions that are to be compared with digests computed elsewhere. `alternatives` are asked in their order when
    `source` fails."""

    tensor: TensorName
    box: Box
    source: RankRef
    address: bytes
    shape: tuple[int, ...] | None = None
    alternatives: tuple[Holder, ...] = ()

    @property
    def holders(self) -> tuple[Holder, ...]:
        return (Holder(self.source, self.address), *self.alternatives)


@dataclass(frozen=True, slots=True)
class PullRequest:
    """What one rank lacks. `item_bytes`: bytes per element on the wire. `deadline`: seconds from the call.

    With a floating `wire_dtype` ("bfloat16", "float16", "float32", "float64") pieces with NaN or infinity are refused.
    Not `checked`: nothing is digested or refused on the way, because the caller compares all that holders and receivers
    have before any of it is used.
    """

    version: int
    items: tuple[PullItem, ...]
    item_bytes: int
    deadline: float
    transition: str
    wire_dtype: str = ""
    checked: bool = True


@dataclass(frozen=True, slots=True)
class PullReport:
    """What a pull did. `moved_bytes` counts payload that arrived, also what was refused and fetched again; `digest`
    is that of everything handed to the sink; `failed` are the sources that had to be replaced."""

    moved_bytes: int
    pieces: int
    seconds: float
    digest: int
    failed: tuple[RankRef, ...] = ()


class Transport(Protocol):
    """One per process. `publish`, `retire`, `pull` and `close` may be called from any thread and block it."""

    @property
    def address(self) -> bytes:
        """Where this process's ranks can be pulled from; opaque, carried by gRPC and the registry."""

    def publish(self, holder: RankRef, version: int, tensors: Tensors) -> None:
        """Offer `tensors` as `version` of `holder`; its other versions go once nobody pulls them.

        The arrays are served in place: whoever writes to them calls `retire` first.
        """

    def retire(self, version_below: int, *, timeout: float) -> None:
        """Offer no version below `version_below` any more, of any holder here.

        Waits up to `timeout` seconds for running pulls of them, then revokes: those pullers get StaleVersion. On return
        the arrays may be written.
        """

    def withdraw(self, holder: RankRef, *, timeout: float) -> bool:
        """Offer nothing of `holder` any more; waits and revokes as `retire` does.

        Whether nobody reads its arrays by then: if so they may be freed, not only written.
        """

    def pull(self, request: PullRequest, sink: Sink) -> PullReport:
        """Fetch all items of `request` into `sink`.

        StaleVersion, NotFound, Unavailable, VerificationFailed or DeadlineExceeded when an item has no holder left to
        ask; what the sink raises passes through. The sink may have been called for some pieces before the error.
        """

    async def async_pull(self, request: PullRequest, sink: Sink) -> PullReport:
        """`pull` on a thread of its own, where `sink` is called too."""

    def close(self) -> None:
        """Stop serving and pulling, and leave no thread, socket or shared memory behind. Idempotent."""
