"""One sample of a request: the tokens it has, and how it goes on from them, here or on another unit. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from nereus_common.core.errors import NereusError
from nereus_common.engines.generation.base import Delta, Finish, GenerationRequest


@dataclass(slots=True)
class Continuation:
    """Sampled in legs, each by one unit under one version. The next leg's prompt is the prompt and every token so far,
    those that another unit handed out included.

    So the next leg computes the keys and values of all of them anew, with its own weights; their log-probs are those
    of the versions that sampled them, and are not computed again.
    """

    request: GenerationRequest
    sample: int
    tokens: list[int] = field(init=False)
    legs: int = 0
    finish: Finish | None = field(init=False)

    def __post_init__(self) -> None:
        self.tokens = list(self.request.response_token_ids)
        self.finish = self.own_end()

    @property
    def name(self) -> str:
        return f"{self.request.id}[{self.sample}]"

    def leg(self) -> GenerationRequest:
        """What is left to sample, as a request of one sequence under an id of its own."""
        sampling = self.request.sampling
        left = sampling.max_tokens - len(self.tokens)
        if self.finish is not None or left < 1:
            raise NereusError(f"{self.name} has ended after {len(self.tokens)} tokens, and cannot go on")
        self.legs += 1
        return replace(
            self.request,
            id=f"{self.name}.{self.legs}",
            prompt_token_ids=(*self.request.prompt_token_ids, *self.tokens),
            sampling=replace(sampling, max_tokens=left),
            samples=1,
            across_versions=False,
            response_token_ids=(),
        )

    def take(self, delta: Delta, *, cut: Finish | None) -> Delta:
        """The delta as the caller sees it. `cut`: what the engine's abort means, unless the sample is at its own end;
        None: that it goes on."""
        self.tokens.extend(delta.token_ids)
        self.finish = (self.own_end() or cut) if delta.finish is Finish.ABORT else delta.finish
        return Delta(self.sample, delta.token_ids, delta.logprobs, self.finish)

    def own_end(self) -> Finish | None:
        """Why there is nothing left to sample; None where there is."""
        if self.tokens and self.tokens[-1] in self.request.sampling.stop_token_ids:
            return Finish.STOP
        return Finish.LENGTH if len(self.tokens) >= self.request.sampling.max_tokens else None
