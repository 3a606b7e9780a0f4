"""The rows of a step, against packs that a step really makes."""

from __future__ import annotations

import math

import numpy as np
import pytest

from nereus_common.core.errors import InvalidInput
from nereus_common.planning.workload import Workload
from nereus_common.rl.assembly import Completion, Group, assemble
from nereus_common.rl.packing import pack_for_ranks

pytestmark = pytest.mark.fast


def test_rows_pairs_and_predictions_are_those_of_the_packs_that_are_trained_on() -> None:
    lengths = (3, 5, 8, 1)
    groups = [
        Group(position, tuple(range(1, 7)), tuple(Completion((9,) * n, (0.0,) * n, (0,) * n, True) for n in lengths))
        for position in range(3)
    ]
    found = Workload(3, 4, 6, lengths).packed()
    (packs,) = pack_for_ranks(assemble(groups), 1, 4096, shared_prefix=True)
    assert found.rows == sum(pack.used for pack in packs)
    assert found.predicted == sum(int((pack.source >= 0).sum()) for pack in packs) == 3 * sum(lengths)
    assert found.pairs == sum(int(pack.visible(segment).sum()) for pack in packs for segment in pack.segments)


def test_the_sequences_of_groups_have_the_lengths_in_turn() -> None:
    lengths = Workload(5, 2, 10, (1, 2, 3)).lengths(3)
    assert len(lengths) == 6 and [response for _, response in lengths] == [1, 2, 3, 1, 2, 3]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"groups": 0}, "groups"),
        ({"epochs": -1}, "epochs"),
        ({"prompt": math.nan}, "prompt"),
        ({"responses": ()}, "responses"),
        ({"responses": (4.0, math.inf)}, "responses"),
        ({"responses": (0.5,)}, "responses"),
    ],
)
def test_a_step_that_is_none_is_refused_by_its_field(change: dict[str, object], field: str) -> None:
    given = {"groups": 2, "samples": 2, "prompt": 4.0, "responses": (3.0,)} | change
    with pytest.raises(InvalidInput) as refused:
        Workload(**given)  # type: ignore[arg-type]
    assert refused.value.details["field"] == field


def test_lengths_are_an_average_over_all_that_are_given() -> None:
    assert Workload(1, 1, 1, tuple(np.arange(1.0, 10.0))).response == 5.0
