"""One cluster and one job that live through many kills, and what has to hold after each."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nereus_coordinator.fitting import rank_need

from nereus.cluster.config import ClusterConfig
from nereus.cluster.down import Shutdown, down
from nereus.cluster.launch import config_file
from nereus.cluster.spawn import await_serving, reap, spawn, terminate
from nereus.cluster.state import ClusterFolder
from nereus.cluster.up import up
from nereus.events import JobEvent, JobState, Restart, StepReport
from nereus.sync import SyncClient, SyncJobHandle
from nereus.transition import Transition
from nereus_common.checkpoints.folder import complete
from nereus_common.checkpoints.manifest import read_manifest
from nereus_common.core.ids import DeviceId
from nereus_common.core.layout import Layout
from nereus_common.core.plan import Dtypes, StagePlan
from nereus_common.state.architecture import ModelShape
from nereus_common.transitions.lifecycle import TransitionState
from nereus_common.workers import processes
from tests.system.job_specs import DTYPES, job_spec
from tests.system.kill_cases import PAIRS, TRAINING, Case, Pair, Place, Who, tight
from tests.system.test_transitions import units_of

DEADLINE = 180.0
"""Seconds of every wait inside the job and of every wait for it here."""
KEPT = 40
"""Checkpoints; one after each step, whose manifests say what the job held."""
ROOM = 5 << 30


def devices(model: Path) -> dict[str, int]:
    """Six CPU devices, of which cpu1 has no room for the state of the in-place pair's both places."""
    shape = ModelShape.from_config(json.loads((model / "config.json").read_text()))

    def need(place: Place) -> Any:
        ranks = tuple(DeviceId("node0", slot) for slot in place[1])
        plan = StagePlan(Layout.parse(place[0]), ranks, dtypes=Dtypes(**DTYPES), microbatch_tokens=256)
        return rank_need(shape, TRAINING, plan, 0)

    here, there = (need(place) for place in PAIRS[0].places)
    return dict.fromkeys((f"cpu{slot}" for slot in range(6)), ROOM) | {"cpu1": tight(here, there.rest)}


