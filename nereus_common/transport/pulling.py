"""The receiver's side: each assignment is fetched over one link, through the staging ring, into the mailbox."""

from __future__ import annotations

import asyncio
import itertools
import secrets
from functools import partial

from nereus_common.core.errors import InvalidInput, NereusError, Unavailable
from nereus_common.transport.base import Raw
from nereus_common.transport.collect import Arrived, Failed, Finished, Mailbox, Order
from nereus_common.transport.control import Ask, Coming, Done, Refused, Stop, item_of
from nereus_common.transport.failures import deadline_exceeded, unavailable
from nereus_common.transport.lane import Lanes
from nereus_common.transport.links import Link, Links
from nereus_common.transport.ring import StagingRing
from nereus_common.transport.settings import UcxSettings


class Puller:
    """Fetches assignments. Lives on the transport's loop."""

    def __init__(self, settings: UcxSettings, lanes: Lanes) -> None:
        self.settings = settings
        self.ring = StagingRing(settings.ring, settings.chunk_bytes)
        self.links = Links(lanes, settings.node)
        self._nonces = itertools.count(secrets.randbits(31))
        self._tasks: set[asyncio.Task[None]] = set()

    async def fetch(self, order: Order, mailbox: Mailbox) -> None:
        """Carry one assignment to Finished or Failed."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await Fetch(self, order, mailbox).run()
        finally:
            self._tasks.discard(task)

    def nonce(self) -> int:
        """The first tag of a request; the tags of its chunks follow it. Never used again in this process."""
        return (next(self._nonces) & 0xFFFF_FFFF) << 32

    def wind_down(self, fetch: Fetch, link: Link) -> None:
        """Drain an aborted fetch in the background."""
        task = asyncio.get_running_loop().create_task(fetch.drain(link))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Fail what runs, then free or strand every lane."""
        for task in list(self._tasks):
            task.cancel()
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await asyncio.sleep(0)
        self.links.close()


class Fetch:
    """One assignment on its way. Receives are posted once the source announced their chunk, so that none is left over
    when the source has answered."""

    def __init__(self, puller: Puller, order: Order, mailbox: Mailbox) -> None:
        self._puller = puller
        self._order = order
        self._mailbox = mailbox
        self._nonce = puller.nonce()
        self._loop = asyncio.get_running_loop()
        self._receives: set[asyncio.Future[None]] = set()
        self._lost: BaseException | None = None
        self._answered = False
        self._limit: asyncio.Timeout | None = None

    async def run(self) -> None:
        """Fetch and report. Ends within the order's patience, also when the source says nothing."""
        order, rank = self._order, self._order.assignment.holder.rank
        try:
            await self._within_limits()
        except TimeoutError:
            error: NereusError = deadline_exceeded(order.request, str(rank), order.patience)
        except (ConnectionError, Unavailable) as lost:
            error = unavailable(order.request, rank, str(lost))
        except NereusError as refused:
            error = refused
        except asyncio.CancelledError:
            self._mailbox.put(Failed(order.assignment, unavailable(order.request, rank, "the pull was given up")))
            raise
        else:
            self._mailbox.put(Finished(order.assignment))
            return
        self._mailbox.put(Failed(order.assignment, error))

    async def _within_limits(self) -> None:
        async with asyncio.timeout(None) as self._limit:
            self._progressed()
            try:
                await self._over_link(await self._puller.links.take(self._order.assignment.holder.address))
            finally:
                self._limit = None

    async def _over_link(self, link: Link) -> None:
        try:
            await link.control.send(self._ask())
            refusal = await self._follow(link)
            await self._arrived()
        except ConnectionError:
            link.close()  # the source is gone: nothing will be drained
            raise
        except BaseException:
            self._puller.wind_down(self, link)
            raise
        self._puller.links.give(link)
        if refusal is not None:
            raise refusal

    @property
    def _checked(self) -> bool:
        return self._puller.settings.digest and self._order.request.checked

    def _ask(self) -> Ask:
        order, settings = self._order, self._puller.settings
        holder = order.assignment.holder.rank
        return Ask(
            nonce=self._nonce,
            unit=holder.unit,
            rank=holder.rank,
            version=order.request.version,
            transition=order.request.transition,
            item_bytes=order.request.item_bytes,
            chunk_bytes=settings.chunk_bytes,
            digest=self._checked,
            seconds=max(order.deadline - self._loop.time(), 0.0),
            items=[item_of(want.piece) for want in order.assignment.wants],
        )

    async def _follow(self, link: Link) -> NereusError | None:
        """Post a receive for every chunk announced, until the source has answered; returns its refusal."""
        while not self._answered:
            match await link.control.receive():
                case Coming(number, digest):
                    await self._receive(link, number, digest)
                case Done():
                    self._answered = True
                case Refused() as refused:
                    self._answered = True
                    return refused.error()
                case other:
                    raise InvalidInput(f"{type(other).__name__} was not expected from a source")
        return None

    async def _receive(self, link: Link, number: int, digest: int) -> None:
        chunks = self._order.assignment.chunks
        if not 0 <= number < len(chunks):
            raise InvalidInput(f"the source announced chunk {number} of {len(chunks)}")
        self._progressed(waiting_for_sink=True)
        buffer = await self._puller.ring.take()
        receiving = link.lane.receive(buffer[: chunks[number].nbytes], self._nonce + number)
        self._receives.add(receiving)
        receiving.add_done_callback(partial(self._received, number, digest, buffer))
        self._progressed()

    def _received(self, number: int, digest: int, buffer: Raw, receiving: asyncio.Future[None]) -> None:
        self._receives.discard(receiving)
        self._progressed()
        if receiving.cancelled():
            self._puller.ring.strand()
        elif (lost := receiving.exception()) is not None:
            self._lost = lost
            self._puller.ring.give(buffer)
        else:
            assignment = self._order.assignment
            data = buffer[: assignment.chunks[number].nbytes]
            checked = digest if self._checked else None
            self._mailbox.put(Arrived(assignment, number, data, checked, partial(self._release, buffer)))

    def _release(self, buffer: Raw) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._puller.ring.give, buffer)

    async def _arrived(self) -> None:
        """Wait for the receives under way."""
        while self._receives:
            await asyncio.wait(self._receives)
        if self._lost is not None:
            raise self._lost

    def _progressed(self, *, waiting_for_sink: bool = False) -> None:
        """Start the source's patience anew; none runs while the receiver itself holds things up."""
        if self._limit is not None:
            patience = float("inf") if waiting_for_sink else self._order.patience
            self._limit.reschedule(min(self._order.deadline, self._loop.time() + patience))

    async def drain(self, link: Link) -> None:
        """Let an aborted answer end: the source stops, what it announced is received and dropped. Whatever is still
        under way after the grace strands the lane and its buffers."""
        try:
            async with asyncio.timeout(self._puller.settings.grace):
                if not self._answered:
                    await link.control.send(Stop(self._nonce))
                    await self._follow(link)
                await self._arrived()
        except (TimeoutError, ConnectionError, NereusError):
            return  # the pull has already reported why; the lane is closed either way
        finally:
            link.close()
