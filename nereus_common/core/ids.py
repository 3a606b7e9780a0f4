"""Names of things. Strings on every wire; distinct types in code."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import NewType, Self

from nereus_common.core.errors import InvalidInput

JobId = NewType("JobId", str)
UnitId = NewType("UnitId", str)
TransitionId = NewType("TransitionId", str)
NodeId = NewType("NodeId", str)
TensorName = NewType("TensorName", str)
"""A logical tensor: the name the Hugging Face checkpoint gives it."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.\-]{0,62}")


def check_name(value: str, field: str) -> str:
    """Return `value` when it can be part of a key, a log line and a file name; raise InvalidInput naming `field`."""
    if not _NAME.fullmatch(value):
        raise InvalidInput(
            f"{field}: {value!r} is not a name",
            remedy="use 1 to 63 letters, digits, '.', '_' or '-', beginning with a letter or digit",
            field=field,
        )
    return value


class Stage(StrEnum):
    """The three stages, in the order that breaks ties between transitions."""

    GENERATION = "generation"
    INFERENCE = "inference"
    TRAINING = "training"


class Head(StrEnum):
    """What stands on a decoder."""

    LM = "lm"
    """The vocabulary: log-probs of tokens."""
    SCORE = "score"
    """One number per position: a critic's value, or a reward model's score at the last token."""


@dataclass(frozen=True, slots=True, order=True)
class ModelStage:
    """One model in one stage, written `actor/training`."""

    model: str
    stage: Stage

    def __post_init__(self) -> None:
        check_name(self.model, "model")

    def __str__(self) -> str:
        return f"{self.model}/{self.stage}"

    @classmethod
    def parse(cls, text: str) -> Self:
        model, slash, stage = text.partition("/")
        if not slash or stage not in list(Stage):
            raise InvalidInput(
                f"model-stage {text!r} is not MODEL/STAGE",
                remedy=f"the stage is one of {', '.join(Stage)}, as in actor/training",
                field="model_stage",
            )
        return cls(model, Stage(stage))


@dataclass(frozen=True, slots=True, order=True)
class DeviceId:
    """A slot of a node, written `node0/cpu1` or `node0/gpu3`."""

    node: str
    slot: str

    def __post_init__(self) -> None:
        check_name(self.node, "device.node")
        check_name(self.slot, "device.slot")

    def __str__(self) -> str:
        return f"{self.node}/{self.slot}"

    @classmethod
    def parse(cls, text: str) -> Self:
        node, slash, slot = text.partition("/")
        if not slash:
            raise InvalidInput(f"device {text!r} is not NODE/SLOT", remedy="write node0/cpu1", field="device")
        return cls(node, slot)


def unit_id(job: JobId, model_stage: ModelStage, replica: int, epoch: int) -> UnitId:
    """The id of a replica that came to be at plan epoch `epoch`; a rebuilt replica is another unit."""
    return UnitId(f"{job}.{model_stage.model}.{model_stage.stage}.e{epoch}.r{replica}")
