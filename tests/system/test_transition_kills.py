"""`kill -9` of anybody at any point of a transition: the job goes on as promised, with every bit of its state or from
its last checkpoint; nothing hangs, nothing half-applied serves, and nothing is left of the dead."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.report import commit, machine
from tests.system.kill_cases import CASES, GENERATION, Case, Who
from tests.system.struck_jobs import Field, playing_field

pytestmark = pytest.mark.timeout(900)
SEED, SAMPLED = 28, 4
SAMPLE = frozenset(random.Random(SEED).sample(range(len(CASES)), SAMPLED))
LOG = Path(__file__).parents[2] / "benchmarks/results/transition-kills.json"


def _param(number: int, case: Case) -> object:
    return pytest.param(case, id=str(case), marks=() if number in SAMPLE else pytest.mark.long)


@pytest.fixture(scope="module")
def struck(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Field]:
    """Where all cases were played, their log is written for whoever commits it."""
    with playing_field(tmp_path_factory.mktemp("struck"), tiny_model) as field:
        yield field
    if len(field.log) == len(CASES):
        lines = ",\n".join(json.dumps(line) for line in field.log)
        head = json.dumps({"name": "transition-kills", "machine": machine(), "commit": commit()})
        LOG.write_text(f'{head[:-1]}, "command": "make test-long", "cases": [\n{lines}\n]}}\n')


@pytest.mark.parametrize("case", [_param(number, case) for number, case in enumerate(CASES)])
def test_whoever_is_killed_at_any_point_of_a_transition_the_promise_holds(struck: Field, case: Case) -> None:
    assert struck.play(case)["outcome"] in case.promise


@pytest.mark.parametrize("point", ["preparing", pytest.param("moving", marks=pytest.mark.long)])
def test_a_vllm_engine_that_dies_before_it_serves_leaves_the_old_one_serving(
    tmp_path: Path, tiny_model: Path, point: str
) -> None:
    (case,) = (case for case in CASES if (case.pair.stage, case.who, case.point) == (GENERATION, Who.NEW, point))
    with playing_field(tmp_path, tiny_model, engine="vllm") as field:
        assert field.play(case)["outcome"] in case.promise
