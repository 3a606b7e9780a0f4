"""Connections from a puller to its sources, kept between pulls."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass

from nereus_common.core.errors import InvalidInput, Unavailable
from nereus_common.transport.control import Control, Hello, Refused, Welcome
from nereus_common.transport.lane import Lane, Lanes, Reach
from nereus_common.transport.node import Address

_MOST_IDLE = 32


@dataclass(frozen=True, slots=True, eq=False)
class Link:
    """A control socket and the lane it set up; used by one fetch at a time."""

    address: bytes
    control: Control
    lane: Lane

    def close(self) -> None:
        """Messages still under way strand the lane; see `Lane.close`."""
        self.control.close()
        self.lane.close()


class Links:
    """Idle links by address. Lives on the transport's loop."""

    def __init__(self, lanes: Lanes, node: str) -> None:
        self._lanes = lanes
        self._node = node
        self._idle: OrderedDict[Link, None] = OrderedDict()

    async def take(self, address: bytes) -> Link:
        """An idle link, or a new one. ConnectionError when the source is not there, Unavailable when it cannot be."""
        for link in reversed(self._idle):
            if link.address == address:
                del self._idle[link]
                if not link.control.ended:
                    return link
                link.close()
                break
        return await self._connect(address)

    def give(self, link: Link) -> None:
        """Take back a link with nothing under way."""
        self._idle[link] = None
        if len(self._idle) > _MOST_IDLE:
            self._idle.popitem(last=False)[0].close()

    def close(self) -> None:
        while self._idle:
            self._idle.popitem()[0].close()

    async def _connect(self, data: bytes) -> Link:
        address = Address.decode(data)
        reach = Reach.NODE if address.node == self._node else Reach.NETWORK
        control = await _dial(address, reach)
        lane = self._lanes.open(reach)
        link = Link(data, control, lane)
        try:
            await control.send(Hello(address.token, reach, lane.address.hex()))
            match await control.receive():
                case Welcome(peer):
                    lane.connect(bytes.fromhex(peer))
                case Refused() as refused:
                    raise refused.error()
                case other:
                    raise InvalidInput(f"{type(other).__name__} was not expected in answer to Hello")
        except BaseException:
            link.close()
            raise
        return link


async def _dial(address: Address, reach: Reach) -> Control:
    try:
        if reach is Reach.NODE:
            return Control(*await asyncio.open_unix_connection(f"\0{address.socket}"))
        if not address.port:
            raise Unavailable(
                "the source is on another node and can only be reached from its own",
                remedy="set the transport's host on the source's node",
            )
        return Control(*await asyncio.open_connection(address.host, address.port))
    except ConnectionError:
        raise
    except OSError as error:
        raise ConnectionError(f"no connection to {address.host or address.socket}: {error}") from error
