"""A live reshard of training state against a save and a load of torch.distributed.checkpoint on tmpfs, in one run.

Work: SmolLM2-135M's float32 parameters with Adam's moments and counters, six fixed pairs of layouts.

- ours: from the safe boundary to the new units being committed: offer, describe, compile, pull, compare the digests of
  both sides, note it durably, commit. The new units' processes exist by then.
- peer: `benchmarks/peers/dcp.yaml`. Its time is save and load, into processes that exist too.
- `restart_ratio`: a restart loses the peer's save and load, and between them the old processes' end and the new ones'
  start; we lose the move, and by how much preparing held up the steps made meanwhile. They are made without a pause
  on all cores, which is the worst case. `restart_ratio_move` leaves the latter out.
- `restart_ratio_engine`: both ways bring up a new generation engine as well, and fill it; ours beside the running job.
- `bytes_ratio`: counted at the transport, over what the new ranks lack. `moved_fraction`: over their whole state.
- `peak_ratio`: moved in place, old and new rank of one number on one device, its processes' memory as smaps count it
  over what they take without state ÷ (the larger of its two states + two buckets).

Ratios: the worst pair, and of `dcp_ratio` the geometric mean too.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.peers.dcp import DcpReshard, dcp_reshard
from benchmarks.reshard_moves import Engine, Moves, measure_engine, measure_pair
from benchmarks.training_units import bench, random_batch, vocabulary_of
from nereus.cluster.config import default_data_dir
from nereus.models import materialise
from nereus_common.registry import embedded, open_registry

MODEL = "demo:smollm2"
PAIRS = (
    ("tp1.pp1.fs2", "tp1.pp2.fs1"),
    ("tp1.pp2.fs1", "tp3.pp1.fs1"),
    ("tp3.pp1.fs1", "tp1.pp1.fs1 x3"),
    ("tp1.pp1.fs1 x3", "tp1.pp1.fs1"),
    ("tp1.pp1.fs1", "tp1.pp1.fs2"),
    ("tp3.pp1.fs1", "tp1.pp1.fs2"),
)
"""Fixed. New units are new processes, so every pair moves all bytes of the new state."""
REPEAT, PEER_REPEAT = 2, 3
"""Moves of a pair, each to new processes; saves and loads."""
BUCKET_BYTES = 128 << 20
TINY_PAIRS = (("tp1.pp1.fs1", "tp2.pp1.fs1"), ("tp2.pp1.fs1", "tp1.pp1.fs1"))
TINY_BUCKET_BYTES = 256 << 10


@dataclass(frozen=True, slots=True)
class Setup:
    """`engine`: of the generation unit, "" for vLLM."""

    pairs: tuple[tuple[str, str], ...] = PAIRS
    repeat: int = REPEAT
    peer_repeat: int = PEER_REPEAT
    bucket_bytes: int = BUCKET_BYTES
    engine: str = ""


TINY = Setup(TINY_PAIRS, 1, 1, TINY_BUCKET_BYTES, "transformers")


@dataclass(frozen=True, slots=True)
class Pair:
    """One pair of layouts, both ways."""

    ours: Moves
    peer: DcpReshard

    @property
    def dcp_ratio(self) -> float:
        return self.peer.seconds / self.ours.seconds

    @property
    def restart_ratio(self) -> float:
        return self.peer.restart_seconds / self.ours.lost_seconds

    @property
    def restart_ratio_move(self) -> float:
        return self.peer.restart_seconds / self.ours.seconds


def run(*, tiny: bool = False) -> dict[str, Any]:
    setup = TINY if tiny else Setup()
    with _model(tiny) as model, TemporaryDirectory(prefix="nereus-reshard-") as folder:
        pairs, engine = asyncio.run(_measure(model, Path(folder), setup))
    return metrics(pairs, engine)


def metrics(pairs: Mapping[str, Pair], engine: Engine) -> dict[str, Any]:
    first = next(iter(pairs.values()))
    return {
        "dcp_ratio_min": min(pair.dcp_ratio for pair in pairs.values()),
        "dcp_ratio_geomean": statistics.geometric_mean(pair.dcp_ratio for pair in pairs.values()),
        "restart_ratio": min(pair.restart_ratio for pair in pairs.values()),
        "restart_ratio_move": min(pair.restart_ratio_move for pair in pairs.values()),
        "restart_ratio_engine": engine.restart_seconds(first.peer) / engine.lost_seconds,
        "bytes_ratio": sum(p.ours.bytes_moved for p in pairs.values())
        / sum(p.ours.bytes_needed for p in pairs.values()),
        "moved_fraction_max": max(pair.ours.moved_fraction for pair in pairs.values()),
        "peak_ratio": max(pair.ours.peak_ratio for pair in pairs.values()),
        "engine": engine.report(),
        "pairs": {name: _report(pair) for name, pair in pairs.items()},
    }


def _report(pair: Pair) -> dict[str, Any]:
    peer = pair.peer
    return {
        **pair.ours.report(),
        "dcp_ratio": pair.dcp_ratio,
        "restart_ratio": pair.restart_ratio,
        "restart_ratio_move": pair.restart_ratio_move,
        "dcp_seconds": peer.seconds,
        "dcp_save_spread": [min(peer.save), max(peer.save)],
        "dcp_load_spread": [min(peer.load), max(peer.load)],
        "dcp_bytes": peer.bytes,
        "restart_seconds": peer.restart_seconds,
        "restart_stop_seconds": peer.stop,
        "restart_start_seconds": peer.start,
    }


async def _measure(model: Path, folder: Path, setup: Setup) -> tuple[dict[str, Pair], Engine]:
    """Each pair both ways, one right after the other; then the first pair with a new engine."""
    batch = random_batch(vocabulary_of(model))
    server = embedded.start(folder / "registry")
    found: dict[str, Pair] = {}
    try:
        async with await open_registry(server.url) as registry, bench(model, folder / "logs", registry) as stage:
            for number, (old, new) in enumerate(setup.pairs):
                ours = await measure_pair(stage, old, new, batch, setup.repeat, setup.bucket_bytes)
                logs = folder / "logs" / f"dcp{number}"
                found[f"{old} -> {new}"] = Pair(ours, await dcp_reshard(model, old, new, logs, setup.peer_repeat))
            engine = await measure_engine(stage, *setup.pairs[0], batch, setup.engine)
    finally:
        embedded.stop(server.data_dir)
    return found, engine


@contextlib.contextmanager
def _model(tiny: bool) -> Iterator[Path]:
    if not tiny:
        yield materialise(MODEL, default_data_dir() / "demo" / "models")
        return
    from tests.tiny_models import save_tiny_model

    with TemporaryDirectory(prefix="nereus-tiny-") as folder:
        yield save_tiny_model(Path(folder) / "model")
