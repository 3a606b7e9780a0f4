"""Tasks of a step that compute on the same cores or devices take turns."""

from __future__ import annotations

import pytest
from nereus_controller.step import place_of

from nereus_common.core.ids import DeviceId

pytestmark = pytest.mark.fast


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        ("node0/cpu0", "node0/cpu1", True),
        ("node0/cpu0", "node1/cpu0", False),
        ("node0/gpu0", "node0/gpu1", False),
        ("node0/gpu0", "node0/gpu0", True),
        ("node0/gpu0", "node0/cpu0", False),
    ],
)
def test_cpu_devices_of_a_node_share_its_cores_and_other_devices_stand_alone(
    first: str, second: str, same: bool
) -> None:
    assert (place_of(DeviceId.parse(first)) == place_of(DeviceId.parse(second))) is same
