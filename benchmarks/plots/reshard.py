"""Seconds of each way by pair, and each pair's worst device against its bound."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

WAYS = {"seconds": "live", "in_place_seconds": "live, in place", "dcp_seconds": "DCP", "restart_seconds": "restart"}
"""Figure of a pair → what it is called."""
WIDTH = 0.2


def draw(metrics: Mapping[str, Any], figure: Any) -> None:
    pairs = metrics["pairs"]
    names = [name.replace(" -> ", "\n→ ") for name in pairs]
    times, peaks = figure.subplots(1, 2, width_ratios=(3, 1))
    for number, (key, label) in enumerate(WAYS.items()):
        places = [index + (number - 1.5) * WIDTH for index in range(len(pairs))]
        bars = times.bar(places, [pair[key] for pair in pairs.values()], WIDTH, label=label)
        times.bar_label(bars, fmt="%.2g", fontsize=7)
    times.set_xticks(range(len(pairs)), names, fontsize=8)
    times.set(yscale="log", ylabel="seconds", title="Reshard of parameters and Adam's state")
    times.legend(fontsize=8)
    peaks.barh(range(len(pairs)), [pair["peak_ratio"] for pair in pairs.values()])
    peaks.axvline(1.0, color="black", linewidth=1)
    peaks.set_yticks(range(len(pairs)), names, fontsize=8)
    peaks.set(xlabel="peak ÷ (max(old, new) + 2 buckets)", title="In place: worst device")
