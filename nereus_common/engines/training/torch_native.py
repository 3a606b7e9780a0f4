"""The training engine on PyTorch's own parallelism: DTensor tp, FSDP2 fs and replicas, 1F1B pp.

Float32 masters are cut over (fs, tp) and updated by AdamW where they lie; forward and backward run in the compute
dtype on weights cast once per update; gradients are summed in float32 over packs and ranks, and reduced once.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from nereus_common.checkpoints.reader import CheckpointReader
from nereus_common.checkpoints.state import BoxState, Digests
from nereus_common.core.errors import JobFailed, NotFound, StaleVersion
from nereus_common.core.ids import TensorName
from nereus_common.core.transfer import Box
from nereus_common.engines.torch_model.build import TORCH_DTYPES, build_stage
from nereus_common.engines.torch_model.checkpoint import load_shards
from nereus_common.engines.torch_model.limits import check_plan, read_config
from nereus_common.engines.torch_model.memory import peak_bytes, reset_peak
from nereus_common.engines.torch_model.packs import PackTensors, to_tensors
from nereus_common.engines.torch_model.shards import shards
from nereus_common.engines.torch_model.wire import Pieces, digest_shards, wire_copies
from nereus_common.engines.torch_model.world import meeting, open_world
from nereus_common.engines.training.base import (
    Columns,
    TensorState,
    TrainingRankConfig,
    TrainStepResult,
    TrainStepSpec,
)
from nereus_common.engines.training.gradients import clip, collect_gradients, global_norm
from nereus_common.engines.training.microbatches import accumulate_gradients
from nereus_common.engines.training.objective import Objective, read_columns
from nereus_common.engines.training.optimizer import ShardOptimizer
from nereus_common.engines.training.snapshot import fill, owned_states
from nereus_common.rl.losses import make_loss
from nereus_common.rl.packing import common_shape, pack_for_ranks
from nereus_common.rl.rollouts import RolloutBatch


class TorchTrainingEngine:
    """One rank. Constructing it waits for all ranks of the model-stage; the state is undefined until `load`."""

    def __init__(self, config: TrainingRankConfig) -> None:
        plan = config.stage
        check_plan(read_config(config.model_path), plan)
        if config.options.threads:
            torch.set_num_threads(config.options.threads)
        torch.manual_seed(config.seed)
        self._config, self._device = config, torch.device("cpu")
        self._who = f"{config.unit} rank {config.rank}"
        self._world = open_world(
            config.rendezvous,
            plan.layout,
            plan.replicas,
            config.replica,
            config.rank,
            config.collective_timeout,
            self._device.type,
        )
        self._compute = TORCH_DTYPES[plan.dtypes.compute]
        self._model = build_stage(config.model_path, plan, self._world, self._device, train=True)
        self._shards = shards(self._model)
        self._optimizer = ShardOptimizer(self._shards, config.options.optimizer)
        self._version = -1
        self._last: TrainStepResult | None = None

    @property
    def version(self) -> int:
        """-1 until loaded."""
        return self._version

    def load(self, version: int) -> None:
        """Fill this rank's boxes from the model folder; zero moments."""
        load_shards(Path(self._config.model_path), self._shards)
        self._optimizer.reset()
        self._version, self._last = version, None

    def restore(self, version: int, checkpoint: Path, model: str) -> Digests:
        """Fill this rank's boxes, parameters and optimizer state, from the checkpoint of `model`, whatever layout wrote
        it; returns the digests of what the rank then owns within its unit. Raises what `CheckpointReader` raises."""
        moments = self._optimizer.moments()
        with CheckpointReader(checkpoint, model) as reader:
            fill(self._shards, moments, reader)
        self._version, self._last = version, None
        return Digests.of(self.snapshot(version))

    def snapshot(self, version: int) -> Iterator[BoxState]:
        """Copies of what this rank owns within its unit, one tensor at a time; StaleVersion at another version."""
        if version != self._version:
            raise StaleVersion(f"{self._who} holds version {self._version}, not {version}")
        return owned_states(self._model, self._shards, self._optimizer.moments())

    def train_step(self, spec: TrainStepSpec, columns: Columns) -> TrainStepResult:
        """One update on this unit's share of the batch, with all ranks of all units; a repeat returns the result.

        InvalidInput for bad columns or loss options (before anything changed); StaleVersion when the state is not at
        `spec.step`; JobFailed when the gradient is not finite; DeadlineExceeded or Unavailable when a rank is lost.
        """
        if self._last is not None and self._last.version == spec.step + 1:
            return self._last
        if self._version != spec.step:
            raise StaleVersion(f"{self._who} holds version {self._version}, the step starts from {spec.step}")
        loss = make_loss(spec.loss)
        batch = read_columns(columns)
        loss.check_columns({name for name, column in batch.columns().items() if len(column)})
        self._model.zero_grad(set_to_none=True)
        reset_peak(self._device)
        seconds: dict[str, float] = {}
        with meeting(self._who, f"the other ranks in update {spec.step}"):
            with _timed(seconds, "pack"):
                packs = self._packs(batch)
                self._model.temperature = spec.temperature
                objective = Objective(loss, batch, packs, sum(spec.minibatch_tokens), spec.step, self._device)
            with _timed(seconds, "forward_backward"):
                accumulate_gradients(self._model, packs, objective, self._compute)
            with _timed(seconds, "optimizer"):
                metrics = {**objective.metrics(self._world), "grad_norm": self._update(spec)}
        self._version = spec.step + 1
        self._last = TrainStepResult(self._version, metrics, seconds, peak_bytes(self._device))
        return self._last

    def boxes(self) -> Mapping[TensorName, tuple[Box, ...]]:
        """What this rank holds; tensors of which it holds nothing are left out."""
        return {shard.name: (shard.box,) for shard in self._shards if shard.box.elements}

    def wire_copies(self, wire_dtype: str) -> Pieces:
        self._loaded()
        return wire_copies(self._shards, wire_dtype)

    def digest(self, wire_dtype: str) -> int:
        self._loaded()
        return digest_shards(self._shards, wire_dtype)

    def state(self) -> dict[TensorName, TensorState]:
        """Copies of parameters and optimizer state of every non-empty box."""
        self._loaded()
        moments = self._optimizer.moments()
        return {
            shard.name: TensorState(
                shard.box,
                shard.local.cpu().numpy().copy(),
                moments[shard.name].exp_avg.cpu().numpy().copy(),
                moments[shard.name].exp_avg_sq.cpu().numpy().copy(),
                int(moments[shard.name].step),
            )
            for shard in self._shards
            if shard.box.elements
        }

    def load_state(self, state: Mapping[TensorName, TensorState], version: int) -> None:
        """The inverse of `state`; NotFound names a box that is missing."""
        moments = self._optimizer.moments()
        for shard in self._shards:
            if not shard.box.elements:
                continue
            given = state.get(shard.name)
            if given is None or given.box != shard.box:
                raise NotFound(f"{self._who}: the state lacks {shard.name}{shard.box}", tensor=shard.name)
            held = moments[shard.name]
            shard.local.copy_(torch.from_numpy(given.parameter))
            held.exp_avg.copy_(torch.from_numpy(given.exp_avg))
            held.exp_avg_sq.copy_(torch.from_numpy(given.exp_avg_sq))
            held.step.fill_(given.step)
        self._version, self._last = version, None

    def close(self) -> None:
        self._world.close()

    def _loaded(self) -> None:
        if self._version < 0:
            raise NotFound(f"{self._who} holds no version yet", remedy="load the unit first")

    def _packs(self, batch: RolloutBatch) -> list[PackTensors]:
        """This fs rank's packs; all of one shape when a pipeline passes them on."""
        layout = self._world.layout
        share = pack_for_ranks(
            batch,
            layout.fs,
            self._config.stage.microbatch_tokens,
            shared_prefix=self._config.options.shared_prefix,
            wanted=batch.mask,
            at_least=layout.pp,
        )[self._world.place.fs]
        if layout.pp > 1:
            shape = common_shape(share)
            share = [pack.padded(*shape) for pack in share]
        return [to_tensors(pack, self._device, self._compute) for pack in share]

    def _update(self, spec: TrainStepSpec) -> float:
        """Clip by the global norm and step; returns the norm before clipping."""
        gradients = collect_gradients(self._model, self._shards)
        norm = global_norm(gradients, self._model, self._shards)
        if not math.isfinite(norm):
            raise JobFailed(
                f"the gradient norm of update {spec.step} is {norm}; the parameters are unchanged",
                remedy="lower the learning rate, or look at the batch's advantages and log-probs",
            )
        clip(gradients, norm, spec.max_grad_norm)
        self._optimizer.step(gradients, spec.learning_rate)
        return norm


@contextmanager
def _timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[phase] = time.perf_counter() - start
