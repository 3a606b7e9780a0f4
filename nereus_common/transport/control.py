"""Control messages: length-prefixed JSON over a stream socket, one socket per lane.

    puller                               source
      Hello(token, lane address)  ──►
                                  ◄──      Welcome(lane address)
      Ask(nonce, version, boxes)  ──►
                                  ◄──      Coming(chunk 0, digest) …      and each chunk as a tagged message on the lane
      Stop                        ──►                                     (only when the puller gives up)
                                  ◄──      Done | Refused(error)          every chunk announced has been sent

A socket says at once that its process died, which shared memory never does. Tensors do not travel here.
"""

from __future__ import annotations

import asyncio
import json
import struct
from dataclasses import asdict, dataclass
from typing import Any, Self

from nereus_common.core.errors import InvalidInput, NereusError, error_kinds
from nereus_common.core.ids import TensorName
from nereus_common.core.transfer import Box, RankRef
from nereus_common.transport.chunking import Piece

_LENGTH = struct.Struct("!I")
MAX_FRAME = 64 << 20


@dataclass(frozen=True, slots=True)
class Hello:
    token: str
    reach: str
    lane: str


@dataclass(frozen=True, slots=True)
class Welcome:
    lane: str


@dataclass(frozen=True, slots=True)
class Ask:
    """`items`: [tensor, start, stop, shape or None]. `seconds`: how long the puller will wait in all."""

    nonce: int
    unit: str
    rank: int
    version: int
    transition: str
    item_bytes: int
    chunk_bytes: int
    digest: bool
    seconds: float
    items: list[list[Any]]

    @property
    def holder(self) -> RankRef:
        return RankRef(self.unit, self.rank)

    def pieces(self) -> list[Piece]:
        """`items` as pieces; InvalidInput when they are not boxes."""
        try:
            return [
                Piece(TensorName(name), Box(tuple(start), tuple(stop)), None if shape is None else tuple(shape))
                for name, start, stop, shape in self.items
            ]
        except (TypeError, ValueError) as error:
            raise InvalidInput(f"transition {self.transition}: the boxes asked for are malformed: {error}") from None


def item_of(piece: Piece) -> list[Any]:
    return [piece.tensor, piece.box.start, piece.box.stop, piece.shape]


@dataclass(frozen=True, slots=True)
class Coming:
    chunk: int
    digest: int


@dataclass(frozen=True, slots=True)
class Stop:
    nonce: int


@dataclass(frozen=True, slots=True)
class Done:
    nonce: int


@dataclass(frozen=True, slots=True)
class Refused:
    reason: str
    message: str
    remedy: str
    details: dict[str, str]

    @classmethod
    def of(cls, error: NereusError) -> Self:
        return cls(error.reason, error.message, error.remedy, dict(error.details))

    def error(self) -> NereusError:
        """The error as the source raised it."""
        kind = error_kinds().get(self.reason, NereusError)
        return kind(self.message, remedy=self.remedy, **self.details)


Message = Hello | Welcome | Ask | Coming | Stop | Done | Refused
_KINDS: dict[str, type[Message]] = {kind.__name__: kind for kind in (Hello, Welcome, Ask, Coming, Stop, Done, Refused)}


class Control:
    """One end of a control socket. Not thread-safe; lives on the transport's loop."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._length: int | None = None

    @property
    def ended(self) -> bool:
        return self._reader.at_eof() or self._writer.is_closing()

    async def send(self, message: Message) -> None:
        """Raises ConnectionError when the peer is gone."""
        body = json.dumps([type(message).__name__, asdict(message)]).encode()
        if len(body) > MAX_FRAME:
            raise InvalidInput(
                f"a control message of {len(body)} bytes is too long", remedy="pull fewer boxes in one request"
            )
        self._writer.write(_LENGTH.pack(len(body)) + body)
        await self._writer.drain()

    async def receive(self) -> Message:
        """The next message; ConnectionError at the end of the stream, InvalidInput when it is not a message.

        Cancelling it loses nothing: the next call goes on where it stopped.
        """
        try:
            if self._length is None:
                (self._length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            if self._length > MAX_FRAME:
                raise InvalidInput(f"a control message of {self._length} bytes is too long")
            body = await self._reader.readexactly(self._length)
            self._length = None
            return _decode(body)
        except asyncio.IncompleteReadError:
            raise ConnectionResetError("the peer closed its control socket") from None

    def close(self) -> None:
        self._writer.close()


def _decode(body: bytes) -> Message:
    try:
        name, fields = json.loads(body)
        return _KINDS[name](**fields)
    except (ValueError, TypeError, KeyError) as error:
        raise InvalidInput(f"not a control message: {body[:60]!r}: {error}") from None
