"""Requests that new weights interrupt, on both engines; weights pulled over UCX, float32, tied embeddings."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
import pytest_asyncio

from nereus_common.core.errors import DeadlineExceeded, IllegalTransition, ProcessLost, Unavailable, VerificationFailed
from nereus_common.engines.generation.base import Finish, GenerationRequest, Piece, Sampling
from nereus_common.engines.generation.options import GenerationOptions
from nereus_common.transport import Transport
from tests.system.generation_units import CALL_SECONDS, Reference, Unit, plan
from tests.tiny_models import save_tiny_model

pytestmark = pytest.mark.asyncio(loop_scope="module")
BLOCK = 32
"""Tokens per KV block: the least that vLLM's attention takes on CPUs."""
PROMPT = tuple(5 + 7 * index % 90 for index in range(2 * BLOCK))
LENGTH = 512
GREEDY = Sampling(max_tokens=300, temperature=0.0)
SHORT = Sampling(max_tokens=8, temperature=0.0)
NOISE = 1e-4
ACROSS = GenerationRequest("across", PROMPT, GREEDY, stream_interval=1, across_versions=True)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["transformers", "vllm"])
async def unit(
    request: pytest.FixtureRequest, source: Transport, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Unit]:
    started = await Unit.start(
        save_tiny_model(tmp_path_factory.mktemp("model")),
        tmp_path_factory.mktemp("logs"),
        source,
        stage=plan(max_length=LENGTH, max_sequences=32),
        engine=request.param,
        body="tests.system.bodies.generation_faults:FailingHost",
        options=GenerationOptions(block_size=BLOCK),
    )
    yield started
    await started.worker.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def reference(unit: Unit) -> Reference:
    loaded = Reference.load(unit.config.model_path, "float32")
    await unit.sync(loaded)
    return loaded


async def _apply(unit: Unit, reference: Reference) -> None:
    await unit.call("apply_and_verify", reference.version, CALL_SECONDS)


async def _begin(unit: Unit, request: GenerationRequest, pieces: list[Piece], *patience: float) -> asyncio.Task[None]:
    """The request under way, with a piece of every sample in `pieces`."""

    begun = asyncio.Event()

    async def read() -> None:
        async with unit.stream(request, *patience) as stream:
            async for piece in stream:
                pieces.append(piece)
                if len({piece.sample for piece in pieces}) == request.samples:
                    begun.set()

    running = asyncio.create_task(read())
    await asyncio.wait([running, asyncio.create_task(begun.wait())], return_when=asyncio.FIRST_COMPLETED)
    return running


def _tokens(pieces: Sequence[Piece]) -> list[int]:
    return [token for piece in pieces for token in piece.token_ids]


def _logprobs(pieces: Sequence[Piece]) -> list[float]:
    return [value for piece in pieces for value in piece.logprobs]


async def test_no_version_is_served_from_a_prefix_that_another_one_cached(unit: Unit, reference: Reference) -> None:
    """The prompt fills two blocks under each version; a cold engine is the reference itself."""
    for factor in (1.5, 0.8):
        old = deepcopy(reference)
        await unit.samples(GenerationRequest(f"warm{factor}", PROMPT, SHORT))
        reference.scale(factor)
        await unit.sync(reference)
        before = (await unit.call("stats"))["cached_tokens"]
        for again, cached in (("first", {0}), ("second", {32, 64})):
            request = GenerationRequest(f"{again}{factor}", PROMPT, SHORT)
            ((tokens, logprobs),) = await unit.samples(request)
            assert tokens == reference.greedy(PROMPT, 8)
            np.testing.assert_allclose(logprobs, reference.logprobs(request, tokens), atol=NOISE)
            assert np.abs(old.logprobs(request, tokens) - logprobs).max() > 100 * NOISE
            found = (await unit.call("stats"))["cached_tokens"] - before
            assert found in (cached if unit.config.engine == "vllm" else {0})


