"""Vector functions of the CPU that are exact from their first call on.

PyTorch's CPU build hands cos, sqrt, log and their like to Intel's vector library, which picks the kernel of a function
at its first call. When two threads make that call together, one of them may take a kernel of low accuracy for its
part, just this once: errors of 1e-4 in rotary embeddings or in Adam's first update (pytorch issue 188792; seen in one
process of twenty here).
"""

from __future__ import annotations

import torch

FUNCTIONS = (
    *("acos", "asin", "atan", "ceil", "cos", "erf", "erfc", "erfinv", "exp", "exp2", "expm1", "floor", "lgamma", "log"),
    *("log10", "log1p", "log2", "reciprocal", "round", "rsqrt", "sigmoid", "sin", "sinh", "sqrt", "tan", "tanh"),
    "trunc",
)


def settle_vector_math() -> None:
    """Let every function's kernel be picked by one thread alone. To be called before a process computes anything: the
    one number given is too little for a second thread."""
    for dtype in (torch.float32, torch.float64):
        number = torch.full((1,), 0.5, dtype=dtype)
        for name in FUNCTIONS:
            getattr(torch, name)(number)


def use_threads(count: int) -> None:
    """`count` threads within an operation from here on, torch's own choice for 0; exact from their first call on."""
    if count:
        torch.set_num_threads(count)
    settle_vector_math()
