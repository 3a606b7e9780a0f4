"""One transition of a placed job, from its preparation to its end: the DAG over real units, every node journalled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

from nereus_common.core.emu import Event
from nereus_common.core.errors import DeadlineExceeded, NereusError, ProcessLost
from nereus_common.core.ids import DeviceId, ModelStage, Stage, UnitId
from nereus_common.rpc.together import together
from nereus_common.stages.base import UnitSpec, new_unit
from nereus_common.transitions.dag import EdgeKind, Mode, Node, Primitive, Side, TransitionDag, UnitSlot
from nereus_common.transitions.lifecycle import NodeState, TransitionState

from .jobs import PlacedJob, PlacedJobs, syncs_of, wanted_bytes
from .journal import TransitionJournal
from .ledger import UnitLedger
from .moving import WIRE_DTYPE, agreed_digests, move_state
from .placement import Placement, synced_models, unit_specs
from .putting_back import PuttingBack, moved_back
from .reach import Reach, meeting_point
from .remote_unit import RemoteUnit
from .sync import SyncReport

UNDO_SECONDS = 240.0
"""For each old unit: an engine may have to start again, and be filled."""


@dataclass(slots=True)
class Underway:
    """`target`: the placement that it leads to. `needed`: bytes of each of its (model-stage, replica, rank)."""

    placed: PlacedJob
    target: Placement
    dag: TransitionDag
    needed: Mapping[tuple[ModelStage, int, int], int]
    jobs: PlacedJobs
    ledger: UnitLedger
    reach: Reach
    journal: TransitionJournal
    bucket_bytes: int
    _specs: dict[UnitSlot, UnitSpec] = field(default_factory=dict, init=False)
    _old: dict[UnitSlot, RemoteUnit] = field(default_factory=dict, init=False)
    _new: dict[UnitSlot, RemoteUnit] = field(default_factory=dict, init=False)
    _offered: dict[UnitId, RemoteUnit] = field(default_factory=dict, init=False)
    _asleep: dict[UnitId, RemoteUnit] = field(default_factory=dict, init=False)
    _lent: dict[UnitId, Mapping[DeviceId, int]] = field(default_factory=dict, init=False)
    """What old units that made room were granted before."""
    _making_room: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    _gone: list[UnitSlot] = field(default_factory=list, init=False)
    """Old units that were released before the commit."""

    def __post_init__(self) -> None:
        for unit in self.placed.units:
            self._old[UnitSlot(unit.unit.model_stage, Side.OLD, unit.unit.replica)] = unit
        made = {slot for node in self.dag.nodes for slot in node.targets}
        for spec in unit_specs(self.target, meeting_point):
            slot = UnitSlot(spec.model_stage, Side.NEW, spec.replica)
            if slot in made:
                self._specs[slot] = spec

    @property
    def id(self) -> str:
        return self.journal.record.id

    async def prepare(self, dag_json: str, timeout: float) -> None:
        """Start what fits beside the running job. When anything fails it is undone and the transition has failed."""
        kept = [self._old[old].id for old in self.dag.kept]
        units = [spec.unit for spec in self._specs.values()]
        await self.journal.begin(dag_json, len(self.dag.nodes), units, kept)
        try:
            async with self._within(timeout, "prepared"):
                with self.journal.watch.phase("prepare"):
                    early = [node for node in self._making if not self._must_wait(node)]
                    await self._start([slot for node in early for slot in node.targets], timeout)
            await self.journal.become(TransitionState.PREPARED)
        except BaseException as error:
            await asyncio.shield(self.undo(_as_ours(error)))
            raise

    async def run(self, version: int, timeout: float) -> PlacedJob:
        """Move, verify, sync, commit; returns the job under its new plan. `finish` is what is left to do.

        An error before the commit leaves the job as it was. ProcessLost: parts of its state are gone.
        """
        try:
            async with self._within(timeout, "run"):
                await self.journal.become(TransitionState.MOVING, step=version)
                await self._walk(version, timeout)
                await self._withdraw_staying(timeout)
                placed = await self._sync(version, timeout)
                with self.journal.watch.phase("commit"):
                    await self.ledger.commit_plan(self.target.job, self.placed.placement.epoch, self.target.plan)
        except BaseException as error:
            await asyncio.shield(self.undo(_as_ours(error), min(timeout, UNDO_SECONDS)))
            if self.journal.record.state is TransitionState.LOST and isinstance(error, NereusError):
                raise ProcessLost(
                    f"transition {self.id} failed, and parts of the old state are gone: {error}"
                ) from error
            raise
        await self.journal.become(TransitionState.COMMITTED)
        self.jobs.put(placed)
        return placed

    async def finish(self) -> None:
        """Release the old units that the new plan has no use for: the job steps on meanwhile."""
        with self.journal.watch.phase("release"):
            left = [slot for slot in self._old if slot not in self.dag.kept and slot not in self._gone]
            await self._forget([self._old[slot].id for slot in left])
            await self.journal.nodes(range(len(self.dag.nodes)), NodeState.DONE)
        await self.journal.become(TransitionState.DONE)

    async def undo(self, error: NereusError, timeout: float = UNDO_SECONDS) -> None:
        """Put the old units back to work, and release what was made; it ends as LOST where parts of the old state are
        gone, or a unit cannot work again. Never fails. `timeout`: seconds for each unit."""
        record, old = self.journal.record, {unit.id: unit for unit in self._old.values()}
        whole = not self._gone and await moved_back(record, list(old.values()), list(self._new.values()))
        await self._forget([spec.unit for spec in self._specs.values()])
        touched = [unit for name, unit in old.items() if name in {*self._asleep, *self._offered, *self._lent}]
        lost = await PuttingBack(record, self.placed.units, self._lent, self.ledger, timeout).run(touched)
        whole = whole and not lost
        await self.journal.failed(TransitionState.UNDONE if whole else TransitionState.LOST, error)

    @asynccontextmanager
    async def _within(self, timeout: float, what: str) -> AsyncIterator[None]:
        """DeadlineExceeded says which nodes were at work when the time was up."""
        try:
            async with asyncio.timeout(timeout):
                yield
        except TimeoutError as late:
            states = self.journal.record.nodes
            busy = [
                f"{node.id} ({node.primitive} {node.model_stage})"
                for node in self.dag.nodes
                if node.id < len(states) and states[node.id] is NodeState.RUNNING
            ]
            raise DeadlineExceeded(
                f"transition {self.id} was not {what} within {timeout:.0f} s; at work: {', '.join(busy) or 'no node'}",
                remedy="raise deadlines.place, or see the logs of the new units",
                transition=self.id,
            ) from late

    @property
    def _making(self) -> list[Node]:
        return [node for node in self.dag.nodes if node.targets]

    def _must_wait(self, node: Node) -> bool:
        """Whether its memory is still in use by something else while the job runs."""
        blocked = any(edge.after == node.id and edge.kind is EdgeKind.RESOURCE for edge in self.dag.edges)
        return blocked or node.mode is Mode.IN_PLACE

    async def _start(self, slots: Sequence[UnitSlot], timeout: float) -> None:
        specs = [self._specs[slot] for slot in slots if slot not in self._new]
        for spec in specs:
            await self.ledger.add(spec, wanted_bytes(new_unit(spec), self.needed))
        targets = await self.reach.stage_services()
        units = await self.jobs.prepare(specs, targets, timeout)
        for spec, unit in zip(specs, units, strict=True):
            self._new[UnitSlot(spec.model_stage, Side.NEW, spec.replica)] = unit

    async def _walk(self, version: int, timeout: float) -> None:
        """Every node that comes before the commit, each as soon as those it waits for are done."""
        needed_early = {edge.before for edge in self.dag.edges if edge.kind is EdgeKind.RESOURCE}
        chosen = [node for node in self.dag.nodes if node.targets or node.id in needed_early]
        done = {node.id: asyncio.Event() for node in chosen}

        async def one(node: Node) -> None:
            for before in self.dag.before(node.id):
                await done[before].wait()
            await self.journal.nodes([node.id], NodeState.RUNNING)
            if node.primitive is Primitive.DESTROY:
                await self._destroy(node)
            else:
                await self._make(node, version, timeout)
            await self.journal.nodes([node.id], NodeState.DONE)
            done[node.id].set()

        await together(one(node) for node in chosen)

    async def _make(self, node: Node, version: int, timeout: float) -> None:
        if node.mode is Mode.IN_PLACE:
            await self._make_room(node, timeout)
        await self._start(node.targets, timeout)
        if node.model_stage.stage is Stage.TRAINING:
            await self._move(node, version, WIRE_DTYPE, timeout)
        elif node.model_stage.model not in synced_models(self.target.plan):
            await self._fill(node, timeout)

    async def _make_room(self, node: Node, timeout: float) -> None:
        """The old units lend what the node frees. Generation units, which the job has emptied, sleep meanwhile."""
        async with self._making_room:  # several nodes may take the place of one unit
            for slot in node.sources:
                old = self._old[slot]
                if node.model_stage.stage is Stage.GENERATION and old.id not in self._asleep:
                    await self.ledger.advance([old], Event.SLEPT)
                    self._asleep[old.id] = old
                    await old.sleep(timeout)
                granted = await self.ledger.granted(old.id)
                self._lent.setdefault(old.id, granted)
                left = {device: amount - node.frees.get(device, 0) for device, amount in granted.items()}
                await self.ledger.grant(old.id, left)

    async def _move(self, node: Node, version: int, wire_dtype: str, timeout: float) -> None:
        """From the node's sources, which hold the whole state in `wire_dtype`, to its targets."""
        sources = [self._old[slot] if slot in self._old else self._new[slot] for slot in node.sources]
        units = [self._new[slot] for slot in node.targets]
        self._offered |= {unit.id: unit for unit in sources}
        digests = None
        if node.mode is Mode.IN_PLACE:
            with self.journal.watch.phase("verify"):
                digests = await agreed_digests(sources, version, timeout)
            await self.journal.holds(node.id, digests)

        async def after_round(number: int) -> None:
            if node.mode is Mode.IN_PLACE:
                await self.journal.round_done(node.id, number)

        with self.journal.watch.phase("move"):
            report = await move_state(
                sources,
                units,
                version,
                mode=node.mode,
                transition=self.id,
                timeout=timeout,
                after_round=after_round,
                wire_dtype=wire_dtype,
                expected=digests,
                bucket_bytes=self.bucket_bytes,
            )
        await self.journal.moved(report.bytes_moved, report.bytes_needed)
        with self.journal.watch.phase("verify"):
            dtype = self.target.plan[node.model_stage].dtypes.compute
            await together(unit.verify(version, dtype, {}, timeout) for unit in units)
            await together(unit.commit(version, timeout) for unit in units)
        await self.ledger.advance(units, Event.LOAD_STARTED, Event.LOADED, Event.COMMITTED, version=version)

    async def _fill(self, node: Node, timeout: float) -> None:
        """Units of a model that nobody trains: from one that holds it as they will, or else from its folder."""
        name, version = node.model_stage, self.placed.placement.version
        held, wanted = (plan[name].dtypes.compute for plan in (self.placed.placement.plan, self.target.plan))
        if name.stage is Stage.INFERENCE and node.sources and held == wanted:
            await self._move(node, version, wanted, timeout)
        else:
            await together(self._load(self._new[slot], version, timeout) for slot in node.targets)

    async def _load(self, unit: RemoteUnit, version: int, timeout: float) -> None:
        await unit.load(version, timeout)
        await unit.commit(version, timeout)
        await self.ledger.advance([unit], Event.LOAD_STARTED, Event.LOADED, Event.COMMITTED, version=version)

    async def _withdraw_staying(self, timeout: float) -> None:
        """Units that others were filled from, and that work on under the new plan."""
        staying = {self._old[slot].id for slot in self.dag.kept} | {unit.id for unit in self._new.values()}
        await together(unit.withdraw(timeout) for unit in self._offered.values() if unit.id in staying)

    async def _destroy(self, node: Node) -> None:
        self._gone += node.sources
        await self._forget([self._old[slot].id for slot in node.sources])

    async def _sync(self, version: int, timeout: float) -> PlacedJob:
        """Bring every other unit of the trained models to `version`; returns the job as it will be."""
        kept = [
            replace(unit, unit=replace(unit.unit, replica=new.replica))
            for old, new in self.dag.kept.items()
            if (unit := self._old[old])
        ]
        units = [*kept, *self._new.values()]
        syncs = syncs_of(units, self.target)
        reports: list[SyncReport] = []
        with self.journal.watch.phase("sync"):
            for weight_sync in syncs.values():
                reports.append(await weight_sync.run(version, timeout, f"{self.id}.sync.{weight_sync.model}"))
                await self.ledger.took_version(weight_sync.receivers, version)
        return PlacedJob(self.target, units, syncs, reports)

    async def _forget(self, units: Collection[UnitId]) -> None:
        """Release what the registry knows of these units, and forget them."""
        await self.jobs.forget([unit for unit in await self.ledger.known(self.target.job) if unit.value.id in units])


def _as_ours(error: BaseException) -> NereusError:
    return error if isinstance(error, NereusError) else NereusError(f"{type(error).__name__}: {error}")
