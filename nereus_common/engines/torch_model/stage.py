"""One pipeline stage of a Hugging Face decoder, under the checkpoint's names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from nereus_common.core.ids import Head, TensorName
from nereus_common.engines.torch_model.head import position_values, token_logprobs
from nereus_common.engines.torch_model.layer import Carried, add_and_norm, carry_residual
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
        for layer in self.layers.values():
            carry_residual(layer)


class StageModel(nn.Module):
    """Layers `layers` of a decoder, with the embedding on the first stage and the head on the last.

    `full` is a causal language model, or for a score head a sequence classifier with one label. `packs` is what the
    indices that `forward` takes refer to; a pipeline schedule passes tensors only.
    """

    def __init__(self, full: Any, layers: range, world: World, *, head: Head, recompute: bool) -> None:
        super().__init__()
        self.model = Body(full.model, layers, world)
        self.lm_head: nn.Module | None = full.lm_head if world.last_stage and head is Head.LM else None
        self.score: nn.Module | None = full.score if world.last_stage and head is Head.SCORE else None
        self.rotary: Callable[..., tuple[Tensor, Tensor]] | None = None
        self.head = head
        self.tied = bool(full.config.tie_word_embeddings) and head is Head.LM
        self.hidden_size = int(full.config.hidden_size)
        self.recompute = recompute
        self.world = world
        self.first_row = 0
        self.temperature = 1.0
        self.packs: Sequence[PackTensors] = ()

    @property
    def output_rows(self) -> int:
        """C of what the last stage gives, [1, C, R]: log-probs and entropies, or values alone."""
        return 2 if self.head is Head.LM else 1

    def logical_name(self, parameter: str) -> TensorName:
        """The checkpoint's name; a tied head has none of its own."""
        return EMBEDDING if self.tied and parameter == HEAD else TensorName(parameter)

    def tie(self) -> None:
        """Make head and embedding one parameter again where both are here."""
        if self.tied and self.lm_head is not None and self.model.embed_tokens is not None:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, value: Tensor, index: Tensor) -> Tensor:
        """Token ids [1, T] or the previous stage's hidden states [1, T, H] → hidden states, or on the last stage, of
        pack `index`, the log-probs and entropies [1, 2, R] of its targets or the values [1, 1, R] at its rows."""
        pack = self.packs[int(index)]
        hidden = value if self.model.embed_tokens is None else self.model.embed_tokens(value)
        carried: Carried = (hidden, None)
        rotation = self._rotation(hidden, pack)
        for layer in self.model.layers.values():
            carried = self._layer(layer, carried, rotation, pack)
        states, residual = carried
        assert residual is not None, "a stage has at least one layer"
        return self._predict(states, residual, pack) if self.world.last_stage else states + residual

    def _rotation(self, hidden: Tensor, pack: PackTensors) -> tuple[Tensor, Tensor]:
        """Cosines and sines, rounded as the sampler keeps them; wide, so that queries and keys are rounded once."""
        assert self.rotary is not None
        cosines, sines = self.rotary(hidden, position_ids=pack.positions)
        wide = torch.promote_types(hidden.dtype, torch.float32)
        return cosines.to(wide), sines.to(wide)

    def _layer(self, layer: nn.Module, carried: Carried, rotation: tuple[Tensor, Tensor], pack: PackTensors) -> Carried:
        def run(states: Tensor, residual: Tensor | None) -> Any:
            return layer(states, residual, position_embeddings=rotation, segments=pack.segments)

        again = self.recompute and torch.is_grad_enabled()
        output: Carried = checkpoint(run, *carried, use_reentrant=False) if again else run(*carried)
        return output

    def _predict(self, states: Tensor, residual: Tensor, pack: PackTensors) -> Tensor:
        assert self.model.norm is not None
        wanted, carried = (part[0].index_select(0, pack.rows) for part in (states, residual))
        rows, _ = add_and_norm(self.model.norm, wanted, carried)
        if self.score is not None:
            return position_values(rows, self.score.get_parameter("weight"))[None, None]
        assert self.lm_head is not None
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
