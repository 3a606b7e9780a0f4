"""Cluster files: which nodes a job may be planned for, whether they are there or not.

nodes:
  - {kind: h100, count: 4}             # a usual server: `nereus_common.planning.hardware.NODES`
  - {kind: ours, count: 2}
kinds:
  ours: {devices: 4, memory_gb: 48, tflops: {bfloat16: 180}, memory_gb_per_s: 900,
         inside_gb_per_s: 30, outside_gb_per_s: 12}
"""

from __future__ import annotations

import re
from pathlib import Path
from types import MappingProxyType
from typing import Annotated

from pydantic import Field, ValidationError

from nereus.spec.section import PositiveFloat, PositiveInt, Section
from nereus.spec_errors import refusal
from nereus.spec_file import read_mapping
from nereus_common.core.errors import InvalidInput
from nereus_common.planning.hardware import GB, NODES, TERA, Cluster, NodeKind, Processor, cluster_of

SHORT = re.compile(r"([a-z0-9-]+)x(\d+)")


class KindSpec(Section):
    """A server. `tflops` by dtype, dense; rates in GB/s in one direction: of a device's memory, of a device to the
    others of its node, and of the whole node to others."""

    devices: PositiveInt
    memory_gb: PositiveFloat
    tflops: Annotated[dict[str, PositiveFloat], Field(min_length=1)]
    memory_gb_per_s: PositiveFloat
    inside_gb_per_s: PositiveFloat
    outside_gb_per_s: PositiveFloat

    def node(self, name: str) -> NodeKind:
        flops = {dtype: peak * TERA for dtype, peak in self.tflops.items()}
        flops.setdefault("float32", min(flops.values()))
        memory = int(self.memory_gb * GB)
        processor = Processor(name, MappingProxyType(flops), memory, self.memory_gb_per_s * GB)
        return NodeKind(processor, self.devices, self.inside_gb_per_s * GB, self.outside_gb_per_s * GB)


class NodesSpec(Section):
    kind: str
    count: PositiveInt = 1


class ClusterSpec(Section):
    nodes: Annotated[tuple[NodesSpec, ...], Field(min_length=1)]
    kinds: dict[str, KindSpec] = Field(default_factory=dict)

    def cluster(self) -> Cluster:
        """InvalidInput for a kind that is neither usual nor described."""
        known = {**NODES, **{name: kind.node(name) for name, kind in self.kinds.items()}}
        nodes: dict[str, NodeKind] = {}
        for number, group in enumerate(self.nodes):
            if group.kind not in known:
                raise InvalidInput(
                    f"nodes.{number}.kind: there is no node kind {group.kind!r}",
                    remedy=f"one of {', '.join(sorted(known))}, or describe it under kinds",
                    field=f"nodes.{number}.kind",
                )
            for _ in range(group.count):
                nodes[f"node{len(nodes)}"] = known[group.kind]
        return Cluster(nodes)


def load_cluster(text: str) -> Cluster:
    """Of a cluster file, or of `KINDxNODES`: h100x4.

    NotFound when there is no such file; InvalidInput names what is wrong.
    """
    short = SHORT.fullmatch(text)
    if short and not Path(text).exists():
        return cluster_of(short[1], int(short[2]))
    try:
        spec = ClusterSpec.model_validate(read_mapping(Path(text), "cluster"))
    except ValidationError as wrong:
        raise refusal(ClusterSpec, wrong, text) from wrong
    return spec.cluster()
