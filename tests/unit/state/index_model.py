"""What a rank holds, worked out another way: by laying out the indices of every dimension in numpy.

It shares no code with the oracle: parts are slices of padded index arrays, ranks are places in reshaped grids.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from nereus_common.core.layout import Layout
from nereus_common.state.architecture import LogicalTensor, ModelShape

Mask = NDArray[np.bool_]
NOBODY = -1


def parts_of(indices: NDArray[np.int64], parts: int, multiple: int = 1) -> NDArray[np.int64]:
    """[parts, n]: the indices laid out in order over equal parts, the end filled with NOBODY; `multiple`: up to which
    multiple in all, where parts must not decide it."""
    total = -(-len(indices) // multiple) * multiple if multiple > 1 else -(-len(indices) // parts) * parts
    padded = np.full(total, NOBODY)
    padded[: len(indices)] = indices
    return padded.reshape(parts, -1)


def stages(model: ModelShape, layout: Layout, serving: bool) -> list[set[int]]:
    """The layers of each pipeline stage."""
    counts = [model.layers // layout.pp] * layout.pp
    for extra in range(model.layers % layout.pp):
        counts[layout.pp - 2 - extra if serving else extra] += 1
    counts = list(layout.split or counts)
    ends = np.cumsum([0, *counts]).tolist()
    return [set(range(a, b)) for a, b in pairwise(ends)]


def holds(model: ModelShape, layout: Layout, rank: int, tensor: LogicalTensor, serving: bool) -> Mask | None:
    """The elements that `rank` holds; None where it has nothing to do with the tensor."""
    grid = np.arange(layout.ranks).reshape(layout.pp, layout.fs, layout.tp)
    stage, shard, part = (int(at[0]) for at in np.nonzero(grid == rank))
    if not _on_stage(model, layout, stage, tensor, serving):
        return None
    shards, parts = layout.fs, layout.tp
    if tensor.expert is not None:
        parts = int(np.gcd(layout.tp, layout.fs * layout.tp // layout.ep))
        inside = np.arange(layout.fs * layout.tp).reshape(-1, layout.ep, parts)
        shards = inside.shape[0]
        shard, index, part = (int(at[0]) for at in np.nonzero(inside == rank % (layout.fs * layout.tp)))
        assert model.experts is not None
        if index != _expert_index(model.experts.count, layout.ep, tensor.expert, serving):
            return None
    axes = [np.arange(size) for size in tensor.shape]
    _cut_over_tp(axes, model, tensor, parts, part, serving)
    if axes:
        real = axes[0][axes[0] != NOBODY]
        axes[0] = parts_of(real, shards)[shard]
    mask = np.zeros(tensor.shape, bool)
    mask[np.ix_(*(axis[axis != NOBODY] for axis in axes)) if axes else ()] = True
    return mask


def _on_stage(model: ModelShape, layout: Layout, stage: int, tensor: LogicalTensor, serving: bool) -> bool:
    name, last = str(tensor.name), layout.pp - 1
    if ".layers." in name:
        return int(name.split(".")[2]) in stages(model, layout, serving)[stage]
    if "embed_tokens" in name:
        return stage == 0 or (model.tied and stage == last)
    return stage == last


def _expert_index(experts: int, ep: int, expert: int, serving: bool) -> int:
    if serving:  # whole rounds first, then one more each for the first
        sizes = [experts // ep + (index < experts % ep) for index in range(ep)]
        return int(np.repeat(np.arange(ep), sizes)[expert])
    return int(np.nonzero((parts_of(np.arange(experts), ep) == expert).any(axis=1))[0][0])


def _cut_over_tp(
    axes: list[NDArray[np.int64]], model: ModelShape, tensor: LogicalTensor, parts: int, part: int, serving: bool
) -> None:
    """Narrow the dimension that tensor parallelism cuts, told from the checkpoint's name alone."""
    words = str(tensor.name).partition(":")[0].split(".")
    kind, bias = words[-2], words[-1] == "bias"
    if not axes or kind in ("gate", "shared_expert_gate", "score") or "norm" in kind:
        return
    if kind in ("o_proj", "down_proj", "w2"):
        if not bias:
            axes[1] = parts_of(axes[1], parts)[part]
    elif kind in ("embed_tokens", "lm_head"):
        axes[0] = parts_of(axes[0], parts, 64 if serving else 1)[part]
    elif kind in ("k_proj", "v_proj") and parts > model.kv_heads:
        heads = axes[0].reshape(model.kv_heads, -1)
        axes[0] = np.repeat(heads, parts // model.kv_heads, axis=0)[part]
    else:
        axes[0] = parts_of(axes[0], parts)[part]
