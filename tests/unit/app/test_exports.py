"""What `nereus` exports, and what importing it loads."""

from __future__ import annotations

import subprocess
import sys

import pytest

import nereus
from nereus import errors
from nereus_common.core import errors as core_errors

pytestmark = pytest.mark.fast

EXPORTED = {
    "Client", "ClusterStatus", "Device", "Evaluation", "Job", "JobEvent", "JobHandle", "JobSpec", "JobState", "LogLine",
    "Observation", "Plan", "RewardInput", "Service", "StateChange", "StepReport", "SyncClient", "SyncJobHandle",
    "SyncReport", "Task", "errors", "load_spec",
    "Checkpoint", "Restart", "Sample", "load_plan", "StateDigests", "Transition", "TransitionChange",
}  # fmt: skip
HEAVY = ("torch", "grpc", "vllm", "transformers", "redis", "ucxx", "numpy", "pydantic", "nereus_controller")

LOADED = f"""
import sys, nereus
nereus.JobState
print([name for name in {HEAVY!r} if name in sys.modules])
"""

LIGHT_SPEC = """
import sys, nereus
nereus.JobSpec, nereus.load_spec
print([name for name in ("torch", "grpc", "transformers") if name in sys.modules])
"""

LIGHT_CLIENT = """
import sys, nereus
nereus.Client, nereus.SyncClient
heavy = ("torch", "vllm", "transformers", "ucxx", "redis", "nereus_common.rpc.server")
print([name for name in heavy if name in sys.modules])
"""


def test_the_exported_names_are_these_and_all_of_them_exist() -> None:
    assert set(nereus.__all__) == EXPORTED
    assert all(getattr(nereus, name) is not None for name in EXPORTED)
    assert set(dir(nereus)) == EXPORTED


def test_a_name_that_is_not_exported_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Clinet'"):
        _ = nereus.Clinet


def test_every_error_can_be_caught_by_name() -> None:
    kinds = [kind for kind in vars(core_errors).values() if isinstance(kind, type)]
    assert set(errors.__all__) == {kind.__name__ for kind in kinds if issubclass(kind, core_errors.NereusError)}


@pytest.mark.parametrize("program", [LOADED, LIGHT_SPEC, LIGHT_CLIENT], ids=["nereus", "spec", "client"])
def test_importing_loads_nothing_heavy(program: str) -> None:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
