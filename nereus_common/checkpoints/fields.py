"""Reading JSON files of ours: every error names the file and the field."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nereus_common.core.errors import NotFound, VerificationFailed
from nereus_common.core.transfer import Box

FORMAT = 1
"""Of manifest and index together; a reader refuses any other."""


class Field:
    """One value of a file; `path` is where in the file, as in `models.actor.index`. VerificationFailed: not so."""

    def __init__(self, file: Path, path: str, value: Any) -> None:
        self.file, self.path, self.value = file, path, value

    def __getitem__(self, key: str) -> Field:
        if key not in self.table:
            raise self._wrong("is an object without", key)
        return self._below(key, self.table[key])

    def items(self) -> Iterator[tuple[str, Field]]:
        """Of an object."""
        return ((key, self._below(key, value)) for key, value in self.table.items())

    def __iter__(self) -> Iterator[Field]:
        """The entries of a list."""
        if not isinstance(self.value, list):
            raise self._wrong("is not a list")
        return (self._below(str(number), value) for number, value in enumerate(self.value))

    @property
    def table(self) -> dict[str, Any]:
        if not isinstance(self.value, dict):
            raise self._wrong("is not an object")
        return self.value

    @property
    def text(self) -> str:
        if not isinstance(self.value, str):
            raise self._wrong("is not a string")
        return self.value

    @property
    def count(self) -> int:
        """A whole number, at least 0."""
        if not isinstance(self.value, int) or isinstance(self.value, bool) or self.value < 0:
            raise self._wrong("is not a whole number")
        return self.value

    @property
    def counts(self) -> tuple[int, ...]:
        return tuple(entry.count for entry in self)

    @property
    def word(self) -> int:
        """64 bits as hexadecimal text."""
        try:
            return int(self.text, 16)
        except ValueError:
            raise self._wrong("is not hexadecimal") from None

    def _below(self, key: str, value: Any) -> Field:
        return Field(self.file, f"{self.path}.{key}" if self.path else key, value)

    def _wrong(self, what: str, key: str = "") -> VerificationFailed:
        where = self.path or "the file"
        return VerificationFailed(
            f"{self.file}: {where} {what}{f' {key}' if key else ''}",
            remedy="the checkpoint is damaged or not ours: use another one",
            field=f"{self.path}.{key}".strip("."),
        )


def read_json(file: Path) -> Field:
    """The whole file; NotFound when it is missing, VerificationFailed when it is no JSON or of another format."""
    return parse_json(file, read_bytes(file))


def read_bytes(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as missing:
        raise NotFound(
            f"{file} cannot be read ({missing.strerror})", remedy="name a complete checkpoint's folder"
        ) from missing


def parse_json(file: Path, content: bytes) -> Field:
    try:
        found = Field(file, "", json.loads(content))
    except ValueError as wrong:
        raise VerificationFailed(f"{file} is not JSON: {wrong}", remedy="use another checkpoint") from wrong
    if found["format"].count != FORMAT:
        raise VerificationFailed(
            f"{file}: format is {found['format'].count}, this version reads {FORMAT}",
            remedy="read it with the version of Nereus that wrote it",
            field="format",
        )
    return found


def box_to_dict(box: Box) -> dict[str, list[int]]:
    return {"start": list(box.start), "stop": list(box.stop)}


def box_of(field: Field) -> Box:
    return Box(field["start"].counts, field["stop"].counts)
