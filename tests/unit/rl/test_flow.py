"""Rollouts are consumed in order, once each, and never staler than η, whatever happens between."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from nereus_common.core.errors import IllegalTransition
from nereus_common.rl.flow import Pace, RolloutFlow

pytestmark = pytest.mark.fast


@dataclass(frozen=True, slots=True)
class Sample:
    """A group as the simulated units make it: the versions of its tokens in the order of sampling."""

    position: int
    versions: tuple[int, ...]
    flat: bool


@dataclass(slots=True)
class Simulation:
    """One job under a random schedule of starts, tokens, ends, losses, syncs, moves and crashes of the whole job.

    Training is slower or faster than generation as chance has it. A crash goes back to the last checkpoint: an earlier
    step with its position; what was in flight is forgotten.
    """

    pace: Pace
    dice: random.Random
    flow: RolloutFlow[Sample] = field(init=False)
    growing: dict[int, list[int]] = field(default_factory=dict)
    consumed: list[tuple[int, Sample]] = field(default_factory=list)
    checkpoint: tuple[int, int] = (0, 0)
    trained: bool = False
    seen: set[int] = field(default_factory=set)
    """Events that came about, for the test that all do."""

    def __post_init__(self) -> None:
        self.flow = RolloutFlow(self.pace)

    def run(self, limit: int = 20_000) -> None:
        for _ in range(limit):
            if self.flow.step == self.pace.steps and not self.trained:
                return
            self.turn()
        raise AssertionError(f"step {self.flow.step} of {self.pace.steps} was never finished")

    def turn(self) -> None:
        event = self.dice.choices(range(8), (6, 8, 6, 1, 5, 4, 0.05, 1))[0]
        self.seen.add(event)
        [self.begin, self.grow, self.end, self.fault, self.take, self.sync, self.crash, self.move][event]()

    def begin(self) -> None:
        position = self.flow.start()
        if position is not None:
            assert position not in self.growing
            self.growing[position] = [self.flow.version]

    def grow(self) -> None:
        for versions in self.growing.values():
            if self.dice.random() < 0.5 and not self.flow.paused:
                versions.append(self.flow.version)

    def end(self) -> None:
        if self.growing:
            position = self.dice.choice(sorted(self.growing))
            versions = tuple(self.growing.pop(position))
            sample = Sample(position, versions, self.dice.random() < 0.3)
            self.flow.finish(position, sample, oldest=min(versions), flat=sample.flat)

    def fault(self) -> None:
        if self.growing:
            position = self.dice.choice(sorted(self.growing))
            del self.growing[position]
            self.flow.lose(position)

    def take(self) -> None:
        step = self.flow.step
        if self.trained or step == self.pace.steps:
            return
        taken = self.flow.take()
        if taken is not None:
            self.consumed += [(step, sample) for sample in taken.groups]
            self.trained, self.flow.paused = True, self.dice.random() < 0.5

    def sync(self) -> None:
        """The step's update ends, and its version is served."""
        if self.trained:
            self.trained = False
            self.flow.serve(self.flow.step)
            if self.dice.random() < 0.3:
                self.checkpoint = (self.flow.step, self.flow.position)

    def move(self) -> None:
        """Between an update and its sync some units go: what they sample is thrown away; on others it goes on."""
        if self.trained:
            self.flow.paused = True
            for position in sorted(self.growing):
                if self.dice.random() < 0.5:
                    del self.growing[position]
                    self.flow.lose(position)
            assert self.flow.start() is None
            self.sync()

    def crash(self) -> None:
        step, position = self.checkpoint
        self.flow = RolloutFlow(self.pace, step, position, step)
        self.growing, self.trained = {}, False
        self.consumed = [(at, sample) for at, sample in self.consumed if at < step]


def simulations(count: int) -> list[Simulation]:
    dice = random.Random(20261130)
    return [
        Simulation(
            Pace(dice.randint(1, 5), dice.randint(1, 8), dice.randint(0, 3), dice.random() < 0.4),
            random.Random(seed),
        )
        for seed in range(count)
    ]


