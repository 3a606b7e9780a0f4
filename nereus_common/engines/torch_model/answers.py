"""What a rank's worker answers to its service: without torch, which no service may have to load to read an answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nereus_common.core.ids import TensorName
from nereus_common.core.transfer import Box


@dataclass(frozen=True, slots=True)
class RankHolding:
    """What one rank holds of every logical tensor, at which version (-1: none), and where it can be pulled from."""

    rank: int
    address: bytes
    version: int
    boxes: Mapping[TensorName, tuple[Box, ...]]


@dataclass(frozen=True, slots=True)
class RankPull:
    """`digest`: of the staged boxes as logical content, in the wire dtype."""

    rank: int
    bytes: int
    seconds: float
    digest: int
