"""Transition DAGs ↔ protobuf, and as the text that journals keep."""

from __future__ import annotations

from collections.abc import Mapping

from google.protobuf.json_format import MessageToJson, Parse

from nereus.v1 import transitions_pb2 as pb
from nereus_common.core.ids import DeviceId
from nereus_common.rpc.convert import plan_to_pb
from nereus_common.transitions.dag import Node, Side, TransitionDag, UnitSlot


def dag_to_pb(dag: TransitionDag) -> pb.Transition:
    """Plans, nodes, edges, peaks and budgets; who and when is the caller's to add."""
    return pb.Transition(
        plan=plan_to_pb(dag.old),
        target=plan_to_pb(dag.new),
        nodes=[_node_to_pb(node) for node in dag.nodes],
        edges=[pb.TransitionEdge(before=edge.before, after=edge.after, kind=str(edge.kind)) for edge in dag.edges],
        peaks=_bytes_to_pb(dag.peaks),
        budgets=_bytes_to_pb(dag.budgets),
        bytes_needed=dag.moved,
        step=-1,
    )


def dag_to_json(dag: TransitionDag) -> str:
    return str(MessageToJson(dag_to_pb(dag), indent=None))


def dag_from_json(text: str) -> pb.Transition:
    """The message of `dag_to_json`."""
    return Parse(text, pb.Transition())


def _node_to_pb(node: Node) -> pb.TransitionNode:
    slots: tuple[UnitSlot, ...] = (*node.sources, *node.targets)
    return pb.TransitionNode(
        id=node.id,
        primitive=str(node.primitive),
        model_stage=str(node.model_stage),
        old_replicas=[slot.replica for slot in slots if slot.side is Side.OLD],
        new_replicas=[slot.replica for slot in slots if slot.side is Side.NEW],
        mode=str(node.mode),
        bytes=node.moved,
        acquires=_bytes_to_pb(node.acquires),
        frees=_bytes_to_pb(node.frees),
        state="waiting",
    )


def _bytes_to_pb(of: Mapping[DeviceId, int]) -> list[pb.DeviceBytes]:
    return [pb.DeviceBytes(device=str(device), bytes=value) for device, value in sorted(of.items())]