@dataclass
class Field:
    """`log`: a line for each case that was played."""

    folder: ClusterFolder
    config: ClusterConfig
    client: SyncClient
    job: SyncJobHandle
    log: list[dict[str, Any]] = field(default_factory=list)

    @property
    def _faults(self) -> Path:
        return self.folder.path / "faults"

    def play(self, case: Case) -> dict[str, Any]:
        """Strike once and see to it that the promise of the case holds; its line of the log."""
        source = self._come_to(case.pair)
        target = next(place for place in case.pair.places if place != source)
        self._arm(case)
        begun = self.job.apply_transition(_wanted(case.pair, target))
        struck = self._read_soon("struck.json")
        started = time.monotonic()
        _await_death(struck["pid"])
        self.mend()
        ended = self._ended(begun.id)
        steps, restarts = self.job.get().steps_done, case.promise.get(ended.state, False)
        events = self._events(begun, lambda seen: _went_on(seen, steps, restarts))
        seconds = time.monotonic() - started
        restarted = any(isinstance(event.value, Restart) for event in events)
        line = {
            "case": str(case),
            "who": str(case.who),
            "point": case.point,
            "mode": str(case.pair.mode),
            "nodes": [f"{node.primitive} {node.model_stage} {node.mode}" for node in ended.nodes],
            "outcome": str(ended.state),
            "reason": ended.error_reason,
            "restarted": restarted,
            "seconds": round(seconds, 2),
            "why": [event.value.message for event in events if isinstance(event.value, Restart)],
            "digests": None if restarted else self._digests(),
        }
        assert case.promise.get(ended.state) is restarted, line
        assert self._place_of(case.pair) == (target if ended.state is TransitionState.DONE else source), line
        self._nothing_is_left(struck)
        self.log.append(line)
        return line

    def mend(self) -> None:
        """Start again what has died; the coordinator is always the one that strikes."""
        state = self.folder.require()
        member = state.member("coordinator")
        assert member is not None
        if not member.alive:
            reap(member)
            arguments = ["-m", "tests.system.struck_coordinator", "--config"]
            arguments.append(str(config_file(self.folder, "coordinator")))
            log = Path(member.log)
            member = spawn("coordinator", arguments, target=member.target, log=log, mark=state.mark, append=True)
            self.folder.write(state.with_member(member))
            await_serving(member, DEADLINE)
        up(self.folder, self.config)

    def _come_to(self, pair: Pair) -> Place:
        """Where the pair's stage is, after a move to one of its two places if it has to be."""
        until = time.monotonic() + DEADLINE
        while self.job.get().state is not JobState.RUNNING:
            assert time.monotonic() < until, f"{self.job.get()} does not come back"
            time.sleep(0.1)
        if (place := self._place_of(pair)) not in pair.places:
            moved = self.job.apply_transition(_wanted(pair, pair.places[0]))
            assert self._ended(moved.id).check().state is TransitionState.DONE
            place = pair.places[0]
        return place

    def _place_of(self, pair: Pair) -> Place:
        plan = self.job.get().plan
        assert plan is not None
        stage = plan[pair.stage]
        return str(stage.layout), tuple(device.slot for device in stage.devices)

    def _arm(self, case: Case) -> None:
        for name in ("struck.json", "before.json"):
            (self._faults / name).unlink(missing_ok=True)
        armed = self._faults / "armed.json"
        armed.with_suffix(".new").write_text(json.dumps({"point": case.point, "victim": self._victim(case)}))
        armed.with_suffix(".new").rename(armed)

    def _victim(self, case: Case) -> list[str]:
        """Words of its command line."""
        stage = str(case.pair.stage).replace("/", ".")
        rank = ".0" if case.pair.stage == TRAINING else ""
        match case.who:
            case Who.COORDINATOR:
                return []
            case Who.SERVICE:
                return [f"nereus_{case.pair.stage.stage}", "--config"]
            case Who.OLD:
                (unit,) = (unit for unit in units_of(self.client) if f".{stage}." in unit)
                return [f"{unit}{rank}"]
            case Who.NEW:
                return [f"{self.job.id}.{stage}.e{self.job.get().epoch + 1}.r0{rank}"]

    def _ended(self, transition: str) -> Transition:
        until = time.monotonic() + 2 * DEADLINE
        while not (seen := self.job.transition(transition)).has_ended:
            assert time.monotonic() < until, f"{seen} hangs"
            time.sleep(0.05)
        return seen

    def _events(self, begun: Transition, enough: Callable[[list[JobEvent]], bool]) -> list[JobEvent]:
        """From the beginning of the transition until there are `enough`."""
        seen: list[JobEvent] = []
        for event in self.job.watch():
            if seen or (event.kind == "transition" and event.payload["transition_id"] == begun.id):
                seen.append(event)
                if enough(seen):
                    return seen
        raise AssertionError(f"the job ended: {self.job.get()}")

    def _read_soon(self, name: str) -> dict[str, Any]:
        until = time.monotonic() + DEADLINE
        while not (self._faults / name).exists():
            assert time.monotonic() < until, f"no {name}: {self.job.transitions()[-1]}"
            time.sleep(0.01)
        found: dict[str, Any] = json.loads((self._faults / name).read_text())
        return found

    def _digests(self) -> dict[str, Any] | None:
        """What the old units held when the job stood still, and what the job held at that version afterwards: the same.
        None where it had not stood still."""
        if not (self._faults / "before.json").exists():
            return None
        before = self._read_soon("before.json")
        manifest = _manifest(Path(self.job.get().folder), before["version"])
        after = dict(manifest.model("actor").digests.to_dict())
        assert after == {kind: before["digests"][kind] for kind in after}, before
        return {"version": before["version"], "before": before["digests"], "after": after}

    def _nothing_is_left(self, struck: dict[str, Any]) -> None:
        """No unit, grant, process or segment of what died or was given up."""
        plan = self.job.get().plan
        assert plan is not None
        until = time.monotonic() + DEADLINE
        while (left := self._left(plan, struck)) and time.monotonic() < until:
            time.sleep(0.1)
        assert not left, left

    def _left(self, plan: Any, struck: dict[str, Any]) -> list[str]:
        granted = {(device.id, len(device.units)) for device in self.client.cluster_status().devices if device.units}
        wanted: dict[str, int] = {}
        for _, stage in plan.stages:
            for device in stage.devices:
                wanted[str(device)] = wanted.get(str(device), 0) + 1
        wrong = [f"{device} has {count} units" for device, count in granted ^ {*wanted.items()}]
        units = units_of(self.client)
        alive = processes.marked(self.folder.require().mark, processes.snapshot())
        workers = [name for one in alive if f"{self.job.id}.actor" in (name := _worker_name(one.pid))]
        wrong += [f"{name} runs" for name in workers if not {name, name.rpartition(".")[0]} & units]
        mapped = {segment.path for one in alive for segment in processes.segments(one.pid)}
        return wrong + [path for path in struck["segments"] if Path(path).exists() and path not in mapped]


