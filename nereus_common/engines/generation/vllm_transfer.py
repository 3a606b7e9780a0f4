"""Inside a vLLM rank: pull a version into staging, load it through vLLM's own loaders, read back what is computed with.

Two phases. The pull runs on a thread of its own while the rank goes on serving; everything that can fail is done
there. Loading cannot be undone: an exception between `start_weight_update` and `finish_weight_update` leaves the
engine without weights.
"""

from __future__ import annotations

import pickle
from collections import defaultdict
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from nereus_common.core.errors import IllegalTransition, NereusError, VerificationFailed
from nereus_common.core.ids import TensorName
from nereus_common.core.transfer import Box
from nereus_common.engines.generation import readback
from nereus_common.engines.generation.base import RankDigest, RankHolding, RankPull, WeightOrder
from nereus_common.engines.generation.installed import WEIGHTS, Surface, surfaces
from nereus_common.engines.generation.staging import Staging, check_cover, stage
from nereus_common.state.digest import combine, digest_box
from nereus_common.transport import Transport, open_transport


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    transport: str


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    version: int


class NereusTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):  # type: ignore[misc]
    """Registered with vLLM as `nereus`; one per rank."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._transport: Transport | None = None

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        self.rank = self.parallel_config.rank
        self.dtype = self.model_config.dtype
        self._surfaces = surfaces(self.model)
        self._shapes, self._boxes = _needed(self._surfaces)
        self._transport = open_transport(init_info.transport)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="pull")
        self._pulling: Future[RankPull] | None = None
        self._staging: Staging | None = None

    @property
    def _open(self) -> Transport:
        if self._transport is None:
            raise IllegalTransition("weights cannot move before the transfer engine is initialised")
        return self._transport

    def describe(self) -> RankHolding:
        return RankHolding(self.rank, self._open.address, self._boxes)

    def begin_pull(self, order: WeightOrder) -> None:
        """Start on what `order` has for this rank; `poll_pull` tells the end."""
        if self._pulling is not None and not self._pulling.done():
            raise IllegalTransition(f"rank {self.rank} is already pulling", remedy="wait for it", rank=self.rank)
        if getattr(torch, order.wire_dtype) is not self.dtype:
            raise VerificationFailed(
                f"rank {self.rank} computes in {self.dtype}, version {order.version} comes in {order.wire_dtype}",
                remedy="let the wire dtype be the unit's compute dtype",
            )
        offered: dict[TensorName, list[Box]] = defaultdict(list)
        for item in order.items[self.rank]:
            offered[item.tensor].append(item.box)
        check_cover(self._boxes, {tensor: tuple(boxes) for tensor, boxes in offered.items()})
        self._staging = None
        self._pulling = self._thread.submit(self._pull, order)

    def poll_pull(self) -> RankPull | None:
        """None while it runs; raises what went wrong."""
        if self._pulling is None:
            raise IllegalTransition(f"rank {self.rank} is not pulling", rank=self.rank)
        if not self._pulling.done():
            return None
        return self._pulling.result()

    def drop(self) -> None:
        """Forget what was staged."""
        self._staging = None

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Hand every tensor to vLLM's loaders, which take this rank's slice: of a buffer that holds nothing else."""
        staging = self.staged(update_info.version)
        for tensor in staging.tensors():
            self.load_tensor(tensor, staging)

    def load_tensor(self, tensor: TensorName, staging: Staging) -> None:
        whole = torch.full(self._shapes[tensor], torch.nan, dtype=self.dtype)
        for box, array in staging.boxes(tensor):
            whole[box.slices] = torch.from_numpy(array).view(self.dtype)
        self.model.load_weights([(tensor, whole)])

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        self.repack_tied_head()

    def repack_tied_head(self) -> None:
        """A tied head is loaded through the embedding, so the reload passes it by and its packed copy stays old."""
        for module in self.model.modules():
            if isinstance(module, ParallelLMHead) and self.model.config.tie_word_embeddings:
                module.quant_method.process_weights_after_loading(module)

    @torch.no_grad()
    def verify(self, version: int) -> RankDigest:
        """Read every surface back and compare with what was staged; frees staging.

        VerificationFailed names the surfaces that hold something else.
        """
        staging = self.staged(version)
        self._staging = None
        found: dict[tuple[str, TensorName], list[int]] = defaultdict(list)
        for surface in self._surfaces:
            words = readback.bits(surface.read(), self.dtype)
            for part in surface.parts:
                read = words[part.rows]
                shown = read if surface.exact else staging.shown_bits(part.tensor, part.box, read)
                digest = digest_box(part.tensor, part.shape, part.box, shown)
                found[surface.copy, part.tensor].append(digest)
        expected = staging.digests()
        wrong = [f"{tensor} ({copy})" for (copy, tensor), parts in found.items() if combine(parts) != expected[tensor]]
        if wrong:
            more = f" and {len(wrong) - 4} more" if len(wrong) > 4 else ""
            raise VerificationFailed(
                f"rank {self.rank} was given version {version}, computes with other {', '.join(wrong[:4])}{more}",
                remedy="the unit must not serve; release it and prepare another",
                rank=self.rank,
                version=version,
                tensors=",".join(wrong),
            )
        return RankDigest(
            self.rank, combine(digest for (copy, _), parts in found.items() if copy == WEIGHTS for digest in parts)
        )

    def staged(self, version: int) -> Staging:
        if self._staging is None or self._staging.version != version:
            held = "nothing" if self._staging is None else f"version {self._staging.version}"
            raise IllegalTransition(
                f"rank {self.rank} has {held} staged, not version {version}", remedy="pull it first", rank=self.rank
            )
        return self._staging

    def shutdown(self) -> None:
        if self._transport is not None:
            self._thread.shutdown(wait=False)
            self._transport.close()

    def _pull(self, order: WeightOrder) -> RankPull:
        staging = Staging(order.version, order.wire_dtype, self._shapes, self._boxes)
        report = stage(staging, order, self.rank, self._open)
        self._staging = staging
        return report


class WorkerExtension:
    """Mixed into vLLM's worker class: the one method by which the host reaches a rank.

    Payloads are pickles between processes of one engine. A NereusError travels as an answer, so that it keeps its
    kind; any other exception is vLLM's to report.
    """

    weight_transfer_engine: NereusTransferEngine

    def nereus_call(self, method: str, payload: bytes) -> bytes:
        arguments: tuple[Any, ...] = pickle.loads(payload)
        try:
            return pickle.dumps(self.nereus_dispatch(method, arguments))
        except NereusError as error:
            return pickle.dumps(error)

    def nereus_dispatch(self, method: str, arguments: tuple[Any, ...]) -> Any:
        engine = self.weight_transfer_engine
        match method:
            case "describe" | "begin_pull" | "poll_pull" | "drop":
                return getattr(engine, method)(*arguments)
            case "install":
                return self._install(*arguments)
            case _:
                raise IllegalTransition(f"a rank has no method {method}")

    def _install(self: Any, version: int) -> RankDigest:
        engine: NereusTransferEngine = self.weight_transfer_engine
        engine.staged(version)
        self.start_weight_update()
        self.update_weights({"version": version})
        self.finish_weight_update()
        return engine.verify(version)


def _needed(found: tuple[Surface, ...]) -> tuple[dict[TensorName, tuple[int, ...]], dict[TensorName, tuple[Box, ...]]]:
    """Shapes and boxes of the logical tensors behind the loaded surfaces."""
    parts = [part for surface in found if surface.copy == WEIGHTS for part in surface.parts]
    return {part.tensor: part.shape for part in parts}, {part.tensor: (part.box,) for part in parts}
