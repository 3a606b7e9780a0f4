"""The training engine on PyTorch's own parallelism: DTensor tp, FSDP2 fs and replicas, 1F1B pp.

Float32 masters are cut over (fs, tp) and updated by AdamW where they lie; forward and backward run in the compute
dtype on weights cast once per update; gradients are summed in float32 over packs and ranks, and reduced once.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from nereus_common.checkpoints.reader import CheckpointReader
from nereus_common.checkpoints.state import BoxState, Digests
from nereus_common.core.errors import JobFailed, NotFound, StaleVersion
from nereus_common.core.ids import Head, TensorName
from nereus_common.core.transfer import Box
from nereus_common.engines.torch_model.build import TORCH_DTYPES, build_stage
from nereus_common.engines.torch_model.checkpoint import load_shards
from nereus_common.engines.torch_model.devices import own_device
from nereus_common.engines.torch_model.forward import forward_packs
from nereus_common.engines.torch_model.limits import check_plan, read_config
from nereus_common.engines.torch_model.live_state import NOTHING
from nereus_common.engines.torch_model.memory import peak_bytes, reset_peak
from nereus_common.engines.torch_model.packs import PackTensors, to_tensors
from nereus_common.engines.torch_model.rank_state import RankState
from nereus_common.engines.torch_model.shards import shards
from nereus_common.engines.torch_model.vector_math import use_threads
from nereus_common.engines.torch_model.wire import Pieces, digest_shards, wire_copies
from nereus_common.engines.torch_model.world import meeting, open_world
from nereus_common.engines.training.agreement import check_tokens, refused_by_all
from nereus_common.engines.training.base import (
    Columns,
    TensorState,
    TrainingRankConfig,
    TrainStepResult,
    TrainStepSpec,
)
from nereus_common.engines.training.gradients import clip, collect_gradients, global_norm
from nereus_common.engines.training.microbatches import accumulate_gradients
from nereus_common.engines.training.objective import Objective
from nereus_common.engines.training.optimizer import ShardOptimizer
from nereus_common.engines.training.share import (
    Minibatch,
    loss_columns,
    loss_for,
    minibatch_of,
    read_columns,
    wanted_tokens,
)
from nereus_common.engines.training.snapshot import fill, owned_states
from nereus_common.engines.training.state_parts import state_parts
from nereus_common.rl.packing import common_shape, pack_for_ranks
from nereus_common.rl.rollouts import RolloutBatch


class TorchTrainingEngine(RankState):
    """One rank. Constructing it waits for all ranks of the model-stage; the state has no storage until it is filled:
    by `load`, `restore`, `load_state`, or by pulling it part by part."""

    def __init__(self, config: TrainingRankConfig) -> None:
        plan = config.stage
        check_plan(read_config(config.model_path), plan, config.head)
        use_threads(config.options.threads)
        torch.manual_seed(config.seed)
        self._config, device = config, own_device(plan, config.replica, config.rank)
        self._world = open_world(
            config.rendezvous,
            plan.layout,
            plan.replicas,
            config.replica,
            config.rank,
            config.collective_timeout,
            device.type,
        )
        self._compute = TORCH_DTYPES[plan.dtypes.compute]
        model = build_stage(config.model_path, plan, self._world, device, train=True, head=config.head)
        self._shards = shards(model)
        self._optimizer = ShardOptimizer(self._shards, config.options.optimizer)
        parts = state_parts(model, self._shards, self._optimizer.moments())
        super().__init__(f"{config.unit} rank {config.rank}", device, model, parts)
        self._last: TrainStepResult | None = None
        self._partial: int | None = None
        """The step whose updates have begun; while the version is -1 they are not all made."""

    def load(self, version: int) -> None:
        """Fill this rank's boxes from the model folder, a score head that it lacks with zeros; zero moments."""
        self._check_not_offered()
        self._live.materialize()
        load_shards(Path(self._config.model_path), self._shards, new_head=self._config.head is Head.SCORE)
        self._optimizer.reset()
        self._changed(version)

    def restore(self, version: int, checkpoint: Path, model: str) -> Digests:
        """Fill this rank's boxes, parameters and optimizer state, from the checkpoint of `model`, whatever layout wrote
        it; returns the digests of what the rank then owns within its unit. Raises what `CheckpointReader` raises."""
        self._check_not_offered()
        self._live.materialize()
        moments = self._optimizer.moments()
        with CheckpointReader(checkpoint, model) as reader:
            fill(self._shards, moments, reader)
        self._changed(version)
        return Digests.of(self.snapshot(version))

    def snapshot(self, version: int) -> Iterator[BoxState]:
        """Copies of what this rank owns within its unit, one tensor at a time; StaleVersion at another version."""
        if version != self._version:
            raise StaleVersion(f"{self._who} holds version {self._version}, not {version}")
        return owned_states(self._model, self._shards, self._optimizer.moments())

    def train_step(self, spec: TrainStepSpec, columns: Columns) -> TrainStepResult:
        """All updates of a step on this unit's share of the batch, with all ranks of all units; a repeat returns the
        result.

        InvalidInput for bad columns, counts or loss options: before anything changed, and on every rank what one of
        them found. StaleVersion when the state is not at `spec.step`; JobFailed when a gradient is not finite;
        DeadlineExceeded or Unavailable when a rank is lost. An error after the first of the updates leaves a state
        that belongs to no version: there is no copy to go back to, so from then on everything is refused until `load`
        or `load_state`.
        """
        if self._last is not None and self._last.version == spec.step + 1:
            return self._last
        self._check_not_offered()
        self._check_whole()
        if self._version != spec.step:
            raise StaleVersion(f"{self._who} holds version {self._version}, the step starts from {spec.step}")
        self._model.zero_grad(set_to_none=True)
        reset_peak(self._device)
        seconds: dict[str, float] = {}
        with meeting(self._who, f"the other ranks in update {spec.step}"):
            with _timed(seconds, "pack"):
                minibatches, objective = self._prepare(spec, columns)
            norms = self._updates(spec, minibatches, objective, seconds)
            metrics = objective.metrics(self._world)
        metrics |= {"grad_norm": sum(norms) / len(norms), "grad_norm_max": max(norms), "updates": float(len(norms))}
        metrics["tokens"] = float(sum(spec.minibatch_tokens))
        self._version = spec.step + 1
        self._live.replaced(self._version)
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
        self._live.materialize()
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
        self._changed(version)

    def state_boxes(self) -> Mapping[TensorName, tuple[Box, ...]]:
        """Of the whole state: parameters, moments and counters, named as in `LiveState`."""
        return self._live.boxes()

    def close(self) -> None:
        self._world.close()

    def _loaded(self) -> None:
        self._check_whole()
        if self._version < 0:
            raise NotFound(f"{self._who} holds no version yet", remedy="load the unit first")

    def _check_whole(self) -> None:
        if self._version < 0 and self._partial is not None:
            raise JobFailed(
                f"{self._who}: step {self._partial} failed after some of its updates; the state belongs to no version",
                remedy="load the unit again, or restore a checkpoint",
                step=self._partial,
            )

    def _changed(self, version: int) -> None:
        """Forget what was made from the old state."""
        super()._changed(version)
        self._last, self._partial = None, None

    def _prepare(self, spec: TrainStepSpec, columns: Columns) -> tuple[Sequence[Minibatch], Objective]:
        """All that can be refused is refused here, on all ranks alike."""
        count = len(spec.minibatch_tokens)
        with refused_by_all(spec):
            loss = loss_for(self._config.head, spec)
            batch = read_columns(columns, loss, count)
            inputs = loss_columns(batch, loss, spec.step)
            minibatches = [minibatch_of(self._packs(batch, wanted), inputs) for wanted in wanted_tokens(batch, count)]
        check_tokens(spec.minibatch_tokens, [minibatch.tokens for minibatch in minibatches], self._world)
        self._model.temperature = spec.temperature
        return minibatches, Objective(loss, minibatches, spec.updates)

    def _packs(self, batch: RolloutBatch, wanted: NDArray[np.bool_]) -> list[PackTensors]:
        """This fs rank's packs of the wanted tokens; all of one shape when a pipeline passes them on."""
        layout = self._world.layout
        share = pack_for_ranks(
            batch,
            layout.fs,
            self._config.stage.microbatch_tokens,
            shared_prefix=self._config.options.shared_prefix,
            wanted=wanted,
            at_least=layout.pp,
        )[self._world.place.fs]
        if layout.pp > 1:
            shape = common_shape(share)
            share = [pack.padded(*shape) for pack in share]
        return [to_tensors(pack, self._device, self._compute) for pack in share]

    def _updates(
        self, spec: TrainStepSpec, minibatches: Sequence[Minibatch], objective: Objective, seconds: dict[str, float]
    ) -> list[float]:
        """The gradient norms of the updates, before clipping."""
        for number, minibatch in objective.unseen():
            with _timed(seconds, "proximal"):
                forward_packs(self._model, minibatch.packs, self._compute, partial(objective.remember, number))
        norms: list[float] = []
        for number in list(range(len(minibatches))) * spec.epochs:
            with _timed(seconds, "forward_backward"):
                accumulate_gradients(self._model, minibatches[number].packs, objective.of(number), self._compute)
            with _timed(seconds, "optimizer"):
                norms.append(self._update(spec, len(norms)))
        return norms

    def _update(self, spec: TrainStepSpec, made: int) -> float:
        """Clip by the global norm and step, after `made` updates; returns the norm before clipping."""
        gradients = collect_gradients(self._model, self._shards)
        norm = global_norm(gradients, self._model, self._shards)
        if not math.isfinite(norm):
            left = f"{made} updates were made and the state belongs to no version" if made else "nothing was changed"
            raise JobFailed(
                f"the gradient norm of update {made + 1} of {spec.updates} in step {spec.step} is {norm}; {left}",
                remedy="lower the learning rate, or look at the batch's advantages and log-probs",
                step=spec.step,
            )
        clip(gradients, norm, spec.max_grad_norm)
        self._version, self._partial = -1, spec.step
        self._live.version = NOTHING
        self._optimizer.step(gradients, spec.learning_rate)
        return norm


@contextmanager
def _timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[phase] = seconds.get(phase, 0.0) + time.perf_counter() - start
