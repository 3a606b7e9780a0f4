"""The processes of a model-stage as one process group and one mesh.

Ranks are numbered (replica, pp, fs, tp), outermost first. The mesh has the dimensions (pp, replica, fs, tp): FSDP2
wants its two, replicate and shard, beside each other.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from nereus_common.core.errors import DeadlineExceeded, NereusError, Unavailable
from nereus_common.core.layout import Coordinate, Layout
from nereus_common.engines.options import Rendezvous

DIMENSIONS = ("pp", "replica", "fs", "tp")


@dataclass(frozen=True, slots=True)
class World:
    """This rank's place among `replicas` units of `layout`. `store` lives as long as the group."""

    layout: Layout
    replicas: int
    replica: int
    place: Coordinate
    mesh: DeviceMesh
    store: Store

    @property
    def data_parallel(self) -> int:
        return self.layout.fs * self.replicas

    @property
    def first_stage(self) -> bool:
        return self.place.pp == 0

    @property
    def last_stage(self) -> bool:
        return self.place.pp == self.layout.pp - 1

    @property
    def tensor_group(self) -> dist.ProcessGroup | None:
        """The tp ranks; None when there is one."""
        return self.mesh.get_group("tp") if self.layout.tp > 1 else None

    def peer(self, stage: int) -> int:
        """Global rank of the process at this one's place on pipeline stage `stage`."""
        return self.replica * self.layout.ranks + self.layout.rank(self.place._replace(pp=stage))

    def close(self) -> None:
        """Leave the group.

        DTensor remembers local shapes by mesh and not by rank: a process that comes back to an equal mesh as another
        rank must not find its old ones.
        """
        dist.destroy_process_group()
        _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]


def open_world(
    rendezvous: Rendezvous, layout: Layout, replicas: int, replica: int, rank: int, timeout: float, device_type: str
) -> World:
    """Meet the other ranks; rank 0 of replica 0 hosts the store. DeadlineExceeded after `timeout` seconds."""
    size, mine = replicas * layout.ranks, replica * layout.ranks + rank
    if _is_loopback(rendezvous.host):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    wait = timedelta(seconds=timeout)
    with meeting(f"rank {mine} of {size} at {rendezvous.host}:{rendezvous.port}", "the other ranks to start"):
        store = TCPStore(rendezvous.host, rendezvous.port, None, mine == 0, wait, wait_for_workers=False)
        dist.init_process_group(
            "gloo" if device_type == "cpu" else "cpu:gloo,cuda:nccl",
            store=PrefixStore(rendezvous.prefix, store),
            rank=mine,
            world_size=size,
            timeout=wait,
        )
        ranks = torch.arange(size).reshape(replicas, layout.pp, layout.fs, layout.tp).transpose(0, 1)
        mesh = DeviceMesh(device_type, ranks, mesh_dim_names=DIMENSIONS)
        for dimension in DIMENSIONS:
            # Groups of a mesh take the library's half hour, not the default group's timeout.
            _set_pg_timeout(wait, mesh.get_group(dimension))
    return World(layout, replicas, replica, layout.coordinate(rank), mesh, store)


@contextmanager
def meeting(who: str, what: str) -> Iterator[None]:
    """Name the waiter and what it waits for when a collective, or the store, fails or runs out of time."""
    try:
        yield
    except NereusError:
        raise
    except RuntimeError as error:
        text = str(error).lower()
        if "timed out" in text or "timeout" in text:
            raise DeadlineExceeded(f"{who} waited for {what}: {error}", remedy="see the log of the others") from error
        if isinstance(error, dist.DistError) or "connection" in text or "gloo" in text:
            raise Unavailable(f"{who} lost {what}: {error}", remedy="see the log of the others") from error
        raise


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
