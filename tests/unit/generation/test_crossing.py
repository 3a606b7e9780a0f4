"""Interrupts at every point of a request, on an engine whose tokens tell their own positions and versions."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing

import pytest

from nereus_common.core.errors import NereusError, Unavailable
from nereus_common.engines.generation.base import (
    Delta,
    Finish,
    GenerationEngine,
    GenerationRequest,
    Piece,
    RankDigest,
    RankHolding,
    RankPull,
    Sampling,
    WeightOrder,
)
from nereus_common.engines.generation.crossing import Crossing
from nereus_common.engines.generation.gate import NONE, Gate
from nereus_common.engines.generation.one_version import OneVersion

pytestmark = pytest.mark.fast
STOP = 0
PROMPT = (1000,)


class CountingEngine(GenerationEngine):
    """Samples the position of the token, or STOP at `stop_at`; one to three tokens at a time, at random moments.

    An abort comes at any moment, with tokens sampled and not yet given: they are lost, as vLLM's are.
    """

    def __init__(self, seed: int, stop_at: int) -> None:
        self._random = random.Random(seed)
        self._stop_at = stop_at
        self._aborted: set[str] = set()
        self.weights = NONE
        self.used: dict[str, int] = {}

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Delta]:
        assert request.id not in self.used, "an id is never used twice"
        self.used[request.id] = self.weights
        first = len(request.prompt_token_ids)
        end, left = first + request.sampling.max_tokens, list(range(first, first + request.sampling.max_tokens))
        while True:
            await self._pause()
            if request.id in self._aborted:
                yield Delta(0, (), (), Finish.ABORT)
                return
            assert self.weights == self.used[request.id], "nothing changes under a flight"
            tokens = left[: self._random.randint(1, 3)]
            if self._stop_at in tokens:
                tokens = [*tokens[: tokens.index(self._stop_at)], STOP]
            del left[: len(tokens)]
            finish = Finish.STOP if tokens[-1] == STOP else Finish.LENGTH if tokens[-1] == end - 1 else None
            yield Delta(0, tuple(tokens), tuple(float(self.weights) for _ in tokens), finish)
            if finish is not None:
                return

    async def abort(self, request_id: str) -> None:
        self._aborted.add(request_id)
        await self._pause()

    async def install(self, version: int, *, timeout: float) -> tuple[RankDigest, ...]:
        await self._pause()
        self.weights = version
        return ()

    async def _pause(self) -> None:
        for _ in range(self._random.randint(0, 4)):
            await asyncio.sleep(0)

    async def describe(self) -> tuple[RankHolding, ...]:
        return ()

    async def pull(self, order: WeightOrder) -> tuple[RankPull, ...]:
        return ()

    async def sleep(self) -> None:
        return

    async def wake(self) -> None:
        return

    def stats(self) -> Mapping[str, int]:
        return {}

    def close(self) -> None:
        return


class Scene:
    """A gate and an engine that serve version 1."""

    def __init__(self, seed: int = 0, stop_at: int = -1) -> None:
        self.gate = Gate("unit")
        self.engine = CountingEngine(seed, stop_at)

    async def sync(self, version: int) -> None:
        async with self.gate.applying(version, 5):
            await self.engine.install(version, timeout=5)

    def crossing(self, name: str = "r", samples: int = 2, max_tokens: int = 30, interval: int = 1) -> Crossing:
        sampling = Sampling(max_tokens, stop_token_ids=(STOP,))
        request = GenerationRequest(name, PROMPT, sampling, samples, stream_interval=interval, across_versions=True)
        return Crossing(self.gate, self.engine, request, asyncio.get_running_loop().time() + 5)

    def run(self, response: tuple[int, ...], version: int, *, across: bool) -> Crossing | OneVersion:
        """One sample that goes on from `response`."""
        request = GenerationRequest(
            "r", PROMPT, Sampling(30, stop_token_ids=(STOP,)), across_versions=across, response_token_ids=response
        )
        if across:
            return Crossing(self.gate, self.engine, request, asyncio.get_running_loop().time() + 5)
        return OneVersion(self.engine, request, version)


async def _all(crossing: Crossing | OneVersion) -> list[Piece]:
    async with aclosing(crossing.pieces()) as pieces:
        return [piece async for piece in pieces]


@pytest.mark.parametrize("seed", range(150))
async def test_interrupts_lose_and_double_no_token_and_versions_only_grow(seed: int) -> None:
    chance = random.Random(seed)
    stop_at = chance.choice([-1, chance.randint(1, 30)])
    interval, samples = chance.randint(0, 4), chance.randint(1, 3)
    scene = Scene(seed, stop_at)
    await scene.sync(1)
    scene.gate.commit(1)
    requests = [asyncio.create_task(_all(scene.crossing(f"r{index}", samples, 30, interval))) for index in range(4)]
    for version in (2, 3, 4):
        for _ in range(chance.randint(0, 30)):
            await asyncio.sleep(0)
        await scene.sync(version)
        for _ in range(chance.randint(0, 5)):
            await asyncio.sleep(0)
        scene.gate.commit(version)
    expected = [*range(1, 31)] if stop_at == -1 else [*range(1, stop_at), STOP]
    for request in requests:
        pieces = await request
        for sample in range(samples):
            mine = [piece for piece in pieces if piece.sample == sample]
            assert [token for piece in mine for token in piece.token_ids] == expected
            assert [piece.finish for piece in mine[:-1]] == [None] * (len(mine) - 1)
            assert mine[-1].finish is (Finish.LENGTH if stop_at == -1 else Finish.STOP)
            versions = [piece.version for piece in mine]
            assert versions == sorted(versions)
            # the engine's log-probs name the weights that sampled
            assert all(value == piece.version for piece in mine for value in piece.logprobs)
            assert not interval or max(len(piece.token_ids) for piece in mine) <= interval
    assert (scene.gate.active, scene.gate.parked) == (0, 0)


async def _parked(scene: Scene, crossing: Crossing) -> tuple[asyncio.Task[list[Piece]], list[Piece]]:
    """The request, parked in the middle under an applied version 2, and what it gave until then."""
    await scene.sync(1)
    scene.gate.commit(1)
    given: list[Piece] = []
    begun = asyncio.Event()

    async def run() -> list[Piece]:
        async with aclosing(crossing.pieces()) as pieces:
            async for piece in pieces:
                given.append(piece)
                if len(given) == 4:
                    begun.set()
        return given

    running = asyncio.create_task(run())
    await begun.wait()
    await scene.sync(2)
    await asyncio.sleep(0.01)
    assert scene.gate.parked == 2
    return running, given


async def test_an_abort_while_parked_ends_every_sample() -> None:
    scene = Scene()
    crossing = scene.crossing()
    running, _ = await _parked(scene, crossing)
    await crossing.end(Finish.ABORT)
    pieces = await running
    assert [piece.sample for piece in pieces if piece.finish is Finish.ABORT] == [0, 1]
    assert {piece.version for piece in pieces} == {1}


async def test_an_abort_in_flight_ends_every_sample_also_when_weights_come_at_that_moment() -> None:
    scene = Scene()
    crossing = scene.crossing()
    await scene.sync(1)
    scene.gate.commit(1)
    running = asyncio.create_task(_all(crossing))
    await asyncio.sleep(0)
    await asyncio.gather(scene.sync(2), crossing.end(Finish.ABORT))
    assert [piece.sample for piece in await running if piece.finish is Finish.ABORT] == [0, 1]


@pytest.mark.parametrize("across", [True, False])
@pytest.mark.parametrize("seed", range(40))
async def test_a_response_handed_back_goes_on_elsewhere_without_a_token_lost_or_doubled(
    seed: int, across: bool
) -> None:
    """Units at versions 1, 2, 3 …, each drained at a random moment, while the first also takes new weights."""
    chance = random.Random(seed)
    stop_at = chance.choice([-1, chance.randint(1, 30)])
    tokens: list[int] = []
    versions: list[int] = []
    finish: Finish | None = None
    for version in range(1, 40):
        scene = Scene(seed + version, stop_at)
        await scene.sync(version)
        scene.gate.commit(version)
        run = scene.run(tuple(tokens), version, across=across)
        running = asyncio.create_task(_all(run))
        for _ in range(chance.randint(0, 40)):
            await asyncio.sleep(0)
        await asyncio.gather(
            run.end(Finish.INTERRUPTED), *([scene.sync(version + 1)] if across and version == 1 else [])
        )
        for piece in await running:
            assert finish is None, "nothing comes after a sample's end"
            tokens += piece.token_ids
            versions += [piece.version] * len(piece.token_ids)
            assert all(value == piece.version for value in piece.logprobs)
            finish = piece.finish
        assert (scene.gate.active, scene.gate.parked) == (0, 0)
        if finish is not Finish.INTERRUPTED:
            break
        finish = None
    assert tokens == ([*range(1, 31)] if stop_at == -1 else [*range(1, stop_at), STOP])
    assert finish is (Finish.LENGTH if stop_at == -1 else Finish.STOP)
    assert versions == sorted(versions)


async def test_a_parked_request_that_is_cut_says_how() -> None:
    for cut in (Finish.INTERRUPTED, Finish.REQUEUED):
        scene = Scene()
        crossing = scene.crossing()
        running, _ = await _parked(scene, crossing)
        await crossing.end(cut)
        await crossing.end(Finish.ABORT)
        assert [piece.finish for piece in await running if piece.finish] == [cut, cut]


async def test_a_caller_that_leaves_while_parked_leaves_nothing_behind() -> None:
    scene = Scene()
    running, _ = await _parked(scene, scene.crossing())
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert (scene.gate.active, scene.gate.parked) == (0, 0)


async def test_a_failed_apply_ends_a_parked_request_after_all_its_tokens_were_given() -> None:
    scene = Scene()
    running, given = await _parked(scene, scene.crossing())
    with pytest.raises(RuntimeError):
        async with scene.gate.applying(3, 1):
            raise RuntimeError("broken")
    with pytest.raises(Unavailable, match="version 3, which failed: broken"):
        await running
    for sample in range(2):
        tokens = [token for piece in given if piece.sample == sample for token in piece.token_ids]
        assert tokens == list(range(1, len(tokens) + 1))


async def test_a_caller_that_does_not_read_keeps_no_weights_waiting() -> None:
    scene = Scene()
    await scene.sync(1)
    scene.gate.commit(1)
    async with aclosing(scene.crossing(max_tokens=5000).pieces()) as pieces:
        first = await anext(pieces)
        await scene.sync(2)
        assert first.version == 1
        assert scene.gate.parked == 2


async def test_an_abort_that_nobody_asked_for_is_passed_on() -> None:
    scene = Scene()
    await scene.sync(1)
    scene.gate.commit(1)
    await scene.engine.abort("r[0].1")
    pieces = await _all(scene.crossing(samples=1))
    assert [piece.finish for piece in pieces] == [Finish.ABORT]


async def test_a_stream_without_an_end_is_an_error_not_a_loop() -> None:
    class Silent(CountingEngine):
        async def generate(self, request: GenerationRequest) -> AsyncGenerator[Delta]:
            yield Delta(0, (1,), (0.0,))

    scene = Scene()
    scene.engine = Silent(0, -1)
    await scene.sync(1)
    scene.gate.commit(1)
    with pytest.raises(NereusError, match="without a word"):
        await _all(scene.crossing())
