"""The interface between the lifecycle of a unit, which is common, and what a stage does at each point of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from nereus_common.core.emu import Unit
from nereus_common.core.errors import UnsupportedByEngine
from nereus_common.core.ids import Head, JobId, ModelStage, TensorName, UnitId
from nereus_common.core.plan import StagePlan
from nereus_common.core.transfer import Box, RankRef, Transfer
from nereus_common.core.transfer import state_holder as state_holder


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where the ranks of one model-stage meet; `prefix` separates one epoch's group from the next one's."""

    host: str
    port: int
    prefix: str


@dataclass(frozen=True, slots=True)
class UnitSpec:
    """All a stage service must know to build one replica."""

    unit: UnitId
    job: JobId
    model_stage: ModelStage
    replica: int
    epoch: int
    model_path: str
    plan: StagePlan
    engine: str
    options: Mapping[str, Any]
    rendezvous: Rendezvous
    seed: int
    head: Head = Head.LM


@dataclass(frozen=True, slots=True)
class RankHolding:
    """What one rank holds, or must hold, and the transport address at which it serves."""

    rank: int
    device: str
    address: bytes
    boxes: Mapping[TensorName, tuple[Box, ...]]


@dataclass(frozen=True, slots=True)
class Holding:
    """All ranks of a unit; `version` is -1 while nothing is held."""

    version: int
    ranks: tuple[RankHolding, ...]


@dataclass(frozen=True, slots=True)
class PullOrder:
    """Bring the unit's staging to `version`. `timeout` in seconds.

    `state`: fill the whole state of a new unit from offers instead, in place; `more`: further parts follow;
    `compared_whole`: digests of the whole are compared before any of it is used, and none on the way.
    """

    version: int
    wire_dtype: str
    transfers: Sequence[Transfer]
    addresses: Mapping[RankRef, bytes]
    timeout: float
    transition: str
    state: bool = False
    more: bool = False
    compared_whole: bool = False


@dataclass(frozen=True, slots=True)
class RankPulled:
    """`bytes` as counted at the transport; `digest` of the staged boxes as logical content."""

    rank: int
    bytes: int
    seconds: float
    digest: int


@dataclass(frozen=True, slots=True)
class HostSettings:
    """`log_dir`: where the processes of units write. `transport`: "ucx", or "loopback" inside one process."""

    log_dir: Path
    transport: str = "ucx"


class StateCopies(Protocol):
    """What keeps copies of a unit's state, and outlives the processes that the state is in."""

    async def offer(self, version: int, timeout: float) -> Holding:
        """As the unit would. StaleVersion when it is not a version that is kept; ProcessLost when none is any more."""

    async def digest(self, version: int, timeout: float) -> Mapping[str, int]: ...


class UnitHost(Protocol):
    """One unit's processes. Every method may raise ProcessLost; after that only `release` is called, and `copies`."""

    @property
    def copies(self) -> StateCopies | None:
        """None: the state is gone with the unit's processes."""

    @property
    def pids(self) -> Sequence[int]: ...

    async def prepare(self, timeout: float) -> None:
        """Start processes and engine, on empty storage."""

    async def load(self, version: int, timeout: float, checkpoint: str = "") -> None:
        """Fill from the model folder, or from a complete checkpoint's; the state becomes `version`.

        Only training units are given a checkpoint. VerificationFailed when the state is not the one that was saved.
        """

    async def describe(self, timeout: float, state: bool = False) -> Holding:
        """`state`: of the whole state, as `offer` serves it; of a training unit with the optimizer's tensors."""

    async def pull(self, order: PullOrder) -> Sequence[RankPulled]:
        """Pull into staging, digests checked. What is served stays untouched."""

    async def verify(self, version: int, wire_dtype: str, timeout: float) -> Mapping[int, int]:
        """Apply staging if there is any, then return per rank the digest of what is really computed with."""

    async def commit(self, version: int, timeout: float) -> None:
        """Serve `version`."""

    async def offer(self, version: int, timeout: float) -> Holding:
        """Serve the whole state in place, as holder `state_holder(unit)`, until `withdraw`. Idempotent."""

    async def withdraw(self, timeout: float) -> None:
        """End the offer."""

    async def drop(self, tensors: Sequence[TensorName], timeout: float) -> None:
        """Free the storage of offered tensors on every rank. Idempotent."""

    async def digest(self, version: int, timeout: float) -> Mapping[str, int]:
        """Of the logical state, by kind: "parameters", and of a training unit also each optimizer slot."""

    async def sleep(self, timeout: float) -> None: ...

    async def wake(self, timeout: float) -> None: ...

    async def release(self) -> None:
        """Stop everything, also in the middle of any other call. Never fails."""

    async def release_ranks(self) -> None:
        """As `release`, but for `copies`."""


def new_unit(spec: UnitSpec) -> Unit:
    devices = spec.plan.unit_devices(spec.replica)
    return Unit(spec.unit, spec.job, spec.model_stage, spec.replica, spec.plan.layout, devices, spec.epoch)


class OffersNothing:
    """The part of UnitHost that moves state, for units that are filled by weight sync or from their model's folder."""

    copies: StateCopies | None = None

    async def release_ranks(self) -> None:
        raise self._refused("has no copies to leave behind")

    async def offer(self, version: int, timeout: float) -> Holding:
        raise self._refused("offers no state")

    async def withdraw(self, timeout: float) -> None:
        """Nothing was offered."""

    async def drop(self, tensors: Sequence[TensorName], timeout: float) -> None:
        raise self._refused("offers no state that could be dropped")

    async def digest(self, version: int, timeout: float) -> Mapping[str, int]:
        raise self._refused("has no digest of its state")

    def _refused(self, what: str) -> UnsupportedByEngine:
        return UnsupportedByEngine(
            f"{type(self).__name__} {what}", remedy="ask a training unit of the model", field="model_stage"
        )
