"""What a job's models need is read from their folders, with the head that stands on each."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from nereus_coordinator.placement import ModelSource, Placement, loads_from_folder, needed_bytes, unit_specs

from nereus.v1 import units_pb2 as pb
from nereus_common.core.errors import InvalidInput, UnsupportedByEngine
from nereus_common.core.ids import DeviceId, Head, JobId, ModelStage, Stage
from nereus_common.planning.default import default_plan
from nereus_common.planning.memory import footprint, state_bytes
from nereus_common.stages.base import Rendezvous
from nereus_common.stages.convert import head_from_pb, spec_from_pb, spec_to_pb
from nereus_common.state.architecture import ModelShape

pytestmark = pytest.mark.fast

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 1000,
    "tie_word_embeddings": True,
}
CLASSIFIER = {**CONFIG, "architectures": ["LlamaForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
STAGES = tuple(
    map(
        ModelStage.parse,
        ("actor/generation", "actor/training", "critic/inference", "critic/training", "reward/inference"),
    )
)


def ppo(folder: Path, reward: object = CLASSIFIER) -> Placement:
    for name, config in (("lm", CONFIG), ("reward", reward)):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    sources = (
        ModelSource("actor", str(folder / "lm")),
        ModelSource("critic", str(folder / "lm"), head=Head.SCORE),
        ModelSource("reward", str(folder / "reward"), head=Head.SCORE),
    )
    plan = default_plan([DeviceId("node0", f"cpu{slot}") for slot in range(8)], STAGES)
    return Placement(JobId("job"), 1, plan, {source.name: source for source in sources}, seed=0)


async def test_every_model_is_priced_with_the_head_it_has(tmp_path: Path) -> None:
    placement = ppo(tmp_path)
    needed = await needed_bytes(placement)
    for (name, _, rank), found in needed.items():
        head = Head.LM if name.model == "actor" else Head.SCORE
        shape = ModelShape.from_config(CONFIG, head)
        assert found == footprint(shape, name, placement.plan[name], rank).total
    assert {name for name, _, _ in needed} == set(STAGES)


async def test_redundancy_is_priced_on_the_device_of_the_next_rank(tmp_path: Path) -> None:
    placement = ppo(tmp_path)
    twice = {Stage.TRAINING: {"redundancy": 1}}
    models = {name: replace(source, options=twice) for name, source in placement.models.items()}
    mirrored = replace(placement, models=models)
    alone, both = await needed_bytes(placement), await needed_bytes(mirrored)
    for (name, replica, rank), found in both.items():
        more = found - alone[name, replica, rank]
        if name.stage is not Stage.TRAINING:
            assert more == 0
            continue
        plan = placement.plan[name]
        shape = ModelShape.from_config(CONFIG, Head.LM if name.model == "actor" else Head.SCORE)
        before = (rank - 1) % plan.layout.ranks
        assert more > 2 * state_bytes(shape, name, plan, before) == 3 * footprint(shape, name, plan, before).optimizer


async def test_a_classifier_of_several_labels_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedByEngine, match="id2label makes 3 labels"):
        await needed_bytes(ppo(tmp_path, CLASSIFIER | {"id2label": {"0": "a", "1": "b", "2": "c"}}))


def test_a_critic_is_loaded_where_it_trains_and_a_reward_model_where_it_scores(tmp_path: Path) -> None:
    plan = ppo(tmp_path).plan
    loaded = {str(name) for name in plan.names if loads_from_folder(plan, name)}
    assert loaded == {"actor/training", "critic/training", "reward/inference"}


def test_the_head_reaches_every_unit_across_the_wire(tmp_path: Path) -> None:
    specs = unit_specs(ppo(tmp_path), lambda prefix: Rendezvous("127.0.0.1", 1, prefix))
    for spec in specs:
        assert spec.head is (Head.LM if spec.model_stage.model == "actor" else Head.SCORE)
        assert spec_from_pb(spec_to_pb(spec)) == spec


def test_a_model_message_without_a_head_has_the_vocabularys() -> None:
    assert head_from_pb(pb.Model(name="actor")) is Head.LM
    with pytest.raises(InvalidInput, match=r"head 'value' is unknown.*lm, score"):
        head_from_pb(pb.Model(name="critic", head="value"))
