"""Memory of this process: the allocator's on a GPU, resident bytes as the kernel counts them on a CPU."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def reset_peak(device: torch.device) -> None:
    """Start a new measurement."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        _CLEAR.write_text("5")


def peak_bytes(device: torch.device) -> int:
    """The largest amount in use since `reset_peak`."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    lines = dict(line.split(":", 1) for line in _STATUS.read_text().splitlines())
    return int(lines["VmHWM"].split()[0]) * 1024


def give_back(device: torch.device) -> None:
    """Return to the system what tensors have freed; allocators keep it otherwise."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(ctypes.c_size_t(0))
