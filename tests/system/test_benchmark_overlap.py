"""The benchmark `overlap` runs to a result: one trial of each kind, on real processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.overlap_trials import KINDS
from benchmarks.plots import plot
from benchmarks.report import measure

pytestmark = pytest.mark.timeout(600)


def test_changes_that_want_each_others_devices_succeed_by_one_dag(tmp_path: Path) -> None:
    report = measure("overlap", ["python", "-m", "benchmarks", "overlap", "--tiny"], tiny=True)
    found = report["metrics"]
    assert found["success_rate"] == dict.fromkeys(KINDS, 1.0), found["errors"]
    assert all(moved > 0 for moved in found["bytes_moved"].values())
    assert all(edges >= 1 for edges in found["resource_edges_mean"].values())
    for kind, rate in found["success_rate_alone"].items():
        assert rate == 1.0 - found["mutual"][kind], found["errors_alone"]
    plot(report, tmp_path / "overlap.png")
    assert (tmp_path / "overlap.png").stat().st_size > 10_000
