from __future__ import annotations

from nereus_common.transport.doctor import PairKind, check_pairs


def test_the_doctor_moves_64_mb_over_each_kind_of_pair_and_names_what_ucx_uses() -> None:
    reports = {report.kind: report for report in check_pairs()}
    assert set(reports) == set(PairKind)
    for report in reports.values():
        assert not report.problem
        assert report.moved_bytes == 64 << 20
        assert report.gb_per_s > 0
    within = " ".join(reports[PairKind.NODE].protocols)
    assert ("sysv" in within or "posix" in within) and "cma" not in within and "tcp" not in within
    assert "tcp" in " ".join(reports[PairKind.NETWORK].protocols)


def test_a_pair_that_cannot_work_is_reported_and_not_raised() -> None:
    (report,) = check_pairs([PairKind.NODE], seconds=0.01)
    assert report.problem and report.gb_per_s == 0
