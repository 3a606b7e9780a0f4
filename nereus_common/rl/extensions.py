"""A user's own code, found by installed name, by import path or in a file.

A name is looked up in an entry point group; `package.module:attribute` is imported, and so is
`path/to/file.py:attribute`. Importing runs it: this happens in worker processes, see `nereus_common.engines.strangers`.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from nereus_common.core.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class Extension:
    """One kind of user code: what it is called, its entry point group, and the job field that names one."""

    kind: str
    group: str
    field: str

    def load(self, name: str) -> Callable[..., Any]:
        """The function or class that `name` stands for; InvalidInput says what was looked for and what there is."""
        if ":" in name:
            return self._import(name)
        found = {entry.name: entry.value for entry in entry_points(group=self.group)}
        if name not in found:
            raise InvalidInput(
                f"there is no {self.kind} named {name!r}",
                remedy=f"installed: {', '.join(sorted(found)) or 'none'}; or write package.module:name, file.py:name",
                field=self.field,
            )
        return self._import(found[name])

    def _import(self, path: str) -> Callable[..., Any]:
        where, _, attribute = path.rpartition(":")
        try:
            module = self._module_of_file(Path(where)) if where.endswith(".py") else importlib.import_module(where)
            found = getattr(module, attribute)
        except Exception as wrong:  # a user module may raise anything while it is imported
            raise InvalidInput(f"{self.kind} {path} cannot be imported: {wrong!r}", field=self.field) from wrong
        if not callable(found):
            raise InvalidInput(
                f"{self.kind} {path} is a {type(found).__name__}, which cannot be called", field=self.field
            )
        loaded: Callable[..., Any] = found
        return loaded

    def _module_of_file(self, path: Path) -> ModuleType:
        spec = importlib.util.spec_from_file_location(f"nereus_{self.kind}_{path.stem}", path)
        if spec is None or spec.loader is None:
            raise ImportError(f"{path} is no Python file")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        return module
