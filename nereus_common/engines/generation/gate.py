"""Who is served, and from which version: the state between a host's callers and its engine.

    empty ──applied──► applied ──committed──► serving ◄──slept/woken──► asleep
      ▲                   ▲                      │
      └──────failed───────┴───── applying ◄──────┘   (no request in flight, none admitted)

Tokens of one request all come from one version, because nothing is applied while a request is in flight.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from nereus_common.core.errors import Conflict, DeadlineExceeded, IllegalTransition, StaleVersion

NONE = -1


class Gate:
    """One event loop only. `unit` names it in errors."""

    def __init__(self, unit: str) -> None:
        self._unit = unit
        self._active: set[str] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._applying = False
        self._asleep = False
        self.applied = NONE
        """The version in the engine, verified; NONE before the first and after a failed one."""
        self.serving = NONE

    @property
    def active(self) -> int:
        return len(self._active)

    @contextmanager
    def admit(self, request_id: str, wanted: int) -> Iterator[int]:
        """Count a request in and out; gives the version that serves it.

        IllegalTransition when nothing is served, StaleVersion when another version is, Conflict when the id is taken.
        """
        if self._applying or self._asleep or self.serving == NONE:
            why = (
                "is taking new weights" if self._applying else "is asleep" if self._asleep else "serves no version yet"
            )
            raise IllegalTransition(f"unit {self._unit} {why}", remedy="commit a version first", unit=self._unit)
        if wanted not in (NONE, self.serving):
            raise StaleVersion(
                f"unit {self._unit} serves version {self.serving}, the request wants {wanted}", serving=self.serving
            )
        if request_id in self._active:
            raise Conflict(f"request {request_id} is already running on {self._unit}", request=request_id)
        self._active.add(request_id)
        self._idle.clear()
        try:
            yield self.serving
        finally:
            self._active.discard(request_id)
            if not self._active:
                self._idle.set()

    @asynccontextmanager
    async def applying(self, version: int, timeout: float) -> AsyncIterator[None]:
        """Admit nobody, wait until no request is in flight, and let the caller change the weights.

        DeadlineExceeded names the requests left after `timeout` seconds: the old version is served on. An error of
        the caller's leaves the unit serving nothing until a later version is applied.
        """
        if self._applying:
            raise Conflict(f"unit {self._unit} is already taking new weights", unit=self._unit)
        self._applying = True
        try:
            await self._drain(timeout)
            self.applied = self.serving = NONE
            yield
            self.applied = version
        finally:
            self._applying = False

    async def _drain(self, timeout: float) -> None:
        try:
            async with asyncio.timeout(timeout):
                await self._idle.wait()
        except TimeoutError:
            left = sorted(self._active)
            raise DeadlineExceeded(
                f"unit {self._unit} waited {timeout:g} s for {len(left)} requests in flight, {left[0]} among them",
                remedy="abort them or wait longer",
                requests=",".join(left[:20]),
            ) from None

    def commit(self, version: int) -> None:
        if version != self.applied:
            raise IllegalTransition(
                f"unit {self._unit} has applied version {self.applied}, cannot serve {version}",
                remedy="pull and verify it first",
                unit=self._unit,
            )
        self.serving = version

    def sleep(self) -> None:
        if self._active:
            raise IllegalTransition(f"unit {self._unit} has {len(self._active)} requests in flight", remedy="drain it")
        self._asleep = True

    def wake(self) -> None:
        self._asleep = False