async def test_an_interrupted_sample_goes_on_as_the_new_version_would_from_its_tokens(
    unit: Unit, reference: Reference
) -> None:
    old, pieces = deepcopy(reference), list[Piece]()
    reference.scale(1.2)
    await unit.pull(reference)
    running = await _begin(unit, replace(ACROSS, id="go on", version=old.version), pieces)
    await _apply(unit, reference)
    await unit.until(active=0, parked=1)
    before = (await unit.call("stats"))["cached_tokens"]
    await asyncio.sleep(0.2)
    kept, count = _tokens(pieces), len(pieces)
    await unit.call("commit", reference.version)
    await running
    first, second = pieces[:count], pieces[count:]
    assert 0 < len(kept) < 300
    assert len(_tokens(pieces)) == 300
    assert {piece.version for piece in first} == {old.version}
    assert {piece.version for piece in second} == {reference.version}
    assert [piece.finish for piece in pieces] == [None] * (len(pieces) - 1) + [Finish.LENGTH]
    assert kept == old.greedy(PROMPT, len(kept))
    assert _tokens(second) == reference.greedy((*PROMPT, *kept), 300 - len(kept))
    np.testing.assert_allclose(_logprobs(first), old.logprobs(ACROSS, kept), atol=NOISE)
    expected = reference.logprobs(ACROSS, _tokens(pieces))[len(kept) :]
    np.testing.assert_allclose(_logprobs(second), expected, atol=NOISE)
    assert (await unit.call("stats"))["cached_tokens"] == before  # all of it was computed anew


async def test_syncs_under_load_lose_and_double_no_token(unit: Unit, reference: Reference) -> None:
    """Log-probs are compared over whole sequences: one token too many or too few would move all that follow."""
    versions = {reference.version: deepcopy(reference)}
    sampling = Sampling(max_tokens=120, temperature=0.9, stop_token_ids=(9, 11))
    requests = [
        GenerationRequest(
            f"load{index}", PROMPT[: 20 + index], sampling, samples=2, stream_interval=index % 4, across_versions=True
        )
        for index in range(8)
    ]
    running = [asyncio.create_task(unit.pieces(request)) for request in requests]
    for _ in range(3):
        reference.scale(1.05)
        versions[reference.version] = deepcopy(reference)
        await unit.sync(reference)
    seen = set()
    for request, pieces in zip(requests, await asyncio.gather(*running), strict=True):
        for sample in range(2):
            mine = [piece for piece in pieces if piece.sample == sample]
            tokens = _tokens(mine)
            assert [piece.finish for piece in mine[:-1]] == [None] * (len(mine) - 1)
            assert mine[-1].finish is (Finish.STOP if tokens[-1] in (9, 11) else Finish.LENGTH)
            assert not {9, 11} & set(tokens[:-1])
            assert len(tokens) == 120 if mine[-1].finish is Finish.LENGTH else len(tokens) <= 120
            column = [piece.version for piece in mine for _ in piece.token_ids]
            assert column == sorted(column)
            seen |= set(column)
            for version in set(column):
                own = np.array(column) == version
                expected = versions[version].logprobs(request, tokens)
                np.testing.assert_allclose(np.array(_logprobs(mine))[own], expected[own], atol=5 * NOISE)
    assert len(seen) > 1
    await unit.until(active=0, parked=0)


async def test_an_interrupt_in_the_moment_of_admission_is_not_lost(unit: Unit, reference: Reference) -> None:
    """The engine's processes may not know a request yet when it is interrupted; none is sampled to its end then."""
    reference.scale(1.0)
    await unit.pull(reference)
    requests = [replace(ACROSS, id=f"moment{index}", samples=2) for index in range(4)]
    running = [asyncio.create_task(unit.pieces(request)) for request in requests]
    await asyncio.sleep(0)
    await _apply(unit, reference)
    await unit.until(active=0, parked=8)
    await unit.call("commit", reference.version)
    expected = reference.greedy(PROMPT, 300)
    for pieces in await asyncio.gather(*running):
        for sample in range(2):
            assert _tokens([piece for piece in pieces if piece.sample == sample]) == expected


async def test_a_sample_that_fills_the_units_length_ends_there_also_when_interrupted(
    unit: Unit, reference: Reference
) -> None:
    prompt, pieces = PROMPT * 7, list[Piece]()
    request = GenerationRequest("full", prompt, replace(GREEDY, max_tokens=LENGTH), stream_interval=1)
    reference.scale(1.0)
    await unit.pull(reference)
    running = await _begin(unit, replace(request, across_versions=True), pieces)
    await _apply(unit, reference)
    await unit.call("commit", reference.version)
    await running
    assert pieces[-1].finish is Finish.LENGTH
    assert len(prompt) + len(_tokens(pieces)) == LENGTH
    assert _tokens(pieces) == reference.greedy(prompt, LENGTH - len(prompt))


