"""Errors survive the wire, and the contract's reasons are exactly those of the code."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereus.v1.errors_pb2 import ErrorReason
from nereus_common.core.errors import NereusError, ProcessLost, error_kinds
from nereus_common.rpc.errors import CODES, error_of, status_of
from nereus_common.workers import WorkerError

pytestmark = pytest.mark.fast

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
names = st.from_regex(r"[a-z_]{1,12}", fullmatch=True).filter(lambda name: name not in ("remedy", "log", "message"))


@given(st.sampled_from(sorted(error_kinds())), texts, texts, st.dictionaries(names, texts, max_size=4))
def test_an_error_is_the_same_after_the_wire(reason: str, message: str, remedy: str, details: dict[str, str]) -> None:
    sent = error_kinds()[reason](message, remedy=remedy, **details)
    got = error_of(status_of(sent))
    assert got is not None
    assert type(got) is type(sent)
    assert (got.message, got.remedy, got.details) == (sent.message, sent.remedy, sent.details)


@given(st.text(max_size=20_000), st.lists(st.text(max_size=3_000), max_size=30), st.text(max_size=9_000))
def test_a_status_fits_the_trailers_of_a_stock_client(message: str, log: list[str], detail: str) -> None:
    lost = ProcessLost(message, remedy=detail, process=detail, pid=7, log="\n".join(log), more=detail)
    assert status_of(lost).ByteSize() < 6 * 1024


def test_the_newest_log_lines_are_kept() -> None:
    lines = [f"line {number} {'x' * 200}" for number in range(50)]
    got = error_of(status_of(ProcessLost("gone", process="worker", pid=7, log="\n".join(lines))))
    assert got is not None
    kept = got.details["log"].splitlines()
    assert kept == lines[-len(kept) :]
    assert len(kept) >= 5
    assert (got.details["process"], got.details["pid"]) == ("worker", "7")


def test_the_contract_lists_exactly_the_reasons_of_the_code() -> None:
    prefix = "ERROR_REASON_"
    listed = {name.removeprefix(prefix) for name in ErrorReason.keys()} - {"UNSPECIFIED"}  # noqa: SIM118
    assert listed == set(error_kinds()) == set(CODES)


def test_a_bug_in_a_worker_crosses_as_internal_with_its_traceback_end() -> None:
    got = error_of(status_of(WorkerError("bug", traceback="x" * 5_000 + "ZeroDivisionError")))
    assert type(got) is NereusError
    assert got.details["traceback"].endswith("ZeroDivisionError")
