"""One sample of a request that goes across versions: the tokens it has, and how it goes on from them. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from nereus_common.core.errors import NereusError
from nereus_common.engines.generation.base import Delta, Finish, GenerationRequest


@dataclass(slots=True)
class Continuation:
    """Sampled in legs, each under one version. The next leg's prompt is the prompt and every token handed out so far.

    So the next leg computes the keys and values of all of them anew, with its own weights; their log-probs are those
    of the versions that sampled them, and are not computed again.
    """

    request: GenerationRequest
    sample: int
    tokens: list[int] = field(default_factory=list)
    legs: int = 0
    finish: Finish | None = None

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
        )

    def take(self, delta: Delta, *, interrupted: bool) -> Delta:
        """The delta as the caller sees it. When `interrupted`, an abort is no end, unless the sample is at its own."""
        self.tokens.extend(delta.token_ids)
        self.finish = self._own_end() if interrupted and delta.finish is Finish.ABORT else delta.finish
        return Delta(self.sample, delta.token_ids, delta.logprobs, self.finish)

    def _own_end(self) -> Finish | None:
        if self.tokens and self.tokens[-1] in self.request.sampling.stop_token_ids:
            return Finish.STOP
        return Finish.LENGTH if len(self.tokens) >= self.request.sampling.max_tokens else None
