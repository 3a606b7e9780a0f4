"""How far apart two ranks are: the nearest holder of a box sends it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from nereus_common.core.errors import NotFound
from nereus_common.core.ids import DeviceId
from nereus_common.core.transfer import RankRef
from nereus_common.state.box_arrays import Integers

Distance = Callable[[RankRef, RankRef], int]
"""(source, target) → how far apart."""

SAME_DEVICE, SAME_NODE, SAME_SWITCH, FAR = range(4)
LEVELS = ("device", "node", "switch", "far")
"""What each distance is called: the smallest place that both ends are in."""


def anywhere(source: RankRef, target: RankRef) -> int:
    """All ranks equally far apart."""
    return 0


class DeviceDistance:
    """0 on the same device, 1 on the same node, 2 on the same switch, 3 beyond it.

    `switches` names the switch of a node; a node that it does not name is alone on its own.
    """

    def __init__(self, devices: Mapping[RankRef, DeviceId], switches: Mapping[str, str] | None = None) -> None:
        self._devices = devices
        self._switches = switches or {}

    def __call__(self, source: RankRef, target: RankRef) -> int:
        return int(self.table([source], [target])[0, 0])

    def table(self, sources: Sequence[RankRef], targets: Sequence[RankRef]) -> Integers:
        """[targets, sources]; NotFound names a rank without a device."""
        there, here = self._places(sources), self._places(targets)
        codes: dict[object, int] = {}
        near = np.zeros((len(here), len(there)), np.int64)
        for level in range(SAME_DEVICE, FAR):
            of_sources, of_targets = (
                np.array([codes.setdefault(place[level], len(codes)) for place in places], np.int64)
                for places in (there, here)
            )
            near += of_targets[:, None] == of_sources
        distances: Integers = FAR - near
        return distances

    def _places(self, ranks: Sequence[RankRef]) -> list[tuple[object, object, object]]:
        return [self._place(rank) for rank in ranks]

    def _place(self, rank: RankRef) -> tuple[object, object, object]:
        """Device, node and switch; each inside the next."""
        device = self._devices.get(rank)
        if device is None:
            raise NotFound(f"{rank} has no device", remedy="name the device of every source and target", rank=str(rank))
        switch = self._switches.get(device.node)
        return device, ("node", device.node), ("switch", switch) if switch else ("switch of", device.node)


def device_distance(devices: Mapping[RankRef, DeviceId], switches: Mapping[str, str] | None = None) -> DeviceDistance:
    """The distance between ranks on `devices`; `switches`: node → switch, where that is known."""
    return DeviceDistance(devices, switches)


def distances(distance: Distance, sources: Sequence[RankRef], targets: Sequence[RankRef]) -> Integers:
    """[targets, sources]"""
    if isinstance(distance, DeviceDistance):
        return distance.table(sources, targets)
    return np.array([[distance(source, target) for source in sources] for target in targets], np.int64)
