"""Units that are to go, on both engines: what is in flight ends, goes on elsewhere, or is thrown away; and sleep."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import pytest_asyncio

from nereus_common.core.errors import IllegalTransition, Unavailable
from nereus_common.engines.generation.base import Drain, Finish, GenerationRequest, Piece, Sampling
from nereus_common.transport import Transport
from nereus_common.workers import processes
from nereus_common.workers.memory import pss_bytes
from tests.system.generation_units import CALL_SECONDS, PROMPT, Reference, Unit, plan
from tests.tiny_models import save_tiny_model

pytestmark = pytest.mark.asyncio(loop_scope="module")
LENGTH = 400
GREEDY = Sampling(max_tokens=250, temperature=0.0)
NOISE = 1e-4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["transformers", "vllm"])
async def unit(
    request: pytest.FixtureRequest, folder: Path, source: Transport, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Unit]:
    logs = tmp_path_factory.mktemp("logs")
    started = await Unit.start(folder, logs, source, stage=plan(max_length=LENGTH), engine=request.param)
    yield started
    await started.worker.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def other(folder: Path, source: Transport, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Unit]:
    """Another unit of the model-stage, where responses go on."""
    logs = tmp_path_factory.mktemp("logs")
    started = await Unit.start(folder, logs, source, stage=plan(max_length=LENGTH), engine="transformers")
    yield started
    await started.worker.stop()


@pytest.fixture(scope="module")
def newer(folder: Path) -> Reference:
    """What the other unit serves: other weights, of later versions."""
    loaded = Reference.load(folder, "float32")
    loaded.version = 100
    return loaded


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def reference(unit: Unit, folder: Path) -> Reference:
    loaded = Reference.load(folder, "float32")
    await unit.sync(loaded)
    return loaded


def _request(name: str, *, across: bool = False, **changes: object) -> GenerationRequest:
    request = GenerationRequest(name, PROMPT, GREEDY, stream_interval=1, across_versions=across)
    return replace(request, **changes)  # type: ignore[arg-type]


async def _begin(unit: Unit, requests: Sequence[GenerationRequest]) -> list[asyncio.Task[list[Piece]]]:
    """All under way, the first with tokens."""
    begun = asyncio.Event()

    async def read(request: GenerationRequest) -> list[Piece]:
        pieces = []
        async with unit.stream(request) as stream:
            async for piece in stream:
                pieces.append(piece)
                if request is requests[0] and len(pieces) == 3:
                    begun.set()
        return pieces

    running = [asyncio.create_task(read(request)) for request in requests]
    await asyncio.wait([*running, asyncio.create_task(begun.wait())], return_when=asyncio.FIRST_COMPLETED)
    return running


def _of(pieces: Sequence[Piece], sample: int) -> tuple[list[int], list[float], list[int], Finish | None]:
    """Tokens, log-probs, versions and finish of a sample."""
    mine = [piece for piece in pieces if piece.sample == sample]
    assert all(piece.finish is None for piece in mine[:-1])
    return (
        [token for piece in mine for token in piece.token_ids],
        [value for piece in mine for value in piece.logprobs],
        [piece.version for piece in mine for _ in piece.token_ids],
        mine[-1].finish,
    )


@pytest.mark.parametrize("across", [False, True])
async def test_finish_lets_run_what_is_there_and_takes_nothing_new_until_it_is_undone(
    unit: Unit, reference: Reference, across: bool
) -> None:
    (running,) = await _begin(unit, [_request(f"there{across}", across=across)])
    assert await unit.call("drain", Drain.FINISH, 0.01) == 1
    with pytest.raises(Unavailable, match=f"unit {unit.config.unit} is being drained"):
        await unit.pieces(_request("late", across=across))
    assert await unit.call("drain", Drain.FINISH, 60.0) == 0
    tokens, _, _, finish = _of(await running, 0)
    assert (tokens, finish) == (reference.greedy(PROMPT, 250), Finish.LENGTH)
    with pytest.raises(Unavailable, match="being drained"):
        await unit.pieces(_request("still", across=across))
    await unit.call("admit_again")
    short = replace(GREEDY, max_tokens=4)
    tokens, _, _, _ = _of(await unit.pieces(_request("again", sampling=short)), 0)
    assert tokens == reference.greedy(PROMPT, 4)


@pytest.mark.parametrize("across", [False, True])
async def test_a_response_handed_back_goes_on_elsewhere_and_every_token_keeps_its_version_and_logprob(
    unit: Unit, other: Unit, reference: Reference, newer: Reference, across: bool
) -> None:
    """Log-probs are compared over whole sequences: one token too many or too few would move all that follow. More
    samples than sequence slots: some are handed back before their first token."""
    newer.scale(1.1)
    await other.sync(newer)
    sampling = Sampling(max_tokens=120, temperature=0.9, stop_token_ids=(9,))
    begun = [
        _request(
            f"go{across}{index}", across=across, sampling=sampling, samples=2, prompt_token_ids=PROMPT[: 30 + index]
        )
        for index in range(6)
    ]
    running = await _begin(unit, begun)
    assert await unit.call("drain", Drain.RESUME, 30.0) == 0
    handed = await asyncio.gather(*running)
    assert (await unit.call("stats"))["active"] == 0
    cut = 0
    for request, pieces in zip(begun, handed, strict=True):
        for sample in range(2):
            tokens, logprobs, versions, finish = _of(pieces, sample)
            assert set(versions) <= {reference.version}
            if finish is Finish.INTERRUPTED:
                cut += 1
                rest = replace(request, id=f"{request.id}.{sample}", samples=1, response_token_ids=tuple(tokens))
                more = _of(await other.pieces(rest), 0)
                assert set(more[2]) == {newer.version}
                tokens, logprobs = [*tokens, *more[0]], [*logprobs, *more[1]]
                versions, finish = [*versions, *more[2]], more[3]
            assert finish is (Finish.STOP if tokens[-1] == 9 else Finish.LENGTH)
            assert 9 not in tokens[:-1]
            assert len(tokens) == 120 if finish is Finish.LENGTH else len(tokens) <= 120
            for weights in (reference, newer):
                own = np.array(versions) == weights.version
                expected = weights.logprobs(request, tokens)
                np.testing.assert_allclose(np.array(logprobs)[own], expected[own], atol=5 * NOISE)
    assert cut > 0
    await unit.call("admit_again")


@pytest.mark.parametrize("across", [False, True])
async def test_requeue_says_so_for_every_sample_that_is_not_whole(
    unit: Unit, reference: Reference, across: bool
) -> None:
    sampling = Sampling(max_tokens=250, temperature=0.9)
    group = _request(f"away{across}", across=across, samples=2, sampling=sampling)
    running = await _begin(unit, [group, _request("b", across=across)])
    assert await unit.call("drain", Drain.REQUEUE, 30.0) == 0
    ends = [piece.finish for task in running for piece in await task if piece.finish]
    assert ends == [Finish.REQUEUED] * 3
    await unit.call("admit_again")


async def test_a_commit_ends_a_drain(unit: Unit, reference: Reference) -> None:
    await unit.call("drain", Drain.FINISH, 1.0)
    reference.scale(1.0)
    await unit.sync(reference)
    short = replace(GREEDY, max_tokens=4)
    assert _of(await unit.pieces(_request("new", sampling=short)), 0)[0] == reference.greedy(PROMPT, 4)


async def test_a_response_that_was_whole_elsewhere_has_nothing_left_to_sample(unit: Unit, reference: Reference) -> None:
    whole = tuple(reference.greedy(PROMPT, 6))
    for across in (False, True):
        request = _request(f"whole{across}", across=across, response_token_ids=whole)
        (piece,) = await unit.pieces(replace(request, sampling=replace(GREEDY, max_tokens=6)))
        assert (piece.token_ids, piece.finish) == ((), Finish.LENGTH)


def _tree(pid: int) -> dict[int, int]:
    """Bytes by process."""
    found = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    return {one.pid: pss_bytes(one.pid) for one in found if one.status() != psutil.STATUS_ZOMBIE}


async def test_a_unit_that_slept_has_freed_its_engine_and_serves_only_what_it_was_given_since(
    unit: Unit, other: Unit, reference: Reference, newer: Reference
) -> None:
    same = deepcopy(reference)
    newer.version = same.version = newer.version + 1
    await other.sync(same)
    engine = [pid for name, pid in (await unit.call("stats")).items() if name.startswith("pid.")]
    before = _tree(unit.worker.pid)
    segments = {segment for pid in before for segment in processes.segments(pid)}
    (running,) = await _begin(unit, [_request("sleepy")])
    await unit.call("sleep", 30.0)
    tokens, _, _, finish = _of(await running, 0)
    assert finish is Finish.INTERRUPTED and tokens == reference.greedy(PROMPT, len(tokens))
    rest = await other.pieces(_request("rest", response_token_ids=tuple(tokens)))
    assert _of(rest, 0)[0] == reference.greedy(PROMPT, 250)[len(tokens) :]
    if unit.config.engine == "vllm":
        after = _tree(unit.worker.pid)
        assert not set(engine) & set(after)
        assert sum(before.values()) - sum(after.values()) >= 0.9 * sum(before[pid] for pid in engine)
        left = {segment for pid in after for segment in processes.segments(pid)}
        assert not left & segments

    for again in range(2):
        await unit.call("sleep", 30.0)
        with pytest.raises(IllegalTransition, match=f"unit {unit.config.unit} is asleep"):
            await unit.pieces(_request("asleep", across=bool(again)))
        with pytest.raises(IllegalTransition, match="is asleep"):
            await unit.call("describe")
    for again in range(2):
        await unit.call("wake")
        with pytest.raises(IllegalTransition, match="serves no version yet"):
            await unit.pieces(_request("woken", across=bool(again)))
        with pytest.raises(IllegalTransition, match=f"cannot serve {reference.version}"):
            await unit.call("commit", reference.version)
    assert [rank.digest for rank in await unit.sync(reference)] == await unit.expected(reference)
    assert _of(await unit.pieces(_request("filled")), 0)[0] == reference.greedy(PROMPT, 250)


async def test_the_weights_of_a_sleeping_transformers_engine_are_free(
    folder: Path, source: Transport, tmp_path: Path
) -> None:
    config = json.loads((folder / "config.json").read_text()) | {"intermediate_size": 1 << 16}
    (tmp_path / "config.json").write_text(json.dumps(config))
    weights = 2 * 3 * config["hidden_size"] * config["intermediate_size"] * 4
    large = await Unit.start(tmp_path, tmp_path, source, stage=plan(), engine="transformers")
    try:
        before = pss_bytes(large.worker.pid)
        await large.call("sleep", CALL_SECONDS)
        assert before - pss_bytes(large.worker.pid) >= 0.9 * weights
        await large.call("wake")
        assert before - pss_bytes(large.worker.pid) <= 0.1 * weights
    finally:
        await large.worker.stop()
