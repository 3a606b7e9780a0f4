"""Refusing a step on all ranks or on none, before anything changed: no rank waits for one that will not come."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from nereus_common.core.errors import InvalidInput, NereusError
from nereus_common.engines.torch_model.world import World
from nereus_common.engines.training.base import TrainStepSpec


@contextmanager
def refused_by_all(spec: TrainStepSpec) -> Iterator[None]:
    """An error of one rank inside becomes the error of every rank; all of them come here together.

    InvalidInput when the ranks were told different steps: they would hang, or their copies of the state would part.
    """
    problem: NereusError | None = None
    try:
        yield
    except NereusError as error:
        problem = error
    told = zlib.crc32(repr((spec.step, sorted(spec.loss.items()), *_numbers(spec))).encode())
    found = torch.tensor([problem is not None, told, -told])
    dist.all_reduce(found, dist.ReduceOp.MAX)
    refused, most, least = found.tolist()
    if refused:
        raise _first(problem)
    if most != -least:
        raise InvalidInput(
            f"the units were told different things about step {spec.step}",
            remedy="send every unit of the model-stage the same header",
            field="header",
        )


def check_tokens(told: Sequence[int], here: Sequence[int], world: World) -> None:
    """InvalidInput, on every rank, unless `here`, this rank's unmasked tokens by minibatch, add up to `told`."""
    speaks = world.last_stage and world.place.tp == 0
    counted = torch.tensor(list(here), dtype=torch.int64) * speaks
    dist.all_reduce(counted)
    for number, (wanted, found) in enumerate(zip(told, counted.tolist(), strict=True)):
        if wanted != found:
            raise InvalidInput(
                f"minibatch {number} has {found} unmasked tokens over all ranks, the step was told {wanted}",
                remedy="count the unmasked tokens of the whole minibatch",
                field="minibatch_tokens",
            )


def _numbers(spec: TrainStepSpec) -> tuple[object, ...]:
    return spec.learning_rate, spec.max_grad_norm, spec.minibatch_tokens, spec.epochs, spec.temperature


def _first(problem: NereusError | None) -> NereusError:
    """What this rank found, else what the first of the others did; every rank takes part."""
    found: list[NereusError | None] = [None] * dist.get_world_size()
    dist.all_gather_object(found, problem)
    return problem or next(one for one in found if one is not None)
