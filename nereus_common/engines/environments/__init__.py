"""Environments in worker processes: `pool` and `seat` are the parent, `body` the child; `play` plays one episode."""

from nereus_common.engines.environments.play import play
from nereus_common.engines.environments.pool import Dialogue, EnvironmentChoice, EnvironmentPool

__all__ = ["Dialogue", "EnvironmentChoice", "EnvironmentPool", "play"]
