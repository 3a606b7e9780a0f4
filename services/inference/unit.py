"""An inference unit: one worker process per rank; units of a model-stage know nothing of each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from nereus_common.core.errors import ProcessLost
from nereus_common.engines import options as engine_options
from nereus_common.engines.inference.base import Columns, InferenceOptions, InferenceRankConfig, Scored, check_work
from nereus_common.engines.torch_model import answers
from nereus_common.stages.base import Holding, HostSettings, PullOrder, RankPulled, UnitSpec
from nereus_common.stages.cores import cores_per_rank
from nereus_common.stages.ranks import holding_of, request_of
from nereus_common.stages.torch_unit import TorchUnit

BODY = "nereus_common.engines.inference.worker:InferenceWorker"


class InferenceUnit(TorchUnit):
    """UnitHost over one process per rank. `on_lost` hears of a process that ended unasked."""

    def __init__(self, spec: UnitSpec, settings: HostSettings, on_lost: Callable[[ProcessLost], None]) -> None:
        configs = [_config(spec, rank, settings) for rank in range(spec.plan.layout.ranks)]
        super().__init__(spec, BODY, configs, settings, on_lost)

    async def load(self, version: int, timeout: float, checkpoint: str = "") -> None:
        """From the model folder; a unit that had dropped parts of its state has all of it again."""
        await self._workers.call_each("load", version, timeout / 2, timeout=timeout)

    async def describe(self, timeout: float, state: bool = False) -> Holding:
        """The weights are the whole state."""
        found: list[answers.RankHolding] = await self._workers.call_each("describe", timeout=timeout)
        return holding_of(found[0].version, self._devices, found)

    async def pull(self, order: PullOrder) -> Sequence[RankPulled]:
        """Into staging; with `order.state` straight into their place, in the dtype in which they are held."""
        requests = [request_of(order, rank) for rank in range(len(self._devices))]
        if order.state:
            given: list[tuple[Any, ...]] = [(request, order.more) for request in requests]
            pulled = await self._workers.call_all("pull_state", given, order.timeout)
        else:
            pulled = await self._workers.call_all("pull", [(request,) for request in requests], order.timeout)
        return [RankPulled(one.rank, one.bytes, one.seconds, one.digest) for one in pulled]

    async def verify(self, version: int, wire_dtype: str, timeout: float) -> Mapping[int, int]:
        await self._workers.call_each("apply", version, timeout=timeout)
        return dict(enumerate(await self._workers.call_each("verify", version, wire_dtype, timeout=timeout)))

    async def commit(self, version: int, timeout: float) -> None:
        """What was applied is what scores; nothing is left to switch."""

    async def score(self, columns: Columns, work: str, temperature: float, timeout: float) -> Scored:
        """What the head says of the batch's responses, see `TorchInferenceEngine.score`; every rank returns the same.

        InvalidInput, before any rank is asked, for a work that is not the head's.
        """
        asked = check_work(self._spec.head, work)
        scored: list[Scored] = await self._workers.call_each("score", columns, asked, temperature, timeout=timeout)
        return scored[0]


def _config(spec: UnitSpec, rank: int, settings: HostSettings) -> InferenceRankConfig:
    meeting = spec.rendezvous
    return InferenceRankConfig(
        unit=spec.unit,
        model_path=spec.model_path,
        stage=spec.plan,
        rank=rank,
        rendezvous=engine_options.Rendezvous(meeting.host, meeting.port, meeting.prefix),
        options=_options(spec),
        transport=settings.transport,
        head=spec.head,
        replica=spec.replica,
    )


def _options(spec: UnitSpec) -> InferenceOptions:
    """The job's options; unless they say otherwise, the ranks of the model-stage here share the cores evenly."""
    given = engine_options.parse_options(InferenceOptions, spec.options)
    return given if given.threads else replace(given, threads=cores_per_rank(spec))
