"""A transition as text for people, as a Graphviz graph, and as a timeline for Perfetto. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from nereus.transition import Transition, TransitionNode
from nereus_common.transitions.schedule import Span, list_schedule

MIB = 1 << 20
LINKS_SHOWN = 8
PHASES = ("prepare", "move", "verify", "sync", "commit", "release")
"""In the order in which they come; the job steps on during the first."""


def as_text(transition: Transition) -> str:
    """Nodes in an order that their edges allow, then every device's peak. No line is wider than 80 columns for names
    of usual length."""
    lines = [f"from plan {transition.plan.id} (epoch {transition.from_epoch}) to plan {transition.target.id}"]
    lines += [line for node in transition.nodes for line in _node_lines(transition, node)]
    if not transition.nodes:
        lines.append("nothing moves: only knobs differ")
    lines.append(f"{_size(transition.bytes_needed)} to move" + _moved(transition))
    lines += _link_lines(transition)
    lines += _peak_lines(transition)
    lines += _second_lines(transition)
    if transition.error_message:
        lines.append(f"{transition.error_reason}: {transition.error_message}")
    return "\n".join(lines)


def as_dot(transition: Transition) -> str:
    """For `dot -Tsvg`: data edges drawn through, resource edges dashed."""
    nodes = (
        f'  n{node.id} [label="{node.id} {node.primitive}\\n{node.model_stage}\\n{_who(node)}\\n'
        f'{_size(node.bytes)} {node.mode}"];'
        for node in transition.nodes
    )
    edges = (
        f"  n{edge.before} -> n{edge.after}{' [style=dashed]' if edge.kind == 'resource' else ''};"
        for edge in transition.edges
    )
    return "\n".join(["digraph transition {", "  node [shape=box];", *nodes, *edges, "}"])


def rate_of(transition: Transition) -> float | None:
    """Bytes per second of the whole move, as predicted from measured links; None where some are not measured."""
    phases = {link.phase for link in transition.links}
    seconds = sum(transition.seconds.get(phase, 0.0) for phase in phases)
    known = seconds > 0 and phases <= set(transition.seconds)
    return sum(link.bytes for link in transition.links) / seconds if known else None


def as_perfetto(transition: Transition, bytes_per_second: float) -> dict[str, Any]:
    """One track per device, in the trace event format: each node when those before it are done and its devices
    receive for no other, for as long as its bytes take at `bytes_per_second`. A prediction, not a measurement."""
    spans = _spans(transition, bytes_per_second)
    devices = sorted({*transition.peaks, *(device for node in transition.nodes for device in _devices(node))})
    tracks = {device: number for number, device in enumerate(devices, 1)}
    names = [
        {"name": "thread_name", "ph": "M", "pid": 1, "tid": number, "args": {"name": device}}
        for device, number in tracks.items()
    ]
    events = [
        {
            "name": f"{node.primitive} {node.model_stage}",
            "cat": node.mode,
            "ph": "X",
            "pid": 1,
            "tid": tracks[device],
            "ts": spans[node.id].start * 1e6,
            "dur": (spans[node.id].end - spans[node.id].start) * 1e6,
            "args": {"node": node.id, "bytes": node.bytes, "units": _who(node)},
        }
        for node in transition.nodes
        for device in _devices(node)
    ]
    return {"traceEvents": [*names, *events], "displayTimeUnit": "ms"}


def _spans(transition: Transition, rate: float) -> Sequence[Span]:
    """Nodes are numbered in a topological order."""
    edges = [(edge.before, edge.after) for edge in transition.edges]
    links = [node.acquires if node.new_replicas else () for node in transition.nodes]
    return list_schedule(edges, links, [node.bytes / rate for node in transition.nodes])


def _node_lines(transition: Transition, node: TransitionNode) -> Iterable[str]:
    waits = [
        f"{edge.before}{'*' if edge.kind == 'resource' else ''}" for edge in transition.edges if edge.after == node.id
    ]
    after = f" after {', '.join(waits)}" if waits else ""
    size = f" {_size(node.bytes)}, {node.mode}" if node.new_replicas else ""
    state = "" if transition.state is None else f" [{node.state}]"
    yield f"{node.id:>3} {node.primitive:<7} {node.model_stage}{state}"
    yield f"    {_who(node)}{size}{after}"


def _who(node: TransitionNode) -> str:
    old = ",".join(f"r{number}" for number in node.old_replicas)
    new = ",".join(f"r{number}" for number in node.new_replicas)
    if node.primitive == "destroy":
        return f"old {old}"
    return f"old {old} -> new {new}" if old else f"new {new}"


def _link_lines(transition: Transition) -> Iterable[str]:
    shown, rest = transition.links[:LINKS_SHOWN], transition.links[LINKS_SHOWN:]
    for link in shown:
        near = link.distance if link.distance == "far" else f"same {link.distance}"
        yield f"{link.phase:<5} {link.source} -> {link.target} {_size(link.bytes)} ({near})"
    if rest:
        yield f"      and {_size(sum(link.bytes for link in rest))} over {len(rest)} further links"


def _second_lines(transition: Transition) -> Iterable[str]:
    """As measured, or of a dry run as predicted."""
    predicted = " at the rates measured so far" if transition.state is None else ""
    for phase in PHASES:
        if phase in transition.seconds:
            yield f"{phase:<8} {transition.seconds[phase]:.2f} s{predicted}"
    if unmeasured := {link.phase for link in transition.links} - set(transition.seconds):
        yield f"no time for {' and '.join(sorted(unmeasured))}: such a link has carried nothing yet"


def _peak_lines(transition: Transition) -> Iterable[str]:
    for device, peak in sorted(transition.peaks.items()):
        budget = transition.budgets.get(device, 0)
        share = f" ({peak / budget:.0%})" if budget else ""
        yield f"{device:<12} peak {_size(peak)} of {_size(budget)}{share}"


def _moved(transition: Transition) -> str:
    return f", {_size(transition.bytes_moved)} moved" if transition.bytes_moved else ""


def _devices(node: TransitionNode) -> list[str]:
    return sorted({*node.acquires, *node.frees})


def _size(count: int) -> str:
    return f"{count / MIB:,.1f} MiB"
