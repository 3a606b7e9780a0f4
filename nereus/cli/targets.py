"""What a user writes for a plan to move to: a file, or `MODEL/STAGE=LAYOUT[@DEVICE,…]` words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nereus_common.core.errors import InvalidInput
from nereus_common.core.ids import DeviceId, ModelStage
from nereus_common.core.layout import parse_replicated
from nereus_common.core.plan import Plan

FORM = "write a file, or MODEL/STAGE=LAYOUT@DEVICE,DEVICE as in actor/training=tp1.pp2.fs1@node0/cpu1,node0/cpu2"


def parse_target(words: Sequence[str], plan: Plan) -> Path | Mapping[str, Any]:
    """A file as it is; words as fields of a plan that is merged onto `plan`. InvalidInput names the word."""
    if len(words) == 1 and "=" not in words[0]:
        return Path(words[0])
    return {"stages": dict(_stage(word, plan) for word in words)}


def _stage(word: str, plan: Plan) -> tuple[str, dict[str, Any]]:
    name, equals, given = word.partition("=")
    text, at, devices = given.partition("@")
    if not equals or not text:
        raise InvalidInput(f"target {word!r} is not understood", remedy=FORM, field="target")
    stage = ModelStage.parse(name)
    layout, replicas = parse_replicated(text)
    needed = layout.ranks * replicas
    chosen = [DeviceId.parse(device) for device in devices.split(",")] if at else list(plan[stage].devices)[:needed]
    if len(chosen) != needed:
        raise InvalidInput(
            f"target {word!r} needs {needed} devices, and {len(chosen)} are known", remedy=FORM, field="target"
        )
    return str(stage), {"layout": text, "devices": [str(device) for device in chosen]}
