from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Any

import pytest

from nereus_common.core.errors import InvalidInput, StaleVersion
from nereus_common.core.ids import TensorName
from nereus_common.core.transfer import Box
from nereus_common.transport.chunking import Piece
from nereus_common.transport.control import Ask, Coming, Control, Done, Message, Refused, Stop, item_of
from nereus_common.transport.node import Address, node_identity

pytestmark = pytest.mark.fast

PIECES = [Piece(TensorName("w"), Box((0, 1), (2, 3)), (4, 4)), Piece(TensorName("step"), Box((), ()))]
ASK = Ask(1 << 63, "unit", 3, 7, "t", 2, 4096, True, 1.5, [item_of(piece) for piece in PIECES])


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[socket.socket, Control]]:
    """A plain socket and the control at its other end."""
    plain, other = socket.socketpair()
    reader, writer = await asyncio.open_connection(sock=other)
    try:
        yield plain, Control(reader, writer)
    finally:
        plain.close()
        writer.close()
        await writer.wait_closed()


def plain_json(message: Message) -> Any:
    return json.loads(json.dumps([type(message).__name__, asdict(message)]))


@pytest.mark.parametrize("message", [ASK, Coming(5, (1 << 64) - 1), Stop(9), Done(9)])
async def test_messages_arrive_as_they_were_sent(message: Message) -> None:
    async with connected() as (plain, control):
        await control.send(message)
        plain.sendall(plain.recv(1 << 16))
        received = await control.receive()
    assert plain_json(received) == plain_json(message)
    if isinstance(received, Ask):
        assert received.pieces() == PIECES


async def test_an_error_crosses_with_its_kind_words_and_details() -> None:
    error = StaleVersion("gone", remedy="ask again", version=3)
    rebuilt = Refused.of(error).error()
    assert (type(rebuilt), str(rebuilt), rebuilt.details) == (StaleVersion, "gone (ask again)", {"version": "3"})


async def test_a_receive_that_is_cancelled_half_way_loses_nothing() -> None:
    async with connected() as (plain, control):
        body = json.dumps(["Stop", {"nonce": 4}]).encode()
        plain.sendall(struct.pack("!I", len(body)) + body[:3])
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await control.receive()
        plain.sendall(body[3:])
        assert await control.receive() == Stop(4)
        plain.close()
        with pytest.raises(ConnectionError):
            await control.receive()


@pytest.mark.parametrize("body", [b"{}", b'["Nothing", {}]', b'["Stop", {"unknown": 1}]', b"\xff", b'["Stop"]'])
async def test_what_is_no_message_is_refused(body: bytes) -> None:
    async with connected() as (plain, control):
        plain.sendall(struct.pack("!I", len(body)) + body)
        with pytest.raises(InvalidInput, match="not a control message"):
            await control.receive()


async def test_a_message_that_would_fill_memory_is_refused_by_its_length() -> None:
    async with connected() as (plain, control):
        plain.sendall(b"\xff\xff\xff\xff")
        with pytest.raises(InvalidInput, match="too long"):
            await control.receive()


def test_boxes_that_are_none_are_refused() -> None:
    for items in ([["w", [0], [1, 2], None]], [["w"]], [3]):
        with pytest.raises(InvalidInput):
            Ask(0, "unit", 0, 1, "t", 2, 16, True, 1.0, items).pieces()  # type: ignore[arg-type]


def test_an_address_survives_the_wire_and_nonsense_is_refused() -> None:
    address = Address(node_identity(), "name", "host", 7, "token")
    assert Address.decode(address.encode()) == address
    for data in (b"", b"{}", b"[1]", b"\xff"):
        with pytest.raises(InvalidInput, match="not the address of a transport"):
            Address.decode(data)
