"""`python -m nereus_inference [--config FILE]`: the inference stage service."""

from __future__ import annotations

import sys
from collections.abc import Coroutine
from typing import Any

from nereus.v1.inference_pb2_grpc import add_InferenceServiceServicer_to_server
from nereus_common.config import ServiceSettings
from nereus_common.core.ids import Stage
from nereus_common.rpc.server import run_service
from nereus_common.stages.base import HostSettings
from nereus_common.stages.service import serve_stage

from .servicer import InferenceServicer
from .unit import InferenceUnit


def serve(settings: ServiceSettings) -> Coroutine[Any, Any, None]:
    host_settings = HostSettings(settings.log_dir)
    return serve_stage(
        settings,
        Stage.INFERENCE,
        lambda spec, on_lost: InferenceUnit(spec, host_settings, on_lost),
        lambda server, units: server.add(add_InferenceServiceServicer_to_server, InferenceServicer(units)),
    )


if __name__ == "__main__":
    sys.exit(run_service("inference", serve))
