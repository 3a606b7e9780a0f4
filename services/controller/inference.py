"""The inference units of a model, seen from the loop: a batch in, one number per token or response out."""

from __future__ import annotations

from collections.abc import AsyncIterator

import numpy as np
from numpy.typing import NDArray

from nereus.v1 import inference_pb2
from nereus.v1.inference_pb2_grpc import InferenceServiceStub
from nereus_common.core.errors import InvalidInput
from nereus_common.core.workflow import Work
from nereus_common.rl.assembly import share_groups
from nereus_common.rl.rollouts import RolloutBatch
from nereus_common.rpc import calling, chunks_from_columns, columns_from_chunks
from nereus_common.rpc.together import together

from .placed import PlacedStage, PlacedUnit


class InferenceGroup:
    """All replicas of one scoring model; `timeout` in seconds for one batch."""

    def __init__(self, stage: PlacedStage, timeout: float) -> None:
        self._stage = stage
        self._timeout = timeout

    async def run(self, work: Work, batch: RolloutBatch, temperature: float) -> NDArray[np.float32]:
        """[R] log-probs or values, [N] scores, in the order of the batch."""
        shares = [share for share in share_groups(batch, len(self._stage.units)) if share]
        parts = await together(
            self._run_one(unit, work, batch.select_groups(share), temperature)
            for unit, share in zip(self._stage.units, shares, strict=False)
        )
        found = np.full(len(batch.group) if work is Work.SCORES else len(batch.response_tokens), np.nan, np.float32)
        for share, part in zip(shares, parts, strict=True):
            chosen = np.isin(batch.group, share)
            place = chosen if work is Work.SCORES else np.repeat(chosen, batch.response_lengths)
            if len(part) != int(place.sum()):
                raise InvalidInput(f"{self._stage.name} gave {len(part)} {work}, not {int(place.sum())}", field=work)
            found[place] = part
        return found

    async def _run_one(
        self, unit: PlacedUnit, work: Work, share: RolloutBatch, temperature: float
    ) -> NDArray[np.float32]:
        header = inference_pb2.ScoreHeader(unit_id=unit.id, epoch=unit.epoch, temperature=temperature, work=str(work))

        async def parts() -> AsyncIterator[inference_pb2.ScoreRequest]:
            yield inference_pb2.ScoreRequest(header=header)
            for chunk in chunks_from_columns(share.columns()):
                yield inference_pb2.ScoreRequest(chunk=chunk)

        with calling("Score", unit.service):
            answer = InferenceServiceStub(unit.channel).Score(parts(), timeout=self._timeout)
            columns = await columns_from_chunks(piece.chunk async for piece in answer)
        return columns[str(work)]
