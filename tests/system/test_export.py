"""What was trained is what `transformers` and vLLM load from the exported folder."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from nereus_common.checkpoints import folder as folders
from nereus_common.checkpoints.export import export
from nereus_common.checkpoints.rank_file import write_rank_file
from nereus_common.checkpoints.state import BoxState
from nereus_common.core.ids import TensorName
from nereus_common.core.transfer import Box
from nereus_common.engines.generation.base import GenerationRequest, Sampling
from nereus_common.rl.rollouts import RolloutBatch
from nereus_common.transport import Transport, open_transport
from tests.system.checkpoint_cases import UPDATES, save
from tests.system.generation_units import CALL_SECONDS, PROMPT, Reference, Unit, plan
from tests.system.rank_processes import RankProcesses
from tests.system.training_cases import assemble, make_batch, make_plan, rank_configs, step_spec, update, warm_state
from tests.unit.checkpoints.checkpoint_cases import entry, manifest

MIX = "tp2.pp1.fs1"


def tiny_batch() -> RolloutBatch:
    """Tokens that the tiny models know."""
    batch = make_batch()
    return replace(batch, prompt_tokens=batch.prompt_tokens % 100, response_tokens=batch.response_tokens % 100)


def trained(ranks: RankProcesses, model: Path) -> dict[TensorName, Any]:
    """Parameters after UPDATES updates, by another road than checkpoints."""
    batch = tiny_batch()
    specs = [step_spec(batch, step) for step in range(UPDATES)]
    outcomes = ranks.run(update, [(one, None, batch.columns(), specs) for one in rank_configs(model, make_plan(MIX))])
    return {name: values[0] for name, values in assemble([s for _, s, _ in outcomes], warm_state(model)).items()}


@pytest.mark.parametrize("tied", [True, False])
def test_transformers_loads_it_and_computes_with_what_was_trained(
    tied: bool, tiny_model: Path, tiny_untied_model: Path, ranks: RankProcesses, tmp_path: Path
) -> None:
    model = tiny_model if tied else tiny_untied_model
    checkpoint, _ = save(ranks, model, make_plan(MIX), tiny_batch(), tmp_path / "root")
    expected = {name: torch.from_numpy(array) for name, array in trained(ranks, model).items()}
    whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    before = whole(torch.tensor([PROMPT])).logits
    whole.load_state_dict(expected, strict=not tied)
    wanted = whole(torch.tensor([PROMPT])).logits
    assert not torch.equal(before, wanted)
    for name, options in (("whole", {}), ("cut", {"shard_bytes": 200_000})):
        done = export(checkpoint, tmp_path / name, **options)
        assert (len(done.files) > 1) is (name == "cut")
        loaded = AutoModelForCausalLM.from_pretrained(done.folder)
        assert loaded.dtype is torch.float32
        assert torch.equal(loaded(torch.tensor([PROMPT])).logits, wanted)
    assert AutoTokenizer.from_pretrained(tmp_path / "whole").encode("1+1=") == AutoTokenizer.from_pretrained(
        model
    ).encode("1+1=")
    narrow = AutoModelForCausalLM.from_pretrained(
        export(checkpoint, tmp_path / "narrow", dtype="bfloat16").folder, dtype="auto"
    )
    for name, parameter in narrow.named_parameters():
        assert torch.equal(parameter, expected[TensorName(name)].to(torch.bfloat16)), name


def test_a_critic_that_began_as_a_language_model_is_exported_as_a_classifier(tiny_model: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    critic = AutoModelForSequenceClassification.from_pretrained(tiny_model, num_labels=1, dtype=torch.float32)
    partial = folders.begin(tmp_path / "root", 3, ["critic"])
    states = []
    for name, parameter in critic.named_parameters():
        array = parameter.detach().numpy()
        zeros = np.zeros_like(array)
        box = Box.whole(array.shape)
        states.append(BoxState(TensorName(name), array.shape, box, array, zeros, zeros, updates=3))
    files = [write_rank_file(partial / "critic", 0, states)]
    checkpoint = folders.commit(partial, manifest(3, {"critic": entry(partial, "critic", files)}, str(tiny_model)))
    done = export(checkpoint, tmp_path / "out", model="critic")
    loaded = AutoModelForSequenceClassification.from_pretrained(done.folder)
    assert loaded.config.num_labels == 1
    tokens = torch.tensor([PROMPT])
    assert torch.equal(loaded(tokens).logits, critic(tokens).logits)


@pytest.fixture
def source() -> Iterator[Transport]:
    transport = open_transport("loopback")
    yield transport
    transport.close()


@pytest.mark.long
async def test_vllm_loads_it_and_says_what_transformers_says(
    tiny_model: Path, ranks: RankProcesses, source: Transport, tmp_path: Path
) -> None:
    checkpoint, _ = save(ranks, tiny_model, make_plan(MIX), tiny_batch(), tmp_path / "root")
    folder = export(checkpoint, tmp_path / "out").folder
    unit = await Unit.start(folder, tmp_path, source, stage=plan())
    try:
        await unit.call("load", 0, CALL_SECONDS)
        await unit.call("commit", 0)
        request = GenerationRequest("greedy", PROMPT, Sampling(max_tokens=16, temperature=0.0))
        ((tokens, _),) = await unit.samples(request)
        assert tokens == Reference.load(folder, "float32").greedy(PROMPT, len(tokens))
        assert tokens != Reference.load(tiny_model, "float32").greedy(PROMPT, len(tokens))
    finally:
        await unit.worker.stop()
