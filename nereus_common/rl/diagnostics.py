"""What a batch says about the critic and about how old its samples are."""

from __future__ import annotations

import numpy as np

from nereus_common.core.errors import InvalidInput
from nereus_common.rl.rollouts import RolloutBatch
from nereus_common.rl.trajectories import Trajectories


def explained_variance(batch: RolloutBatch) -> float:
    """1 − Var(returns − values) / Var(returns) over the unmasked tokens: 1 for a perfect critic, 0 for a constant one.

    0 too where the returns do not vary, or there are no tokens: nothing was there to be explained. InvalidInput
    without values and returns.
    """
    for name in ("values", "returns"):
        if len(getattr(batch, name)) != len(batch.mask):
            raise InvalidInput(
                f"explained variance needs the column {name}", remedy="compute values and returns first", field=name
            )
    tokens = Trajectories.of(batch)
    returns, values = tokens.pick(batch.returns), tokens.pick(batch.values)
    spread = float(returns.var()) if len(returns) else 0.0
    return 1.0 - float((returns - values).var()) / spread if spread > 0 else 0.0


def staleness(batch: RolloutBatch, version: int) -> tuple[int, float]:
    """The largest and the mean staleness of the samples when `version` consumes them, 0 without samples.

    A sample is as old as its oldest unmasked token; one without unmasked tokens does not count.
    """
    tokens = Trajectories.of(batch)
    oldest = np.full(batch.sequences, np.iinfo(np.int64).max)
    np.minimum.at(oldest, tokens.owner, batch.versions[tokens.token])
    ages = version - oldest[tokens.lengths > 0]
    return (int(ages.max()), float(ages.mean())) if len(ages) else (0, 0.0)
