"""A job of a minute, on a random model: shows that a benchmark runs to a result, which then says nothing."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

STEPS = 3
ENGINES = {"generation": {"name": "transformers"}}
"""It starts in seconds."""
DTYPES = {"master": "float32", "compute": "float32", "kv": "float32"}


@contextmanager
def tiny_job(spec: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """`spec` with a tiny model, 2 prompts × 2 samples, 4 tokens and one device for each stage."""
    from tests.tiny_models import save_tiny_model

    with TemporaryDirectory(prefix="nereus-tiny-") as folder:
        small = copy.deepcopy(dict(spec))
        del small["model"]
        path = str(save_tiny_model(Path(folder) / "model"))
        small.update(models={"actor": {"path": path, "engines": ENGINES}}, steps=STEPS)
        small["algorithm"] = {**small["algorithm"], "groups_per_step": 2, "samples_per_group": 2}
        small["sampling"] = {**small["sampling"], "max_tokens": 4}
        small["prompts"] = {**small["prompts"], "examples": 0, "size": 64}
        limits = {"max_sequences": 8, "max_batched_tokens": 512, "max_length": 256, "kv_bytes": 32 << 20}
        small["plan"] = {
            "stages": {
                "actor/generation": {
                    "layout": "tp1.pp1.fs1",
                    "devices": ["node0/cpu0"],
                    "dtypes": DTYPES,
                    "generation": limits,
                },
                "actor/training": {"layout": "tp1.pp1.fs1", "devices": ["node0/cpu1"], "dtypes": DTYPES},
            }
        }
        yield small
