"""Losses by name, as a training engine is told them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nereus_common.rl.options import by_name
from nereus_common.rl.policy_loss import PolicyLoss
from nereus_common.rl.value_loss import ValueLoss

Loss = PolicyLoss | ValueLoss
LOSSES: Mapping[str, type[Loss]] = {"policy": PolicyLoss, "value": ValueLoss}


def make_loss(options: Mapping[str, Any]) -> Loss:
    """The loss that `{"name": "policy", …}` asks for; InvalidInput names an unknown name, option or a wrong value."""
    return by_name(LOSSES, options, "loss")
