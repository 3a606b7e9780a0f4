"""Where a plan puts a rank's tensors."""

from __future__ import annotations

import pytest
import torch

from nereus_common.core.errors import InvalidPlan
from nereus_common.core.ids import DeviceId
from nereus_common.core.layout import Layout
from nereus_common.core.plan import StagePlan
from nereus_common.engines.torch_model.devices import own_device


def plan(*slots: str, replicas: int = 1) -> StagePlan:
    layout = Layout.parse(f"tp1.pp1.fs{len(slots) // replicas}")
    return StagePlan(layout, tuple(DeviceId("node0", slot) for slot in slots), replicas)


def test_a_cpu_slot_is_the_cpu_whatever_its_number() -> None:
    assert own_device(plan("cpu0", "cpu7"), 0, 1) == torch.device("cpu")


def test_a_gpu_slot_is_the_nodes_gpu_of_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[object] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    assert own_device(plan("gpu0", "gpu1", "gpu2", "gpu3", replicas=2), 1, 0) == torch.device("cuda", 2)
    assert chosen == [torch.device("cuda", 2)]


def test_a_gpu_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(InvalidPlan, match=r"node0/gpu1 is not there: PyTorch .* sees 1 GPUs"):
        own_device(plan("gpu1"), 0, 0)


def test_another_kind_of_slot_is_refused() -> None:
    with pytest.raises(InvalidPlan, match="node0/tpu0 is neither cpuN nor gpuN"):
        own_device(plan("tpu0"), 0, 0)