@contextmanager
def playing_field(root: Path, model: Path, engine: str = "transformers") -> Iterator[Field]:
    """A cluster whose coordinator strikes, and a job on it; its end proves that nothing is left of them."""
    folder, config = ClusterFolder(root), ClusterConfig(devices=devices(model))
    state = up(folder, config)
    try:
        coordinator = state.member("coordinator")
        assert coordinator is not None
        terminate(coordinator, DEADLINE)
        with SyncClient.connect(state.controller) as client:
            spec = job_spec(
                "struck",
                model,
                engine=engine,
                steps=100_000,
                evaluation={"size": 0},
                rollouts={"samples": 0},
                checkpoint={"every": 1, "keep": KEPT, "resume": "auto"},
                rewards=[f"{Path(__file__).parent / 'rewards.py'}:unhurried_digit_share"],
                deadlines=dict.fromkeys(("place", "generate", "score", "train", "sync", "release"), DEADLINE),
            )
            field = Field(folder, config, client, None)  # type: ignore[arg-type]
            field.mend()
            field.job = client.submit(spec)
            next(event for event in field.job.watch() if isinstance(event.value, StepReport))
            yield field
            field.job.cancel()
    finally:
        left = down(folder, grace=config.stop_seconds)
    assert left == Shutdown(left.stopped, (), 0, 0), left


def _await_death(pid: int) -> None:
    """What strikes says so just before it does."""
    until = time.monotonic() + DEADLINE
    while (process := processes.read(pid)) is not None and process.alive:
        assert time.monotonic() < until, f"process {pid} lives on"
        time.sleep(0.01)


def _wanted(pair: Pair, place: Place) -> dict[str, Any]:
    devices = [f"node0/{slot}" for slot in place[1]]
    return {"stages": {str(pair.stage): {"layout": place[0], "devices": devices}}}


def _went_on(events: list[JobEvent], steps: int, restarts: bool) -> bool:
    """Whether the job has made a whole step after its transition had ended, when `steps` were done; or, where it is to
    start again, after it has. Enough is also what shows that it does not do as promised."""
    after = [event.value for event in events]
    starts = [place for place, value in enumerate(after) if isinstance(value, Restart)]
    if starts and restarts:
        return sum(isinstance(value, StepReport) for value in after[starts[-1] :]) > 1
    limit = steps + (10 if restarts else 1)
    return any(isinstance(value, StepReport) and value.step >= limit for value in after)


def _manifest(folder: Path, version: int) -> Any:
    until = time.monotonic() + DEADLINE
    while time.monotonic() < until:
        if (path := complete(folder / "checkpoints").get(version)) is not None:
            return read_manifest(path)
        time.sleep(0.1)
    raise AssertionError(f"no checkpoint of version {version} in {folder}")


def _worker_name(pid: int) -> str:
    command = Path(f"/proc/{pid}/cmdline")
    return command.read_bytes().decode().rstrip("\0").rpartition("\0")[2] if command.exists() else ""
