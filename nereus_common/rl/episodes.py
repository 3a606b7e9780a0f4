"""The tokens of a dialogue: response, observation, response … after one prompt.

Ids are never decoded and encoded again: each turn's prompt is the last one, followed by the very ids that were sampled
and by the observation's. A response that was cut (no stop token) ends the episode, and so does an observation after
which no token could be sampled within the budget; the episode is not finished then, and the observation is left out.
The limit on turns is a rule of the game, no cut: an episode that reaches it is finished.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Self

from nereus_common.core.errors import IllegalTransition, InvalidInput
from nereus_common.rl.assembly import Completion

NO_VERSION = -1
"""Stands where no version sampled the token."""


class Turn(StrEnum):
    """Whose turn it is, or how the episode ended."""

    MODEL = "model"
    ENVIRONMENT = "environment"
    FINISHED = "finished"
    CUT = "cut"


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """At most `max_turns` responses of `turn_tokens` each, and `max_tokens` in all, observations included."""

    max_turns: int
    turn_tokens: int
    max_tokens: int

    def __post_init__(self) -> None:
        if min(self.max_turns, self.turn_tokens, self.max_tokens) < 1:
            raise InvalidInput(f"{self} leaves no room", remedy="1 or more of each", field="environment")


@dataclass(frozen=True, slots=True)
class Episode:
    """`token_ids`, `logprobs`, `versions` and `mask` run over everything after the prompt; `mask` is False, the
    log-prob 0 and the version NO_VERSION on an observation. `reward` sums over the turns; `turns` counts responses."""

    prompt: tuple[int, ...]
    limits: EpisodeLimits
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    versions: tuple[int, ...] = ()
    mask: tuple[bool, ...] = ()
    reward: float = 0.0
    turns: int = 0
    turn: Turn = Turn.MODEL

    @property
    def ended(self) -> bool:
        return self.turn in (Turn.FINISHED, Turn.CUT)

    @property
    def finished(self) -> bool:
        """Ended by the environment or by the limit on turns, not for lack of tokens."""
        return self.turn is Turn.FINISHED

    @property
    def last_turn(self) -> bool:
        """No response may follow the latest: what is observed now matters for its reward alone."""
        return self.turns == self.limits.max_turns

    @property
    def next_tokens(self) -> int:
        """How long the next response may be; at least 1 while it is the model's turn."""
        return min(self.limits.turn_tokens, self.limits.max_tokens - len(self.token_ids))

    def next_prompt(self) -> tuple[int, ...]:
        """What the next response is sampled after; the last one is a prefix of it."""
        self._expect(Turn.MODEL)
        return self.prompt + self.token_ids

    def after_response(self, response: Completion) -> Self:
        """With one response of sampled tokens; InvalidInput when it is longer than was allowed, or masked."""
        self._expect(Turn.MODEL)
        if len(response.token_ids) > self.next_tokens or not all(response.sampled):
            raise InvalidInput(
                f"a response of {len(response.token_ids)} tokens, {sum(response.sampled)} of them sampled, where "
                f"{self.next_tokens} were asked for",
                field="response",
            )
        return replace(
            self,
            token_ids=self.token_ids + response.token_ids,
            logprobs=self.logprobs + response.logprobs,
            versions=self.versions + response.versions,
            mask=self.mask + (True,) * len(response.token_ids),
            turns=self.turns + 1,
            turn=Turn.ENVIRONMENT if response.finished else Turn.CUT,
        )

    def after_observation(self, token_ids: Sequence[int], reward: float, done: bool) -> Self:
        """With what the environment said; its ids are dropped where no response is to follow them.

        InvalidInput when a response is to follow, and there are none.
        """
        self._expect(Turn.ENVIRONMENT)
        rewarded = replace(self, reward=self.reward + reward)
        if done or self.last_turn:
            return replace(rewarded, turn=Turn.FINISHED)
        if not token_ids:
            raise InvalidInput("an observation without tokens: nothing asks for the next response", field="token_ids")
        count = len(token_ids)
        if len(self.token_ids) + count >= self.limits.max_tokens:
            return replace(rewarded, turn=Turn.CUT)
        return replace(
            rewarded,
            token_ids=self.token_ids + tuple(token_ids),
            logprobs=self.logprobs + (0.0,) * count,
            versions=self.versions + (NO_VERSION,) * count,
            mask=self.mask + (False,) * count,
            turn=Turn.MODEL,
        )

    def completion(self) -> Completion:
        """The whole episode as one response, for a group."""
        if not self.ended:
            raise IllegalTransition(f"an episode after {self.turns} turns is not over", remedy="play it to its end")
        return Completion(self.token_ids, self.logprobs, self.versions, self.finished, self.mask, self.reward)

    def _expect(self, turn: Turn) -> None:
        if self.turn is not turn:
            raise IllegalTransition(f"an episode that waits for {self.turn} cannot go on with {turn}")
