"""vLLM as a generation engine: an AsyncLLM in this process, its EngineCore and one worker per rank below it.

What `AsyncLLM.abort` does (0.32, output kind DELTA), on which "no token lost or doubled" rests: in this process and
at once, it forgets the request and puts an output with no token and finish "abort" into the request's queue, merged
behind the tokens nobody has taken yet. EngineCore hears of it later; what it samples until then finds no request here
and is dropped. So the tokens before the abort are all delivered, none comes after it, and a request whose last token
was here already is not known any more and keeps its own finish. An id that is not known *yet* (its prompt is still
being prepared) is passed over without a word: `generate` looks again once the request is known.
EngineCore takes ADD, ABORT and calls of ranks in the order they were sent, and an aborted request's blocks are free at
once, so a call after an abort finds no block in use, and `reset_prefix_cache` drops them all.
"""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import signal
import time
from collections.abc import AsyncGenerator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import psutil

from nereus_common.core.errors import DeadlineExceeded, InvalidInput, NereusError, ProcessLost
from nereus_common.engines.generation.base import (
    Delta,
    Finish,
    GenerationEngine,
    GenerationRequest,
    GenerationUnitConfig,
    RankDigest,
    RankHolding,
    RankPull,
    WeightOrder,
)
from nereus_common.engines.generation.scratch import Scratch
from nereus_common.engines.generation.vllm_arguments import EXTENSION, engine_arguments, environment, sleep_level
from nereus_common.engines.generation.watch import Watch

_POLL_SECONDS = (0.01, 0.1)
"""First and longest pause between looks at a running pull."""
_POLL_GRACE = 15.0
"""What a rank may take beyond the pull's own deadline to say that it failed."""
_CALL_SECONDS = 60.0
_log = logging.getLogger(__name__)


