"""What is shipped to run Nereus is loaded by the very code that will load it."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from nereus_common.config import ServiceSettings, load

pytestmark = pytest.mark.fast
ROOT = Path(__file__).parents[2]
SERVICES = ("controller", "coordinator", "generation", "inference", "training")


@pytest.mark.parametrize("service", SERVICES)
def test_every_shipped_service_config_is_valid(service: str) -> None:
    settings = load(ServiceSettings, ROOT / "deploy/compose" / f"{service}.yaml", {})
    assert settings.name == service
    assert bool(settings.devices) == (service in ("generation", "inference", "training"))


def test_compose_runs_every_service_and_a_durable_redis() -> None:
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    assert set(compose["services"]) == {"redis", *SERVICES}
    for service in SERVICES:
        assert compose["services"][service]["build"]["args"] == {"SERVICE": service}
        assert compose["services"][service]["depends_on"] == {"redis": {"condition": "service_healthy"}}
    assert compose["services"]["redis"]["command"][-4:] == ["--appendonly", "yes", "--appendfsync", "always"]
