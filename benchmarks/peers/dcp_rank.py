"""The body of one rank's process of the peer `dcp`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as load_checkpoint
from torch.distributed.checkpoint.state_dict_saver import save as save_checkpoint
from torch.distributed.tensor import DTensor

from benchmarks.peers.dcp import DcpRankConfig
from nereus_common.core.ids import TensorName
from nereus_common.core.transfer import Box
from nereus_common.engines.options import Optimizer
from nereus_common.engines.torch_model.build import build_stage
from nereus_common.engines.torch_model.checkpoint import load_shards
from nereus_common.engines.torch_model.devices import own_device
from nereus_common.engines.torch_model.live import served
from nereus_common.engines.torch_model.shards import shards
from nereus_common.engines.torch_model.world import open_world
from nereus_common.engines.training.optimizer import ShardOptimizer
from nereus_common.state.digest import digest_box

TIMEOUT = 300.0
STEP = 10.0


class DcpRank:
    """Model and optimizer as a training rank has them; constructing it waits for all ranks."""

    def __init__(self, config: DcpRankConfig) -> None:
        torch.set_num_threads(config.threads)
        plan = config.plan
        replica, rank = divmod(config.rank, plan.layout.ranks)
        device = own_device(plan, replica, rank)
        self._config = config
        self._world = open_world(config.rendezvous, plan.layout, plan.replicas, replica, rank, TIMEOUT, device.type)
        self._model = build_stage(str(config.model), plan, self._world, device, train=True)
        self._shards = shards(self._model)
        self._moments = ShardOptimizer(self._shards, Optimizer()).moments()
        self._expected: dict[str, int] = {}
        setup = config.setup
        self._planner = DefaultSavePlanner(enable_plan_caching=setup.plan_caching)

    def fill(self) -> None:
        """Parameters from the model folder, and moments that follow from them, so that every layout has the same."""
        load_shards(Path(self._config.model), self._shards, new_head=False)
        for shard in self._shards:
            held = self._moments[shard.name]
            torch.mul(shard.local, 1e-3, out=held.exp_avg)
            torch.mul(shard.local, shard.local, out=held.exp_avg_sq)
            held.step.fill_(STEP)

    def save(self, folder: Path) -> None:
        setup = self._config.setup
        writer = FileSystemWriter(
            folder,
            single_file_per_rank=setup.single_file_per_rank,
            sync_files=setup.sync_files,
            thread_count=setup.threads_per_rank,
        )
        save_checkpoint(self._state(), storage_writer=writer, planner=self._planner)

    def expect(self) -> None:
        """Note what must come, and hold something else until it does."""
        self.fill()
        self._expected = {name: _digest(name, tensor) for name, tensor in self._state().items()}
        for tensor in self._state().values():
            _local(tensor).fill_(-1)

    def load(self, folder: Path) -> None:
        load_checkpoint(self._state(), storage_reader=FileSystemReader(folder))

    def wrong(self) -> list[str]:
        """The tensors that are not what was saved."""
        return [name for name, tensor in self._state().items() if _digest(name, tensor) != self._expected[name]]

    def close(self) -> None:
        self._world.close()

    def _state(self) -> dict[str, Any]:
        """The live tensors by logical name; a moment is cut as its parameter is."""
        found: dict[str, Any] = {}
        for shard in self._shards:
            parameter, held = self._model.get_parameter(shard.parameter).detach(), self._moments[shard.name]
            found[shard.name] = parameter
            for slot in ("exp_avg", "exp_avg_sq"):
                found[f"{shard.name}:{slot}"] = _cut_alike(getattr(held, slot), parameter)
            found[f"{shard.name}:step"] = held.step
        return found


def _cut_alike(local: Tensor, parameter: Tensor) -> Tensor:
    if not isinstance(parameter, DTensor):
        return local
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _digest(name: str, tensor: Tensor) -> int:
    """Of this rank's part, as if that were the whole tensor."""
    local = _local(tensor)
    return digest_box(TensorName(name), tuple(local.shape), Box.whole(tuple(local.shape)), served(local)[...])
