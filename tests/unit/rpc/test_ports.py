"""Ports told to processes before they listen."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from nereus_common.core.errors import ResourceExhausted
from nereus_common.rpc import ports


def test_no_connection_is_given_a_port_that_was_told_to_somebody() -> None:
    first, last = (int(word) for word in ports.EPHEMERAL.read_text().split())
    assert first > ports.LOWEST + 1_000, "else the kernel leaves no port aside on this machine"
    told = {ports.free_port() for _ in range(200)}
    assert not told & set(range(first, last + 1))
    assert min(told) >= ports.LOWEST


def test_a_port_that_is_held_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    held = ports.free_port()
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", held))
        monkeypatch.setattr(ports, "LOWEST", held)
        monkeypatch.setattr(ports, "HIGHEST", held + 1_200)
        assert held not in {ports.free_port() for _ in range(8_000)}


@pytest.mark.parametrize("text", ["1024 65535", "9000 65000"])
def test_where_the_kernel_hands_out_all_any_free_one_is_told(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "range").write_text(text)
    monkeypatch.setattr(ports, "EPHEMERAL", tmp_path / "range")
    assert ports.LOWEST <= ports.free_port() <= ports.HIGHEST


def test_a_taken_port_is_named_with_its_user() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(ResourceExhausted, match=f"port {port} on 127.0.0.1 cannot be used by the controller"):
            ports.usable_port("127.0.0.1", port, "controller")
    assert ports.usable_port("127.0.0.1", port, "controller") == port
