"""The digest of what a model-stage of a placed job holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nereus_common.core.errors import StaleVersion, VerificationFailed
from nereus_common.core.ids import ModelStage
from nereus_common.rpc.together import together

from .remote_unit import RemoteUnit

ATTEMPTS = 20
"""A job that trains on may have a newer version by the time a digest of the last one is asked for."""


async def digest_stage(units: Sequence[RemoteUnit], name: ModelStage, timeout: float) -> tuple[int, Mapping[str, int]]:
    """The version held and its digests by kind, the same on every replica. VerificationFailed names the replicas that
    differ from the first; StaleVersion when the version never stands still."""
    for left in reversed(range(ATTEMPTS)):
        version = (await units[0].describe(timeout)).version
        try:
            first, *others = await together(unit.digest(version, timeout) for unit in units)
        except StaleVersion:
            if not left:
                raise
            continue
        break
    wrong = [unit.id for unit, found in zip(units[1:], others, strict=True) if found != first]
    if wrong:
        raise VerificationFailed(f"{', '.join(wrong)} do not hold what {units[0].id} holds", model_stage=str(name))
    return version, first
