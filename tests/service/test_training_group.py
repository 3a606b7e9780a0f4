"""What the controller sends to the units of a trained model, seen by real servers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import grpc.aio
import numpy as np
from nereus_controller.placed import PlacedStage, PlacedUnit
from nereus_controller.training import TrainingGroup, Update

from nereus.v1 import training_pb2 as pb
from nereus.v1.training_pb2_grpc import TrainingServiceServicer, add_TrainingServiceServicer_to_server
from nereus_common.core.ids import DeviceId
from nereus_common.core.layout import Layout
from nereus_common.core.plan import StagePlan
from nereus_common.core.workflow import ACTOR_TRAINING
from nereus_common.rl.rollouts import RolloutBatch
from nereus_common.rl.weights import minibatch_tokens
from nereus_common.rpc.server import RpcServer
from nereus_common.stages.servicer import header_and_columns
from tests.system.training_cases import make_batch

UPDATE = Update(3, {"name": "policy", "tis_cap": 2.0}, 1e-5, 1.0, 0.9, epochs=2, minibatches=3)


class Recording(TrainingServiceServicer):
    """Keeps what it was sent."""

    def __init__(self) -> None:
        self.header = pb.TrainStepHeader()
        self.share: RolloutBatch | None = None

    async def TrainStep(self, request_iterator: AsyncIterator[pb.TrainStepRequest], context: Any) -> Any:
        self.header, columns = await header_and_columns(request_iterator, "TrainStep")
        self.share = RolloutBatch.from_columns(columns)
        return pb.TrainStepResponse(version=self.header.step + 1, metrics={"loss": 0.5})


async def sent(batch: RolloutBatch, replicas: int) -> list[Recording]:
    recordings = [Recording() for _ in range(replicas)]
    async with AsyncExitStack() as stack:
        units = []
        for replica, recording in enumerate(recordings):
            server = RpcServer(f"training{replica}")
            server.add(add_TrainingServiceServicer_to_server, recording)
            await server.start()
            stack.push_async_callback(server.stop, 0)
            channel = await stack.enter_async_context(grpc.aio.insecure_channel(server.target))
            units.append(PlacedUnit(f"unit{replica}", replica, 1, server.target, channel))
        devices = tuple(DeviceId("node0", f"cpu{index}") for index in range(replicas))
        stage = PlacedStage(ACTOR_TRAINING, StagePlan(Layout(), devices, replicas), tuple(units))
        assert (await TrainingGroup(stage, 10.0).step(batch, UPDATE)).version == 4
    return recordings


async def test_every_unit_is_told_the_same_of_the_whole_and_gets_whole_groups_of_every_minibatch() -> None:
    batch = make_batch(groups=8, minibatches=3)
    recordings = await sent(batch, 2)
    for unit, recording in enumerate(recordings):
        header = recording.header
        assert (header.unit_id, header.step, header.epochs) == (f"unit{unit}", 3, 2)
        assert tuple(header.minibatch_tokens) == minibatch_tokens(batch, 3)
        assert (header.global_tokens, header.global_sequences) == (batch.loss_tokens, batch.sequences)
    shares = [recording.share for recording in recordings if recording.share is not None]
    assert sorted(np.concatenate([share.position for share in shares]).tolist()) == list(range(8))
    for share in shares:
        assert (np.diff(share.position) > 0).all()
        assert set(share.minibatch.tolist()) == {0, 1, 2}
        assert (share.minibatch == batch.minibatch[share.position]).all()
    whole = sum(float(share.weights.astype(np.float64).sum()) for share in shares)
    assert abs(whole - 3) < 1e-5, "the weights of each minibatch add up to one over all units"


async def test_a_unit_may_get_no_group_and_is_called_all_the_same() -> None:
    recordings = await sent(make_batch(groups=3, minibatches=3), 4)
    assert sorted(recording.share.groups for recording in recordings if recording.share) == [0, 1, 1, 1]
    assert all(recording.header.epochs == 2 for recording in recordings)
