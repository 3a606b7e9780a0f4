"""The source's side: control sockets are accepted, asks are answered chunk by chunk over the puller's lane."""

from __future__ import annotations

import asyncio
import hmac
import secrets
import time
from concurrent.futures import Executor
from functools import partial

from nereus_common.core.errors import DeadlineExceeded, InvalidInput, NereusError
from nereus_common.transport.base import Raw
from nereus_common.transport.chunking import Chunk, payload, plan_chunks
from nereus_common.transport.control import Ask, Coming, Control, Done, Hello, Refused, Stop, Welcome
from nereus_common.transport.holdings import Holdings, Pin
from nereus_common.transport.lane import Lane, Lanes, Reach
from nereus_common.transport.node import Address
from nereus_common.transport.ring import StagingRing
from nereus_common.transport.settings import UcxSettings

_HELLO_SECONDS = 10.0


class Server:
    """Serves `holdings`. Lives on the transport's loop; packs and digests on `packer`."""

    def __init__(self, holdings: Holdings, settings: UcxSettings, lanes: Lanes, packer: Executor) -> None:
        self._holdings = holdings
        self._settings = settings
        self._lanes = lanes
        self._packer = packer
        self._token = secrets.token_hex(16)
        self.ring = StagingRing(settings.ring, settings.chunk_bytes)
        self._listeners: list[asyncio.Server] = []
        self._sessions: set[asyncio.Task[None]] = set()

    async def start(self) -> Address:
        """Listen, and say where."""
        name = f"nereus-transport-{secrets.token_hex(8)}"
        self._listeners.append(await asyncio.start_unix_server(self._accept, f"\0{name}"))
        port = 0
        if self._settings.host:
            listener = await asyncio.start_server(self._accept, self._settings.host, 0)
            port = listener.sockets[0].getsockname()[1]
            self._listeners.append(listener)
        return Address(self._settings.node, name, self._settings.host, port, self._token)

    async def close(self) -> None:
        """Stop listening and end all sessions; their pullers learn it from the closed sockets."""
        for listener in self._listeners:
            listener.close()
        for session in self._sessions:
            session.cancel()
        await asyncio.gather(*self._sessions, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        session = asyncio.current_task()
        assert session is not None
        self._sessions.add(session)
        control = Control(reader, writer)
        try:
            await self._greet(control)
        except (ConnectionError, TimeoutError):
            return  # the puller left, or never said hello
        except NereusError as error:
            await _refuse(control, error)
        except asyncio.CancelledError:
            return  # the transport closes
        finally:
            control.close()
            self._sessions.discard(session)

    async def _greet(self, control: Control) -> None:
        async with asyncio.timeout(_HELLO_SECONDS):
            hello = await control.receive()
        if not isinstance(hello, Hello) or not hmac.compare_digest(hello.token, self._token):
            raise InvalidInput("this is not the address of the transport asked for", remedy="ask for its address again")
        lane = self._lanes.open(Reach(hello.reach))
        try:
            lane.connect(bytes.fromhex(hello.lane))
            await control.send(Welcome(lane.address.hex()))
            await self._session(control, lane)
        finally:
            lane.close()

    async def _session(self, control: Control, lane: Lane) -> None:
        """Answer asks one after the other until the puller leaves."""
        answer: Answer | None = None
        running: asyncio.Task[None] | None = None
        try:
            while True:
                match await control.receive():
                    case Ask() as ask if running is None or running.done():
                        answer = Answer(ask, control, lane, self.ring, self._packer, self._settings)
                        running = asyncio.create_task(answer.run(self._holdings))
                        running.add_done_callback(partial(_end_after_bug, control))
                    case Stop(nonce) if answer is not None and answer.nonce == nonce:
                        answer.stop()
                    case other:
                        raise InvalidInput(f"{type(other).__name__} was not expected here")
        finally:
            if answer is not None and running is not None:
                answer.stop()
                await running


class Answer:
    """One ask being answered. Never cancelled: `stop` makes it end by itself, so that no buffer is lost track of."""

    def __init__(
        self, ask: Ask, control: Control, lane: Lane, ring: StagingRing, packer: Executor, settings: UcxSettings
    ) -> None:
        self.nonce = ask.nonce
        self._ask = ask
        self._control = control
        self._lane = lane
        self._ring = ring
        self._packer = packer
        self._grace = settings.grace
        self._window = asyncio.Semaphore(settings.window)
        self._sends: set[asyncio.Future[None]] = set()
        self._stopped = False
        self._end = time.monotonic() + ask.seconds

    def stop(self) -> None:
        """Announce no further chunk, and wait for those announced no longer than the grace."""
        if not self._stopped:
            self._stopped = True
            self._end = min(self._end, time.monotonic()) + self._grace
            self._window.release()

    async def run(self, holdings: Holdings) -> None:
        """Send every chunk asked for, then Done; or Refused, once what was announced has been sent."""
        give_up = asyncio.get_running_loop().call_later(self._ask.seconds, self.stop)
        try:
            try:
                with holdings.pin(self._ask.holder, self._ask.version) as pin:
                    await self._send_all(pin)
                    await self._drain()
            except NereusError as error:
                await self._drain()
                await _refuse(self._control, error)
            else:
                await self._control.send(Refused.of(self._too_late()) if self._stopped else Done(self.nonce))
        except ConnectionError:
            return  # the puller left; the session ends on the same socket
        finally:
            give_up.cancel()

    async def _send_all(self, pin: Pin) -> None:
        ask = self._ask
        if ask.chunk_bytes > self._ring.size:
            raise InvalidInput(
                f"{ask.holder} packs chunks of at most {self._ring.size} bytes, {ask.chunk_bytes} were asked for",
                remedy="set the same chunk_bytes on both sides",
                field="chunk_bytes",
            )
        for number, chunk in enumerate(plan_chunks(ask.pieces(), ask.item_bytes, ask.chunk_bytes)):
            await self._window.acquire()
            if self._stopped:
                return
            pin.check()
            await self._send(number, chunk, pin)

    async def _send(self, number: int, chunk: Chunk, pin: Pin) -> None:
        staging = await self._ring.take()
        try:
            pack = partial(payload, chunk, pin.view, self._ask.item_bytes, staging, digest=self._ask.digest)
            data, digest = await asyncio.get_running_loop().run_in_executor(self._packer, pack)
            pin.check()  # a digest made before any revocation is of this version's bytes, whatever is sent later
            await self._control.send(Coming(number, digest))
        except BaseException:
            self._ring.give(staging)
            raise
        direct = data.base is not staging
        if direct:
            self._ring.give(staging)
        sending = self._lane.send(data, self.nonce + number)
        self._sends.add(sending)
        sending.add_done_callback(partial(self._sent, None if direct else staging))

    def _sent(self, staging: Raw | None, sending: asyncio.Future[None]) -> None:
        """A lost puller shows here first; its control socket ends the session."""
        self._sends.discard(sending)
        self._window.release()
        lost = sending.cancelled()
        if not lost and sending.exception() is not None:
            self.stop()
        if staging is not None:
            self._ring.strand() if lost else self._ring.give(staging)

    def _too_late(self) -> NereusError:
        ask = self._ask
        return DeadlineExceeded(
            f"transition {ask.transition}: {ask.holder} stopped serving version {ask.version} before it was done",
            remedy="give the pull more time",
            source=ask.holder,
            transition=ask.transition,
        )

    async def _drain(self) -> None:
        """Wait for the sends under way: until the deadline while the pull goes on, for the grace once it is stopped."""
        while self._sends and time.monotonic() < self._end:
            await asyncio.wait(self._sends, timeout=0.05)


def _end_after_bug(control: Control, running: asyncio.Task[None]) -> None:
    """Let the puller know at once; the session raises what it was."""
    if not running.cancelled() and running.exception() is not None:
        control.close()


async def _refuse(control: Control, error: NereusError) -> None:
    try:
        await control.send(Refused.of(error))
    except ConnectionError:
        return  # nobody is left to be told