def test_staleness_never_exceeds_eta_in_a_thousand_random_schedules_with_faults() -> None:
    worst: dict[int, int] = {}
    seen: set[int] = set()
    for simulation in simulations(1000):
        simulation.run()
        seen |= simulation.seen
        eta = simulation.pace.staleness
        for step, sample in simulation.consumed:
            stale = step - min(sample.versions)
            assert 0 <= stale <= eta
            worst[eta] = max(worst.get(eta, 0), stale)
    assert worst == {0: 0, 1: 1, 2: 2, 3: 3}, "the bound is reached, so the schedules try it"
    assert seen == set(range(8))


def test_every_step_has_its_groups_in_order_and_none_is_skipped_or_repeated() -> None:
    for simulation in simulations(300):
        simulation.run()
        positions = [sample.position for _, sample in simulation.consumed]
        steps = [step for step, _ in simulation.consumed]
        pace = simulation.pace
        assert steps == [step for step in range(pace.steps) for _ in range(pace.groups)]
        assert positions == sorted(set(positions))
        if not pace.replace:
            assert positions == list(range(pace.steps * pace.groups))


def test_with_eta_zero_nothing_starts_before_the_version_it_is_consumed_at() -> None:
    flow: RolloutFlow[str] = RolloutFlow(Pace(groups=2, steps=2))
    assert [flow.start(), flow.start(), flow.start()] == [0, 1, None]
    for position in (1, 0):
        flow.finish(position, str(position), oldest=0)
    taken = flow.take()
    assert taken is not None and taken.groups == ("0", "1") and taken.next_position == 2
    assert flow.start() is None
    flow.serve(1)
    assert [flow.start(), flow.start(), flow.start()] == [2, 3, None], "a job of two steps ends here"


def test_eta_lets_so_many_steps_be_sampled_ahead() -> None:
    flow: RolloutFlow[str] = RolloutFlow(Pace(groups=3, steps=9, staleness=2))
    started = [flow.start() for _ in range(20)]
    assert [position for position in started if position is not None] == list(range(9))


def test_nothing_starts_while_weights_are_taken_over() -> None:
    flow: RolloutFlow[str] = RolloutFlow(Pace(groups=1, steps=4, staleness=1))
    flow.paused = True
    assert flow.start() is None
    flow.serve(0)
    assert flow.start() == 0


def test_a_lost_group_is_the_next_to_start() -> None:
    flow: RolloutFlow[str] = RolloutFlow(Pace(groups=4, steps=1))
    assert [flow.start(), flow.start()] == [0, 1]
    flow.lose(0)
    assert [flow.start(), flow.start()] == [0, 2]


def test_groups_without_gradient_are_passed_over_and_more_are_sampled_by_the_same_version() -> None:
    flow: RolloutFlow[int] = RolloutFlow(Pace(groups=2, steps=2, replace=True))
    for position in (flow.start(), flow.start()):
        assert position is not None
        flow.finish(position, position, oldest=0, flat=position == 0)
    assert flow.take() is None
    assert flow.start() == 2 and flow.start() is None
    flow.finish(2, 2, oldest=0)
    taken = flow.take()
    assert taken is not None and taken.groups == (1, 2) and taken.next_position == 3


def test_a_step_that_finds_too_few_worthy_groups_fills_up_with_others() -> None:
    flow: RolloutFlow[int] = RolloutFlow(Pace(groups=1, steps=1, replace=True))
    while (position := flow.start()) is not None:
        flow.finish(position, position, oldest=0, flat=True)
    taken = flow.take()
    assert taken is not None and taken.groups == (0,) and taken.next_position == 4


def test_a_group_that_was_not_started_cannot_end() -> None:
    flow: RolloutFlow[str] = RolloutFlow(Pace(groups=1, steps=1))
    with pytest.raises(IllegalTransition):
        flow.finish(0, "never started", oldest=0)
    with pytest.raises(IllegalTransition):
        flow.lose(0)
