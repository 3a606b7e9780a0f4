"""Results as pictures: `python -m benchmarks.plots RESULT.json OUT.png`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.plots import overlap, reshard, transport

DRAW: Mapping[str, Callable[[Mapping[str, Any], Any], None]] = {
    "overlap": overlap.draw,
    "reshard": reshard.draw,
    "transport": transport.draw,
}
"""Name of a benchmark → what draws its metrics into a figure of matplotlib."""


def plot(report: Mapping[str, Any], out: Path) -> None:
    """Write the picture of a benchmark's report; KeyError for one that has none."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure = pyplot.figure(figsize=(12, 4.5), layout="constrained")
    DRAW[report["name"]](report["metrics"], figure)
    machine = report["machine"]
    figure.suptitle(f"{report['name']}: {machine['processor']}, {machine['cores']} cores", fontsize=9)
    figure.savefig(out, dpi=150)
    pyplot.close(figure)
