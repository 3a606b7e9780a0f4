"""What people write for a target and what they are shown of a transition."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.text import Text

from nereus import rendering
from nereus.cli.targets import parse_target
from nereus.cli.transition_progress import follow
from nereus.spec import JobSpec
from nereus.spec.moves import merge_target
from nereus.transition import Transition, TransitionEdge, TransitionLink, TransitionNode
from nereus_common.core.errors import InvalidInput, InvalidPlan
from nereus_common.core.plan import Plan, plan_from_dict
from nereus_common.transitions.lifecycle import TransitionState

pytestmark = pytest.mark.fast

PLAN = plan_from_dict(
    {
        "stages": {
            "actor/generation": {"layout": "tp1.pp1.fs1", "devices": ["node0/cpu0"], "generation": {"kv_bytes": 1024}},
            "actor/training": {"layout": "tp2.pp1.fs1", "devices": ["node0/cpu1", "node0/cpu2"]},
        }
    }
)
TRAINING = {"layout": "tp1.pp2.fs1", "devices": ["node0/cpu2", "node0/cpu3"]}
MIB = 1 << 20


def node(number: int, primitive: str, **more: Any) -> TransitionNode:
    whole = {"old_replicas": (0,), "new_replicas": (0,), "mode": "shadow", "bytes": 0, "acquires": {}, "frees": {}}
    return TransitionNode(number, primitive, "actor/training", state="waiting", **{**whole, **more})


def transition(target: Plan) -> Transition:
    made = node(0, "reshard", bytes=96 * MIB, acquires={"node0/cpu3": 64 * MIB, "node0/cpu2": 64 * MIB})
    gone = node(1, "destroy", new_replicas=(), frees={"node0/cpu1": 64 * MIB, "node0/cpu2": 64 * MIB})
    return Transition(
        id="",
        job="j",
        state=None,
        from_epoch=3,
        plan=PLAN,
        target=target,
        nodes=(made, gone),
        edges=(TransitionEdge(0, 1, "data"),),
        peaks={"node0/cpu2": 128 * MIB},
        budgets={"node0/cpu2": 512 * MIB},
        bytes_moved=0,
        bytes_needed=96 * MIB,
        seconds={},
        step=-1,
        error_reason="",
        error_message="",
        created=None,
        ended=None,
    )


def test_a_target_changes_what_it_names_and_nothing_else() -> None:
    moved = merge_target(PLAN, {"stages": {"actor/training": TRAINING}})
    (changed,) = [name for name, stage in moved.stages if stage != PLAN[name]]
    assert str(changed) == "actor/training" and str(moved[changed].layout) == "tp1.pp2.fs1"
    assert moved[changed].dtypes == PLAN[changed].dtypes
    deeper = merge_target(PLAN, {"stages": {"actor/generation": {"generation": {"max_length": 99}}}})
    (generation, _) = deeper.stages
    assert generation[1].generation is not None
    assert (generation[1].generation.max_length, generation[1].generation.kv_bytes) == (99, 1024)


def test_a_target_that_is_no_plan_names_the_field() -> None:
    with pytest.raises(InvalidPlan, match=r"plan\.stages\.actor/training\.layuot is unknown"):
        merge_target(PLAN, {"stages": {"actor/training": {"layuot": "tp1.pp1.fs1"}}})


def test_words_name_layout_and_devices_or_keep_those_that_suffice() -> None:
    given = parse_target(["actor/training=tp1.pp2.fs1@node0/cpu2,node0/cpu3"], PLAN)
    assert given == {"stages": {"actor/training": TRAINING}}
    kept = parse_target(["actor/training=tp1.pp1.fs1"], PLAN)
    assert kept == {"stages": {"actor/training": {"layout": "tp1.pp1.fs1", "devices": ["node0/cpu1"]}}}
    assert parse_target(["target.yaml"], PLAN) == Path("target.yaml")


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("actor/training=tp3.pp1.fs1", "needs 3 devices, and 2 are known"),
        ("actor/training=@node0/cpu1", "is not understood"),
        ("actor=tp1.pp1.fs1", "is not MODEL/STAGE"),
    ],
)
def test_a_word_that_does_not_say_enough_is_refused(word: str, said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        parse_target([word], PLAN)


def test_the_text_says_what_happens_in_which_order_and_fits_a_narrow_terminal() -> None:
    target = merge_target(PLAN, {"stages": {"actor/training": TRAINING}})
    text = rendering.as_text(transition(target))
    assert text.splitlines() == [
        f"from plan {PLAN.id} (epoch 3) to plan {target.id}",
        "  0 reshard actor/training",
        "    old r0 -> new r0 96.0 MiB, shadow",
        "  1 destroy actor/training",
        "    old r0 after 0",
        "96.0 MiB to move",
        "node0/cpu2   peak 128.0 MiB of 512.0 MiB (25%)",
    ]
    assert max(map(len, text.splitlines())) <= 60


def test_a_dry_run_says_which_links_carry_how_much_and_how_long_that_takes() -> None:
    links = [
        TransitionLink("n0/g0", "n1/g0", "move", 64 * MIB, "far"),
        *(TransitionLink("n0/g0", f"n0/g{number}", "sync", MIB, "node") for number in range(1, 10)),
    ]
    shown = replace(transition(PLAN), links=tuple(links), seconds={"move": 2.0})
    lines = rendering.as_text(shown).splitlines()
    assert "move  n0/g0 -> n1/g0 64.0 MiB (far)" in lines and "sync  n0/g0 -> n0/g1 1.0 MiB (same node)" in lines
    assert "      and 2.0 MiB over 2 further links" in lines
    assert "move     2.00 s at the rates measured so far" in lines
    assert "no time for sync: such a link has carried nothing yet" in lines
    assert rendering.rate_of(shown) is None
    assert rendering.rate_of(replace(shown, seconds={"move": 2.0, "sync": 1.0})) == 73 * MIB / 3


def test_the_text_of_one_that_failed_says_why() -> None:
    failed = replace(
        transition(PLAN), state=TransitionState.UNDONE, error_reason="PROCESS_LOST", error_message="rank 1 is gone"
    )
    assert "PROCESS_LOST: rank 1 is gone" in rendering.as_text(failed)


def test_the_graph_has_every_node_and_edge() -> None:
    dot = rendering.as_dot(transition(PLAN))
    assert dot.startswith("digraph") and "n0 -> n1;" in dot and "reshard" in dot and "destroy" in dot


def test_the_timeline_has_a_track_per_device_and_keeps_the_order() -> None:
    events = rendering.as_perfetto(transition(PLAN), 96 * MIB)["traceEvents"]
    tracks = {event["args"]["name"] for event in events if event["ph"] == "M"}
    assert tracks == {"node0/cpu1", "node0/cpu2", "node0/cpu3"}
    spans = [event for event in events if event["ph"] == "X"]
    assert {(span["args"]["node"], span["ts"], span["dur"]) for span in spans} == {(0, 0.0, 1e6), (1, 1e6, 0.0)}


def spec(**more: Any) -> dict[str, Any]:
    stages = {
        "actor/generation": {"layout": "tp1.pp1.fs1", "devices": ["n/cpu0"], "generation": {}},
        "actor/training": {"layout": "tp1.pp1.fs1", "devices": ["n/cpu1"]},
    }
    prompts = {"task": "chain_sum", "size": 8}
    return {
        "model": "m",
        "steps": 5,
        "prompts": prompts,
        "rewards": ["exact_answer"],
        "plan": {"stages": stages},
        **more,
    }


def move(step: int, **training: Any) -> dict[str, Any]:
    return {"after_step": step, "plan": {"stages": {"actor/training": training}}}


def test_a_job_file_may_hold_targets_which_build_on_each_other() -> None:
    two = [move(1, layout="tp1.pp1.fs2", devices=["n/cpu1", "n/cpu2"]), move(3, layout="tp2.pp1.fs1")]
    assert [one.after_step for one in JobSpec.from_dict(spec(moves=two)).moves] == [1, 3]


@pytest.mark.parametrize(
    ("moves", "said"),
    [
        ([move(3, microbatch_tokens=9), move(3, microbatch_tokens=8)], "each later than the one before"),
        ([move(5, microbatch_tokens=9)], "below 5"),
        ([move(1, layout="tp2.pp1.fs1")], "needs 2 devices, 1 are given"),
    ],
)
def test_targets_that_lead_nowhere_are_refused_with_the_job(moves: list[dict[str, Any]], said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        JobSpec.from_dict(spec(moves=moves))


def states() -> list[Transition]:
    """A transition on its way."""
    begun = replace(transition(PLAN), state=TransitionState.MOVING)
    done = tuple(replace(one, state="done") for one in begun.nodes)
    return [begun, replace(begun, nodes=done, bytes_moved=96 * MIB, state=TransitionState.DONE)]


@pytest.mark.parametrize("columns", [60, 100])
def test_a_transition_is_followed_by_bars_on_a_terminal(columns: int) -> None:
    written = StringIO()
    follow(states(), Console(file=written, force_terminal=True, width=columns, color_system=None))
    plain = Text.from_ansi(written.getvalue().split("\x1b[1A")[-1]).plain
    above, below = [text for text in plain.splitlines() if text.strip()]
    assert above.startswith("done") and "2/2 nodes" in above
    assert below.startswith("moved") and "96.0 of 96.0 MiB" in below
    assert max(len(above), len(below)) <= columns


def test_a_transition_is_followed_by_lines_where_nobody_can_draw() -> None:
    written = StringIO()
    follow(states(), Console(file=written, width=100))
    assert written.getvalue().splitlines() == [
        "moving 0/2 nodes, 0.0 of 96.0 MiB moved",
        "done 2/2 nodes, 96.0 of 96.0 MiB moved",
    ]
