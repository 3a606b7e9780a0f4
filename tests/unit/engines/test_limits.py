"""What a torch engine cannot run is refused by name before anything starts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from nereus_common.core.errors import InvalidInput, InvalidPlan, UnsupportedByEngine
from nereus_common.core.ids import DeviceId, Head
from nereus_common.core.layout import Layout
from nereus_common.core.plan import Dtypes, GenerationLimits, StagePlan
from nereus_common.core.workflow import Work
from nereus_common.engines.inference.base import check_work
from nereus_common.engines.options import Optimizer, parse_options
from nereus_common.engines.torch_model.limits import check_plan
from nereus_common.engines.training.base import TrainingOptions

pytestmark = pytest.mark.fast

SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "vocab_size": 49152,
}


def plan(layout: str = "tp1.pp1.fs1", **changed: Any) -> StagePlan:
    cut = Layout.parse(layout)
    return StagePlan(cut, tuple(DeviceId("node0", f"cpu{i}") for i in range(cut.ranks)), **changed)


@pytest.mark.parametrize("layout", ["tp1.pp1.fs1", "tp3.pp1.fs1", "tp3.pp2.fs2", "tp1.pp4(8+8+7+7).fs1"])
def test_what_divides_is_accepted(layout: str) -> None:
    check_plan(SMOLLM2, plan(layout))


@pytest.mark.parametrize(
    ("config", "stage", "field"),
    [
        ({}, plan("tp2.pp1.fs1"), "layout.tp"),
        ({}, plan("tp9.pp1.fs1"), "layout.tp"),
        ({"intermediate_size": 1537}, plan("tp3.pp1.fs1"), "layout.tp"),
        ({"vocab_size": 4}, plan("tp3.pp1.fs1"), "layout.tp"),
        ({}, plan("tp1.pp1.fs2.ep2"), "layout.ep"),
        ({"architectures": ["MambaForCausalLM"]}, plan(), "architectures"),
        ({"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 128}, plan(), "architectures"),
        ({"architectures": ["MixtralForCausalLM"], "num_local_experts": 8}, plan(), "architectures"),
        ({"architectures": ["Gemma2ForCausalLM"]}, plan(), "architectures"),
        ({"architectures": ["LlamaForTokenClassification"]}, plan(), "architectures"),
        ({"architectures": ["LlamaForSequenceClassification"], "num_labels": 1}, plan(), "architectures"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 4096}, plan(), "sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, plan(), "sliding_window"),
        ({}, plan(generation=GenerationLimits()), "generation"),
        ({}, plan(dtypes=Dtypes(master="bfloat16")), "dtypes.master"),
        ({}, plan(dtypes=Dtypes(compute="float16")), "dtypes.compute"),
        ({}, plan(accumulation=4), "accumulation"),
    ],
)
def test_what_cannot_run_is_refused_by_field(config: dict[str, Any], stage: StagePlan, field: str) -> None:
    with pytest.raises(UnsupportedByEngine) as caught:
        check_plan({**SMOLLM2, **config}, stage)
    assert caught.value.details["field"] == field
    assert caught.value.remedy


def test_a_score_head_goes_on_a_language_model_and_on_a_classifier_of_one_label() -> None:
    classifier = {**SMOLLM2, "architectures": ["LlamaForSequenceClassification"]}
    check_plan(SMOLLM2, plan(), Head.SCORE)
    check_plan({**classifier, "id2label": {"0": "LABEL_0"}}, plan(), Head.SCORE)
    with pytest.raises(UnsupportedByEngine, match=r"config\.id2label makes 2 labels"):
        check_plan(classifier, plan(), Head.SCORE)


def test_a_mistral_classifier_slides_as_its_language_model_does() -> None:
    for kind in ("ForCausalLM", "ForSequenceClassification"):
        config = {**SMOLLM2, "architectures": [f"Mistral{kind}"], "num_labels": 1, "sliding_window": 4096}
        with pytest.raises(UnsupportedByEngine, match="sliding_window"):
            check_plan(config, plan(), Head.SCORE)


@pytest.mark.parametrize(("head", "work"), [(Head.LM, "logprobs"), (Head.SCORE, "values"), (Head.SCORE, "scores")])
def test_a_head_does_its_own_work(head: Head, work: str) -> None:
    assert check_work(head, work) is Work(work)


@pytest.mark.parametrize(
    ("head", "work"),
    [(Head.LM, "values"), (Head.LM, "scores"), (Head.SCORE, "logprobs"), (Head.LM, "sample"), (Head.SCORE, "Values")],
)
def test_work_that_is_not_the_heads_is_refused_by_both_names(head: Head, work: str) -> None:
    with pytest.raises(InvalidInput, match=f"work '{work}'.*head {head}") as caught:
        check_work(head, work)
    assert caught.value.details["field"] == "work"


def test_a_split_that_misses_layers_is_refused() -> None:
    with pytest.raises(InvalidPlan, match="30"):
        check_plan(SMOLLM2, replace(plan("tp1.pp2(15+14).fs1")))


def test_options_are_read_by_name_and_type() -> None:
    found = parse_options(TrainingOptions, {"threads": 2, "optimizer": {"beta2": 0.95, "weight_decay": 0}})
    assert found == TrainingOptions(Optimizer(beta2=0.95, weight_decay=0.0), threads=2)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"treads": 1}, "options.treads"),
        ({"threads": "1"}, "options.threads"),
        ({"shared_prefix": 1}, "options.shared_prefix"),
        ({"optimizer": {"lr": 1.0}}, "options.optimizer.lr"),
        ({"optimizer": {"beta1": 1.5}}, "options.optimizer.beta1"),
    ],
)
def test_bad_options_are_refused_by_name(options: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        parse_options(TrainingOptions, options)
    assert caught.value.details["field"] == field
