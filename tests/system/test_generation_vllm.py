"""What is particular to vLLM: fused, packed and tied weights in every layout, and proof that the readback notices."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from nereus_common.core.errors import IllegalTransition, VerificationFailed
from nereus_common.engines.generation.base import GenerationRequest, Sampling
from nereus_common.transport import Transport
from tests.system.generation_units import CALL_SECONDS, PROMPT, Reference, Unit, plan
from tests.tiny_models import save_tiny_model

GREEDY = Sampling(max_tokens=8, temperature=0.0)
FAULTY = "tests.system.bodies.generation_faults:FaultyHost"


@pytest.mark.parametrize(
    ("kind", "tied", "tp", "dtype"),
    [
        ("llama", False, 2, "float32"),
        pytest.param("qwen2", True, 2, "bfloat16", marks=pytest.mark.long),
        pytest.param("qwen3", False, 1, "float32", marks=pytest.mark.long),
        pytest.param("llama", True, 4, "float32", marks=pytest.mark.long),  # more ranks than KV heads
    ],
)
async def test_every_rank_computes_with_the_sources_weights_after_each_transfer(
    kind: str, tied: bool, tp: int, dtype: str, source: Transport, tmp_path: Path
) -> None:
    folder = save_tiny_model(tmp_path / "model", kind=kind, tied=tied)
    unit = await Unit.start(folder, tmp_path, source, stage=plan(tp, dtype))
    try:
        reference = Reference.load(folder, dtype)
        for _ in range(2):
            reference.scale(1.25)
            assert [rank.digest for rank in await unit.sync(reference)] == await unit.expected(reference)
            request = GenerationRequest(f"greedy{reference.version}", PROMPT, GREEDY)
            ((tokens, logprobs),) = await unit.samples(request)
            if dtype == "float32":
                assert tokens == reference.greedy(PROMPT, 8)
            # the reference computes in float32 on weights that are exact in the unit's dtype
            bound = {"float32": 1e-4, "bfloat16": 0.5}[dtype]
            np.testing.assert_allclose(logprobs, reference.logprobs(request, tokens), atol=bound)
    finally:
        await unit.worker.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def faulty(source: Transport, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Unit]:
    """In bfloat16 the tied head is held twice: as the table, by which logits are computed, and packed."""
    folder = save_tiny_model(tmp_path_factory.mktemp("model"))
    logs = tmp_path_factory.mktemp("logs")
    unit = await Unit.start(folder, logs, source, stage=plan(dtype="bfloat16"), body=FAULTY)
    yield unit
    await unit.worker.stop()


@pytest.mark.asyncio(loop_scope="module")
async def test_a_rank_that_keeps_something_old_is_found_out_and_never_serves(faulty: Unit) -> None:
    reference = Reference.load(faulty.config.model_path, "bfloat16")
    await faulty.sync(reference)
    for lost, named in [
        ("layers.1.self_attn.o_proj", "model.layers.1.self_attn.o_proj.weight (weights)"),
        ("layers.0.mlp", "model.layers.0.mlp.gate_proj.weight (weights)"),
        ("layers.0.self_attn.k_proj", "model.layers.0.self_attn.k_proj.weight (weights)"),
        ("norm", "model.layers.0.input_layernorm.weight (weights)"),
        ("head", "model.embed_tokens.weight (packed output head)"),
        ("embed_tokens", "model.embed_tokens.weight (weights)"),
    ]:
        if not await faulty.call("lose", lost):
            print(f"{lost}: on this processor nothing is packed, so nothing old can stay")
            await faulty.call("lose", "nothing")
            continue
        reference.scale(1.5)
        await faulty.pull(reference)
        with pytest.raises(VerificationFailed) as caught:
            await faulty.call("apply_and_verify", reference.version, CALL_SECONDS)
        assert named in str(caught.value) or named in caught.value.details["tensors"], lost
        with pytest.raises(IllegalTransition):
            await faulty.call("commit", reference.version)
        with pytest.raises(IllegalTransition, match="serves no version"):
            await faulty.pieces(GenerationRequest(lost, PROMPT, GREEDY))
        await faulty.call("lose", "nothing")
        reference.scale(1.0)
        assert [rank.digest for rank in await faulty.sync(reference)] == await faulty.expected(reference)
