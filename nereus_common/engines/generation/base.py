"""What a generation engine does, and the values it takes and gives.

An engine is built synchronously on dummy weights, on the main thread of its process. Versions arrive in two phases:
`pull` fills staging while the engine goes on serving, `install` applies what was staged and reads back what the
engine then computes with. Who may be served which version is not its business: see gate.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from nereus_common.core.errors import InvalidInput
from nereus_common.core.ids import TensorName
from nereus_common.core.plan import StagePlan
from nereus_common.core.transfer import Box
from nereus_common.engines.generation.options import GenerationOptions
from nereus_common.transport import PullItem


class Finish(StrEnum):
    STOP = "stop"
    """A stop token was sampled; it is the last token."""
    LENGTH = "length"
    ABORT = "abort"
    INTERRUPTED = "interrupted"
    """Its unit is to go: the caller keeps the tokens and goes on from them on another unit."""
    REQUEUED = "requeued"
    """Its unit is to go: the caller throws the tokens away, and draws the whole group again."""


class Drain(StrEnum):
    """What becomes of the requests in flight when a unit is to go."""

    FINISH = "finish"
    """They run to their end."""
    RESUME = "resume"
    """They end at once, with Finish.INTERRUPTED where a sample has not ended by itself."""
    REQUEUE = "requeue"
    """They end at once, with Finish.REQUEUED."""

    @property
    def cut(self) -> Finish | None:
        """The finish of what is cut short; None when nothing is."""
        return {Drain.FINISH: None, Drain.RESUME: Finish.INTERRUPTED, Drain.REQUEUE: Finish.REQUEUED}[self]


@dataclass(frozen=True, slots=True)
class Sampling:
    """Temperature 0 is greedy. `top_p` 1 and `top_k` 0 keep the whole vocabulary."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise InvalidInput(f"max_tokens is {self.max_tokens}", remedy="at least 1", field="sampling.max_tokens")
        if self.temperature < 0:
            raise InvalidInput("temperature is negative", remedy="0 is greedy", field="sampling.temperature")
        if not 0 < self.top_p <= 1:
            raise InvalidInput(f"top_p is {self.top_p}", remedy="0 < top_p <= 1", field="sampling.top_p")
        if self.top_k < 0:
            raise InvalidInput(f"top_k is {self.top_k}", remedy="0 keeps all", field="sampling.top_k")


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """`samples` sequences from one prompt. `version`: the one that must be served, -1 for any.

    `stream_interval`: tokens per piece; 0: each sequence whole, as soon as it ends. `across_versions`: new weights do
    not wait for it; they interrupt it, and it goes on under them from the tokens it has, in a piece of its own per
    version. `version` is then the one expected at its admission only.

    `response_token_ids`: what another unit has sampled of the response; only what follows is sampled and given out.
    `sampling.max_tokens` bounds both together. Such a request is of one sample.
    """

    id: str
    prompt_token_ids: tuple[int, ...]
    sampling: Sampling
    samples: int = 1
    version: int = -1
    stream_interval: int = 0
    across_versions: bool = False
    response_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.prompt_token_ids:
            raise InvalidInput(
                f"request {self.id} has no prompt", remedy="one token at least", field="prompt_token_ids"
            )
        if self.samples < 1:
            raise InvalidInput(
                f"request {self.id} asks for {self.samples} samples", remedy="1 or more", field="samples"
            )
        if self.response_token_ids and self.samples > 1:
            raise InvalidInput(
                f"request {self.id} goes on from one response, and asks for {self.samples} samples",
                remedy="send one request for each response that goes on",
                field="response_token_ids",
            )


@dataclass(frozen=True, slots=True)
class Delta:
    """New tokens of one sample, with their log-probs after the sampling transforms (temperature, top-k, top-p)."""

    sample: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: Finish | None = None


@dataclass(frozen=True, slots=True)
class Piece:
    """A Delta with the version of the weights that sampled it."""

    sample: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    version: int
    finish: Finish | None = None


@dataclass(frozen=True, slots=True)
class RankHolding:
    """What one rank needs of every logical tensor, and where its transport is reached."""

    rank: int
    address: bytes
    boxes: Mapping[TensorName, tuple[Box, ...]]


@dataclass(frozen=True, slots=True)
class WeightOrder:
    """One version to pull: per rank, the boxes and their sources. `deadline`: seconds for the whole pull.

    With `folder` the boxes are read from that model folder instead, and the items' sources mean nothing.
    """

    version: int
    items: tuple[tuple[PullItem, ...], ...]
    wire_dtype: str
    deadline: float
    transition: str
    folder: Path | None = None


@dataclass(frozen=True, slots=True)
class RankPull:
    """`digest`: of the staged boxes as logical content, in the wire dtype."""

    rank: int
    bytes: int
    seconds: float
    digest: int


@dataclass(frozen=True, slots=True)
class RankDigest:
    """`digest`: of what the rank computes with, read back after it was applied."""

    rank: int
    digest: int


@dataclass(frozen=True)
class GenerationUnitConfig:
    """All a host process needs to build its engine.

    `replica` picks the unit's devices from `plan`; `seed` is the unit's own, as
    replicas that share one would sample alike.
    """

    unit: str
    model_path: Path
    plan: StagePlan
    log_dir: Path
    replica: int = 0
    seed: int = 0
    engine: str = "vllm"
    transport: str = "ucx"
    options: GenerationOptions = field(default_factory=GenerationOptions)


class GenerationEngine(ABC):
    """One unit's engine. Methods run in one event loop, but for `close`, which runs on the main thread."""

    @abstractmethod
    async def describe(self) -> tuple[RankHolding, ...]:
        """Every rank's boxes, in rank order."""

    @abstractmethod
    async def pull(self, order: WeightOrder) -> tuple[RankPull, ...]:
        """Pull into staging and check; the engine serves on. Nothing is staged after an error.

        StaleVersion, Unavailable, DeadlineExceeded from the transport; VerificationFailed for a digest that differs,
        a value that is not finite, or an order that does not cover the rank's boxes exactly.
        """

    @abstractmethod
    async def install(self, version: int, *, timeout: float) -> tuple[RankDigest, ...]:
        """Apply the staged version with no request in flight, and read back; frees staging.

        Nothing computed with the old weights is used after it, cached prefixes included.

        VerificationFailed when what is computed with differs from what was staged: nothing may be served then.
        """

    @abstractmethod
    def generate(self, request: GenerationRequest) -> AsyncGenerator[Delta]:
        """Sample; closing the iterator aborts what is unfinished.

        Every sample's last delta has a finish. Its deltas are all its tokens, in order, and none after an abort.
        """

    @abstractmethod
    async def abort(self, request_id: str) -> None:
        """End a request's stream soon, with Finish.ABORT for every sample that has not ended by itself.

        Also of a request that is not known to the engine's processes yet; unknown ids are no error.
        """

    @abstractmethod
    async def sleep(self) -> None:
        """Give up KV cache and weights; no request is in flight. Idempotent."""

    @abstractmethod
    async def wake(self) -> None:
        """Take storage for them again. It holds no version: one must be pulled and installed. Idempotent."""

    @abstractmethod
    def stats(self) -> Mapping[str, int]:
        """Process ids by name, as `pid.NAME`, and counters."""

    @abstractmethod
    def close(self) -> None:
        """Stop every process of the engine."""
