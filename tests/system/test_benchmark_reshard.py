"""The benchmark `reshard` runs to a result: a tiny model, two pairs, one repetition. Its times say nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.plots import plot
from benchmarks.report import measure

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

RATIOS = ("dcp_ratio_min", "dcp_ratio_geomean", "restart_ratio", "restart_ratio_engine", "peak_ratio")


def test_a_reshard_moves_what_is_needed_and_every_ratio_is_measured(tmp_path: Path) -> None:
    report = measure("reshard", ["python", "-m", "benchmarks", "reshard", "--tiny"], tiny=True)
    found = report["metrics"]
    assert found["bytes_ratio"] == 1.0
    assert found["moved_fraction_max"] > 0.6
    assert all(found[name] > 0 for name in RATIOS)
    assert list(found["pairs"]) == ["tp1.pp1.fs1 -> tp2.pp1.fs1", "tp2.pp1.fs1 -> tp1.pp1.fs1"]
    assert all(pair["in_place_rounds"] > 1 for pair in found["pairs"].values())
    plot(report, tmp_path / "reshard.png")
    assert (tmp_path / "reshard.png").stat().st_size > 10_000
