"""Laws of a generation unit on both engines, weights pulled over UCX from this process; float32, tied embeddings."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any, cast

import numpy as np
import pytest
import pytest_asyncio

from nereus_common.core.errors import IllegalTransition, InvalidInput, StaleVersion, VerificationFailed
from nereus_common.engines.generation.base import Finish, GenerationRequest, Sampling
from nereus_common.transport import Transport
from tests.system.generation_units import CALL_SECONDS, PROMPT, Reference, Unit, plan
from tests.tiny_models import save_tiny_model

pytestmark = pytest.mark.asyncio(loop_scope="module")
GREEDY = Sampling(max_tokens=12, temperature=0.0)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["transformers", "vllm"])
async def unit(
    request: pytest.FixtureRequest, source: Transport, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Unit]:
    folder = save_tiny_model(tmp_path_factory.mktemp("model"))
    logs = tmp_path_factory.mktemp("logs")
    started = await Unit.start(folder, logs, source, stage=plan(), engine=request.param)
    yield started
    await started.worker.stop()


@pytest.fixture(scope="module")
def reference(unit: Unit) -> Reference:
    return Reference.load(unit.config.model_path, "float32")


async def test_nothing_is_served_before_a_version_is_committed(unit: Unit, reference: Reference) -> None:
    with pytest.raises(IllegalTransition, match="serves no version"):
        await unit.pieces(GenerationRequest("early", PROMPT, GREEDY))
    await unit.pull(reference)
    await unit.call("apply_and_verify", reference.version, CALL_SECONDS)
    with pytest.raises(IllegalTransition, match="serves no version"):
        await unit.pieces(GenerationRequest("verified", PROMPT, GREEDY))


async def test_greedy_tokens_equal_hugging_faces_from_the_first_transfer_on(unit: Unit, reference: Reference) -> None:
    for _ in range(2):
        reference.scale(1.1)
        assert [rank.digest for rank in await unit.sync(reference)] == await unit.expected(reference)
        ((tokens, _),) = await unit.samples(GenerationRequest(f"greedy{reference.version}", PROMPT, GREEDY))
        assert tokens == reference.greedy(PROMPT, 12)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(16),
        Sampling(16, temperature=0.6),
        Sampling(16, top_p=0.8),
        Sampling(16, temperature=0.7, top_k=5, top_p=0.9),
    ],
    ids=["plain", "temperature", "top_p", "all"],
)
async def test_logprobs_are_those_of_the_distribution_that_was_sampled(
    unit: Unit, reference: Reference, sampling: Sampling
) -> None:
    request = GenerationRequest(f"sampled{sampling}", PROMPT, sampling, samples=4)
    samples = await unit.samples(request)
    assert len({tuple(tokens) for tokens, _ in samples}) > 1
    for tokens, logprobs in samples:
        np.testing.assert_allclose(logprobs, reference.logprobs(request, tokens), atol=1e-4)


async def test_new_weights_use_no_cached_prefix_of_the_old_ones(unit: Unit, reference: Reference) -> None:
    """The prompt fills two KV blocks under the old weights; a cold engine is the reference itself."""
    await unit.samples(GenerationRequest("warm", PROMPT, GREEDY))
    reference.scale(1.5)
    await unit.sync(reference)
    before = (await unit.call("stats"))["cached_tokens"]
    for again in ("first", "second"):
        request = GenerationRequest(again, PROMPT, GREEDY)
        ((tokens, logprobs),) = await unit.samples(request)
        np.testing.assert_allclose(logprobs, reference.logprobs(request, tokens), atol=1e-4)
        cached = (await unit.call("stats"))["cached_tokens"] - before
        expected = {"first": 0, "second": 64}[again] if unit.config.engine == "vllm" else 0
        assert cached == expected


async def test_pieces_have_the_length_asked_for_and_name_their_version(unit: Unit, reference: Reference) -> None:
    pieces = await unit.pieces(GenerationRequest("pieces", PROMPT, Sampling(10), samples=2, stream_interval=4))
    assert {piece.version for piece in pieces} == {reference.version}
    for sample in range(2):
        mine = [piece for piece in pieces if piece.sample == sample]
        assert [len(piece.token_ids) for piece in mine] == [4, 4, 2]
        assert [piece.finish for piece in mine] == [None, None, Finish.LENGTH]
    whole = await unit.pieces(GenerationRequest("whole", PROMPT, Sampling(10), samples=2))
    assert [len(piece.token_ids) for piece in whole] == [10, 10]


async def test_a_stop_token_ends_its_sample_and_is_its_last_token(unit: Unit, reference: Reference) -> None:
    expected = reference.greedy(PROMPT, 12)
    stop = expected[5]
    sampling = Sampling(12, temperature=0.0, stop_token_ids=(stop,))
    (piece,) = await unit.pieces(GenerationRequest("stop", PROMPT, sampling))
    assert list(piece.token_ids) == expected[: expected.index(stop) + 1]
    assert piece.finish is Finish.STOP


async def test_an_aborted_request_ends_its_stream_and_frees_the_unit(unit: Unit, reference: Reference) -> None:
    request = GenerationRequest("aborted", PROMPT, Sampling(180), samples=2, stream_interval=1)
    ends: list[Finish | None] = []
    async with aclosing(cast("Any", unit.worker.stream("generate", request, timeout=CALL_SECONDS))) as stream:
        async for piece in stream:
            if not ends:
                await unit.call("abort", "aborted")
            ends.append(piece.finish)
    assert ends[-1] is Finish.ABORT
    assert (await unit.call("stats"))["active"] == 0
    await unit.call("abort", "never heard of")


async def test_closing_a_stream_aborts_its_request(unit: Unit, reference: Reference) -> None:
    request = GenerationRequest("closed", PROMPT, Sampling(180), stream_interval=1)
    async with aclosing(cast("Any", unit.worker.stream("generate", request, timeout=CALL_SECONDS))) as stream:
        await anext(stream)
    await unit.until(active=0)


async def test_weights_wait_for_the_request_in_flight(unit: Unit, reference: Reference) -> None:
    request = GenerationRequest("in flight", PROMPT, Sampling(60), stream_interval=1)
    running = asyncio.create_task(unit.pieces(request))
    await unit.until(active=1)
    old = reference.version
    reference.scale(0.9)
    await unit.sync(reference)
    assert running.done()
    assert {piece.version for piece in await running} == {old}


async def test_another_version_than_the_one_served_is_refused(unit: Unit, reference: Reference) -> None:
    with pytest.raises(StaleVersion, match=f"serves version {reference.version}"):
        await unit.pieces(GenerationRequest("stale", PROMPT, GREEDY, version=reference.version + 1))


async def test_an_order_that_misses_a_box_is_refused_and_the_old_version_served_on(
    unit: Unit, reference: Reference
) -> None:
    order = await unit.order(reference, reference.version + 50)
    short = type(order)(order.version, (order.items[0][:-1],), order.wire_dtype, 30.0, order.transition)
    with pytest.raises(VerificationFailed, match="nothing is offered"):
        await unit.call("pull", short)
    with pytest.raises(InvalidInput, match="has not pulled"):
        await unit.call("apply_and_verify", order.version, CALL_SECONDS)
    ((tokens, _),) = await unit.samples(GenerationRequest("on", PROMPT, GREEDY))
    assert tokens == reference.greedy(PROMPT, 12)


async def test_a_value_that_is_not_finite_never_reaches_the_engine(unit: Unit, reference: Reference) -> None:
    parameter = reference.model.model.layers[1].mlp.down_proj.weight
    kept = parameter[3, 4].item()
    parameter.data[3, 4] = float("nan")
    with pytest.raises(VerificationFailed, match="not finite"):
        await unit.pull(reference, reference.version + 51)
    parameter.data[3, 4] = kept
    ((tokens, _),) = await unit.samples(GenerationRequest("sane", PROMPT, GREEDY))
    assert tokens == reference.greedy(PROMPT, 12)


async def test_a_prompt_longer_than_the_limit_is_refused(unit: Unit, reference: Reference) -> None:
    with pytest.raises(InvalidInput, match="256"):
        await unit.pieces(GenerationRequest("long", tuple(range(90)) * 3, GREEDY))


async def test_a_unit_fills_itself_from_the_model_folder(unit: Unit, reference: Reference) -> None:
    fresh = Reference.load(unit.config.model_path, "float32")
    digests = await unit.worker.call("load", 1000, 60.0, timeout=CALL_SECONDS)
    assert [rank.digest for rank in digests] == await unit.expected(fresh)
    await unit.call("commit", 1000)
    ((tokens, _),) = await unit.samples(GenerationRequest("loaded", PROMPT, GREEDY))
    assert tokens == fresh.greedy(PROMPT, 12)
