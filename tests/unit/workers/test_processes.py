"""Whose descendant a process is, told from a table of processes alone."""

from __future__ import annotations

import multiprocessing
import os

import pytest

from nereus_common.workers import processes
from nereus_common.workers.processes import Identity, Process, alive, family

pytestmark = pytest.mark.fast

ROOT = Identity(10, 100)


def table(*rows: tuple[int, int, int] | tuple[int, int, int, str]) -> dict[int, Process]:
    """Rows of (pid, parent, session[, state]); a process starts at ten times its pid."""
    return {row[0]: Process(Identity(row[0], row[0] * 10), (*row, "S")[3], row[1], row[2]) for row in rows}


def pids(members: set[Identity]) -> set[int]:
    return {one.pid for one in members}


def test_descendants_belong_whatever_their_session() -> None:
    assert pids(family(ROOT, (), table((10, 1, 10), (11, 10, 10), (12, 11, 12), (13, 1, 13)))) == {10, 11, 12}


def test_an_orphan_belongs_by_its_session_while_the_root_holds_the_number() -> None:
    assert pids(family(ROOT, (), table((10, 1, 10, "Z"), (11, 1, 10)))) == {10, 11}


def test_an_orphan_belongs_by_its_session_while_a_known_member_holds_the_number() -> None:
    known = {Identity(11, 110)}
    assert pids(family(ROOT, known, table((11, 1, 10), (12, 1, 10)))) == {11, 12}


def test_a_session_number_that_nobody_known_holds_is_a_strangers() -> None:
    assert family(ROOT, (), table((11, 1, 10))) == set()


def test_a_recycled_pid_is_a_strangers() -> None:
    recycled = {10: Process(Identity(10, 999), "S", 1, 10), 11: Process(Identity(11, 110), "S", 10, 10)}
    assert family(ROOT, {Identity(11, 7)}, recycled) == set()


def test_a_known_member_that_left_everything_still_belongs_with_its_children() -> None:
    known = {Identity(12, 120)}
    assert pids(family(ROOT, known, table((12, 1, 12), (13, 12, 12)))) == {12, 13}


def test_a_zombie_is_not_alive() -> None:
    rows = table((10, 1, 10, "Z"), (11, 10, 10))
    assert pids(alive([ROOT, Identity(11, 110), Identity(12, 120)], rows)) == {11}


def test_a_semaphore_belongs_to_its_creator_although_it_is_mapped_under_another_name() -> None:
    lock = multiprocessing.get_context("spawn").Lock()
    name = f"/dev/shm/sem.{lock._semlock.name.removeprefix('/')}"  # type: ignore[attr-defined]
    assert processes.Segment(name, os.stat(name).st_ino) in processes.segments(os.getpid())
