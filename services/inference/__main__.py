"""`python -m nereus_inference [--config FILE]`: the inference stage service."""

from __future__ import annotations

import os
import sys

from nereus.v1.inference_pb2_grpc import add_InferenceServiceServicer_to_server
from nereus_common.config import ServiceSettings
from nereus_common.core.errors import NereusError
from nereus_common.core.ids import Stage
from nereus_common.rpc.server import run
from nereus_common.stages.service import serve_stage

from .servicer import InferenceServicer
from .unit import InferenceSettings, InferenceUnit


def main() -> int:
    try:
        settings = ServiceSettings.from_argv(sys.argv[1:], os.environ)
    except NereusError as wrong:
        print(f"inference: {wrong}", file=sys.stderr)
        return 2
    unit_settings = InferenceSettings(settings.log_dir)
    service = serve_stage(
        settings,
        Stage.INFERENCE,
        lambda spec, on_lost: InferenceUnit(spec, unit_settings, on_lost),
        lambda server, units: server.add(add_InferenceServiceServicer_to_server, InferenceServicer(units)),
    )
    return run(service, settings.name)


if __name__ == "__main__":
    sys.exit(main())
