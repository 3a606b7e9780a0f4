"""What a vLLM layer computes with, seen from outside: packed weights have no tensor left to look at.

Pushing the identity through a layer gives its matrix, bit for bit but for the sign of zeros: every output is one
weight times one, plus zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

ROWS = 256
"""Rows of the identity pushed through at a time: bounds the memory of a wide layer."""

_WORD = {2: torch.int16, 4: torch.int32}


def product(layer: Any) -> torch.Tensor:
    """The matrix [out, in] that the layer's own method multiplies with, without its bias."""
    size = int(getattr(layer, "input_size_per_partition", layer.input_size))
    return _through(lambda rows: layer.quant_method.apply(layer, rows), size, layer.weight)


def head_in_use(processor: Any, head: Any) -> torch.Tensor:
    """The matrix [vocabulary rows, in] by which logits are computed, in the head's dtype."""
    return _through(lambda rows: processor._apply_head(head, rows, None), head.embedding_dim, head.weight)


def embedding(layer: Any) -> torch.Tensor:
    """The rows that token ids are looked up in."""
    rows = torch.arange(layer.weight.shape[0], device=layer.weight.device)
    looked_up: torch.Tensor = layer.quant_method.embedding(layer, rows)
    return looked_up


def bits(matrix: torch.Tensor, dtype: torch.dtype) -> NDArray[Any]:
    """The bit patterns of `matrix` in `dtype`, which holds its values exactly, as unsigned words on the host."""
    words = matrix.detach().to(dtype).contiguous().view(_WORD[dtype.itemsize]).cpu().numpy()
    return words.view(np.dtype(f"u{dtype.itemsize}"))


def _through(apply: Callable[[torch.Tensor], torch.Tensor], size: int, like: torch.Tensor) -> torch.Tensor:
    """`like` has the dtype and device of the layer's input, even where packing has emptied it."""
    blocks = []
    for first in range(0, size, ROWS):
        count = min(ROWS, size - first)
        identity = torch.zeros(count, size, dtype=like.dtype, device=like.device)
        identity[torch.arange(count), torch.arange(first, first + count)] = 1
        blocks.append(apply(identity))
    return torch.cat(blocks).T
