"""The digest of what a model-stage of a placed job holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nereus_common.core.errors import StaleVersion

from .moving import agreed_digests
from .remote_unit import RemoteUnit

ATTEMPTS = 20
"""A job that trains on may have a newer version by the time a digest of the last one is asked for."""


async def digest_stage(units: Sequence[RemoteUnit], timeout: float) -> tuple[int, Mapping[str, int]]:
    """The version held and its digests by kind, the same on every replica. VerificationFailed names one that differs
    from the first; StaleVersion when the version never stands still."""
    for left in reversed(range(ATTEMPTS)):
        version = (await units[0].describe(timeout)).version
        try:
            return version, await agreed_digests(units, version, timeout)
        except StaleVersion:
            if not left:
                raise
    raise AssertionError("the last attempt returns or raises")
