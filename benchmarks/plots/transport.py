"""GB/s of pulls beside `ucx_perftest`, within a node and over the network's transports."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SPEEDS = {
    "perftest_cached_gb_per_s": "perftest, one buffer",
    "perftest_gb_per_s": "perftest, 1 GiB",
    "gb_per_s": "wire",
    "verified_gb_per_s": "digests and landing",
    "packed_gb_per_s": "… of strided pieces",
}


def draw(metrics: Mapping[str, Any], figure: Any) -> None:
    for prefix, title, axes in zip(("", "network_"), ("within a node", "network"), figure.subplots(1, 2), strict=True):
        bars = axes.barh(list(SPEEDS.values()), [metrics[prefix + name] for name in SPEEDS])
        axes.bar_label(bars, fmt="%.2f", fontsize=8)
        axes.invert_yaxis()
        axes.set(xlabel="GB/s", title=f"{title}: wire at {metrics[prefix + 'perftest_ratio']:.2f} of perftest")
