"""What is wrong with a job, in a user's words: the field as it was written, and the key that was probably meant."""

from __future__ import annotations

import difflib
from typing import Any, get_args

from pydantic import BaseModel, Tag, ValidationError

from nereus_common.core.errors import InvalidInput


def refusal(root: type[BaseModel], wrong: ValidationError, origin: str) -> InvalidInput:
    """What is wrong with a `root` that came from `origin`: a line for each field; `details["field"]` is the first."""
    lines = [_explain(root, error) for error in wrong.errors(include_url=False)]
    text = "\n".join(f"{origin}: {field}{said}" for field, said in lines)
    return InvalidInput(text, field=lines[0][0] or "job")


def _explain(root: type[BaseModel], error: Any) -> tuple[str, str]:
    """One of pydantic's error dicts as (dotted field, what is wrong with it)."""
    path, known = _walk(root, error["loc"])
    field = ".".join(path)
    if error["type"] == "extra_forbidden":
        close = difflib.get_close_matches(path[-1], known, n=1)
        hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(sorted(known))}"
        return field, f" is unknown ({hint})"
    if error["type"] == "missing":
        return field, " is missing"
    text = error["msg"].removeprefix("Value error, ")
    return field, f": {text}" if field else text


def _walk(root: type[BaseModel], location: tuple[str | int, ...]) -> tuple[list[str], list[str]]:
    """The keys a user wrote, without pydantic's union tags, and the keys known where the last of them stands."""
    kind: Any = root
    path: list[str] = []
    known: list[str] = []
    for part in location:
        sections = _sections(kind)
        if part in sections and part != "":
            kind = sections[str(part)]
            continue
        path.append(str(part))
        section = sections.get("")
        known = list(section.model_fields) if section else []
        kind = _below(kind, section, part)
    return path, known


def _below(kind: Any, section: type[BaseModel] | None, part: str | int) -> Any:
    """The annotation of a field, of a sequence's items or of a mapping's values."""
    if section is not None:
        found = section.model_fields.get(str(part))
        return None if found is None else found.annotation
    arguments = get_args(kind) or (None,)
    return arguments[0] if isinstance(part, int) else arguments[-1]


def _sections(kind: Any) -> dict[str, type[BaseModel]]:
    """The sections that may stand where `kind` is annotated: the members of a union by tag, one alone under ""."""
    members = (kind,) if isinstance(kind, type) else get_args(kind)
    found = [(member, getattr(member, "__origin__", member)) for member in members]
    sections = [(member, part) for member, part in found if isinstance(part, type) and issubclass(part, BaseModel)]
    if len(sections) == 1:
        return {"": sections[0][1]} if kind in members or type(None) in members else {}
    return {_tag(member, section): section for member, section in sections}


def _tag(member: Any, section: type[BaseModel]) -> str:
    """What a member of a union is told apart by: its own mark, or the one word that its `name` may be."""
    marks = [mark.tag for mark in getattr(member, "__metadata__", ()) if isinstance(mark, Tag)]
    return marks[0] if marks else str(section.model_fields["name"].default)
