"""Settings of all tests."""

from __future__ import annotations

from hypothesis import settings

# a slow machine is not a failed law; the time of a whole test is bounded by pytest
settings.register_profile("nereus", deadline=None)
settings.load_profile("nereus")
