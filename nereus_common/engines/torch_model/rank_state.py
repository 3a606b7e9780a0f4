"""What engines whose state moves have in common: one rank's state, its version, and whether it is being offered."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from nereus_common.core.errors import IllegalTransition, StaleVersion
from nereus_common.core.ids import TensorName
from nereus_common.core.transfer import Box
from nereus_common.engines.torch_model.build import fsdp_modules
from nereus_common.engines.torch_model.live import Served
from nereus_common.engines.torch_model.live_state import NOTHING, LiveState, Part
from nereus_common.engines.torch_model.memory import give_back
from nereus_common.engines.torch_model.stage import StageModel
from nereus_common.transport.base import Raw


class RankState:
    """`parts` of `model`, without storage until they are filled. `version` is NOTHING while they are not one version's,
    or not all of it."""

    def __init__(self, who: str, device: torch.device, model: StageModel, parts: Mapping[TensorName, Part]) -> None:
        self._who, self._device, self._model = who, device, model
        self._live = LiveState(who, parts)
        self._parts = parts
        give_back(device)
        self._version = NOTHING
        self._offered = False

    @property
    def parts(self) -> Mapping[TensorName, Part]:
        """All of the state, whether it is here or not."""
        return self._parts

    @property
    def version(self) -> int:
        """-1 until loaded or filled, and while only parts are here."""
        return self._version

    def offer(self, version: int) -> Mapping[TensorName, Sequence[tuple[Box, Served]]]:
        """What is here of `version`, in place: from now on it stays as it is. StaleVersion when nothing is."""
        held = self._version if self._version >= 0 else self._live.version
        if version != held or version < 0:
            raise StaleVersion(f"{self._who} holds version {held}, not {version}")
        if not self._offered:
            self._reshard()
            give_back(self._device)
        self._offered = True
        return self._live.served()

    def withdraw(self) -> None:
        self._offered = False

    def drop(self, tensors: Iterable[TensorName]) -> None:
        """Free offered tensors that nobody reads any more; with what is left no work is done."""
        if not self._offered:
            raise IllegalTransition(f"{self._who} offers nothing, so nothing of it may be dropped")
        self._version = NOTHING
        self._live.drop(tensors)
        give_back(self._device)

    def lacking(self, version: int, asked: Sequence[tuple[TensorName, Box]]) -> Sequence[tuple[Box, ...]]:
        """See `LiveState.lacking`; IllegalTransition where a whole state of another version would be lost."""
        if self._version not in (NOTHING, version):
            raise IllegalTransition(f"{self._who} holds version {self._version} and takes no parts of {version}")
        return self._live.lacking(version, asked)

    def put(self, tensor: TensorName, box: Box, data: Raw) -> None:
        """See `LiveState.put`."""
        self._live.put(tensor, box, data)

    def filled(self, version: int, *, whole: bool) -> None:
        """A part has come to its end; `whole`: it was the last, and the state is `version` now.

        VerificationFailed when something of it never came.
        """
        self._live.settle()
        if whole:
            self._live.check_whole()
            self._changed(version)

    def state_digests(self, version: int) -> Mapping[str, int]:
        """By kind, of what this rank owns within its unit; StaleVersion at another version."""
        if version != self._version:
            raise StaleVersion(f"{self._who} holds version {self._version}, not {version}")
        return self._live.digests()

    def _changed(self, version: int) -> None:
        """The state was replaced: what was gathered from the old one is of no use."""
        self._reshard()
        self._version, self._offered = version, False
        self._live.replaced(version)

    def _check_not_offered(self) -> None:
        if self._offered:
            raise IllegalTransition(f"{self._who} offers its state and keeps it as it is", remedy="withdraw it first")

    def _reshard(self) -> None:
        """Drop gathered parameters."""
        for module in fsdp_modules(self._model):
            module.reshard()
