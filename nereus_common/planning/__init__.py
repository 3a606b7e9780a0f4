"""Deciding, purely: what fits, what it costs, what to choose."""
