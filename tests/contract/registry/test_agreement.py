"""Any sequence of calls gets the same answers from a server as from the store in memory, refusals word for word."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nereus_common.core.errors import NereusError
from nereus_common.core.ids import DeviceId, UnitId
from nereus_common.registry import Device, JobRecord, Lease, Registry, open_registry
from nereus_common.registry.memory import MemoryRegistry

from .conftest import JOB, KEPT, SERVERS, Store, make_plan, make_transition, make_unit

Call = Callable[[Registry], Awaitable[object]]

devices = st.sampled_from([DeviceId("n", "cpu0"), DeviceId("n", "cpu1"), DeviceId("n", "absent")])
unit_ids = st.sampled_from([UnitId("u0"), UnitId("u1"), UnitId("u10")])
phases = st.sampled_from(["train", "sleep"])
small = st.integers(0, 3)
fences = st.none() | small
holders = st.sampled_from(["h0", "h1"])


def called(name: str, *args: object, **kwargs: object) -> Call:
    return lambda registry: getattr(registry, name)(*args, **kwargs)


calls: st.SearchStrategy[Call] = st.one_of(
    st.builds(lambda d, m: called("put_device", Device(d, "cpu", m)), devices.filter(lambda d: d.slot != "absent"),
              st.integers(0, 100)),
    st.builds(lambda d: called("remove_device", d), devices),
    st.builds(lambda u, p, w: called("grant", u, p, w), unit_ids, phases, st.dictionaries(devices, st.integers(0, 80))),
    st.builds(lambda u, p: called("release_grants", u, p), unit_ids, st.none() | phases),
    st.builds(lambda n, h: called("acquire_lease", n, h, 1000.0, "r"), holders, holders),
    st.builds(lambda n, h, f: called("renew_lease", Lease(n, h, f, 1000.0)), holders, holders, small),
    st.builds(lambda n, h, f: called("release_lease", Lease(n, h, f, 1000.0)), holders, holders, small),
    st.builds(lambda s, e: called("put_job", JobRecord(JOB, "{}", 1.0, steps_done=s), expected=e), small, small),
    st.builds(lambda e, t, f: called("commit_plan", JOB, e, make_plan(t + 1), fence=f), small, small, fences),
    st.builds(lambda e: called("get_plan", JOB, e), st.none() | small),
    st.builds(lambda u, e, x, f: called("put_unit", make_unit(u, epoch=e), expected=x, fence=f), unit_ids, small, small,
              fences),
    st.builds(lambda t, x, f: called("put_transition", make_transition(f"t{t}"), expected=x, fence=f), small, small,
              fences),
    st.builds(lambda t: called("get_transition", JOB, f"t{t}"), small),
    st.builds(lambda u, x, f: called("remove_unit", JOB, u, expected=x, fence=f), unit_ids, small, fences),
    st.builds(lambda n: called("append_event", JOB, "step", {"n": n}, time=0.5), small),
    st.builds(lambda a, n: called("read_events", JOB, a, limit=n), st.integers(0, 6), st.integers(1, 4)),
    st.sampled_from([called("jobs"), called("units", JOB), called("transitions", JOB),
                     called("grants"), called("devices"), called("services"),
                     called("raise_epoch"), called("epoch"), called("get_job", JOB)]),
)  # fmt: skip


async def answer(registry: Registry, call: Call) -> object:
    try:
        return await call(registry)
    except NereusError as refusal:
        # How long a lease has left is the clock's, and clocks differ.
        return type(refusal), str(refusal).partition(" for another ")[0]


@pytest.mark.parametrize("_running", SERVERS, indirect=True)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(calls, max_size=30))
def test_a_server_answers_as_the_store_in_memory_does(store: Store, sequence: list[Call]) -> None:
    async def compare() -> None:
        model = MemoryRegistry(events_kept=KEPT)
        store.empty()
        async with await open_registry(str(store.url), events_kept=KEPT) as real:
            for call in (*sequence, called("leases")):
                expected, got = await answer(model, call), await answer(real, call)
                if isinstance(expected, tuple) and expected and hasattr(expected[0], "remaining"):
                    expected, got = _leases(expected), _leases(got)
                assert got == expected

    asyncio.run(compare())


def _leases(statuses: object) -> list[tuple[Lease, bool]]:
    assert isinstance(statuses, tuple)
    return [(status.lease, status.alive) for status in statuses]