async def test_requests_that_do_not_cross_are_waited_for_beside_those_that_do(unit: Unit, reference: Reference) -> None:
    old, crossing, whole = reference.version, list[Piece](), list[Piece]()
    reference.scale(1.0)
    await unit.pull(reference)
    tasks = [
        await _begin(unit, replace(ACROSS, id="crosses"), crossing),
        await _begin(
            unit, GenerationRequest("whole", PROMPT, replace(GREEDY, max_tokens=60), stream_interval=1), whole
        ),
    ]
    await _apply(unit, reference)
    await tasks[1]
    assert (await unit.call("stats"))["parked"] == 1
    await unit.call("commit", reference.version)
    await tasks[0]
    assert (len(_tokens(whole)), {piece.version for piece in whole}) == (60, {old})
    assert (len(_tokens(crossing)), {piece.version for piece in crossing}) == (300, {old, reference.version})


async def test_one_that_comes_while_nothing_is_served_waits_for_the_commit(unit: Unit, reference: Reference) -> None:
    reference.scale(1.0)
    await unit.pull(reference)
    await _apply(unit, reference)
    running = asyncio.create_task(unit.pieces(replace(ACROSS, id="early", sampling=SHORT, samples=2)))
    await unit.until(parked=2)
    with pytest.raises(IllegalTransition, match="waits to be committed"):
        await unit.pieces(GenerationRequest("plain", PROMPT, SHORT))
    await unit.call("commit", reference.version)
    assert {piece.version for piece in await running} == {reference.version}


async def _parked(unit: Unit, reference: Reference, name: str, *patience: float) -> asyncio.Task[list[Piece]]:
    """A request of two samples that waits for a commit, with tokens of the old version."""
    pieces: list[Piece] = []
    reference.scale(1.0)
    await unit.pull(reference)
    running = await _begin(unit, replace(ACROSS, id=name, samples=2), pieces, *patience)
    await _apply(unit, reference)
    await unit.until(active=0, parked=2)

    async def end() -> list[Piece]:
        await running
        return pieces

    return asyncio.create_task(end())


async def test_an_abort_ends_a_parked_request(unit: Unit, reference: Reference) -> None:
    running = await _parked(unit, reference, "aborted")
    await unit.call("abort", "aborted")
    pieces = await running
    assert sorted(piece.sample for piece in pieces if piece.finish is Finish.ABORT) == [0, 1]
    await unit.until(parked=0)
    await unit.call("commit", reference.version)


async def test_a_parked_request_whose_time_is_up_names_the_unit_and_what_it_waits_for(
    unit: Unit, reference: Reference
) -> None:
    running = await _parked(unit, reference, "late", 4.0)
    waits = f"unit {unit.config.unit} to serve a version again: .*version {reference.version} waits to be committed"
    with pytest.raises(DeadlineExceeded, match=waits):
        await running
    await unit.until(parked=0)
    await unit.call("commit", reference.version)


async def test_a_failed_apply_ends_a_parked_request_and_the_next_version_is_served(
    unit: Unit, reference: Reference
) -> None:
    running = await _parked(unit, reference, "failed")
    reference.scale(1.0)
    await unit.pull(reference)
    await unit.call("fail_next")
    with pytest.raises(VerificationFailed):
        await _apply(unit, reference)
    with pytest.raises(Unavailable, match=f"version {reference.version}, which failed: .*did not arrive"):
        await running
    reference.scale(1.0)
    await unit.sync(reference)
    (piece,) = await unit.pieces(replace(ACROSS, id="again", sampling=SHORT, stream_interval=0))
    assert list(piece.token_ids) == reference.greedy(PROMPT, 8)


async def test_a_unit_released_while_requests_are_parked_ends_them(unit: Unit, reference: Reference) -> None:
    """Last: the unit is gone after it."""
    running = await _parked(unit, reference, "released")
    await unit.worker.stop()
    with pytest.raises(ProcessLost, match="after it was told to stop"):
        await running
