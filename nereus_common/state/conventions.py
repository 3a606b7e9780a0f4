"""How an engine family cuts a model: one table from rule to cut per convention.

TRAINING is torch: DTensor over tp, then FSDP2 over fs on dimension 0 of what tp left, both cutting as `torch.chunk`
does (chunks of ⌈n/parts⌉, later ranks may get less or nothing). Inference units use it too.
GENERATION is vLLM: KV heads shared when tp exceeds them, the vocabulary padded to a multiple of 64 and cut evenly;
padding is nobody's state and appears in no box.

Experts (see `experts`): torch.chunk of them over ep in TRAINING, vLLM's linear placement in GENERATION.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from nereus_common.core.errors import InvalidPlan, UnsupportedByEngine
from nereus_common.core.ids import Head, Stage
from nereus_common.core.layout import Layout
from nereus_common.core.transfer import Box
from nereus_common.state.architecture import LogicalTensor, ModelShape
from nereus_common.state.experts import chunked_experts, even_experts, expert_degrees

VOCABULARY_PADDING = 64

Cut = Callable[[LogicalTensor, int, int], Box]
"""(tensor, parts, index) → the box of part `index`; it may be empty."""


def span(box: Box, axis: int, start: int, stop: int) -> Box:
    """`box` narrowed to [start, stop) of `axis`, counted from the box's own start and clipped to it."""
    low = min(box.start[axis] + start, box.stop[axis])
    high = min(box.start[axis] + stop, box.stop[axis])
    return Box(
        (*box.start[:axis], low, *box.start[axis + 1 :]), (*box.stop[:axis], max(low, high), *box.stop[axis + 1 :])
    )