class VllmEngine(GenerationEngine):
    """Build it on the main thread: the kernel kills EngineCore when the thread that started it ends.

    `sleep` ends EngineCore and its ranks where the plan lets vLLM's own sleep give up nothing, as on CPUs, where it has
    none; `wake` starts them again, on dummy weights.
    """

    def __init__(self, config: GenerationUnitConfig, extension: str = EXTENSION) -> None:
        self._config = config
        self._extension = extension
        self._scratch = Scratch.create()
        os.environ.update(environment(config, self._scratch.path))
        self._starter = ThreadPoolExecutor(1, thread_name_prefix="engine")
        """The thread of engines started later; it lasts as long as they may."""
        self._cached_tokens = 0
        self._start()
        self._running: dict[str, bool] = {}
        """Requests under way; True: asked to end."""

    async def describe(self) -> tuple[RankHolding, ...]:
        await self._initialise()
        return tuple(await self._call("describe"))

    async def pull(self, order: WeightOrder) -> tuple[RankPull, ...]:
        ranks = self._config.plan.layout.ranks
        if len(order.items) != ranks:
            raise InvalidInput(f"{len(order.items)} ranks are given boxes, the unit has {ranks}", field="items")
        await self._initialise()
        try:
            await self._call("begin_pull", order)
            return await self._poll(order)
        except NereusError:
            await self._call("drop")
            raise

    async def install(self, version: int, *, timeout: float) -> tuple[RankDigest, ...]:
        digests = await self._call("install", version, timeout=timeout)
        if not await self._llm.reset_prefix_cache():
            raise self._lost("still held cached prefixes of the old weights after it took new ones")
        return tuple(digests)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Delta]:
        from vllm.v1.engine.exceptions import EngineDeadError

        prompt = {"prompt_token_ids": list(request.prompt_token_ids)}
        ended, self._running[request.id] = False, False
        try:
            queue = await self._llm.add_request(request.id, prompt, _sampling_params(request))
            if self._running[request.id]:
                await self._llm.abort(request.id)
            while not ended:
                output = queue.get_nowait() or await queue.get()
                ended = output.finished
                for completion in output.outputs:
                    yield _delta(completion)
            self._cached_tokens += output.num_cached_tokens or 0
        except EngineDeadError as dead:
            raise self._lost("died while it generated") from dead
        finally:
            del self._running[request.id]
            if not ended:  # also where it was cancelled between its parts of becoming known
                await self._llm.abort(request.id)

    async def abort(self, request_id: str) -> None:
        if request_id in self._running:
            self._running[request_id] = True
            await self._llm.abort(request_id)

    async def sleep(self) -> None:
        level = sleep_level(self._config.plan)
        if level is not None:
            await self._llm.sleep(level)
        elif self._pids:
            await asyncio.to_thread(self._stop)

    async def wake(self) -> None:
        if sleep_level(self._config.plan) is not None:
            await self._llm.wake_up()
        elif not self._pids:
            await asyncio.get_running_loop().run_in_executor(self._starter, self._start)

    def stats(self) -> Mapping[str, int]:
        return {f"pid.{name}": pid for name, pid in self._pids.items()} | {"cached_tokens": self._cached_tokens}

    def close(self) -> None:
        self._stop()
        self._starter.shutdown()
        self._scratch.remove()

    def _start(self) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self._llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**engine_arguments(self._config, self._extension)))
        self._pids = _engine_processes()
        self._watch = Watch(self._config.unit, self._pids, self._scratch)
        self._initialised = False

    def _stop(self) -> None:
        """End the engine's processes, if they run."""
        if not self._pids:
            return
        self._watch.stop()
        for pid in self._pids.values():  # a polite end takes vLLM 5 s, and leaves nothing that a sudden one does not
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._pids = {}
        self._llm.shutdown()
        del self._llm  # it looks for modules in its finalizer

    async def _initialise(self) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        if not self._initialised:
            info = {"transport": self._config.transport}
            await self._llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=info))
            self._initialised = True

    async def _poll(self, order: WeightOrder) -> tuple[RankPull, ...]:
        """Ask until every rank has answered, so that the engine serves between the questions."""
        pause, limit = _POLL_SECONDS
        ends = time.monotonic() + order.deadline + _POLL_GRACE
        while time.monotonic() < ends:
            await asyncio.sleep(pause)
            pause = min(2 * pause, limit)
            outcomes = await self._outcomes("poll_pull")
            if all(outcome is not None for outcome in outcomes):
                return tuple(_answers(outcomes))
        raise DeadlineExceeded(
            f"the ranks of unit {self._config.unit} did not finish pulling version {order.version} within "
            f"{order.deadline:g} s",
            transition=order.transition,
        )

    async def _call(self, method: str, *arguments: Any, timeout: float = _CALL_SECONDS) -> list[Any]:
        """The answers of all ranks; the first error among them is raised."""
        return _answers(await self._outcomes(method, *arguments, timeout=timeout))

    async def _outcomes(self, method: str, *arguments: Any, timeout: float = _CALL_SECONDS) -> list[Any]:
        """What each rank answered, errors as values."""
        try:
            async with asyncio.timeout(timeout):
                answers = await self._llm.collective_rpc("nereus_call", args=(method, pickle.dumps(arguments)))
        except TimeoutError:
            raise DeadlineExceeded(
                f"the ranks of unit {self._config.unit} did not answer {method} within {timeout:g} s", method=method
            ) from None
        except Exception as failed:
            raise self._lost(f"failed in {method}: {failed}") from failed
        return [pickle.loads(answer) for answer in answers]

    def _lost(self, what: str) -> ProcessLost:
        return ProcessLost(
            f"the vLLM engine of unit {self._config.unit} {what}",
            remedy="release the unit and prepare another; its log tells more",
            unit=self._config.unit,
            log_dir=self._config.log_dir,
        )


def _answers(outcomes: list[Any]) -> list[Any]:
    for outcome in outcomes:
        if isinstance(outcome, NereusError):
            raise outcome
    return outcomes


def _engine_processes() -> dict[str, int]:
    """EngineCore and workers by the names vLLM gives them; multiprocessing's own trackers left out."""
    below = psutil.Process().children(recursive=True)
    titles = {child.pid: " ".join(child.cmdline()) for child in below}
    return {title.split("::", 1)[1].split()[0]: pid for pid, title in titles.items() if title.startswith("VLLM::")}


def _sampling_params(request: GenerationRequest) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    sampling = request.sampling
    return SamplingParams(
        n=request.samples,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=sampling.max_tokens,
        stop_token_ids=list(sampling.stop_token_ids),
        ignore_eos=True,  # nothing but the request's own stop tokens ends a sequence
        logprobs=0,  # the sampled token's
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )


def _delta(completion: Any) -> Delta:
    tokens = tuple(completion.token_ids)
    logprobs = tuple(completion.logprobs.logprobs) if completion.logprobs is not None else ()
    finish = Finish(completion.finish_reason) if completion.finish_reason is not None else None
    return Delta(completion.index, tokens, logprobs, finish)
