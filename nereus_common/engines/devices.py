"""The devices that a plan names, as engines take them: `cpuN` shares the cores, `gpuN` is the node's N-th GPU."""

from __future__ import annotations

from nereus_common.core.errors import InvalidPlan
from nereus_common.core.ids import DeviceId

CPU, GPU = "cpu", "gpu"


def slot_of(device: DeviceId) -> tuple[str, int]:
    """CPU or GPU, and its number; InvalidPlan for a slot of another name."""
    kind, number = device.slot[:3], device.slot[3:]
    if kind not in (CPU, GPU) or not number.isdigit():
        raise InvalidPlan(f"device {device} is neither cpuN nor gpuN", remedy="write node0/cpu1", field="devices")
    return kind, int(number)
