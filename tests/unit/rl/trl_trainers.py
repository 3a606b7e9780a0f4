"""TRL's own GRPO and RLOO trainers without models, data sets and optimizers: their arithmetic on given tensors.

A trainer is made by `__new__` and given just the attributes that `_generate_and_score_completions` and `_compute_loss`
read. The methods themselves run unchanged; what they ask a model for, log-probs, comes from the given tensors.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Given:
    """B sequences of at most T tokens, `lengths` of them real. [B, T]: log-probs under the trained policy now, before
    the step, under the sampler and the reference; tool_mask 0 on what an environment wrote. rewards [B].
    """

    lengths: list[int]
    current: Tensor
    old: Tensor
    sampler: Tensor
    reference: Tensor
    tool_mask: Tensor
    rewards: Tensor
    group: int

    @property
    def real(self) -> Tensor:
        """[B, T] whether a token exists."""
        return torch.arange(self.current.shape[1]) < torch.tensor(self.lengths)[:, None]

    def flat(self, name: str) -> Tensor:
        """[R] the real tokens."""
        column: Tensor = getattr(self, name)[self.real]
        return column

    @classmethod
    def random(cls, seed: int, *, groups: int = 3, group: int = 4, longest: int = 7) -> Given:
        draw = torch.Generator().manual_seed(seed)
        rows = groups * group
        lengths = torch.randint(2, longest + 1, (rows,), generator=draw).tolist()
        lengths[0] = longest

        def near(base: Tensor, scale: float) -> Tensor:
            return base + scale * torch.randn(rows, longest, generator=draw)

        old = near(torch.full((rows, longest), -1.5), 0.5)
        mask = (torch.rand(rows, longest, generator=draw) < 0.75).int()
        mask[:, 0] = 1
        rewards = torch.randn(rows, generator=draw)
        return cls(lengths, near(old, 0.2), old, near(old, 0.3), near(old, 0.4), mask, rewards, group)


@dataclass
class Settings:
    """Of a trainer; names as in TRL's configs."""

    loss_type: str = "bnpo"
    level: str = "token"
    epsilon: float = 0.2
    epsilon_high: float = 0.2
    delta: float | None = None
    beta: float = 0.0
    cap: float | None = None
    scale_rewards: str = "none"
    longest: int = 7
    first_update: bool = False
    more: dict[str, Any] = field(default_factory=dict)


def grpo(given: Given, settings: Settings) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """What GRPOTrainer hands from scoring to its loss, its loss and the loss' gradient [B, T]."""
    from trl.trainer.grpo_trainer import GRPOTrainer

    return _run(GRPOTrainer, given, settings, with_tools=True)


def rloo(given: Given, settings: Settings) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """The same of RLOOTrainer, which knows no masked tokens."""
    from trl.trainer.rloo_trainer import RLOOTrainer

    return _run(RLOOTrainer, given, settings, with_tools=False)


def _run(
    kind: type[Any], given: Given, settings: Settings, *, with_tools: bool
) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    trainer = kind.__new__(kind)
    before, now, reference = (SimpleNamespace(training=True, is_gradient_checkpointing=False) for _ in range(3))
    leaf = given.current.clone().requires_grad_()
    logprobs = {id(before): given.old, id(now): leaf, id(reference): given.reference}

    def lookup(model: Any, *_: Any, **__: Any) -> tuple[Tensor, Tensor, None]:
        return logprobs[id(model)], torch.zeros_like(given.old), None

    vars(trainer).update(_attributes(given, settings))
    trainer.model, trainer.ref_model = before, reference
    trainer._get_per_token_logps_and_entropies = lookup
    ids = [[3] * length for length in given.lengths]
    if with_tools:
        tools = [row[:length].tolist() for row, length in zip(given.tool_mask, given.lengths, strict=True)]
        sampler = [row[:length].tolist() for row, length in zip(given.sampler, given.lengths, strict=True)]
        answer: tuple[Any, ...] = ([[1]] * len(ids), ids, tools, ids, sampler, {}, None, None)
    else:
        answer = ([[1]] * len(ids), ids, ids)
    trainer._generate = lambda prompts: answer
    trainer._calculate_rewards = lambda *_: given.rewards[:, None]
    inputs = trainer._generate_and_score_completions([{"prompt": "?"} for _ in ids])
    loss = trainer._compute_loss(now, inputs)
    loss.backward()
    assert leaf.grad is not None
    return inputs, loss.detach(), leaf.grad


def _attributes(given: Given, settings: Settings) -> dict[str, Any]:
    from accelerate import Accelerator

    args = SimpleNamespace(
        per_device_train_batch_size=len(given.lengths),
        steps_per_generation=1,
        gradient_accumulation_steps=1,
        gradient_checkpointing_kwargs=None,
        delta=settings.delta,
        use_bias_correction_kl=False,
        **settings.more,
    )
    return {
        "args": args,
        "accelerator": Accelerator(cpu=True),
        "_tokenizer": SimpleNamespace(pad_token_id=0),
        "_metrics": {"train": defaultdict(list)},
        "_logs": defaultdict(lambda: deque(maxlen=1), rewards=defaultdict(list)),
        "_pending_extra_logs": {},
        "_pending_metrics": {},
        "log_multimodal": False,
        "pad_to_multiple_of": None,
        "mask_truncated_completions": False,
        "environment_factories": None,
        "environments": None,
        "tools": None,
        "aux_loss_enabled": False,
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "_entropy_bonus_enabled": False,
        "num_generations": given.group,
        "num_iterations": 1 if settings.first_update else 2,
        "current_gradient_accumulation_steps": 1,
        "max_completion_length": settings.longest,
        "reward_func_names": ["given"],
        "reward_funcs": [None],
        "reward_weights": torch.ones(1),
        "reward_clip_range": None,
        "multi_objective_aggregation": "sum_then_normalize",
        "scale_rewards": settings.scale_rewards,
        "normalize_advantages": False,
        "beta": settings.beta,
        "epsilon_low": settings.epsilon,
        "epsilon_high": settings.epsilon_high,
        "loss_type": settings.loss_type,
        "importance_sampling_level": settings.level,
        "use_vllm": settings.cap is not None,
        "vllm_importance_sampling_correction": True,
        "vllm_importance_sampling_mode": "token_truncate",
        "vllm_importance_sampling_clip_min": None,
        "vllm_importance_sampling_clip_max": settings.cap,
    }
