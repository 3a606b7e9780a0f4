"""vLLM's own weight loaders as witnesses of the GENERATION convention."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from itertools import product
from typing import Any

import pytest

from nereus_common.core.layout import Layout
from nereus_common.state.architecture import ModelShape
from nereus_common.state.conventions import GENERATION
from nereus_common.state.oracle import unit_boxes

pytestmark = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")


def case(family: str, tp: int, pp: int = 1, **changes: Any) -> dict[str, Any]:
    """A tiny model: 12 query heads, so that tp 1, 2, 3, 4, 6 divide."""
    config = {
        "model_type": family,
        "hidden_size": 24,
        "intermediate_size": 36,
        "num_hidden_layers": 3,
        "num_attention_heads": 12,
        "num_key_value_heads": 2 if tp % 3 else 3,
        "head_dim": 2 if family == "qwen2" else 4,
        "vocab_size": 150,
        "max_position_embeddings": 64,
    }
    return {"config": config | changes, "tp": tp, "pp": pp}


def witness(cases: list[dict[str, Any]], timeout: float) -> list[Any]:
    """What vLLM takes in each case; in a process of its own, where its warnings and its environment stay."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.state.vllm_boxes", json.dumps(cases)],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR"},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    answers: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return answers


def check(cases: list[dict[str, Any]], timeout: float) -> None:
    for asked, answer in zip(cases, witness(cases, timeout), strict=True):
        layout = Layout(tp=asked["tp"], pp=asked["pp"])
        expected = unit_boxes(ModelShape.from_config(asked["config"]), layout, GENERATION)
        for rank, (boxes, taken) in enumerate(zip(expected, answer, strict=True)):
            ours = {name: [[list(box.start), list(box.stop)] for box in region] for name, region in boxes.items()}
            assert {name: region for name, region in ours.items() if region} == taken, (asked, rank)


@pytest.mark.timeout(300)
def test_vllm_takes_the_boxes_of_the_oracle() -> None:
    check(
        [
            case("llama", tp=2, pp=2, tie_word_embeddings=True),
            case("qwen2", tp=4, vocab_size=40),
            case("qwen3", tp=3, tie_word_embeddings=True),
        ],
        timeout=240,
    )


@pytest.mark.long
@pytest.mark.timeout(900)
def test_vllm_takes_the_boxes_of_the_oracle_for_every_family_degree_and_head() -> None:
    cases = [
        case(family, tp, tie_word_embeddings=tied)
        for family, tp, tied in product(["llama", "mistral", "qwen2", "qwen3"], [1, 2, 3, 4], [False, True])
    ]
    cases += [case("llama", tp=6, num_key_value_heads=kv, vocab_size=380) for kv in (1, 2, 3, 6)]
    cases += [case("gemma2", tp=tp, tie_word_embeddings=True, sliding_window=32) for tp in (2, 3)]
    cases += [case("llama", tp=2, attention_bias=True, mlp_bias=True)]
    cases += [
        case("qwen2", tp=1, pp=pp, num_hidden_layers=7, tie_word_embeddings=tied)
        for pp in (2, 3, 4, 7)
        for tied in (False, True)
    ]
    check(cases, timeout=840)
