"""How torch workers use the cores and the memory of their node."""

from __future__ import annotations

import os

from nereus_common.stages.base import UnitSpec

KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
"""For glibc: memory that a step frees is kept for the next one. Faulting gigabytes in anew costs a tenth of a step."""


def cores_per_rank(spec: UnitSpec) -> int:
    """This node's cores, shared evenly by all ranks of the model-stage that the plan puts on the node; at least one.

    Model-stages take turns in a step, so they are not counted against each other.
    """
    node = spec.plan.unit_devices(spec.replica)[0].node
    ranks = sum(device.node == node for device in spec.plan.devices)
    return max(1, len(os.sched_getaffinity(0)) // ranks)
