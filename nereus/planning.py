"""A job's spec as planning sees it: the shapes of its models, and what a step of it consists of."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from nereus.spec import JobSpec
from nereus_common.core.errors import InvalidInput, NotFound
from nereus_common.core.ids import Head, ModelStage
from nereus_common.planning.workload import Workload
from nereus_common.state.architecture import ModelShape

CONFIG = "config.json"
ENOUGH = "a folder with the model's config.json is enough to plan with"


def shapes_of(spec: JobSpec) -> dict[ModelStage, ModelShape]:
    """By model-stage. Blocks; raises what `read_shape` raises."""
    by_model = {name: shape_of(spec, name) for name in {stage.model for stage in spec.model_stages}}
    return {stage: by_model[stage.model] for stage in spec.model_stages}


def shape_of(spec: JobSpec, model: str) -> ModelShape:
    """Blocks; raises what `read_shape` raises."""
    return read_shape(Path(spec.model(model).path), spec.head(model), model, ENOUGH)


def read_shape(folder: Path, head: Head, model: str, remedy: str) -> ModelShape:
    """From the config of the folder of `model`. Blocks.

    NotFound, with `remedy`, where there is none; InvalidInput where it is not JSON; raises what
    `ModelShape.from_config` raises.
    """
    path, field = folder / CONFIG, f"models.{model}.path"
    try:
        return ModelShape.from_config(json.loads(path.read_text()), head)
    except OSError as missing:
        raise NotFound(f"{field}: {path} cannot be read ({missing.strerror})", remedy=remedy, field=field) from missing
    except json.JSONDecodeError as wrong:
        raise InvalidInput(f"{path} is not JSON: {wrong}", field=field) from wrong


def workload_of(spec: JobSpec, prompt: float, responses: Sequence[float]) -> Workload:
    """A step with prompts and responses of these lengths in tokens."""
    algorithm = spec.algorithm
    return Workload(
        algorithm.groups_per_step,
        algorithm.samples_per_group,
        prompt,
        tuple(responses),
        algorithm.minibatches,
        algorithm.epochs,
    )
