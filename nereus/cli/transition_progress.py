"""A transition while it runs: bars on a terminal, lines elsewhere."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from nereus import rendering
from nereus.transition import Transition

BAR_COLUMNS = 20


def follow(states: Iterable[Transition], console: Console) -> None:
    """Show each state of one transition as it comes, until there is none left."""
    if not console.is_terminal:
        for state in states:
            console.print(line(state), markup=False)
        return
    columns = TextColumn("{task.description}"), BarColumn(BAR_COLUMNS), TextColumn("{task.fields[of]}")
    with Progress(*columns, TimeElapsedColumn(), console=console) as bars:
        nodes, moved = (bars.add_task(name, of="", total=None) for name in ("waiting", "moved"))
        for state in states:
            bars.update(nodes, description=str(state.state), of=_nodes(state))
            bars.update(nodes, completed=_done(state), total=len(state.nodes))
            bars.update(moved, of=_moved(state), completed=state.bytes_moved, total=state.bytes_needed)


def line(state: Transition) -> str:
    """State, how many nodes are done, and the bytes that have moved."""
    return f"{state.state} {_nodes(state)}, {_moved(state)} moved"


def _done(state: Transition) -> int:
    return sum(node.state == "done" for node in state.nodes)


def _nodes(state: Transition) -> str:
    return f"{_done(state)}/{len(state.nodes)} nodes"


def _moved(state: Transition) -> str:
    return f"{state.bytes_moved / rendering.MIB:,.1f} of {state.bytes_needed / rendering.MIB:,.1f} MiB"
