"""Settings come from a file and the environment, and a wrong key is named with its neighbour."""

from __future__ import annotations

from pathlib import Path

import pytest

from nereus_common.config import ServiceSettings, load
from nereus_common.core.errors import InvalidInput, NotFound

pytestmark = pytest.mark.fast

TEXT = """
name: generation0
node: node0
port: 7001
devices:
  - {slot: cpu0, memory_bytes: 4GiB, cores: [0]}
deadlines: {call: 12}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "service.yaml"
    path.write_text(TEXT)
    return path


def test_a_file_is_read_and_defaults_fill_the_rest(file: Path) -> None:
    settings = ServiceSettings.from_argv(["--config", str(file)], {})
    assert settings.devices[0].memory_bytes == 4 << 30
    assert str(settings.devices[0].id(settings.node)) == "node0/cpu0"
    assert (settings.port, settings.host, settings.deadlines.call) == (7001, "127.0.0.1", 12)


def test_the_environment_wins_over_the_file(file: Path) -> None:
    env = {"NEREUS_CONFIG": str(file), "NEREUS_PORT": "7002", "NEREUS_DEADLINES__CALL": "5", "HOME": "/"}
    settings = ServiceSettings.from_argv([], env)
    assert (settings.port, settings.deadlines.call) == (7002, 5)
    assert settings.devices[0].slot == "cpu0"


def test_lists_can_come_from_the_environment() -> None:
    env = {"NEREUS_NAME": "t", "NEREUS_DEVICES": "[{slot: gpu0, kind: gpu, memory_bytes: 1.5 GiB}]"}
    assert load(ServiceSettings, None, env).devices[0].memory_bytes == 3 << 29


@pytest.mark.parametrize(
    ("env", "field", "says"),
    [
        ({"NEREUS_PROT": "1"}, "prot", "did you mean port"),
        ({"NEREUS_DEADLINES__CALLS": "1"}, "deadlines.calls", "did you mean call"),
        ({"NEREUS_DEVICES": "[{slot: a, memory_bytes: 1, core: [1]}]"}, "devices.0.core", "did you mean cores"),
        ({"NEREUS_QQQQ": "1"}, "qqqq", "known: .*registry_url"),
        ({"NEREUS_PORT": "70000"}, "port", "less than or equal to 65535"),
        ({"NEREUS_NAME": "a b"}, "name", "is not a name"),
        ({"NEREUS_DEVICES": "[{slot: a b, memory_bytes: 1}]"}, "devices.0.slot", "is not a name"),
        ({"NEREUS_DEVICES": "[{slot: a, memory_bytes: many}]"}, "devices.0.memory_bytes", "'many'"),
        ({"NEREUS_PORT": "[1"}, "NEREUS_PORT", "not a YAML value"),
        ({"NEREUS_NAME__X": "1"}, "NEREUS_NAME__X", "name is no mapping"),
    ],
)
def test_a_wrong_key_or_value_is_named(env: dict[str, str], field: str, says: str) -> None:
    with pytest.raises(InvalidInput, match=says) as caught:
        load(ServiceSettings, None, {"NEREUS_NAME": "t"} | env)
    assert caught.value.details["field"] == field


def test_a_missing_name_a_missing_file_and_a_broken_file_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="name: Field required"):
        load(ServiceSettings, None, {})
    with pytest.raises(NotFound, match=r"absent\.yaml"):
        load(ServiceSettings, tmp_path / "absent.yaml", {})
    for text, says in [("a: [", "is not YAML"), ("- 1", "holds no mapping")]:
        (tmp_path / "x.yaml").write_text(text)
        with pytest.raises(InvalidInput, match=says):
            load(ServiceSettings, tmp_path / "x.yaml", {})


def test_settings_are_frozen() -> None:
    settings = load(ServiceSettings, None, {"NEREUS_NAME": "t"})
    with pytest.raises(ValueError, match="frozen"):
        settings.port = 1  # type: ignore[misc]
