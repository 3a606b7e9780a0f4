"""Entry point `vllm.general_plugins`: vLLM calls `register` in every process it starts.

Processes of an engine that Nereus does not own (no NEREUS_ENGINE_OWNER in the environment) are left as they are, but
for the weight-transfer engine becoming available by name.
"""

from __future__ import annotations

import os

from nereus_common.engines.generation import guards
from nereus_common.engines.torch_model.vector_math import settle_vector_math

OWNER = "NEREUS_ENGINE_OWNER"
"""Environment: process id of the host that owns the engine."""
SPIN = "NEREUS_ENGINE_SPIN_SECONDS"
TRANSFER_ENGINE = "nereus"


def register() -> None:
    owner = os.environ.get(OWNER)
    if owner is not None and os.getpid() != int(owner):
        guards.die_with_parent()
        guards.unlink_ring_buffers_early()
        guards.unlink_reduce_buffers_early()
        guards.block_instead_of_spinning(float(os.environ[SPIN]))
        settle_vector_math()
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if TRANSFER_ENGINE not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            TRANSFER_ENGINE, "nereus_common.engines.generation.vllm_transfer", "NereusTransferEngine"
        )
