"""Rewards in worker processes: see `pool` (the parent) and `body` (the child)."""
