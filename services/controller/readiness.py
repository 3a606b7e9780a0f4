"""Whom an attempt needs: the coordinator, and a stage service on every node that its plan uses.

A killed service's lease lives on for a while, so the lease says who should be there and the service's own health
check whether it is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection

from nereus_common.core.errors import Unavailable
from nereus_common.core.plan import Plan
from nereus_common.registry import Registry, ServiceRecord
from nereus_common.rpc.health import serves
from nereus_common.rpc.pool import Channels

COORDINATOR = "coordinator"
POLL_SECONDS = 0.5

Need = tuple[str, str]
"""Role and node of a service; the node is empty where any will do."""


def needs_of(plan: Plan | None) -> frozenset[Need]:
    """The coordinator, and what the plan's devices need; without a plan, the coordinator alone."""
    stages = () if plan is None else plan.stages
    return frozenset({(COORDINATOR, "")}) | {
        (str(name.stage), device.node) for name, stage in stages for device in stage.devices
    }


async def await_services(
    registry: Registry,
    channels: Channels,
    needs: Collection[Need],
    timeout: float,
    waiting: Callable[[str], Awaitable[None]],
) -> ServiceRecord:
    """Return the coordinator once every needed service answers; `waiting` is told once for whom, if anybody.

    Unavailable after `timeout` seconds names who is missing.
    """
    loop = asyncio.get_running_loop()
    until = loop.time() + timeout
    told = False
    while True:
        found = await _answering(registry, channels, needs)
        missing = _names(set(needs) - found.keys())
        if not missing:
            return found[COORDINATOR, ""]
        if not told:
            await waiting(f"waiting for {missing}")
            told = True
        if loop.time() >= until:
            raise Unavailable(f"no {missing} is alive after {timeout:g} s", remedy="`nereus up` starts what is missing")
        await asyncio.sleep(POLL_SECONDS)


async def _answering(registry: Registry, channels: Channels, needs: Collection[Need]) -> dict[Need, ServiceRecord]:
    """The needed services that are alive by their lease and answer."""
    candidates: dict[Need, ServiceRecord] = {}
    for status in await registry.services():
        for need in ((status.service.role, status.service.node), (status.service.role, "")):
            if status.alive and need in needs:
                candidates[need] = status.service
    answers = await asyncio.gather(*(serves(channels.get(record.target)) for record in candidates.values()))
    return {need: record for (need, record), answer in zip(candidates.items(), answers, strict=True) if answer}


def _names(needs: Collection[Need]) -> str:
    return ", ".join(f"{role} on {node}" if node else role for role, node in sorted(needs))
