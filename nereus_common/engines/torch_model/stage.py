"""One pipeline stage of a Hugging Face decoder, under the checkpoint's names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from nereus_common.core.ids import TensorName
from nereus_common.engines.torch_model.head import token_logprobs
from nereus_common.engines.torch_model.packs import PackTensors
from nereus_common.engines.torch_model.world import World

HEAD, EMBEDDING = TensorName("lm_head.weight"), TensorName("model.embed_tokens.weight")


class Body(nn.Module):
    """`model.…` of the checkpoint: the stage's layers by number, embedding and norm where the stage has them."""

    def __init__(self, full: Any, layers: range, world: World) -> None:
        super().__init__()
        self.embed_tokens: nn.Module | None = full.embed_tokens if world.first_stage else None
        self.layers = nn.ModuleDict({str(index): full.layers[index] for index in layers})
        self.norm: nn.Module | None = full.norm if world.last_stage else None


class StageModel(nn.Module):
    """Layers `layers` of a causal language model, with the embedding on the first stage and the head on the last.

    `packs` is what the indices that `forward` takes refer to; a pipeline schedule passes tensors only.
    """

    def __init__(self, full: Any, layers: range, world: World, *, recompute: bool) -> None:
        super().__init__()
        self.model = Body(full.model, layers, world)
        self.lm_head: nn.Module | None = full.lm_head if world.last_stage else None
        self.rotary: Callable[..., tuple[Tensor, Tensor]] | None = None
        self.tied = bool(full.config.tie_word_embeddings)
        self.hidden_size = int(full.config.hidden_size)
        self.recompute = recompute
        self.world = world
        self.first_row = 0
        self.temperature = 1.0
        self.packs: Sequence[PackTensors] = ()

    def logical_name(self, parameter: str) -> TensorName:
        """The checkpoint's name; a tied head has none of its own."""
        return EMBEDDING if self.tied and parameter == HEAD else TensorName(parameter)

    def tie(self) -> None:
        """Make head and embedding one parameter again where both are here."""
        if self.tied and self.lm_head is not None and self.model.embed_tokens is not None:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, value: Tensor, index: Tensor) -> Tensor:
        """Token ids [1, T] or the previous stage's hidden states [1, T, H] → hidden states, or on the last stage the
        log-probs and entropies [1, 2, R] of the targets of pack `index`."""
        assert self.rotary is not None
        pack = self.packs[int(index)]
        hidden = value if self.model.embed_tokens is None else self.model.embed_tokens(value)
        rotation = self.rotary(hidden, position_ids=pack.positions)
        for layer in self.model.layers.values():
            hidden = self._layer(layer, hidden, rotation, pack)
        return self._score(hidden, pack) if self.lm_head is not None else hidden

    def _layer(self, layer: nn.Module, hidden: Tensor, rotation: tuple[Tensor, Tensor], pack: PackTensors) -> Tensor:
        def run(states: Tensor) -> Any:
            return layer(states, position_embeddings=rotation, segments=pack.segments)

        again = self.recompute and torch.is_grad_enabled()
        output: Tensor = checkpoint(run, hidden, use_reentrant=False) if again else run(hidden)
        return output

    def _score(self, hidden: Tensor, pack: PackTensors) -> Tensor:
        assert self.model.norm is not None and self.lm_head is not None
        rows = self.model.norm(hidden[0].index_select(0, pack.rows))
        weight = self.lm_head.weight
        logprobs, entropies = token_logprobs(
            rows,
            weight.to_local() if isinstance(weight, DTensor) else weight,  # type: ignore[arg-type]
            pack.targets,
            self.temperature,
            first_row=self.first_row,
            group=self.world.tensor_group,
        )
        return torch.stack((logprobs[None], entropies[None]), dim=1)
