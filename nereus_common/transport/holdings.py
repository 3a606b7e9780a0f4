"""What this process offers: versions of boxes by holder, pinned while they are pulled.

publish ──► offered ──(pin, unpin)*──► retired ──► dropped when the last pin goes
                                          └──► revoked when `retire` ran out of patience: pins learn it at their
                                               next chunk
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

from numpy.typing import NDArray

from nereus_common.core.errors import InvalidInput, NotFound, StaleVersion
from nereus_common.core.ids import TensorName
from nereus_common.core.transfer import Box, RankRef
from nereus_common.transport.base import Tensors


class Held:
    """One version of one holder; guarded by the lock of its `Holdings`."""

    def __init__(self, holder: RankRef, version: int, tensors: Tensors) -> None:
        self.holder = holder
        self.version = version
        self.tensors = tensors
        self.pins = 0
        self.retired = False
        self.revoked = False


class Pin:
    """Keeps a version in place while it is read. Release it exactly once, best as a context manager."""

    def __init__(self, holdings: Holdings, held: Held) -> None:
        self._holdings = holdings
        self._held = held

    def check(self) -> None:
        """Raise StaleVersion once the version was revoked."""
        if self._held.revoked:
            raise StaleVersion(
                f"{self._held.holder} took version {self._held.version} back while it was being pulled",
                remedy="pull the version it holds now, or give pulls more time before the state changes",
                source=self._held.holder,
                version=self._held.version,
            )

    def view(self, tensor: TensorName, box: Box) -> NDArray[Any]:
        """The elements of `box`, which lies in one of the holder's boxes; NotFound otherwise."""
        for outer, array in self._held.tensors.get(tensor, ()):
            if len(outer.start) == len(box.start) and outer.contains(box):
                view: NDArray[Any] = array[box.relative_to(outer).slices or ...]
                return view
        raise NotFound(
            f"{self._held.holder} does not hold {tensor}{box} of version {self._held.version}",
            remedy="ask a rank whose boxes contain it",
            source=self._held.holder,
            tensor=tensor,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._holdings.unpin(self._held)


class Holdings:
    """All versions offered by the ranks of this process. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._held: dict[RankRef, dict[int, Held]] = defaultdict(dict)

    def publish(self, holder: RankRef, version: int, tensors: Tensors) -> None:
        """See `Transport.publish`. InvalidInput when an array does not have its box's shape."""
        for name, boxes in tensors.items():
            for box, array in boxes:
                if array.shape != box.shape:
                    raise InvalidInput(f"{name}{box} is published with an array of shape {array.shape}", field="box")
        with self._changed:
            for other in list(self._held[holder].values()):
                self._retire(other)
            self._held[holder][version] = Held(holder, version, tensors)

    def pin(self, holder: RankRef, version: int) -> Pin:
        """Keep `version` of `holder` in place; StaleVersion when it is not offered."""
        with self._changed:
            held = self._held.get(holder, {}).get(version)
            if held is None or held.retired:
                raise StaleVersion(
                    f"{holder} does not offer version {version}; it offers {self._offered(holder)}",
                    remedy="pull the version it holds now",
                    source=holder,
                    version=version,
                )
            held.pins += 1
            return Pin(self, held)

    def unpin(self, held: Held) -> None:
        with self._changed:
            held.pins -= 1
            if held.retired:
                self._drop(held)
            self._changed.notify_all()

    def retire(self, version_below: int, timeout: float) -> None:
        """See `Transport.retire`."""
        with self._changed:
            all_held = [held for versions in self._held.values() for held in versions.values()]
            self._end([held for held in all_held if held.version < version_below], timeout)

    def withdraw(self, holder: RankRef, timeout: float) -> bool:
        """See `Transport.withdraw`."""
        with self._changed:
            return self._end(list(self._held.get(holder, {}).values()), timeout)

    def _end(self, old: Sequence[Held], timeout: float) -> bool:
        """Retire, wait for the pins, revoke what is still pinned; whether nothing was. With the lock held."""
        end = time.monotonic() + timeout
        for held in old:
            self._retire(held)
        while any(held.pins for held in old):
            if not self._changed.wait(end - time.monotonic()):
                break
        for held in old:
            held.revoked = True
        return not any(held.pins for held in old)

    def _retire(self, held: Held) -> None:
        held.retired = True
        self._drop(held)

    def _drop(self, held: Held) -> None:
        """Forget `held` once nobody reads it, unless it was published anew meanwhile."""
        if not held.pins and self._held[held.holder].get(held.version) is held:
            del self._held[held.holder][held.version]

    def _offered(self, holder: RankRef) -> str:
        offered = [str(held.version) for held in self._held.get(holder, {}).values() if not held.retired]
        return f"version {', '.join(offered)}" if offered else "none"
