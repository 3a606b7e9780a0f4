"""How often each kind of overlap succeeds, and how long a success takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

WIDTH = 0.27
PAPER_ALONE = {"same_model_cross_stage": 0.62, "cross_model_same_stage": 0.56, "cross_model_cross_stage": 0.34}
"""Table 5 of the paper: DynaRL's migration of each component by itself, on GPUs."""


def draw(metrics: Mapping[str, Any], figure: Any) -> None:
    kinds = list(metrics["success_rate"])
    names = [kind.replace("_", " ").replace(" cross", "\ncross").replace("model same", "model\nsame") for kind in kinds]
    rates, times = figure.subplots(1, 2, width_ratios=(3, 2))
    series = {
        "one DAG": metrics["success_rate"],
        "each alone": metrics["success_rate_alone"],
        "each alone, in the paper": PAPER_ALONE,
    }
    for number, (label, values) in enumerate(series.items()):
        bars = rates.bar([at + (number - 1) * WIDTH for at in range(len(kinds))], [values[k] for k in kinds], WIDTH)
        bars.set_label(label)
        rates.bar_label(bars, fmt="{:.0%}", fontsize=8)
    rates.set_xticks(range(len(kinds)), names, fontsize=8)
    rates.set(ylabel="transitions that reach their target", ylim=(0, 1.15))
    rates.legend(fontsize=8, loc="lower right")
    for shift, key in ((-0.1, "seconds"), (0.1, "seconds_alone")):
        for at, kind in enumerate(kinds):
            if took := metrics[key][kind]:
                below, above = took["median"] - took["min"], took["max"] - took["median"]
                color = "C0" if key == "seconds" else "C1"
                times.errorbar(at + shift, took["median"], [[below], [above]], fmt="o", capsize=3, color=color)
    times.set_xticks(range(len(kinds)), names, fontsize=8)
    times.set(ylabel="seconds of those that succeed", ylim=(0, None))
