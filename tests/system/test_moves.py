"""A trained state moved between layouts, on real processes: not one bit of it changes, and training goes on."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from nereus_common.transitions.dag import Mode
from tests.system.moves import Group, move, ranks_of, walk
from tests.system.rank_processes import RankProcesses
from tests.system.training_cases import save_model

ONE = "tp1.pp1.fs1"
SMALL = [
    ONE,
    f"{ONE} x2",
    f"{ONE} x3",
    "tp1.pp1.fs2",
    "tp1.pp1.fs3",
    "tp1.pp2.fs1",
    "tp1.pp2(1+3).fs1",
    "tp1.pp3(1+2+1).fs1",
]
LARGE = [
    *SMALL,
    f"{ONE} x4",
    "tp1.pp1.fs4",
    "tp1.pp1.fs2 x2",
    "tp1.pp2.fs2",
    "tp1.pp2(3+1).fs2",
    "tp1.pp2(3+1).fs1 x2",
    "tp1.pp4.fs1",
]
BY_TWO = ["tp2.pp1.fs1", "tp2.pp1.fs2", "tp2.pp2(1+3).fs1", "tp2.pp1.fs1 x2", "tp2.pp2.fs1"]
BY_THREE = ["tp3.pp1.fs1"]
MODELS = {"llama-three": BY_THREE, "llama-untied": BY_TWO, "qwen3": BY_TWO, "qwen2": BY_TWO}
"""Model → layouts of its own: tp must divide its key and value heads."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: save_model(name, tmp_path_factory.mktemp(name)) for name in MODELS}


@pytest.fixture
def eight() -> Iterator[RankProcesses]:
    processes = RankProcesses(8)
    try:
        yield processes
    finally:
        processes.close()


async def check_chain(pool: RankProcesses, size: int, model: Path, path: list[str], seed: int) -> None:
    """Move along `path`, units at alternate ends of the pool; the modes by chance."""
    chance = random.Random(seed)
    still = Group(pool, model, ONE, 0, 1)
    await still.prepare()
    await still.load()
    await still.train(0)
    expected = await still.train(1)
    await still.release()
    old = Group(pool, model, path[0], 0, 2)
    await old.prepare()
    await old.load()
    await old.train(0)
    digests = None
    for hop, text in enumerate(path[1:], 1):
        first = size - ranks_of(text) if hop % 2 else 0
        new = Group(pool, model, text, first, hop + 2)
        await new.prepare()
        mode = chance.choice(list(Mode))
        report = await move(old, new, 1, mode)
        assert report.bytes_moved == report.bytes_needed, text
        assert (report.rounds > 3) is (mode is Mode.IN_PLACE)
        assert digests in (None, report.digests), text
        digests = report.digests
        await new.commit(1)
        await old.release()
        old = new
    found = await old.train(1)
    await old.release()
    for name in ("loss", "grad_norm", "entropy"):
        assert found.metrics[name] == pytest.approx(expected.metrics[name], rel=1e-5), name
    assert set(digests or {}) == {"parameters", "exp_avg", "exp_avg_sq", "step"}


@pytest.mark.parametrize(("name", "seed"), [("llama-three", 1), ("qwen3", 2)])
async def test_a_state_moved_through_a_sample_of_layouts_is_the_same_and_trains_on(
    models: dict[str, Path], ranks: RankProcesses, name: str, seed: int
) -> None:
    path = walk(seed, [*SMALL, *(one for one in MODELS[name] if ranks_of(one) < 4)], 4, 4)
    await check_chain(ranks, 4, models[name], path, seed)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", list(MODELS))
async def test_a_state_moved_through_many_layouts_is_the_same_and_trains_on(
    models: dict[str, Path], eight: RankProcesses, name: str
) -> None:
    """55 pairs of each model, 220 in all."""
    path = walk(7, [*LARGE, *MODELS[name]], 55, 8)
    assert len(path) == 56
    await check_chain(eight, 8, models[name], path, 7)
