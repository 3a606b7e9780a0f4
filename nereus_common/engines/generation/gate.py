"""Who is served, and from which version: the state between a host's callers and its engine.

    empty ──applied──► applied ──committed──► serving ──slept──► asleep ──woken──► empty
      ▲                   ▲                      │
      └──────failed───────┴───── applying ◄──────┘   (interrupt, then wait: nothing in flight, none admitted)

A unit that is to go is drained: it takes no more requests, and goes on with those it has, until a version is committed
or it is told to take requests again.

A flight is what the engine samples under one version, because nothing is applied while one is under way. A request
is one flight, and new weights wait for its end; unless it goes across versions: then each of its samples is a flight
with an interrupt, and between two of them it is parked:

    in flight ──interrupted──► parked ──committed──► in flight, under the new version
        │                        ├─────not drained──► in flight, under the old one, which is served on
        └──ended──► gone         └─────withdrawn, failed, too late──► gone
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress

from nereus_common.core.errors import (
    Conflict,
    DeadlineExceeded,
    IllegalTransition,
    NereusError,
    StaleVersion,
    Unavailable,
)

NONE = -1
Interrupt = Callable[[], Awaitable[None]]
"""Asks a flight to end soon; it may have ended already."""


class Gate:
    """One event loop only. `unit` names it in errors."""

    def __init__(self, unit: str) -> None:
        self._unit = unit
        self._requests: set[str] = set()
        self._flights: dict[str, Interrupt | None] = {}
        self._parked: dict[str, asyncio.Future[bool | NereusError]] = {}
        """True: look again, False: withdrawn."""
        self._idle = asyncio.Event()
        self._idle.set()
        self._applying = NONE
        self._asleep = False
        self._draining = False
        self._empty = asyncio.Event()
        self._empty.set()
        self.applied = NONE
        """The version in the engine, verified; NONE before the first and after a failed one."""
        self.serving = NONE

    @property
    def active(self) -> int:
        """Flights under way."""
        return len(self._flights)

    @property
    def parked(self) -> int:
        return len(self._parked)

    @property
    def open(self) -> bool:
        return self._applying == NONE and not self._asleep and self.serving != NONE

    @contextmanager
    def admit(self, request_id: str, wanted: int) -> Iterator[int]:
        """Count a request in and out, as one flight; gives the version that serves it.

        IllegalTransition when nothing is served, StaleVersion when another version is, Conflict when the id is taken.
        """
        self._check(wanted)
        with self._named(request_id), self._flight(request_id, None) as version:
            yield version

    @contextmanager
    def admit_across(self, request_id: str, wanted: int) -> Iterator[None]:
        """Count in a request that goes across versions; its samples fly one by one, by `flight`.

        As `admit`, but one that wants no version in particular may also come while new weights are on their way.
        """
        on_their_way = self._applying != NONE or self.applied != NONE
        if wanted != NONE or self._asleep or not on_their_way:
            self._check(wanted)
        with self._named(request_id):
            yield

    @contextmanager
    def flight(self, name: str, interrupt: Interrupt) -> Iterator[int]:
        """Sample under the version that is given; straight after `park`, as the gate may close at any await."""
        self._check(NONE)
        with self._flight(name, interrupt) as version:
            yield version

    async def park(self, name: str, deadline: float) -> bool:
        """Wait until a version is served; False when `withdraw` came first. `deadline` by the loop's clock.

        Unavailable when new weights could not be applied, DeadlineExceeded when nothing was served in time.
        """
        loop = asyncio.get_running_loop()
        began = loop.time()
        while not self.open:
            outcome = self._parked[name] = loop.create_future()
            try:
                async with asyncio.timeout_at(deadline):
                    told = await outcome
            except TimeoutError:
                raise self._too_late(name, loop.time() - began) from None
            finally:
                del self._parked[name]
            if isinstance(told, NereusError):
                raise told
            if not told:
                return False
        return True

    def withdraw(self, name: str) -> None:
        """End the wait of one that is parked; of others there is nothing to end."""
        if name in self._parked:
            self._tell(name, False)

    @asynccontextmanager
    async def applying(self, version: int, timeout: float) -> AsyncIterator[None]:
        """Admit nobody, interrupt what can be, wait until nothing is in flight, and let the caller change the weights.

        DeadlineExceeded names the flights left after `timeout` seconds: the old version is served on. An error of
        the caller's leaves the unit serving nothing until a later version is applied, and ends what is parked.
        """
        if self._applying != NONE:
            raise Conflict(f"unit {self._unit} is already taking new weights", unit=self._unit)
        self._applying = version
        try:
            await self._drain(timeout)
            self.applied = self.serving = NONE
            yield
            self.applied = version
        except BaseException as error:
            if self.applied == NONE:
                self._fail_parked(version, error)
            raise
        finally:
            self._applying = NONE
            self._let_go()

    def commit(self, version: int) -> None:
        if version != self.applied:
            raise IllegalTransition(
                f"unit {self._unit} has applied version {self.applied}, cannot serve {version}",
                remedy="pull and verify it first",
                unit=self._unit,
            )
        self.serving = version
        self._draining = False
        self._let_go()

    def stop_admitting(self) -> None:
        """Take no more requests; those that are here go on. Until `commit` or `admit_again`."""
        self._draining = True

    def admit_again(self) -> None:
        self._draining = False

    async def emptied(self, timeout: float) -> int:
        """Wait until no request is here, in flight or parked; how many are left after `timeout` seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._empty.wait()
        return len(self._requests)

    def sleep(self) -> None:
        """Nothing is served any more, nor after `wake`, until a version is applied and committed."""
        if self._requests or self._applying != NONE:
            raise IllegalTransition(
                f"unit {self._unit} has {len(self._requests)} requests and cannot sleep",
                remedy="drain it, and let no weights be under way",
                unit=self._unit,
            )
        self._asleep = True
        self.applied = self.serving = NONE

    def wake(self) -> None:
        """Able to take a version again."""
        self._asleep = self._draining = False

    def check_awake(self) -> None:
        if self._asleep:
            raise IllegalTransition(f"unit {self._unit} is asleep", remedy="wake it first", unit=self._unit)

    def _check(self, wanted: int) -> None:
        if not self.open:
            raise IllegalTransition(
                f"unit {self._unit} {self._closed()}", remedy="commit a version first", unit=self._unit
            )
        if wanted not in (NONE, self.serving):
            raise StaleVersion(
                f"unit {self._unit} serves version {self.serving}, the request wants {wanted}", serving=self.serving
            )

    def _closed(self) -> str:
        """Why nothing is served now."""
        if self._applying != NONE:
            return f"is taking new weights, version {self._applying}"
        if self._asleep:
            return "is asleep"
        waits = f": version {self.applied} waits to be committed" if self.applied != NONE else ""
        return f"serves no version yet{waits}"

    @contextmanager
    def _named(self, request_id: str) -> Iterator[None]:
        if request_id in self._requests:
            raise Conflict(f"request {request_id} is already running on {self._unit}", request=request_id)
        if self._draining:
            raise Unavailable(
                f"unit {self._unit} is being drained and takes no more requests",
                remedy="ask another unit of the model-stage",
                unit=self._unit,
            )
        self._requests.add(request_id)
        self._empty.clear()
        try:
            yield
        finally:
            self._requests.discard(request_id)
            if not self._requests:
                self._empty.set()

    @contextmanager
    def _flight(self, name: str, interrupt: Interrupt | None) -> Iterator[int]:
        self._flights[name] = interrupt
        self._idle.clear()
        try:
            yield self.serving
        finally:
            del self._flights[name]
            if not self._flights:
                self._idle.set()

    async def _drain(self, timeout: float) -> None:
        try:
            async with asyncio.timeout(timeout):
                for interrupt in tuple(self._flights.values()):
                    if interrupt is not None:
                        await interrupt()
                await self._idle.wait()
        except TimeoutError:
            left = sorted(self._flights)
            raise DeadlineExceeded(
                f"unit {self._unit} waited {timeout:g} s for {len(left)} requests in flight, {left[0]} among them",
                remedy="abort them or wait longer",
                requests=",".join(left[:20]),
            ) from None

    def _let_go(self) -> None:
        if self.open:
            for name in self._parked:
                self._tell(name, True)

    def _fail_parked(self, version: int, error: BaseException) -> None:
        for name in self._parked:
            failed = Unavailable(
                f"request {name} was parked while unit {self._unit} took version {version}, which failed: "
                f"{str(error) or type(error).__name__}",
                remedy="go on from the tokens received, on another unit",
                unit=self._unit,
                version=version,
            )
            self._tell(name, failed)

    def _tell(self, name: str, outcome: bool | NereusError) -> None:
        if not self._parked[name].done():
            self._parked[name].set_result(outcome)

    def _too_late(self, name: str, waited: float) -> DeadlineExceeded:
        return DeadlineExceeded(
            f"request {name} waited {waited:.3g} s for unit {self._unit} to serve a version again: "
            f"the unit {self._closed()}",
            remedy="commit the version, or give the request more time",
            unit=self._unit,
        )
