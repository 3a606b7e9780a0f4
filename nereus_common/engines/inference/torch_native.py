"""The inference engine: the training engine's model without gradients, weights in the compute dtype.

They are the whole state of a rank, which moves as a training rank's does: see `RankState`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from nereus_common.core.errors import NotFound
from nereus_common.core.ids import TensorName
from nereus_common.core.transfer import Box
from nereus_common.core.workflow import Work
from nereus_common.engines.inference.base import Columns, InferenceRankConfig, Scored, check_work
from nereus_common.engines.torch_model.build import TORCH_DTYPES, build_stage
from nereus_common.engines.torch_model.checkpoint import load_shards
from nereus_common.engines.torch_model.devices import own_device
from nereus_common.engines.torch_model.exchange import Staging
from nereus_common.engines.torch_model.forward import forward_packs
from nereus_common.engines.torch_model.limits import check_plan, read_config
from nereus_common.engines.torch_model.live_state import weight_parts
from nereus_common.engines.torch_model.packs import PackTensors, to_tensors
from nereus_common.engines.torch_model.rank_state import RankState
from nereus_common.engines.torch_model.shards import shards
from nereus_common.engines.torch_model.vector_math import use_threads
from nereus_common.engines.torch_model.wire import digest_shards
from nereus_common.engines.torch_model.world import meeting, open_world
from nereus_common.rl.packing import pack_for_ranks
from nereus_common.rl.rollouts import RolloutBatch


class TorchInferenceEngine(RankState):
    """One rank. Constructing it waits for the unit's other ranks; nothing can be scored before a version is there, and
    no weight has storage: `load` or `apply` fill all of them, or they are pulled part by part."""

    def __init__(self, config: InferenceRankConfig) -> None:
        check_plan(read_config(config.model_path), config.stage, config.head)
        use_threads(config.options.threads)
        self._config, device = config, own_device(config.stage, config.replica, config.rank)
        self._compute = TORCH_DTYPES[config.stage.dtypes.compute]
        self._world = open_world(
            config.rendezvous,
            config.stage.layout,
            1,
            0,
            config.rank,
            config.collective_timeout,
            device.type,
        )
        model = build_stage(config.model_path, config.stage, self._world, device, train=False, head=config.head)
        self._shards = shards(model)
        super().__init__(f"{config.unit} rank {config.rank}", device, model, weight_parts(model, self._shards))

    def load(self, version: int) -> None:
        """Fill this rank's boxes from the model folder."""
        self._check_not_offered()
        self._live.materialize()
        load_shards(Path(self._config.model_path), self._shards)
        self._changed(version)

    def stage(self, version: int, wire_dtype: str) -> Staging:
        """Buffers for a version to come; what is served stays."""
        return Staging(version, wire_dtype, self._shards)

    def apply(self, staging: Staging) -> None:
        """Take over what was staged. VerificationFailed, and nothing changed, when it is incomplete."""
        self._check_not_offered()
        staging.check_complete()
        self._live.materialize()
        staging.apply()
        self._changed(staging.version)

    def score(self, columns: Columns, work: str, temperature: float) -> Scored:
        """The column `work` asks for; every rank of the unit gets all of it.

        "logprobs" [R]: of the batch's response tokens at `temperature`. "values" [R]: what the score head says before
        each of them. "scores" [N]: what it says at the last token of each response, also of one that was cut short.

        NotFound before a version is there; InvalidInput for bad columns or a work that is not the head's;
        DeadlineExceeded or Unavailable when a rank is lost.
        """
        asked = check_work(self._config.head, work)
        if self._version < 0:
            raise NotFound(f"{self._who} holds no version yet", remedy="load the unit, or sync it, first")
        batch = RolloutBatch.from_columns(columns)
        found = torch.zeros(batch.sequences if asked is Work.SCORES else len(batch.response_tokens))
        self._model.temperature = temperature
        packs = self._packs(batch, asked)

        def take(index: int, output: Tensor) -> None:
            if self._world.place.tp == 0:
                source = packs[index].source
                real = source >= 0
                found[source[real]] = output[0, 0].float().cpu()[real]

        with meeting(self._who, "the unit's other ranks in score"):
            forward_packs(self._model, packs, self._compute, take)
            if len(found):
                dist.all_reduce(found)
        return {str(asked): found.numpy()}

    def boxes(self) -> Mapping[TensorName, tuple[Box, ...]]:
        """What this rank holds; tensors of which it holds nothing are left out."""
        return {shard.name: (shard.box,) for shard in self._shards if shard.box.elements}

    def digest(self, wire_dtype: str) -> int:
        """Of what this rank computes with."""
        return digest_shards(self._shards, wire_dtype)

    def close(self) -> None:
        self._world.close()

    def _packs(self, batch: RolloutBatch, work: Work) -> Sequence[PackTensors]:
        plan, place = self._config.stage, self._world.place
        share = pack_for_ranks(
            batch,
            plan.layout.fs,
            plan.microbatch_tokens,
            shared_prefix=self._config.options.shared_prefix,
            ends=work is Work.SCORES,
        )[place.fs]
        return [to_tensors(pack, self._device, self._compute) for pack in share]
