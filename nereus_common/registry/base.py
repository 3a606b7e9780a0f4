"""The registry: the one place where a cluster's devices, units, plans, jobs, events and leases are recorded.

Laws, kept by every store (tests/contract/registry):

- A write that returned is durable; it may be acted on. A write that raised Unavailable may or may not have happened:
  read before trying again.
- Records change by compare-and-set: of N writers who expect the same revision, exactly one wins and the others get
  Conflict. `expected=0` means "must not exist yet".
- The bytes granted on a device never exceed its budget.
- Nothing goes back: plan epochs, revisions, fences and the registry's own epoch only rise, and a store that has lost
  acknowledged writes is refused (StaleEpoch).

Every call ends within the store's timeout, plus its own `wait` where it has one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping
from types import TracebackType
from typing import Self

from nereus_common.core.emu import Unit
from nereus_common.core.ids import DeviceId, JobId, TransitionId, UnitId, check_name
from nereus_common.core.plan import Plan
from nereus_common.registry import codec
from nereus_common.registry.records import (
    CommittedPlan,
    Device,
    Grant,
    JobEvent,
    JobRecord,
    Lease,
    LeaseStatus,
    ServiceRecord,
    ServiceStatus,
    TransitionRecord,
    Versioned,
)

EVENTS_KEPT = 10_000
SERVICE_PREFIX = "service/"


class Registry(ABC):
    """See the module's text for the laws. Safe for concurrent use by the tasks of one event loop."""

    # -- the registry's own epoch ---------------------------------------------------------------------------------

    @property
    @abstractmethod
    def known_epoch(self) -> int:
        """The highest registry epoch this client has seen."""

    @abstractmethod
    async def epoch(self) -> int:
        """The registry's epoch: raised by every new lease and every plan commit, durable, never lower."""

    @abstractmethod
    async def raise_epoch(self) -> int:
        """Raise the registry's epoch by one and return it."""

    # -- the device pool ------------------------------------------------------------------------------------------

    @abstractmethod
    async def put_device(self, device: Device) -> None:
        """Add a device, or change its budget. Conflict when less than what is granted on it."""

    @abstractmethod
    async def remove_device(self, device: DeviceId) -> None:
        """Take a device out of the pool; absent is fine. Conflict while anything is granted on it."""

    @abstractmethod
    async def devices(self) -> tuple[Device, ...]:
        """The pool, ordered by id."""

    @abstractmethod
    async def grant(self, unit: UnitId, phase: str, wanted: Mapping[DeviceId, int]) -> None:
        """Make the bytes per device in `wanted` the grant of (unit, phase): all of it or none, replacing the former.

        Several units may share a device as long as their bytes fit, over all their phases; a unit that wants a
        device for itself asks for all of it. ResourceExhausted names the device and the bytes; NotFound the device.
        """

    @abstractmethod
    async def release_grants(self, unit: UnitId, phase: str | None = None) -> int:
        """Give back what `unit` holds in `phase` (None: in all); return the bytes freed. Nothing held is fine."""

    @abstractmethod
    async def grants(self) -> tuple[Grant, ...]:
        """The ledger: one consistent snapshot, ordered by (device, unit, phase)."""

    async def occupied(self, job: JobId) -> dict[DeviceId, int]:
        """Bytes granted to units of other jobs, by device; of all units where `job` is empty."""
        mine = {unit.value.id for unit in await self.units(job)} if job else set()
        used: dict[DeviceId, int] = {}
        for grant in await self.grants():
            if grant.unit not in mine:
                used[grant.device] = used.get(grant.device, 0) + grant.bytes
        return used

    # -- leases and services --------------------------------------------------------------------------------------

    @abstractmethod
    async def acquire_lease(self, name: str, holder: str, ttl: float, record: str = "") -> Lease:
        """Take a free or lapsed name for `ttl` seconds under a new fence; Conflict names who holds it.

        Asked again by the holder it keeps the fence and starts the time anew, so a lost answer can be asked for
        again. A process that starts anew must bring a new `holder` token.
        """

    @abstractmethod
    async def renew_lease(self, lease: Lease) -> None:
        """Start the lease's time anew. StaleEpoch when it lapsed (even if nobody took it), or went to another."""

    @abstractmethod
    async def release_lease(self, lease: Lease) -> bool:
        """Give a lease up, or clear away a lapsed one. False, and nothing changed, when it has been taken over."""

    @abstractmethod
    async def leases(self) -> tuple[LeaseStatus, ...]:
        """Held and lapsed leases, ordered by name; released ones are gone."""

    async def announce_service(self, service: ServiceRecord, holder: str, ttl: float) -> Lease:
        """Publish a service under a lease of its name. Conflict when a living one has that name."""
        check_name(service.name, "service.name")
        return await self.acquire_lease(SERVICE_PREFIX + service.name, holder, ttl, codec.service_to_json(service))

    async def services(self) -> tuple[ServiceStatus, ...]:
        """Services that have not said goodbye, the dead among them, ordered by name."""
        return tuple(
            ServiceStatus(codec.service_from_json(status.lease.record), status.lease, status.alive)
            for status in await self.leases()
            if status.lease.name.startswith(SERVICE_PREFIX)
        )

    # -- jobs -----------------------------------------------------------------------------------------------------

    @abstractmethod
    async def put_job(self, job: JobRecord, *, expected: int) -> int:
        """Write a job's record if it is at revision `expected`; return the new revision. Conflict."""

    @abstractmethod
    async def get_job(self, job: JobId) -> Versioned[JobRecord]:
        """NotFound."""

    @abstractmethod
    async def jobs(self) -> tuple[Versioned[JobRecord], ...]:
        """All jobs, oldest first."""

    # -- plans ----------------------------------------------------------------------------------------------------

    @abstractmethod
    async def commit_plan(self, job: JobId, expected_epoch: int, plan: Plan, *, fence: int | None = None) -> int:
        """Put `plan` in force if the job is at `expected_epoch` (0: no plan yet); return the new epoch.

        StaleEpoch when the job is at another epoch, or when a coordinator with a higher fence has written to it.
        """

    @abstractmethod
    async def get_plan(self, job: JobId, epoch: int | None = None) -> CommittedPlan:
        """The plan in force, or the one committed as `epoch`. NotFound."""

    # -- transitions ----------------------------------------------------------------------------------------------

    @abstractmethod
    async def put_transition(self, record: TransitionRecord, *, expected: int, fence: int | None = None) -> int:
        """Write a transition if it is at revision `expected`; return the new revision. Conflict; StaleEpoch (fence)."""

    @abstractmethod
    async def get_transition(self, job: JobId, transition: TransitionId) -> Versioned[TransitionRecord]:
        """NotFound."""

    @abstractmethod
    async def transitions(self, job: JobId) -> tuple[Versioned[TransitionRecord], ...]:
        """Of a job, oldest first."""

    # -- units ----------------------------------------------------------------------------------------------------

    @abstractmethod
    async def put_unit(self, unit: Unit, *, expected: int, fence: int | None = None) -> int:
        """Write a unit if it is at revision `expected`; return the new revision. Conflict; StaleEpoch by fence."""

    @abstractmethod
    async def remove_unit(self, job: JobId, unit: UnitId, *, expected: int, fence: int | None = None) -> None:
        """Forget a unit if it is at revision `expected`. Conflict; StaleEpoch by fence."""

    @abstractmethod
    async def get_unit(self, job: JobId, unit: UnitId) -> Versioned[Unit]:
        """NotFound."""

    @abstractmethod
    async def units(self, job: JobId) -> tuple[Versioned[Unit], ...]:
        """The units of a job, ordered by id."""

    # -- events ---------------------------------------------------------------------------------------------------

    @abstractmethod
    async def append_event(self, job: JobId, kind: str, payload: Mapping[str, object], *, time: float) -> int:
        """Add to the job's stream, which keeps a bounded number of the newest; return the revision."""

    @abstractmethod
    async def read_events(
        self, job: JobId, after: int = 0, *, limit: int = 256, wait: float = 0.0
    ) -> tuple[JobEvent, ...]:
        """Up to `limit` events after a revision (0: from the first kept). When there are none, wait up to `wait`
        seconds for the next, then return nothing.

        ResourceExhausted when events after that revision have been dropped already: the reader is too slow.
        StaleEpoch when the revision is ahead of the stream.
        """

    async def watch_events(self, job: JobId, after: int = 0, *, quiet: float) -> AsyncIterator[JobEvent]:
        """Events after a revision as they come, ending after `quiet` seconds without one. Errors as read_events."""
        while True:
            events = await self.read_events(job, after, wait=quiet)
            for event in events:
                yield event
                after = event.revision
            if not events:
                return

    # -- end ------------------------------------------------------------------------------------------------------

    @abstractmethod
    async def close(self) -> None:
        """Close connections. Leases are kept: they are released, or lapse."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
