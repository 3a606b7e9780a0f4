"""The body of a training rank's process: the engine, and the transport that offers what it trained."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from nereus_common.checkpoints.state import Digests
from nereus_common.core.errors import StaleVersion
from nereus_common.core.ids import TensorName
from nereus_common.core.transfer import RankRef, state_holder
from nereus_common.engines.torch_model.answers import RankHolding
from nereus_common.engines.torch_model.exchange import open_transport
from nereus_common.engines.torch_model.offering import Offering, OffersState
from nereus_common.engines.training.base import (
    Columns,
    TensorState,
    TrainingEngine,
    TrainingRankConfig,
    TrainStepResult,
    TrainStepSpec,
)
from nereus_common.engines.training.mirror import MirroredTensor
from nereus_common.engines.training.snapshot import Snapshots
from nereus_common.engines.training.torch_native import TorchTrainingEngine


class TrainingWorker(OffersState):
    """Methods run on the main thread, one at a time; the transport serves pulls on threads of its own, and a snapshot
    is written on another one, while the main thread trains on."""

    def __init__(self, config: TrainingRankConfig) -> None:
        self._config = config
        self._engine: TrainingEngine = TorchTrainingEngine(config)
        self._transport = open_transport(config.transport)
        self._holder = RankRef(config.unit, config.rank)
        offered = RankRef(state_holder(config.unit), config.rank)
        self._offering = Offering(self._engine, self._transport, offered, self._holder)
        self._snapshots = Snapshots(f"{config.unit} rank {config.rank}", config.rank)

    def load(self, version: int) -> None:
        self._engine.load(version)

    def restore(self, version: int, checkpoint: str, model: str) -> Digests:
        """See `TorchTrainingEngine.restore`."""
        return self._engine.restore(version, Path(checkpoint), model)

    def take_snapshot(self, version: int) -> None:
        """Copy what this rank owns aside, so that training can go on while it is written. Idempotent.

        StaleVersion when the engine holds another version; see `Snapshots.take`.
        """
        self._snapshots.take(version, self._engine.snapshot(version))

    async def write_snapshot(self, version: int, folder: str) -> str:
        """See `Snapshots.write`."""
        return await self._snapshots.write(version, folder)

    def train_step(self, spec: TrainStepSpec, columns: Columns) -> TrainStepResult:
        """See `TorchTrainingEngine.train_step`. What was published stays: it is a copy."""
        return self._engine.train_step(spec, columns)

    def describe(self, state: bool = False) -> RankHolding:
        """`state`: of the whole state, the optimizer's tensors too."""
        boxes = self._engine.state_boxes() if state else self._engine.boxes()
        return RankHolding(self._config.rank, self._transport.address, self._engine.version, boxes)

    def mirrored(self) -> Mapping[TensorName, MirroredTensor]:
        """What of the state a mirror of this rank keeps."""
        return {
            name: MirroredTensor(part.kind, part.shape, part.box, part.owned)
            for name, part in self._engine.parts.items()
            if part.box.elements
        }

    def publish(self, version: int, pin_timeout: float) -> None:
        """Offer the state as `version` in the compute dtype; older versions are revoked after `pin_timeout` seconds.

        Idempotent. StaleVersion when the engine holds another version.
        """
        if version != self._engine.version:
            raise StaleVersion(
                f"{self._config.unit} rank {self._config.rank} holds version {self._engine.version}, not {version}"
            )
        self._transport.retire(version, timeout=pin_timeout)
        self._transport.publish(self._holder, version, self._engine.wire_copies(self._config.stage.dtypes.compute))

    def verify(self, wire_dtype: str) -> int:
        """Digest of the boxes held, in the wire dtype."""
        return self._engine.digest(wire_dtype)

    def state(self) -> Mapping[TensorName, TensorState]:
        return self._engine.state()

    def load_state(self, state: Mapping[TensorName, TensorState], version: int) -> None:
        self._engine.load_state(state, version)

    def close(self) -> None:
        self._transport.close()
        self._engine.close()
