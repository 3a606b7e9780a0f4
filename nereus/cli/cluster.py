"""`nereus up`, `down` and `status`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from nereus.cli.options import DataDir, Json, Target
from nereus.cli.output import console, notes, print_json, speaks_plainly
from nereus.cluster.config import default_data_dir, load_cluster_config
from nereus.cluster.state import ClusterFolder, ClusterState
from nereus.types import ClusterStatus
from nereus_common.core.errors import NereusError


def say(text: str) -> None:
    notes.print(text, style="dim", markup=False)


@speaks_plainly
def up(
    config: Annotated[Path | None, typer.Option(help="A cluster config (YAML): devices, ports, registry.")] = None,
    registry: Annotated[str | None, typer.Option(help="A redis:// URL; default: an embedded server.")] = None,
    port: Annotated[int | None, typer.Option(help="The controller's port; default: any free one.")] = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Start a cluster on this machine, or what of it has died: registry and services, in the background."""
    from nereus.cluster.up import up as start

    chosen = load_cluster_config(config, registry=registry, controller_port=port)
    state = start(ClusterFolder(data_dir or default_data_dir()), chosen, report=say)
    if as_json:
        print_json({"controller": state.controller, "devices": state.devices, "members": state.members})
    else:
        console.print(f"controller at {state.controller}, {len(state.devices)} devices")


@speaks_plainly
def down(
    grace: Annotated[float, typer.Option(help="Seconds for each service before it is killed.")] = 30.0,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Stop the cluster, and check that no process and no shared memory is left."""
    from nereus.cluster.down import down as stop

    result = stop(ClusterFolder(data_dir or default_data_dir()), grace=grace, report=say)
    if as_json:
        print_json(result)
        return
    for name in result.killed:
        notes.print(f"{name} did not stop within {grace:g} s and was killed", style="yellow")
    swept = result.swept_processes, result.swept_segments
    if any(swept):
        notes.print(f"{swept[0]} processes and {swept[1]} segments were left and are removed", style="yellow")
    console.print("stopped; nothing is left")


@speaks_plainly
def status(target: Target = None, data_dir: DataDir = None, as_json: Json = False) -> None:
    """Show the cluster's processes, devices and services."""
    state = None if target else ClusterFolder(data_dir or default_data_dir()).require()
    known, problem = _ask(target or (state.controller if state else ""), data_dir)
    processes = _processes(state)
    if as_json:
        print_json({"processes": processes, "cluster": known, "problem": problem})
    else:
        _show_processes(processes or _services(known))
        _show_devices(known)
        if problem:
            notes.print(f"nereus: {problem}", style="red", markup=False, soft_wrap=True)
    dead = [process["name"] for process in processes or _services(known) if not process["alive"]]
    if dead:
        notes.print(f"nereus: {', '.join(dead)} died; `nereus up` starts what is missing again", style="red")
    if problem or dead:
        raise typer.Exit(1)


def _processes(state: ClusterState | None) -> list[dict[str, Any]]:
    """Of a cluster on this machine, from its folder."""
    members = state.members if state else ()
    return [{"name": m.name, "pid": m.pid, "target": _public(m.target), "alive": m.alive} for m in members]


def _services(known: ClusterStatus | None) -> list[dict[str, Any]]:
    """Of any cluster, from its registry: by their leases, which a dead service keeps for some seconds."""
    services = known.services if known else ()
    return [{"name": s.name, "node": s.node, "target": s.target, "alive": s.alive} for s in services]


def _ask(target: str, data_dir: Path | None) -> tuple[ClusterStatus | None, str]:
    """What the controller knows, or why it does not answer."""
    from nereus.sync import SyncClient

    try:
        with SyncClient.connect(target, data_dir=data_dir, timeout=10.0) as client:
            return client.cluster_status(), ""
    except NereusError as error:
        return None, str(error)


def _public(target: str) -> str:
    """A registry URL without its password."""
    scheme, separator, rest = target.partition("://")
    return f"{scheme}{separator}{rest.rpartition('@')[2]}" if separator else target


def _show_processes(processes: list[dict[str, Any]]) -> None:
    if not processes:
        return
    table = Table(box=None)
    for heading in processes[0]:
        table.add_column(heading, overflow="fold")
    for process in processes:
        alive = "yes" if process["alive"] else "[red]no[/]"
        table.add_row(*(alive if name == "alive" else str(value) for name, value in process.items()))
    console.print(table)


def _show_devices(known: ClusterStatus | None) -> None:
    if known is None:
        return
    table = Table(box=None)
    for heading in ("device", "memory", "granted", "units"):
        table.add_column(heading, overflow="fold")
    for device in known.devices:
        sizes = (f"{size / (1 << 30):.1f} GiB" for size in (device.memory_bytes, device.granted_bytes))
        table.add_row(device.id, *sizes, ", ".join(device.units) or "-")
    console.print(table)
