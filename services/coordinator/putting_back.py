"""The old units of a transition that failed, put back to work. It reads the journal's record, so that a coordinator
undoes what an earlier life of it left under way just as it undoes its own.

First, while the new units are there, what training units have dropped in durable rounds of an in-place move comes back
from those, and is whole again once its digests are what the journal has of it. Then, without them, offers are taken
back. Training units come before the others: they fill generation units that slept, by weight sync. A unit of a model
that nobody trains may have dropped parts of its state: it is filled from the model's folder.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from nereus_common.core.emu import Event, Phase
from nereus_common.core.errors import IllegalTransition, NereusError
from nereus_common.core.ids import DeviceId, ModelStage, Stage, UnitId
from nereus_common.registry import TransitionRecord
from nereus_common.rpc.together import together
from nereus_common.rpc.transitions import dag_from_json
from nereus_common.transitions.dag import Mode

from .jobs import sync_of
from .ledger import UnitLedger
from .moving import move_state
from .remote_unit import RemoteUnit

log = logging.getLogger(__name__)

BACK_SECONDS = 300.0
"""For a reverse move: as much as a placement may take."""


async def moved_back(record: TransitionRecord, old: Sequence[RemoteUnit], new: Sequence[RemoteUnit]) -> bool:
    """Whether no old training unit lacks anything, once all rounds of in-place moves are reversed. The new units must
    be there still."""
    whole = True
    for stage, node in _drained(record).items():
        givers, takers = ([one for one in units if one.unit.model_stage == stage] for units in (new, old))
        try:
            await _move_back(record, node, stage, givers, takers)
        except NereusError as error:
            log.warning("transition %s: %s did not get back what it had given away: %s", record.id, stage, error)
            whole = False
    return whole


@dataclass(frozen=True, slots=True)
class PuttingBack:
    """`units`: the job's under the plan in force. `granted`: bytes by device that units have lent and get back.
    `timeout`: seconds for each unit. The new units, which may be reading, must be gone."""

    record: TransitionRecord
    units: Sequence[RemoteUnit]
    granted: Mapping[UnitId, Mapping[DeviceId, int]]
    ledger: UnitLedger
    timeout: float

    async def run(self, touched: Collection[RemoteUnit]) -> list[UnitId]:
        """Those of the `touched` units that could not be put back."""
        training = [unit for unit in touched if unit.unit.model_stage.stage is Stage.TRAINING]
        others = [unit for unit in touched if unit.unit.model_stage.stage is not Stage.TRAINING]
        lost: list[UnitId] = []
        for units in (training, others):
            back = await together(self._put_back(unit) for unit in units)
            lost += [unit.id for unit, well in zip(units, back, strict=True) if not well]
        return lost

    async def _put_back(self, unit: RemoteUnit) -> bool:
        try:
            async with asyncio.timeout(self.timeout):
                if unit.id in self.granted:
                    await self.ledger.grant(unit.id, self.granted[unit.id])
                match unit.unit.model_stage.stage:
                    case Stage.GENERATION:
                        await self._wake(unit)
                    case Stage.INFERENCE:
                        await self._withdraw_or_reload(unit)
                    case Stage.TRAINING:
                        if unit.unit.model_stage not in _drained(self.record):  # else it was given everything back
                            await unit.withdraw(self.timeout)
            return True
        except NereusError as error:
            why = str(error)
        except TimeoutError:
            why = f"it was not put back within {self.timeout:g} s"
        log.error("transition %s: unit %s is lost: %s", self.record.id, unit.id, why)
        await self.ledger.lost(unit.unit)
        return False

    async def _wake(self, unit: RemoteUnit) -> None:
        """What it held is gone: it is filled as any unit of a trained model is, and proven by what it computes with."""
        stored = await self.ledger.registry.get_unit(unit.unit.job, unit.id)
        if stored.value.phase is Phase.ACTIVE:
            return
        await unit.wake(self.timeout)
        if stored.value.phase is Phase.ASLEEP:
            await self.ledger.advance([unit], Event.WOKEN)
        refill = sync_of(unit.unit.model_stage.model, self.units, self.record.plan, [unit])
        await refill.run(self.record.step, self.timeout, f"{self.record.id}.undo")
        await self.ledger.took_version([unit], self.record.step)

    async def _withdraw_or_reload(self, unit: RemoteUnit) -> None:
        """From its folder where parts were dropped: only units of models that nobody trains are ever offered here."""
        try:
            await unit.withdraw(self.timeout)
        except IllegalTransition:
            version = (await self.ledger.registry.get_unit(unit.unit.job, unit.id)).value.version
            await unit.load(version, self.timeout)
            await unit.commit(version, self.timeout)


def _drained(record: TransitionRecord) -> dict[ModelStage, int]:
    """The training model-stages that have dropped something, each with the node that moves it."""
    if not any(record.rounds.values()):
        return {}
    nodes = {node.id: ModelStage.parse(node.model_stage) for node in dag_from_json(record.dag_json).nodes}
    drained = {nodes[node]: node for node in record.digests if record.rounds.get(node)}
    return {name: node for name, node in drained.items() if name.stage is Stage.TRAINING}


async def _move_back(
    record: TransitionRecord, node: int, stage: ModelStage, givers: Sequence[RemoteUnit], takers: Sequence[RemoteUnit]
) -> None:
    async def unnoted(number: int) -> None:
        """Nothing is dropped on the way back, so nothing has to be durable."""

    version, dtype = record.step, record.plan[stage].dtypes.compute
    drained = [unit for unit in takers if not await _withdraws(unit)]
    if not drained:
        return
    await move_state(
        givers,
        drained,
        version,
        mode=Mode.SHADOW,
        transition=f"{record.id}.back",
        timeout=BACK_SECONDS,
        after_round=unnoted,
        expected=record.digests[node],
        refill=True,
    )
    await together(unit.verify(version, dtype, {}, BACK_SECONDS) for unit in drained)
    await together(unit.commit(version, BACK_SECONDS) for unit in drained)


async def _withdraws(unit: RemoteUnit) -> bool:
    """False when the unit has dropped something; a round may be durable of which nothing was dropped yet."""
    try:
        await unit.withdraw(BACK_SECONDS)
    except IllegalTransition:
        return False
    return True
