"""Small models and layouts for property tests, and a way to fill, hold and move their state in numpy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from nereus_common.core.ids import Head, TensorName
from nereus_common.core.layout import Layout
from nereus_common.core.transfer import Box, RankRef, TransferProgram
from nereus_common.state.architecture import LogicalTensor, ModelShape
from nereus_common.state.conventions import GENERATION, TRAINING, Convention

Array = NDArray[np.uint32]
Held = dict[TensorName, dict[Box, Array]]

CONVENTIONS = st.sampled_from([TRAINING, GENERATION])


@st.composite
def models(draw: st.DrawFn, *on_top: Head) -> ModelShape:
    """Dense and sparse models of a few hundred elements per tensor; widths chosen so that tp 2, 3, 4, 6 often divide.

    `on_top`: heads that may stand on them, none meaning any.
    """
    family = draw(
        st.sampled_from(["llama", "mistral", "qwen2", "qwen3", "gemma2", "mixtral", "qwen3_moe", "qwen2_moe"])
    )
    kv_heads = draw(st.sampled_from([1, 2, 3, 4, 6]))
    heads, head_dim = kv_heads * draw(st.integers(1, 3)), draw(st.integers(1, 3))
    config = {
        "model_type": family,
        "hidden_size": heads * head_dim if family == "qwen2" else draw(st.integers(3, 9)),
        "intermediate_size": draw(st.sampled_from([12, 24, 10])),
        "num_hidden_layers": draw(st.integers(1, 5)),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": draw(st.integers(1, 200)),
        "tie_word_embeddings": draw(st.booleans()),
        "attention_bias": family == "llama" and draw(st.booleans()),
        "mlp_bias": draw(st.booleans()),
    }
    if family in ("mixtral", "qwen3_moe", "qwen2_moe"):
        config |= {
            "num_local_experts": draw(st.integers(1, 5)),
            "moe_intermediate_size": draw(st.sampled_from([6, 12])),
            "shared_expert_intermediate_size": 12,
            "decoder_sparse_step": draw(st.integers(1, 2)),
        }
    return ModelShape.from_config(config, draw(st.sampled_from(on_top or tuple(Head))))


def conventions(model: ModelShape) -> st.SearchStrategy[Convention]:
    """Of the engines that have a use for the model: a score head generates nothing."""
    return CONVENTIONS if model.head is Head.LM else st.just(TRAINING)


@st.composite
def layouts(draw: st.DrawFn, model: ModelShape, convention: Convention) -> Layout:
    """Any layout the convention can run, uneven splits and degrees that are no powers of two among them."""
    pp = draw(st.integers(1, min(4, model.layers)))
    split = None
    if draw(st.booleans()):
        ends = sorted(draw(st.permutations(range(1, model.layers)))[: pp - 1])
        split = tuple(b - a for a, b in zip([0, *ends], [*ends, model.layers], strict=True))
    fs = 1 if convention is GENERATION else draw(st.integers(1, 5))
    tp = draw(st.sampled_from(convention.allowed_tp(model)))
    return Layout(tp, pp, fs, draw(st.sampled_from(expert_degrees(model, convention, tp * fs))), split)


def expert_degrees(model: ModelShape, convention: Convention, ranks: int) -> list[int]:
    """The ep that the convention can run over the `ranks` of a pipeline stage: an expert is never cut finer than at
    ep 1, which tp already fits."""
    most = 1 if model.experts is None else min(model.experts.count, ranks)
    degrees = [ep for ep in range(1, most + 1) if ranks % ep == 0]
    return [ep for ep in degrees if ep in (1, ranks)] if convention is GENERATION else degrees


def indexed(tensors: Mapping[TensorName, LogicalTensor]) -> dict[TensorName, Array]:
    """Every element of every tensor filled with a number of its own, from 1."""
    filled, first = {}, 1
    for name, tensor in tensors.items():
        filled[name] = np.arange(first, first + tensor.elements, dtype=np.uint32).reshape(tensor.shape)
        first += tensor.elements
    return filled


def hold(state: Mapping[TensorName, Array], boxes: Mapping[TensorName, Sequence[Box]]) -> Held:
    """What a rank with `boxes` holds of `state`."""
    return {name: {box: state[name][box.slices].copy() for box in region} for name, region in boxes.items()}


def run(
    program: TransferProgram,
    sources: Mapping[RankRef, Held],
    target: RankRef,
    into: Mapping[TensorName, Array],
    count: Mapping[TensorName, Array],
) -> None:
    """Carry out the transfers of one target, counting how often each element arrives."""
    for transfer in program.for_target(target):
        outer, array = next(
            (box, array)
            for box, array in sources[transfer.source][transfer.tensor].items()
            if box.contains(transfer.box)
        )
        into[transfer.tensor][transfer.box.slices] = array[transfer.box.relative_to(outer).slices]
        count[transfer.tensor][transfer.box.slices] += 1
