from __future__ import annotations

import pickle

import pytest

import nereus_common.core.errors as errors
from nereus_common.core.errors import NereusError, error_kinds

pytestmark = pytest.mark.fast


def test_every_error_has_a_reason_of_its_own() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, NereusError)]
    assert len({kind.reason for kind in kinds}) == len(kinds)
    known = error_kinds()
    assert all(known[kind.reason] is kind for kind in kinds)


@pytest.mark.parametrize("kind", error_kinds().values(), ids=lambda kind: kind.__name__)
def test_an_error_survives_pickling_whole(kind: type[NereusError]) -> None:
    error = kind("the worker died", remedy="start it again", pid=7, log="last lines")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert (copy.message, copy.remedy, copy.details) == (error.message, error.remedy, error.details)
    assert str(copy) == str(error)


def test_the_text_carries_the_remedy_and_details_are_strings() -> None:
    error = NereusError("tp2 does not divide", remedy="use tp1", tp=2)
    assert str(error) == "tp2 does not divide (use tp1)"
    assert str(NereusError("plain")) == "plain"
    assert error.details == {"tp": "2"}


def test_the_tree_at_the_top_of_the_file_is_the_tree() -> None:
    assert errors.__doc__ is not None
    drawn = {line.split("── ")[1].split()[0] for line in errors.__doc__.splitlines() if "── " in line}
    assert drawn | {"NereusError"} >= {
        kind.__name__ for kind in error_kinds().values() if kind.__module__ == errors.__name__
    }
