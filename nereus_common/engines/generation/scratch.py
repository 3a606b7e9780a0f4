"""The folder of an engine's sockets and temporary files, which goes when its owner goes, however that ends.

The owner holds a lock on its folder, and the kernel drops it with the owner. So a folder that can be locked belongs to
nobody, also where several containers, with process ids of their own, share one /tmp.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

PREFIX = "nereus-engine-"
"""Of folders that are locked from their first moment; any other name may be in use without a lock."""
_NEW = "nereus-new-"
"""Of a folder not yet locked, so that nobody takes it for one left behind."""


class Scratch:
    """Made by `create`; `path` is the folder."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock = lock

    @classmethod
    def create(cls) -> Scratch:
        """A new folder, after those that nobody owns any more are removed."""
        parent = Path(tempfile.gettempdir())
        sweep(parent)
        new = Path(tempfile.mkdtemp(prefix=_NEW, dir=parent))
        lock = _try_lock(new)
        assert lock is not None, "nobody else knows the folder yet"
        return cls(new.rename(parent / new.name.replace(_NEW, PREFIX, 1)), lock)

    def remove(self) -> None:
        """Also from another thread than the creator's, and a second time."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def sweep(parent: Path) -> None:
    """Remove the folders in `parent` whose owners are gone; those of other users are theirs."""
    for folder in parent.glob(f"{PREFIX}*"):
        try:
            lock = _try_lock(folder)
        except (PermissionError, FileNotFoundError, NotADirectoryError):
            continue
        if lock is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)


def _try_lock(folder: Path) -> int | None:
    """An open descriptor that holds the folder's lock, or None where another process holds it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor
