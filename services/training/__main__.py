"""`python -m nereus_training [--config FILE]`: the training stage service."""

from __future__ import annotations

import sys
from collections.abc import Coroutine
from typing import Any

from nereus.v1.training_pb2_grpc import add_TrainingServiceServicer_to_server
from nereus_common.config import ServiceSettings
from nereus_common.core.ids import Stage
from nereus_common.rpc.server import run_service
from nereus_common.stages.base import HostSettings
from nereus_common.stages.service import serve_stage

from .servicer import TrainingServicer
from .unit import TrainingUnit


def serve(settings: ServiceSettings) -> Coroutine[Any, Any, None]:
    host_settings = HostSettings(settings.log_dir)
    return serve_stage(
        settings,
        Stage.TRAINING,
        lambda spec, on_lost: TrainingUnit(spec, host_settings, on_lost),
        lambda server, units: server.add(add_TrainingServiceServicer_to_server, TrainingServicer(units)),
    )


if __name__ == "__main__":
    sys.exit(run_service("training", serve))
