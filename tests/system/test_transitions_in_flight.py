"""Generation units change under a job that generates while it trains, and under one whose device has room for one unit
only; frozen models go from unit to unit."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nereus.events import JobEvent, LogLine, Restart
from nereus.sync import SyncClient
from nereus_common.rl.step_rollouts import StepRollouts, rollouts_file
from nereus_common.transitions.lifecycle import TransitionState
from tests.system.job_specs import LIMITS, job_spec
from tests.system.test_transition_faults import Own, steps_after, until
from tests.system.test_transitions import GRPO, LONG, last, spec_of, stage, steps_of
from tests.system.workers_of_jobs import worker_pid

pytestmark = pytest.mark.timeout(900)
STALENESS = 2
LENGTH = 200
TOLD = {"finish": "finish on the units that go", "resume": "go on on the units", "requeue": "groups drawn again"}
ONES = "tp1.pp1.fs1 x2"


def beside(turn: int) -> dict[str, Any]:
    """The first of two units stays, the second goes to another device."""
    return stage(ONES, 0, 3 + turn % 2)


def in_its_place(turn: int) -> dict[str, Any]:
    """Both units become others on devices that have room for one."""
    return {**stage(ONES, 0, 1), "generation": {**LIMITS, "max_length": 300 + turn}}


def in_flight_spec(name: str, model: Path, how: str) -> dict[str, Any]:
    """Responses so long that training waits for them: some are under way at most boundaries."""
    spec = job_spec(
        name,
        model,
        generation=ONES,
        engine="transformers",
        steps=5000,
        asynchronous={"staleness": STALENESS},
        transitions={"in_flight": how},
        rollouts={"record": True},
        evaluation={"size": 0},
    )
    spec["models"]["actor"]["engines"]["training"] = {"options": {"threads": 1}}
    spec["algorithm"] = {**GRPO, "samples_per_group": 2}
    spec["sampling"] = {"max_tokens": LENGTH}
    spec["plan"]["stages"]["actor/generation"]["generation"] = {**LIMITS, "max_length": 256, "max_sequences": 4}
    return spec


def check_order_and_age(folder: Path, steps: int) -> None:
    """Every prompt once and in order, nothing too old, and no response goes back to an older version."""
    positions: list[int] = []
    for step in range(steps):
        batch = StepRollouts.load(rollouts_file(folder / "rollouts", step)).batch
        positions += dict.fromkeys(batch.position.tolist())
        assert 0 <= step - int(batch.versions.min()) <= STALENESS
        starts = batch.response_lengths.cumsum()[:-1]
        for versions in map(list, _split(batch.versions.tolist(), starts.tolist())):
            assert versions == sorted(versions)
    assert positions == list(range(steps * 4))


def _split(values: list[int], stops: list[int]) -> Iterator[list[int]]:
    for start, stop in zip([0, *stops], [*stops, len(values)], strict=True):
        yield values[start:stop]


@pytest.mark.parametrize(
    ("how", "target"),
    [
        pytest.param("resume", beside, id="resume"),
        pytest.param("finish", beside, id="finish", marks=LONG),
        pytest.param("requeue", beside, id="requeue", marks=LONG),
        *(pytest.param(how, in_its_place, id=f"{how}-sleep-first", marks=LONG) for how in TOLD),
    ],
)
def test_responses_in_flight_are_dealt_with_as_the_job_says_and_no_prompt_is_skipped_repeated_or_too_old(
    client: SyncClient, tiny_model: Path, how: str, target: Callable[[int], dict[str, Any]]
) -> None:
    """Transitions until one has met responses in flight, which the very first does unless the machine is odd."""
    job = client.submit(in_flight_spec(f"{target.__name__}-{how}".replace("_", "-"), tiny_model, how))
    events, revision = steps_after(job, "", 2)
    for turn in range(12):
        moved = last(job, {"stages": {"actor/generation": target(turn)}})
        modes = {node.mode for node in moved.nodes if node.primitive != "destroy"}
        assert modes == ({"shadow"} if target is beside else {"in-place"})
        more, revision = steps_after(job, revision, 4)
        events += more
        if said := logged(more):
            break
    assert said and TOLD[how] in said[0]
    assert not any(isinstance(event.value, Restart) for event in events)
    state = job.cancel()
    check_order_and_age(Path(state.folder), len(steps_of(events)))


def logged(events: list[JobEvent]) -> list[str]:
    """What was said of responses in flight."""
    messages = [event.value.message for event in events if isinstance(event.value, LogLine)]
    return [message for message in messages if "responses in flight" in message]


def shown_gap(events: list[JobEvent]) -> float:
    """The largest mean log-prob gap: what samples has the weights that were trained."""
    return max(float(step["logprob_gap_mean"]) for step in steps_of(events))


@pytest.mark.parametrize("engine", ["transformers", pytest.param("vllm", marks=LONG)])
def test_a_unit_whose_device_has_no_room_for_two_sleeps_first_and_serves_again_when_the_new_one_does_not_start(
    own: Own, tiny_model: Path, engine: str
) -> None:
    """The job's own bound on the log-prob gap would end it if the unit that was woken computed with anything else than
    the trained weights."""
    _, _, state = own
    spec = spec_of("sleepy", tiny_model, GRPO, steps=5000)
    spec["models"]["actor"]["engines"]["generation"]["name"] = engine
    target = {"stages": {"actor/generation": {**stage("tp1.pp1.fs1", 0), "generation": {**LIMITS, "max_length": 96}}}}
    with SyncClient.connect(state.controller) as client:
        job = client.submit(spec)
        _, revision = steps_after(job, "", 2)
        plan, grants = job.get().plan, grants_of(client)
        begun = job.apply_transition(target)
        os.kill(worker_pid(state, f"{job.id}.actor.generation.e2", "generation"), signal.SIGKILL)
        ended = until(job, begun.id, lambda seen: seen.has_ended)
        assert (ended.state, ended.error_reason) == (TransitionState.UNDONE, "PROCESS_LOST")
        assert {node.mode for node in ended.nodes if node.primitive != "destroy"} == {"in-place"}
        events, revision = steps_after(job, revision, 4)
        assert job.get().plan == plan and grants_of(client) == grants
        moved = last(job, target)
        assert {node.mode for node in moved.nodes if node.primitive != "destroy"} == {"in-place"}
        more, _ = steps_after(job, revision, 4)
        assert not any(isinstance(event.value, Restart) for event in (*events, *more))
        assert 0 < shown_gap([*events, *more]) < spec["max_logprob_gap"]
        assert job.get().plan == moved.target
        job.cancel()


def grants_of(client: SyncClient) -> dict[str, tuple[int, tuple[str, ...]]]:
    return {
        str(device.id): (device.granted_bytes, tuple(sorted(device.units)))
        for device in client.cluster_status().devices
    }


def test_a_frozen_model_goes_from_unit_to_unit_and_its_folder_is_not_read_again(
    client: SyncClient, tiny_model: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(tiny_model, tmp_path / "reference")
    options: dict[str, Any] = {
        "engine": "transformers",
        "steps": 5000,
        "evaluation": {"size": 0},
        "rollouts": {"samples": 0},
    }
    spec = job_spec("frozen", tiny_model, reference="tp1.pp1.fs1", **options)
    spec["models"]["reference"] = str(folder)
    job = client.submit(spec)
    _, revision = steps_after(job, "", 1)
    before = job.state_digest("reference/inference")
    for file in folder.glob("*.safetensors"):
        file.unlink()
    for layout in (stage("tp2.pp1.fs1", 3, 4), stage("tp1.pp1.fs2", 2, 5), stage("tp1.pp1.fs2 x2", 2, 5, 3, 4)):
        moved = last(job, {"stages": {"reference/inference": layout}})
        assert moved.bytes_moved == moved.bytes_needed > 0
        found = job.state_digest("reference/inference")
        assert (found.version, found.digests) == (before.version, before.digests)
        events, revision = steps_after(job, revision, 2)
        assert all("reference_kl" in step for step in steps_of(events))
    job.cancel()
