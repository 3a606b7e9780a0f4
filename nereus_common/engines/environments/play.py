"""One episode from its prompt to its end: the model answers, the environment answers back."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from nereus_common.engines.environments.pool import EnvironmentPool
from nereus_common.rl.assembly import Completion
from nereus_common.rl.environments import Task
from nereus_common.rl.episodes import Episode, EpisodeLimits, Turn

Generate = Callable[[tuple[int, ...], int], Awaitable[Completion]]
"""(prompt ids, longest response in tokens) → one response, sampled after exactly these ids."""
PLACE_SECONDS = 3600.0


async def play(
    pool: EnvironmentPool,
    task: Task,
    prompt_ids: Sequence[int],
    generate: Generate,
    limits: EpisodeLimits,
    encode_observation: Callable[[str], Sequence[int]],
    decode: Callable[[Sequence[int]], str],
    *,
    place_timeout: float = PLACE_SECONDS,
) -> Completion:
    """The whole episode as one completion, with the environment's tokens masked and its rewards summed.

    A response that was cut ends the episode without being shown to the environment. `encode_observation` gives what
    stands between two responses (`ChatTokenizer.observation_ids`); `place_timeout` seconds bound the wait for the
    pool's other episodes. Raises what `generate` raises, and as `EnvironmentPool.episode` and `Dialogue.step` do.
    """
    episode = Episode(tuple(prompt_ids), limits)
    async with pool.episode(task, timeout=place_timeout) as dialogue:
        while not episode.ended:
            response = await generate(episode.next_prompt(), episode.next_tokens)
            episode = episode.after_response(response)
            if episode.turn is Turn.ENVIRONMENT:
                seen = await dialogue.step(decode(response.token_ids))
                ids = () if seen.done or episode.last_turn else encode_observation(seen.text)
                episode = episode.after_observation(ids, seen.reward, seen.done)
    return episode.completion()