def chunk(box: Box, axis: int, parts: int, index: int) -> Box:
    """Part `index` of `torch.chunk(…, parts, dim=axis)`."""
    size = -(-box.shape[axis] // parts)
    return span(box, axis, index * size, (index + 1) * size)


def whole(tensor: LogicalTensor, parts: int, index: int) -> Box:
    return Box.whole(tensor.shape)


def rows(tensor: LogicalTensor, parts: int, index: int) -> Box:
    return chunk(Box.whole(tensor.shape), 0, parts, index)


def columns(tensor: LogicalTensor, parts: int, index: int) -> Box:
    return chunk(Box.whole(tensor.shape), 1, parts, index)


def shared_heads(tensor: LogicalTensor, parts: int, index: int) -> Box:
    """Whole heads: several per rank, or one head for `parts / heads` neighbouring ranks."""
    heads = tensor.units
    return rows(tensor, parts, index) if parts <= heads else rows(tensor, heads, index // (parts // heads))


def padded_rows(tensor: LogicalTensor, parts: int, index: int) -> Box:
    size = padded_vocabulary(tensor.shape[0]) // parts
    return span(Box.whole(tensor.shape), 0, index * size, (index + 1) * size)


def padded_vocabulary(size: int) -> int:
    return -(-size // VOCABULARY_PADDING) * VOCABULARY_PADDING


@dataclass(frozen=True)
class Convention:
    """One column of the table: a cut over tp per rule, and the limits that come with it.

    `replace(TRAINING, vocabulary=whole)` is the convention of an engine that keeps the vocabulary on every rank.
    `max_fs` None: no limit. `refuses` says why a model cannot be run at all, "" when it can.
    """

    name: str
    column: Cut
    kv_head: Cut
    row: Cut
    vocabulary: Cut
    replicated: Cut
    layer_counts: Callable[[Layout, int], tuple[int, ...]]
    experts: Callable[[int, int, int], range]
    """(experts of a layer, ep, expert-parallel index) → those that the ranks of this index hold."""
    max_fs: int | None = None
    whole_experts: bool = False
    """Whether ep is all or nothing: 1, or as many as a pipeline stage has ranks."""
    refuses: Callable[[ModelShape], str] | None = None

    def cut(self, tensor: LogicalTensor, parts: int, index: int) -> Box:
        """The box of tensor-parallel rank `index`, before fs cuts it further."""
        cut: Cut = getattr(self, tensor.rule.value)
        return cut(tensor, parts, index)

    def allowed_tp(self, model: ModelShape) -> tuple[int, ...]:
        """Every tensor-parallel degree this model can run at without expert parallelism, ascending."""
        degrees = (Layout(tp=tp) for tp in range(1, model.query_heads + 1))
        return tuple(layout.tp for layout in degrees if not self._tp_fault(model, layout))

    def check(self, model: ModelShape, layout: Layout) -> None:
        """Raise InvalidPlan or UnsupportedByEngine, naming field, value and remedy, when `layout` cannot be run."""
        if self.refuses is not None and (unfit := self.refuses(model)):
            raise UnsupportedByEngine(unfit, field="config", remedy="use another generation engine")
        if fault := self._tp_fault(model, layout):
            field, value, kind = fault
            allowed = ", ".join(map(str, self.allowed_tp(model)))
            raise kind(
                f"{self.name} of this {model.model_type} model cannot run tp{layout.tp}: {field} is {value}",
                remedy=f"tp can be {allowed}",
                field="layout.tp",
                model_field=field,
            )
        if self.max_fs is not None and layout.fs > self.max_fs:
            raise UnsupportedByEngine(
                f"{self.name} cannot run fs{layout.fs}", remedy=f"fs can be {self.max_fs}", field="layout.fs"
            )
        self._check_ep(model, layout)
        self.layer_counts(layout, model.layers)

    def _check_ep(self, model: ModelShape, layout: Layout) -> None:
        if layout.ep > 1 and model.experts is None:
            raise InvalidPlan(f"ep{layout.ep}: the model has no experts", remedy="ep can be 1", field="layout.ep")
        if model.experts is not None and layout.ep > model.experts.count:
            raise InvalidPlan(
                f"ep{layout.ep}: the model has {model.experts.count} experts in a layer",
                remedy=f"ep can be at most {model.experts.count}",
                field="layout.ep",
            )
        if self.whole_experts and layout.ep not in (1, layout.tp * layout.fs):
            raise UnsupportedByEngine(
                f"{self.name} cannot run ep{layout.ep} on tp{layout.tp}: it cuts every expert over tp, or none",
                remedy=f"ep can be 1 or {layout.tp * layout.fs}",
                field="layout.ep",
            )

    def _tp_fault(
        self, model: ModelShape, layout: Layout
    ) -> tuple[str, int, type[InvalidPlan | UnsupportedByEngine]] | None:
        tp, experts = layout.tp, model.experts
        if model.query_heads % tp:
            return "num_attention_heads", model.query_heads, InvalidPlan
        if model.has_dense_layers and model.ffn % tp:
            return "intermediate_size", model.ffn, InvalidPlan
        if experts is not None and experts.ffn % expert_degrees(layout)[0]:
            return "the width of an expert", experts.ffn, InvalidPlan
        if experts is not None and experts.shared_ffn % tp:
            return "shared_expert_intermediate_size", experts.shared_ffn, InvalidPlan
        if model.kv_heads % tp and (tp < model.kv_heads or tp % model.kv_heads):
            return "num_key_value_heads", model.kv_heads, InvalidPlan
        if model.kv_heads % tp and self.kv_head is not shared_heads:
            return "num_key_value_heads", model.kv_heads, UnsupportedByEngine
        if self.vocabulary is padded_rows and padded_vocabulary(model.vocabulary) % tp:
            return (
                f"vocab_size padded to a multiple of {VOCABULARY_PADDING}",
                padded_vocabulary(model.vocabulary),
                InvalidPlan,
            )
        return None


def even_layers(layout: Layout, layers: int) -> tuple[int, ...]:
    """The layout's own split, or as even as possible with the earlier stages taking what does not divide."""
    return layout.layer_counts(layers)


def vllm_layers(layout: Layout, layers: int) -> tuple[int, ...]:
    """The layout's own split, or vLLM's rule (`get_pp_indices`): what does not divide goes to the stages before the
    last, from the back; 30 layers over 4 stages are 7, 8, 8, 7."""
    if layout.split is not None or layout.pp > layers:
        return layout.layer_counts(layers)
    even, left = divmod(layers, layout.pp)
    return tuple(even + (layout.pp - 1 - left <= stage < layout.pp - 1) for stage in range(layout.pp))


def _unfit_for_vllm(model: ModelShape) -> str:
    """Models that vLLM cannot generate with, or would serve wrongly; its loaders say nothing about the third kind."""
    if model.head is not Head.LM:
        return f"the model's head is {model.head}: it gives no logits to sample from"
    if model.model_type == "qwen3" and model.output_bias:
        return "config.attention_bias is true: vLLM's qwen3 has no bias on o_proj"
    if model.model_type == "qwen2" and model.query_heads * model.head_dim != model.hidden:
        return f"config.head_dim is {model.head_dim}: vLLM's qwen2 takes hidden_size / num_attention_heads instead"
    return ""


TRAINING = Convention(
    name="training",
    column=rows,
    kv_head=rows,
    row=columns,
    vocabulary=rows,
    replicated=whole,
    layer_counts=even_layers,
    experts=chunked_experts,
)

GENERATION = Convention(
    name="generation",
    column=rows,
    kv_head=shared_heads,
    row=columns,
    vocabulary=padded_rows,
    replicated=whole,
    layer_counts=vllm_layers,
    experts=even_experts,
    max_fs=1,
    whole_experts=True,
    refuses=_unfit_for_vllm,
)


def convention_of(stage: Stage) -> Convention:
    return GENERATION if stage is Stage.GENERATION else TRAINING
