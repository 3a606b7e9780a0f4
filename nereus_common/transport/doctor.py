"""Do the transports of this machine work, and which does UCX choose? Moves real bytes between real processes."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from nereus_common.core.errors import NereusError
from nereus_common.transport.probe import Probe, Role

_BYTES = 64 << 20


class PairKind(StrEnum):
    """Where the two ranks of a pair run."""

    PROCESS = "process"
    """In one process."""
    NODE = "node"
    """In two processes of one node: shared memory."""
    NETWORK = "network"
    """As though on two nodes; over the loopback device here."""


@dataclass(frozen=True, slots=True)
class PairReport:
    """One kind of pair: the protocols UCX chose for large messages, and what a verified pull reached.

    `problem` is empty when it worked.
    """

    kind: PairKind
    protocols: tuple[str, ...]
    moved_bytes: int
    seconds: float
    problem: str = ""

    @property
    def gb_per_s(self) -> float:
        return self.moved_bytes / self.seconds / 1e9 if self.seconds else 0.0


def check_pairs(kinds: Sequence[PairKind] = tuple(PairKind), *, seconds: float = 60.0) -> list[PairReport]:
    """Move 64 MB over each kind of pair, digests included; each within `seconds`. Never raises for a broken pair."""
    return [_check(kind, seconds) for kind in kinds]


def _check(kind: PairKind, seconds: float) -> PairReport:
    try:
        return _move(kind, seconds)
    except NereusError as error:
        return PairReport(kind, (), 0, 0.0, str(error))


def _move(kind: PairKind, seconds: float) -> PairReport:
    env = {"UCX_PROTO_INFO": "y"}
    away = {"host": "127.0.0.1", "node": f"elsewhere-{secrets.token_hex(4)}"} if kind is PairKind.NETWORK else {}
    serving = Role(_BYTES, away, both=kind is PairKind.PROCESS, repeat=2, seconds=seconds)
    with Probe(serving, env) as source:
        address = source.answer()["address"]
        if kind is PairKind.PROCESS:
            return _report(kind, source, source)
        with Probe(Role(_BYTES, address=address, repeat=2, seconds=seconds), env) as puller:
            return _report(kind, puller, source)


def _report(kind: PairKind, puller: Probe, source: Probe) -> PairReport:
    """Of the second pull: the first one pays for connections and page faults."""
    puller.answer()
    second = puller.answer()
    return PairReport(kind, tuple(sorted(set(source.protocols))), second["bytes"], second["seconds"])
