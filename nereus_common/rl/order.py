"""The global sample order: which prompt stands at which position, whatever the plan.

A job's progress is one number, the position: how many prompts it has consumed. Position p is prompt
`permutation(seed, epoch)[p mod size]` of epoch p div size, computed from scratch each time, so nothing is kept per rank
and a change of the data-parallel degree can neither skip nor repeat a prompt. The tail rule: a batch that reaches the
end of an epoch goes on with the first prompts of the next.

The permutation is a Feistel network over the smallest even number of bits that holds `size`, walked until the value is
in range (Black & Rogaway, "Ciphers with arbitrary finite domains", 2002). It needs no memory and, unlike a library's
shuffle, can never change under a running job with a library's version.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from nereus_common.core.errors import InvalidInput

_WORD = (1 << 64) - 1
_ROUNDS = 6


@dataclass(frozen=True, slots=True)
class SampleOrder:
    """The order of `size` prompts under `seed`."""

    size: int
    seed: int

    def __post_init__(self) -> None:
        if self.size < 1:
            raise InvalidInput("there are no prompts to put in order", field="prompts")

    def index(self, position: int) -> int:
        """The prompt at `position` ≥ 0, as an index in [0, size)."""
        if position < 0:
            raise InvalidInput(f"sample position {position} is negative", field="position")
        epoch, offset = divmod(position, self.size)
        return permuted(offset, self.size, _mix(_mix(self.seed & _WORD) ^ (epoch & _WORD)))

    def indices(self, positions: range) -> list[int]:
        return [self.index(position) for position in positions]


def step_positions(step: int, groups_per_step: int) -> range:
    """The positions that step `step` (from 0) consumes; the global batch does not depend on the plan."""
    return range(step * groups_per_step, (step + 1) * groups_per_step)


def shares(positions: range, degree: int) -> tuple[range, ...]:
    """Cut a global batch into `degree` contiguous shares whose sizes differ by at most one."""
    if degree < 1:
        raise InvalidInput(f"a batch cannot be cut into {degree} shares", field="degree")
    small, larger = divmod(len(positions), degree)
    starts = [share * small + min(share, larger) for share in range(degree + 1)]
    return tuple(positions[start:stop] for start, stop in pairwise(starts))


def permuted(value: int, size: int, key: int) -> int:
    """Where `value` in [0, size) goes under the permutation named by the 64-bit `key`."""
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    while True:
        value = _feistel(value, half, key)
        if value < size:
            return value


def _feistel(value: int, half: int, key: int) -> int:
    """One pass over 2·half bits; a bijection, whatever the round function."""
    mask = (1 << half) - 1
    left, right = value >> half, value & mask
    for turn in range(_ROUNDS):
        left, right = right, left ^ (_mix(key ^ _mix((turn << 56) | right)) & mask)
    return (left << half) | right


def _mix(word: int) -> int:
    """splitmix64's output function (Steele, Lea, Flood 2014)."""
    word = (word + 0x9E3779B97F4A7C15) & _WORD
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _WORD
    return word ^ (word >> 31)
