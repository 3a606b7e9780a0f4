"""A score head on the decoder says what Hugging Face's sequence classifiers say, and learns, in every layout."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from nereus_inference.unit import InferenceUnit

from nereus_common.core.errors import InvalidInput, UnsupportedByEngine
from nereus_common.core.ids import Head, JobId, ModelStage, Stage, TensorName, UnitId
from nereus_common.core.transfer import RankRef
from nereus_common.engines.torch_model.limits import read_config
from nereus_common.rpc.ports import free_port
from nereus_common.stages.base import HostSettings, Rendezvous, UnitSpec
from nereus_common.state.architecture import ModelShape
from nereus_common.state.conventions import TRAINING
from nereus_common.state.digest import combine, digest_box
from nereus_common.state.oracle import shard_boxes, unit_boxes
from nereus_common.state.program import compile_program
from tests.system.rank_processes import RankProcesses
from tests.system.score_cases import (
    gradients,
    load_classifier,
    receive_and_score,
    reference_gradients,
    reference_scores,
    reference_values,
    score,
    scored_batch,
    scorer_ranks,
    whole,
)
from tests.system.training_cases import make_plan, rank_configs, shares
from tests.tiny_models import save_tiny_model, save_tiny_reward_model

KINDS = ("llama", "qwen2")
SCORE = TensorName("score.weight")
LAYOUTS = ("tp1.pp1.fs1", "tp2.pp1.fs1", "tp1.pp2.fs1", "tp1.pp1.fs2", "tp2.pp2.fs1")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: save_tiny_reward_model(tmp_path_factory.mktemp(kind), kind=kind) for kind in KINDS}


@pytest.fixture(scope="module")
def language_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("lm"), tied=True)


@pytest.mark.parametrize("kind", KINDS)
def test_values_and_scores_equal_the_plain_classifier_in_every_layout_packed_or_not(
    kind: str, folders: dict[str, Path], ranks: RankProcesses
) -> None:
    batch, reference = scored_batch(), load_classifier(folders[kind])
    with torch.no_grad():
        scores, values = reference_scores(reference, batch).numpy(), reference_values(reference, batch).numpy()
    assert np.abs(values).max() > 0.1
    for layout in LAYOUTS:
        for shared in (True, False):
            configs = scorer_ranks(folders[kind], make_plan(layout), shared=shared)
            arguments = [(config, batch.columns(), ("values", "scores")) for config in configs]
            for found in ranks.run(score, arguments):
                np.testing.assert_allclose(found["scores"], scores, atol=2e-5, err_msg=f"{layout} {shared}")
                np.testing.assert_allclose(found["values"], values, atol=2e-5, err_msg=f"{layout} {shared}")


@pytest.mark.parametrize("kind", KINDS)
def test_in_bfloat16_values_are_about_as_exact_as_the_plain_classifiers_own(
    kind: str, folders: dict[str, Path], ranks: RankProcesses
) -> None:
    batch, folder = scored_batch(), folders[kind]
    with torch.no_grad():
        exact = reference_values(load_classifier(folder), batch).numpy()
        plain = reference_values(load_classifier(folder, torch.bfloat16), batch).float().numpy()
    (config,) = scorer_ranks(folder, make_plan("tp1.pp1.fs1", dtype="bfloat16"))
    (found,) = ranks.run(score, [(config, batch.columns(), ("values",))])
    ours, theirs = (float(np.sqrt(np.mean((values - exact) ** 2))) for values in (found["values"], plain))
    assert ours <= 1.5 * theirs <= 0.05 * np.abs(exact).max(), (ours, theirs)


@pytest.mark.parametrize("mix", [*LAYOUTS[1:], "tp2.pp1.fs2", "tp1.pp2.fs2", "tp1.pp1.fs2 x2"])
def test_gradients_of_every_parameter_are_those_of_the_plain_classifier(
    mix: str, folders: dict[str, Path], ranks: RankProcesses
) -> None:
    batch, plan = scored_batch(), make_plan(mix)
    for kind in KINDS:
        parts = shares(batch, plan.replicas)
        configs = rank_configs(folders[kind], plan)
        outcomes = ranks.run(gradients, [(config, parts[config.replica].columns(), False) for config in configs])
        expected, found = reference_gradients(folders[kind], batch), whole([grads for _, _, grads in outcomes])
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            off = np.linalg.norm(found[name] - gradient) / np.linalg.norm(gradient)
            assert off <= 1e-5, (kind, mix, name)


@pytest.mark.parametrize("mix", ["tp1.pp1.fs3", "tp2.pp1.fs2", "tp2.pp2.fs1"])
def test_the_boxes_held_are_those_of_the_layout_oracle(
    mix: str, folders: dict[str, Path], ranks: RankProcesses
) -> None:
    plan = make_plan(mix)
    shape = ModelShape.from_config(read_config(str(folders["llama"])), Head.SCORE)
    configs = rank_configs(folders["llama"], plan)
    outcomes = ranks.run(gradients, [(config, scored_batch().columns(), False) for config in configs])
    for config, (held, _, _) in zip(configs, outcomes, strict=True):
        expected = shard_boxes(shape, plan.layout, config.rank, TRAINING)
        assert {name: (box,) for name, (box, _) in held.items()} == {n: boxes for n, boxes in expected.items() if boxes}


def test_a_critic_starts_from_a_language_model_with_a_head_of_zeros_that_learns(
    language_model: Path, ranks: RankProcesses
) -> None:
    batch = scored_batch()
    configs = rank_configs(language_model, make_plan("tp1.pp2.fs1"))
    outcomes = ranks.run(gradients, [(config, batch.columns(), True) for config in configs])
    held, found = whole([held for held, _, _ in outcomes]), whole([grads for _, _, grads in outcomes])
    assert "lm_head.weight" not in held and not held[SCORE].any()
    assert found[SCORE].any() and all(not found[name].any() for name in found.keys() - {SCORE})


def test_a_reward_model_without_a_trained_head_is_refused_by_file(language_model: Path, ranks: RankProcesses) -> None:
    (config,) = scorer_ranks(language_model, make_plan("tp1.pp1.fs1"))
    with pytest.raises(InvalidInput, match=r"model\.safetensors holds no tensor score\.weight .*trained head"):
        ranks.run(score, [(config, scored_batch().columns(), ("scores",))])


def test_a_work_that_is_not_the_heads_is_refused_by_both_names(
    folders: dict[str, Path], language_model: Path, ranks: RankProcesses
) -> None:
    for folder, head, work in ((folders["llama"], Head.SCORE, "logprobs"), (language_model, Head.LM, "values")):
        (config,) = scorer_ranks(folder, make_plan("tp1.pp1.fs1"), head=head)
        with pytest.raises(InvalidInput, match=f"{work}.*head {head}"):
            ranks.run(score, [(config, scored_batch().columns(), (work,))])


async def test_a_unit_of_processes_scores_with_the_head_of_its_spec(folders: dict[str, Path], tmp_path: Path) -> None:
    batch, plan = scored_batch(), make_plan("tp1.pp2.fs1")
    unit = InferenceUnit(
        UnitSpec(
            unit=UnitId("job.reward.inference.e1.r0"),
            job=JobId("job"),
            model_stage=ModelStage("reward", Stage.INFERENCE),
            replica=0,
            epoch=1,
            model_path=str(folders["qwen2"]),
            plan=plan,
            engine="",
            options={"threads": 1},
            rendezvous=Rendezvous("127.0.0.1", free_port(), "unit"),
            seed=0,
            head=Head.SCORE,
        ),
        HostSettings(tmp_path),
        lambda lost: None,
    )
    try:
        await unit.prepare(120.0)
        await unit.load(0, 60.0)
        found = await unit.score(batch.columns(), "scores", 1.0, 60.0)
        with pytest.raises(InvalidInput, match="logprobs"):
            await unit.score(batch.columns(), "logprobs", 1.0, 60.0)
    finally:
        await unit.release()
    with torch.no_grad():
        expected = reference_scores(load_classifier(folders["qwen2"]), batch).numpy()
    assert found.keys() == {"scores"}
    np.testing.assert_allclose(found["scores"], expected, atol=2e-5)


def test_a_classifier_has_no_logprobs_to_give(folders: dict[str, Path], ranks: RankProcesses) -> None:
    (config,) = scorer_ranks(folders["qwen2"], make_plan("tp1.pp1.fs1"), head=Head.LM)
    with pytest.raises(UnsupportedByEngine, match="Qwen2ForSequenceClassification"):
        ranks.run(score, [(config, scored_batch().columns(), ("logprobs",))])


@pytest.mark.parametrize("layout", ["tp1.pp1.fs1", "tp2.pp1.fs1", "tp1.pp2.fs2"])
def test_a_critics_weights_reach_its_inference_ranks_bit_for_bit(
    layout: str, folders: dict[str, Path], ranks: RankProcesses
) -> None:
    batch, folder = scored_batch(), folders["llama"]
    shape = ModelShape.from_config(read_config(str(folder)), Head.SCORE)
    trained, served = make_plan("tp1.pp1.fs2", dtype="bfloat16"), make_plan(layout, dtype="bfloat16")
    outcomes = ranks.run(gradients, [(config, batch.columns(), False) for config in rank_configs(folder, trained)])
    sources = {RankRef("trainer", rank): wire for rank, (_, wire, _) in enumerate(outcomes)}
    targets = {RankRef("scorer", r): boxes for r, boxes in enumerate(unit_boxes(shape, served.layout, TRAINING))}
    holders = {ref: {name: (box,) for name, (box, _) in parts.items()} for ref, parts in sources.items()}
    program = compile_program(targets, holders, wire_dtype="bfloat16")
    configs = scorer_ranks(folder, served)
    received = ranks.run(receive_and_score, [(config, program, sources, batch.columns()) for config in configs])
    (loaded, *_) = ranks.run(score, [(c, batch.columns(), ("values",)) for c in scorer_ranks(folder, served)])
    for found, _ in received:
        assert (found["values"] == loaded["values"]).all()
    if served.layout.tp == 1:  # otherwise what is replicated would count twice
        sent = [(name, box, bits) for parts in sources.values() for name, (box, bits) in parts.items()]
        content = combine(digest_box(name, shape.tensors()[name].shape, box, bits) for name, box, bits in sent)
        assert combine(digest for _, digest in received) == content
