"""The body of a mirror: a process that keeps copies of one training rank's whole state, for when that rank is lost.

It keeps the last two versions, because the rank may be lost while a new one is being copied, and because a job may
have to go on from the version before. It needs no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nereus_common.core.errors import StaleVersion, VerificationFailed
from nereus_common.core.ids import TensorName
from nereus_common.core.transfer import Box, RankRef, state_holder
from nereus_common.engines.torch_model.answers import RankHolding, RankPull
from nereus_common.planning.memory import MIRRORED_VERSIONS
from nereus_common.state.digest import combine, digest_box
from nereus_common.transport import PullItem, PullRequest, Raw, open_transport

Copies = dict[TensorName, tuple[Box, NDArray[np.uint32]]]


@dataclass(frozen=True, slots=True)
class MirrorConfig:
    """The rank that is mirrored."""

    unit: str
    rank: int
    transport: str = "ucx"


@dataclass(frozen=True, slots=True)
class MirroredTensor:
    """A rank's `box` of a logical tensor of `shape`. `owned`: it counts in the unit's digest, as part of `kind`."""

    kind: str
    shape: tuple[int, ...]
    box: Box
    owned: bool


class MirrorWorker:
    """Methods run one at a time; the transport serves pulls beside them."""

    def __init__(self, config: MirrorConfig) -> None:
        self._config = config
        self._who = f"the mirror of {config.unit} rank {config.rank}"
        self._transport = open_transport(config.transport)
        self._holder = RankRef(state_holder(config.unit), config.rank)
        self._tensors: Mapping[TensorName, MirroredTensor] = {}
        self._versions: dict[int, Copies] = {}
        self._spare: Copies | None = None

    def keep(self, tensors: Mapping[TensorName, MirroredTensor]) -> None:
        """What the rank's state consists of, for as long as this lives. Before the first copy."""
        self._tensors = tensors

    def copy(self, version: int, address: bytes, transition: str, timeout: float) -> RankPull:
        """Pull `version` of what the rank offers at `address`. The older of the two versions kept makes room for it.

        Raises what the transport raises; then the newest version is here as before. Idempotent.
        """
        rank = self._config.rank
        if version in self._versions:
            return RankPull(rank, 0, 0.0, 0)
        while len(self._versions) >= MIRRORED_VERSIONS:
            self._spare = self._versions.pop(min(self._versions))
        copies = self._spare or {
            name: (one.box, np.empty(one.box.shape, np.uint32)) for name, one in self._tensors.items()
        }
        self._spare = copies
        items = tuple(PullItem(name, box, self._holder, address) for name, (box, _) in copies.items() if box.elements)
        request = PullRequest(version, items, np.uint32().itemsize, timeout, transition, "float32")
        missing = sum(box.elements for box, _ in copies.values())

        def put(tensor: TensorName, box: Box, data: Raw) -> None:
            nonlocal missing
            outer, array = copies[tensor]
            array[box.relative_to(outer).slices or ...] = data.view(np.uint32).reshape(box.shape)
            missing -= box.elements

        report = self._transport.pull(request, put)
        if missing:
            raise VerificationFailed(f"{self._who}: {missing} elements of version {version} never came")
        self._versions[version], self._spare = copies, None
        return RankPull(rank, report.moved_bytes, report.seconds, report.digest)

    def versions(self) -> Sequence[int]:
        """What it can give."""
        return sorted(self._versions)

    def offer(self, version: int) -> RankHolding:
        """Serve `version` in the rank's stead, for good. StaleVersion when it is not kept."""
        held = self._held(version)
        self._transport.publish(self._holder, version, {name: [(box, array)] for name, (box, array) in held.items()})
        boxes = {name: (box,) for name, (box, _) in held.items()}
        return RankHolding(self._config.rank, self._transport.address, version, boxes)

    def digest_state(self, version: int) -> Mapping[str, int]:
        """By kind, of what the rank owns within its unit. StaleVersion when it is not kept."""
        held = self._held(version)
        found = dict.fromkeys((one.kind for one in self._tensors.values()), 0)
        for name, one in self._tensors.items():
            if one.owned:
                found[one.kind] = combine((found[one.kind], digest_box(name, one.shape, *held[name])))
        return found

    def close(self) -> None:
        self._transport.close()

    def _held(self, version: int) -> Copies:
        if version not in self._versions:
            raise StaleVersion(f"{self._who} keeps versions {self.versions()}, not {version}")
        return self._versions[version]
