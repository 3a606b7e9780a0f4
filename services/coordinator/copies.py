"""Training units filled from the copies that lost ones have left."""

from __future__ import annotations

from collections.abc import Sequence

from nereus_common.core.errors import NereusError, ProcessLost
from nereus_common.core.ids import Stage
from nereus_common.rpc.together import together
from nereus_common.transitions.dag import Mode

from .moving import move_state
from .placement import Placement
from .remote_unit import RemoteUnit


async def fill_from_copies(
    placement: Placement, left: Sequence[RemoteUnit], units: Sequence[RemoteUnit], timeout: float
) -> None:
    """Bring the training units among `units` to the placement's version, and prove it by digest.

    ProcessLost, whatever went wrong: there is no state to go on with, but perhaps a checkpoint.
    """
    trained = [name for name in placement.plan.names if name.stage is Stage.TRAINING]
    try:
        for name in trained:
            candidates, targets = ([unit for unit in some if unit.unit.model_stage == name] for some in (left, units))
            sources = await _offering(candidates, placement.version, timeout)
            await _fill(placement, sources, targets, timeout)
    except NereusError as error:
        raise ProcessLost(
            f"job {placement.job}: version {placement.version} cannot be had from copies: {error}", job=placement.job
        ) from error


async def _offering(candidates: Sequence[RemoteUnit], version: int, timeout: float) -> list[RemoteUnit]:
    """Those that offer `version`, since a failed transition leaves units of two plans; ProcessLost says why there are
    none."""
    offering, refused = [], ["there are none"]
    for unit in candidates:
        try:
            await unit.offer(version, timeout)
            offering.append(unit)
        except NereusError as error:
            refused.append(str(error))
    if not offering:
        raise ProcessLost(refused[-1])
    return offering


async def _fill(
    placement: Placement, sources: Sequence[RemoteUnit], targets: Sequence[RemoteUnit], timeout: float
) -> None:
    version, dtype = placement.version, placement.plan[targets[0].unit.model_stage].dtypes.compute

    async def after_round(number: int) -> None:
        """Nothing is dropped, so nothing has to be durable."""

    await move_state(
        sources,
        targets,
        version,
        mode=Mode.SHADOW,
        transition=f"{placement.job}.e{placement.epoch}.copies",
        timeout=timeout,
        after_round=after_round,
    )
    await together(unit.verify(version, dtype, {}, timeout) for unit in targets)
    await together(unit.commit(version, timeout) for unit in targets)
