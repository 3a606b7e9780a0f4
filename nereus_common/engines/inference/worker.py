"""The body of an inference rank's process: the engine, and the transport through which it gets new weights."""

from __future__ import annotations

from nereus_common.core.errors import InvalidInput, NotFound, VerificationFailed
from nereus_common.core.transfer import RankRef, state_holder
from nereus_common.engines.inference.base import Columns, InferenceRankConfig, Scored
from nereus_common.engines.inference.torch_native import TorchInferenceEngine
from nereus_common.engines.torch_model.answers import RankHolding, RankPull
from nereus_common.engines.torch_model.exchange import Staging, open_transport
from nereus_common.engines.torch_model.offering import Offering, OffersState
from nereus_common.transport.base import PullRequest


class InferenceWorker(OffersState):
    """`pull` runs beside the main thread, which goes on scoring with the old version until `apply`."""

    def __init__(self, config: InferenceRankConfig) -> None:
        self._config = config
        self._engine = TorchInferenceEngine(config)
        self._transport = open_transport(config.transport)
        offered, nothing = RankRef(state_holder(config.unit), config.rank), RankRef(config.unit, config.rank)
        self._offering = Offering(self._engine, self._transport, offered, nothing)
        self._staging: Staging | None = None

    def load(self, version: int, timeout: float) -> None:
        """Fill from the model folder; what is offered is taken back first, within `timeout` seconds."""
        self._offering.withdraw(timeout)
        self._engine.load(version)

    def score(self, columns: Columns, work: str, temperature: float) -> Scored:
        return self._engine.score(columns, work, temperature)

    def describe(self) -> RankHolding:
        return RankHolding(self._config.rank, self._transport.address, self._engine.version, self._engine.boxes())

    async def pull(self, request: PullRequest) -> RankPull:
        """Fill staging with `request.version`. Raises what the transport raises, and VerificationFailed when the
        request does not cover every held box exactly once; then nothing is staged."""
        self._staging = None
        staging = self._engine.stage(request.version, request.wire_dtype)
        report = await self._transport.async_pull(request, staging.put)
        staging.check_complete()
        self._staging = staging
        return RankPull(self._config.rank, report.moved_bytes, report.seconds, report.digest)

    def pull_state(self, request: PullRequest, more: bool) -> RankPull:
        """See `Offering.pull`. InvalidInput when the weights would come in another dtype than they are held in."""
        held = self._config.stage.dtypes.compute
        if request.wire_dtype != held:
            raise InvalidInput(
                f"{self._config.unit} rank {self._config.rank} holds its weights in {held}, not {request.wire_dtype}",
                remedy="move a state between units of one compute dtype, else load the unit from the model folder",
                field="wire_dtype",
            )
        return super().pull_state(request, more)

    def apply(self, version: int) -> None:
        """Serve what was staged. Idempotent by version; NotFound when it was not pulled."""
        if self._staging is not None and self._staging.version == version:
            self._engine.apply(self._staging)
            self._staging = None
        elif self._engine.version != version:
            raise NotFound(f"{self._config.unit} rank {self._config.rank} has not pulled version {version}")

    def verify(self, version: int, wire_dtype: str) -> int:
        """Digest of what the rank computes with, which must be `version`: VerificationFailed otherwise."""
        held, who = self._engine.version, f"{self._config.unit} rank {self._config.rank}"
        if held != version:
            raise VerificationFailed(f"{who} computes with version {held}, not {version}")
        return self._engine.digest(wire_dtype)

    def close(self) -> None:
        self._transport.close()
        self._engine.close()
