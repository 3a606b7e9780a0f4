"""What the benchmark `overlap` tries: every trial overlaps, can be done, and is the same each time it is drawn."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.overlap import Standstill, changed
from benchmarks.overlap_trials import ACTOR, KINDS, REFERENCE, SCORER, Draws
from nereus_common.core.ids import JobId
from nereus_common.transitions.dag import EdgeKind
from tests.tiny_models import HEADS

pytestmark = pytest.mark.fast

CONFIG = {
    "model_type": "llama",
    "vocab_size": 131,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "tie_word_embeddings": True,
    **HEADS,
}


@pytest.fixture
def draws(tmp_path: Path) -> Draws:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return Draws(tmp_path)


@pytest.mark.parametrize("kind", list(KINDS))
def test_both_change_and_a_device_passes_from_one_to_the_other_in_an_order_that_fits(draws: Draws, kind: str) -> None:
    trials = [draws.trial(kind, number) for number in range(6)]
    for trial in trials:
        one, other = KINDS[kind]
        wants = [set(trial.new[a].devices) & set(trial.old[b].devices) for a, b in ((one, other), (other, one))]
        assert any(wants) and trial.mutual is all(wants)
        assert all(trial.old[name] != trial.new[name] for name in KINDS[kind])
        assert any(edge.kind is EdgeKind.RESOURCE for edge in trial.dag.edges)
        assert all(peak <= draws.device_bytes for peak in trial.dag.peaks.values())
    assert {trial.mutual for trial in trials} == {True, False}
    assert draws.trial(kind, 3) == trials[3]


def test_only_when_all_that_are_left_were_refused_twice_nothing_will_change_any_more() -> None:
    one, other = JobId("one"), JobId("other")
    still = Standstill({one, other})
    still.refused.update({one: 5, other: 1})
    assert not still.reached
    still.refused[other] += 1
    assert still.reached
    still.done(other)
    assert not still.reached


def test_what_a_trained_models_scorer_holds_after_a_transition_is_what_was_trained() -> None:
    trained = {"parameters": 7, "step": 1}
    before = {ACTOR: (1, trained), SCORER: (0, {"parameters": 3})}
    assert changed(before, {ACTOR: (1, trained), SCORER: (1, {"parameters": 7})}) == ""
    assert "actor/inference" in changed(before, before)
    alone = {REFERENCE: (0, {"parameters": 3})}
    assert changed(alone, alone) == ""
    assert "reference/inference" in changed(alone, {REFERENCE: (0, {"parameters": 4})})
