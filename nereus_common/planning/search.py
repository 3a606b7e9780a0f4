"""The best plan for a job on a cluster: every placement of every model-stage, and every way to share devices.

Model-stages stand in groups: those of a group share devices and take turns on them, groups are disjoint. For each group
and number of devices the placements of its model-stages are combined as far as they fit memory together
(`options`); then dynamic programming over the model-stages that are placed so far finds the groups:

    states(set of model-stages) = undominated { states(set without a group) + group, for groups with the set's first }

A state is what no other one of its set beats: in devices used of each pool, and in seconds at any moment of the step.
On up to EXACT_DEVICES devices all of it is exact under the cost model, with two restrictions: a group stands on devices
of one pool, and within a node or on whole ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nereus_common.core.errors import ResourceExhausted
from nereus_common.core.ids import ModelStage, Stage
from nereus_common.planning.arrangement import Arrangement, Group, Picked
from nereus_common.planning.bounds import Bounds
from nereus_common.planning.cost import step_cost
from nereus_common.planning.frontier import undominated
from nereus_common.planning.groups import PoolOptions
from nereus_common.planning.hardware import CPU
from nereus_common.planning.moments import Matrix, Moments
from nereus_common.planning.options import Indices, StageOptions
from nereus_common.planning.pools import NodePool, node_pools
from nereus_common.planning.question import Found, Question, Searched
from nereus_common.planning.space import levels, space, with_knobs

SPARE = 8
"""Candidates beyond those asked for that are made into plans, because some may not fit the nodes."""
COARSE = (0.6, 0.2, 0.05)
"""The shares by which choices have to differ in the searches before the last one."""
EXACT_DEVICES, FINE = 64, 0.01
"""Up to so many devices the last search leaves nothing out; above, what is better by no more than FINE."""
NEAR = 0.25
"""How much slower than the best a plan may be that is shown beside it."""
ROUNDING = 1e-9


def search(question: Question, top: int = 1) -> Searched:
    """The `top` best plans that differ in how model-stages share devices or in how many they have.

    ResourceExhausted where none fits: it names the model-stage that fits on no number of devices, if there is one.
    """
    return _Search(question).run(top)


class _States(NamedTuple):
    """`used` [N, pools], `seconds` [N, moments]; `trail` [N, 3]: number of the last group, its option, and the row of
    the state before it."""

    used: NDArray[np.int64]
    seconds: Matrix
    trail: Indices

    @classmethod
    def none(cls, pools: int, moments: int) -> _States:
        return cls(np.zeros((0, pools), np.int64), np.zeros((0, moments)), np.zeros((0, 3), np.intp))

    def at(self, rows: Indices) -> _States:
        return _States(self.used[rows], self.seconds[rows], self.trail[rows])


class _Search:
    def __init__(self, question: Question) -> None:
        self._question = question
        self._names = question.job.workflow.model_stages
        usable = question.cluster.devices if question.usable is None else question.usable
        self._pools = node_pools(question.cluster, frozenset(usable))
        self._sizes = np.array([pool.size for pool in self._pools], np.int64)
        nodes = [node for pool in self._pools for node in pool.nodes]
        turns = len(nodes) == 1 and self._pools[0].kind.processor.name == CPU
        self._moments = Moments.of(question.job, asynchronous=question.staleness is not None, turns=turns)
        self._levels = [levels(pool.pool) for pool in self._pools]
        self._stages = [
            [self._options(name, pool, counts) for name in self._names]
            for pool, counts in zip(self._pools, self._levels, strict=True)
        ]
        self._bounds = Bounds(self._moments, self._levels, self._fastest())
        self._groups: list[Group] = []

    def run(self, top: int) -> Searched:
        """Coarse searches first: the best that each finds bounds the next one."""
        for slack in COARSE:
            self._bounds = replace(self._bounds, slack=slack)
            for rough in self._best(1):
                self._bounds = replace(self._bounds, seconds=min(rough.cost.seconds, self._bounds.seconds))
        reach = self._bounds.seconds * (1 + (NEAR if top > 1 else ROUNDING))
        slack = 0.0 if self._sizes.sum() <= EXACT_DEVICES else FINE
        self._bounds = replace(self._bounds, seconds=reach, slack=slack)
        plans = self._best(top)
        if not plans:
            raise self._refusal()
        return Searched(tuple(plans[:top]), sum(len(one.used) for stages in self._stages for one in stages))

    def _fastest(self) -> list[NDArray[np.float64]]:
        by_pool = zip(self._stages, self._levels, self._pools, strict=True)
        return [
            np.stack([one.fastest(steps, pool.budget) for one in stages], axis=1) for stages, steps, pool in by_pool
        ]

    def _best(self, top: int) -> list[Found]:
        self._groups = []
        by_set = self._options_by_set()
        nothing = np.zeros((1, len(self._pools)), np.int64), np.zeros((1, self._moments.count))
        states = {0: _States(*nothing, np.zeros((1, 3), np.intp))}
        everything = (1 << len(self._names)) - 1
        for chosen in range(1, everything):
            reached = self._extended(chosen, states, by_set)
            costs = np.concatenate([reached.used, reached.seconds], axis=1)
            states[chosen] = reached.at(undominated(costs, self._bounds.slack))
        final = self._extended(everything, states, by_set)
        states[everything] = final.at(np.argsort(self._moments.total(final.seconds), kind="stable")[: SPARE + top])
        found = [self._found(states, everything, row) for row in range(len(states[everything].used))]
        return sorted((one for one in found if one is not None), key=lambda one: one.cost.seconds)

    def _options(self, name: ModelStage, pool: NodePool, counts: Sequence[int]) -> StageOptions:
        question, pin = self._question, self._question.pinned.get(name)
        first, *others = question.knobs[name] if pin is None else (pin,)
        wanted = counts if pin is None else (len(pin.devices),)
        base = space(question.job.shapes[name], name, pool.pool, first, wanted)
        variants = [(base, first), *((with_knobs(base, other), other) for other in others)]
        found = StageOptions.of(question.job, name, variants, self._moments, question.calibration)
        if name in question.widths:
            found = found.within(question.widths[name])
        return found if pin is None else found.only(pin.layout, pin.replicas, pool.size)

    def _options_by_set(self) -> Mapping[int, Sequence[int]]:
        """Numbers in `_groups` of what each set of model-stages can be, pool by pool."""
        found: dict[int, list[int]] = {}
        for pool in range(len(self._pools)):
            options = self._pool_options(pool)
            for chosen in range(1, 1 << len(self._names)):
                members = _members(chosen)
                if self._may_share(members):
                    self._groups.append(Group(members, pool, options.group(members)))
                    found.setdefault(chosen, []).append(len(self._groups) - 1)
        return found

    def _pool_options(self, number: int) -> PoolOptions:
        stages, steps, budget = self._stages[number], self._levels[number], self._pools[number].budget
        fronts = [stage.fronts(steps, budget, self._bounds.slack) for stage in stages]
        of_pool = np.arange(len(self._pools)) == number
        left = [self._sizes - level * of_pool for level in steps]
        return PoolOptions(stages, fronts, steps, left, budget, self._bounds)

    def _may_share(self, members: Sequence[int]) -> bool:
        """Asynchronous generation has devices of its own."""
        apart = self._question.staleness is not None and len(members) > 1
        return not apart or all(self._names[one].stage is not Stage.GENERATION for one in members)

    def _extended(self, chosen: int, states: Mapping[int, _States], by_set: Mapping[int, Sequence[int]]) -> _States:
        """Every state of the set `chosen`, from those without the group of its first model-stage."""
        first, tables = chosen & -chosen, [_States.none(len(self._pools), self._moments.count)]
        for others in _subsets(chosen ^ first):
            for number in by_set.get(first | others, ()):
                tables.append(self._joined(states[chosen ^ first ^ others], number))
        reached = _States(*(np.concatenate(side) for side in zip(*tables, strict=True)))
        absent = [member for member in self._members if not chosen >> member & 1]
        rest = self._bounds.rest(absent, self._sizes - reached.used)
        return reached.at(np.flatnonzero(self._bounds.may_win(reached.seconds, rest)))

    def _joined(self, states: _States, number: int) -> _States:
        group = self._groups[number]
        before, option = np.divmod(np.arange(len(states.used) * len(group.options.used)), len(group.options.used))
        used = states.used[before]
        used[:, group.pool] += group.options.used[option]
        fits = np.flatnonzero((used <= self._sizes).all(axis=1))
        before, option = before[fits], option[fits]
        seconds = self._moments.join(states.seconds[before], group.options.seconds[option])
        return _States(used[fits], seconds, np.stack([np.full_like(before, number), option, before], axis=1))

    def _found(self, states: Mapping[int, _States], chosen: int, row: int) -> Found | None:
        question = self._question
        plan = Arrangement(question, self._names, self._pools, self._stages).plan(self._picked(states, chosen, row))
        if plan is None:
            return None
        return Found(plan, step_cost(question.job, plan, question.cluster, question.calibration))

    def _picked(self, states: Mapping[int, _States], chosen: int, row: int) -> list[Picked]:
        picked = []
        while chosen:
            number, option, before = states[chosen].trail[row]
            group = self._groups[number]
            picked.append((group, int(option)))
            chosen ^= sum(1 << member for member in group.members)
            row = before
        return picked

    def _refusal(self) -> ResourceExhausted:
        most = max((pool.budget for pool in self._pools), default=0.0)
        least = {
            name: min((stages[member].memory.min(initial=np.inf) for stages in self._stages), default=np.inf)
            for member, name in enumerate(self._names)
        }
        name = max(least, key=lambda one: least[one])
        devices = f"{self._sizes.sum()} devices with {most:,.0f} bytes each to plan with"
        if least[name] <= most:
            return ResourceExhausted(
                f"the model-stages fit in no arrangement on {devices}",
                remedy="more devices, recomputation, smaller microbatches or KV caches",
                field="devices",
            )
        pin = self._question.pinned.get(name)
        lacks = (
            f"needs {least[name]:,.0f} bytes a device at least" if np.isfinite(least[name]) else "has no such layout"
        )
        return ResourceExhausted(
            f"{name} fits nowhere on {devices}: it {lacks}" + (f", pinned to {pin}" if pin else ""),
            remedy="take the pin away, or give it more devices" if pin else "larger devices, or smaller batches",
            field=f"pin.{name}" if pin else f"stages.{name}",
        )

    @property
    def _members(self) -> range:
        return range(len(self._names))


def _members(chosen: int) -> tuple[int, ...]:
    return tuple(number for number in range(chosen.bit_length()) if chosen >> number & 1)


def _subsets(chosen: int) -> Iterator[int]:
    """Of a set as a bit mask, the empty one and itself among them."""
    subset = chosen
    while subset:
        yield subset
        subset = (subset - 1) & chosen
    yield 0
