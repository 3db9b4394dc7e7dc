"""Every control: its effect, its refusals in clear words, dry plans that change nothing, and twice the same as once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.simulator import Simulator, World, make_config
from whale_tui import records as r
from whale_tui.loop import alternation as todo
from whale_tui.loop import control
from whale_tui.loop.control import CONTROLS, Refused
from whale_tui.loop.run import Run
from whale_tui.loop.state import replay
from whale_tui.records import Settings
from whale_tui.rundir import RunDir


def in_weight() -> Simulator:
    sim = Simulator(make_config(schedule__epochs=1.0))
    sim.until(lambda a: isinstance(a, todo.SampleStep) and a.step == 3)
    return sim


def in_search() -> Simulator:
    """h0001 is scored, h0002 failed, h0003 waits for approval, h0004 is not checked."""

    class One(World):
        def outcome(self, sim: Simulator, harness: str) -> r.Outcome:
            return "crash" if harness == "h0002" else "scored"

        def check(self, sim: Simulator, harness: str) -> bool:
            return harness != "h0004"

    sim = Simulator(make_config(run__first_phase="harness", schedule__iterations=9), One())
    sim.until(lambda a: isinstance(a, todo.Check) and "h0003" in a.harnesses)
    sim.record(r.CandidateChecked(harness="h0003", ok=True, reason=""))
    return sim


def refused(sim: Simulator, what: str, **args: Any) -> str:
    before = msgspec.json.encode(sim.state)
    with pytest.raises(Refused) as refusal:
        control.plan(sim.state, what, args, "ann")
    assert msgspec.json.encode(sim.state) == before
    return str(refusal.value)


EFFECTS = [
    ("pause", {}),
    ("resume", {}),
    ("switch", {}),
    ("switch", {"now": True}),
    ("pin", {}),
    ("pin", {"harness": "h0001"}),
    ("unpin", {}),
    ("approve", {"harness": "h0001"}),
    ("approve", {"harness": "h0003"}),
    ("veto", {"harness": "h0003", "reason": "no"}),
    ("rollback", {"policy": "theta-0000", "harness": "h0001"}),
    ("evaluate", {"policy": "theta-0000", "harness": "h0001", "samples": 2}),
    ("set", {"iterations": 4, "epochs": 0.5}),
    ("stop", {}),
]


def test_every_control_is_tried() -> None:
    assert {what for what, _ in EFFECTS} == set(CONTROLS)
    for name, one in CONTROLS.items():
        assert one.name == name and one.help and one.help[0].islower()


@pytest.mark.parametrize(("what", "args"), EFFECTS)
def test_a_plan_changes_nothing(what: str, args: dict[str, Any]) -> None:
    sim = in_search()
    before, given = msgspec.json.encode(sim.state), dict(args)
    planned = control.plan(sim.state, what, args, "ann")
    assert msgspec.json.encode(sim.state) == before and args == given
    assert planned.effect and planned.effect[0] != " " and not planned.effect.endswith(".")


@pytest.mark.parametrize(("what", "args"), [e for e in EFFECTS if e[0] != "stop"])
def test_twice_is_the_same_as_once(what: str, args: dict[str, Any]) -> None:
    """The second one, from another person's terminal, changes nothing but the count of commands."""
    sim = in_search()
    sim.command(what, who="ann", **args)
    before, action = sim.state, sim.next()
    before = msgspec.json.decode(msgspec.json.encode(before))
    planned = sim.command(what, who="bob", **args)
    after = msgspec.json.decode(msgspec.json.encode(sim.state))
    for volatile in ("seq", "at", "commands"):
        before.pop(volatile), after.pop(volatile)
    assert after == before and sim.next() == action
    assert not planned.events and not planned.interrupt


@pytest.mark.parametrize(("what", "args"), EFFECTS)
def test_every_effect_survives_the_journal(what: str, args: dict[str, Any]) -> None:
    sim = in_search()
    sim.command(what, **args)
    assert replay([r.event_decoder.decode(r.encode_event(e)) for e in sim.events]) == sim.state


def test_pause_and_resume() -> None:
    sim = in_weight()
    assert sim.command("pause").effect == "pauses at the next safe point"
    assert (sim.state.status, sim.state.reason) == ("paused", "by ann")
    assert sim.command("pause").effect == "already paused"
    sim.command("resume")
    assert sim.state.status == "running"
    assert sim.command("resume").effect == "already running"


def test_switch_says_when() -> None:
    sim = in_weight()
    assert control.plan(sim.state, "switch", {}, "ann").effect == "the weight phase ends after step 3"
    assert "dropped and not counted" in control.plan(sim.state, "switch", {"now": True}, "ann").effect
    assert "after iteration 3" in control.plan(in_search().state, "switch", {}, "ann").effect
    between = Simulator(make_config())
    assert "no phase is running" in refused(between, "switch")


def test_switch_now_is_not_taken_back_by_switch() -> None:
    sim = in_search()
    sim.command("switch", now=True)
    assert "already ends now" in sim.command("switch", who="bob").effect
    assert (sim.state.switch, sim.state.switch_by) == ("now", "ann")
    sim = in_search()
    sim.command("switch")
    assert sim.command("switch", now=True).interrupt and sim.state.switch == "now"


def test_switch_false_is_not_now() -> None:
    for value in (False, "false", 0, "", None):
        assert not control.plan(in_weight().state, "switch", {"now": value}, "ann").interrupt


def test_pin_and_unpin() -> None:
    sim = in_search()
    assert "in place of h0000" in sim.command("pin", harness="h0001").effect
    assert (sim.state.pinned, sim.state.harness) == ("h0001", "h0001")
    assert "already pinned" in sim.command("pin").effect
    assert "h0001 is no longer pinned" in sim.command("unpin").effect
    assert (sim.state.pinned, sim.state.harness) == ("", "h0001")
    assert sim.command("unpin").effect == "nothing was pinned"


def test_pin_refuses_what_cannot_run() -> None:
    sim = in_search()
    assert "it is crash" in refused(sim, "pin", harness="h0002")
    assert "not passed the checks" in refused(sim, "pin", harness="h0004")
    assert "there are h0000, h0001" in refused(sim, "pin", harness="h0099")


def test_approve_and_veto() -> None:
    sim = in_search()
    assert sim.command("approve", harness="h0003").effect == "h0003 will be evaluated"
    assert (sim.state.harnesses["h0003"].decided, sim.state.harnesses["h0003"].decided_by) == ("approved", "ann")
    assert "already approved by ann" in sim.command("approve", who="bob", harness="h0003").effect
    assert sim.command("veto", harness="h0003", reason=" reads the clock ").events == [
        r.CandidateOutcome(harness="h0003", outcome="vetoed", reason="reads the clock", at=sim.state.at)
    ]
    assert "already vetoed by ann" in sim.command("veto", who="bob", harness="h0003", reason="x").effect
    assert "can't be approved" in refused(sim, "approve", harness="h0003")
    assert "can't be approved" in refused(sim, "approve", harness="h0002")
    assert "can't be vetoed" in refused(sim, "veto", harness="h0000", reason="x")
    assert "needs a reason" in refused(sim, "veto", harness="h0001")
    assert "needs a reason" in refused(sim, "veto", harness="h0001", reason="  ")
    assert "(none given)" in refused(sim, "approve")
    assert sim.command("approve", harness="h0001").effect == "h0001 may be accepted"


def test_rollback() -> None:
    sim = in_weight()
    assert (sim.state.policy, sim.state.harness) == ("theta-0002", "h0000")
    planned = sim.command("rollback", policy="theta-0001")
    assert planned.interrupt and planned.args == {"policy": "theta-0001", "harness": "h0000"}
    assert sim.state.policy == "theta-0001"
    assert "is the current pair" in sim.command("rollback", policy="theta-0001").effect
    assert "there are theta-0000, theta-0001, theta-0002" in refused(sim, "rollback", policy="theta-0009")
    sim.step()
    assert sim.command("rollback", policy="theta-0000").effect.endswith("; step 3 is not trained")
    search = in_search()
    assert "it is crash" in refused(search, "rollback", harness="h0002")
    assert "not checked yet" in refused(search, "rollback", harness="h0004")
    search.command("pin")
    assert "unpin it first" in refused(search, "rollback", harness="h0001")


def test_evaluate_measures_a_pair_at_the_next_safe_point_and_decides_nothing() -> None:
    """The same run with and without it: every decision and every score of the search is the same."""

    def run(wish: bool) -> Simulator:
        sim = Simulator(make_config(run__cycles=2, test__samples=2, run__first_phase="weight"))
        sim.until(lambda a: isinstance(a, todo.TrainStep) and len(sim.state.versions) == 2)
        if wish:
            planned = sim.command("evaluate", policy="theta-0001", harness="h0000", samples=3)
            assert planned.effect.startswith("theta-0001 with h0000 is measured on D_test at the next safe point")
            assert isinstance(sim.next(), todo.TrainStep), "an open step is trained first"
            sim.step()
            assert sim.next() == todo.Test("theta-0001", "h0000", "asked by ann", 3, 1)
            sim.step()
            (test,) = [t for t in sim.state.tests if t.label == "asked by ann"]
            assert (test.policy, test.samples) == ("theta-0001", 3) and not sim.state.wanted
            again = sim.command("evaluate", policy="theta-0001", harness="h0000", samples=3)
            assert "is measured already: mean@3 50.0%" in again.effect and not sim.state.wanted
        return sim.run()

    def decided(sim: Simulator) -> list[todo.Action]:
        return [a for a in sim.actions if not (isinstance(a, todo.Test) and a.asked)]

    with_wish, without = run(True), run(False)
    assert decided(with_wish) == decided(without)
    assert with_wish.state.budget_used == without.state.budget_used
    assert with_wish.state.ranking() == without.state.ranking()
    assert with_wish.state.start == without.state.start != with_wish.state.tests[1]


def test_a_wish_with_fewer_samples_never_replaces_a_test_of_the_config() -> None:
    sim = Simulator(make_config(run__cycles=1, test__samples=4, test__at="end"))
    sim.until(todo.SampleStep)
    sim.command("evaluate", policy="theta-0000", harness="h0000", samples=1)
    sim.run()
    assert [(t.label, t.samples) for t in sim.state.tests if t.policy == "theta-0000"] == [
        ("asked by ann", 1),
        ("start", 4),
    ]


def test_evaluate_refuses_what_cannot_be_measured() -> None:
    sim = in_search()
    assert "no policy version theta-0007" in refused(sim, "evaluate", policy="theta-0007")
    assert "h0002 can't be measured: it is crash" in refused(sim, "evaluate", harness="h0002")
    assert "h0004 can't be measured: it is not checked yet" in refused(sim, "evaluate", harness="h0004")
    assert "number of episodes" in refused(sim, "evaluate", samples="many")
    assert "from 1 to" in refused(sim, "evaluate", samples=-1)
    sim.state.splits = sim.state.splits | {"test": 0}
    assert "D_test has no tasks" in refused(sim, "evaluate")


def test_evaluate_waits_while_paused_and_a_switch_at_once_goes_before_it() -> None:
    sim = in_weight()
    sim.command("pause")
    assert "once the run is resumed" in sim.command("evaluate").effect
    sim.command("resume")
    assert isinstance(sim.next(), todo.Test)
    sim.command("switch", now=True)
    assert isinstance(sim.next(), todo.EndPhase)


def test_a_pair_that_is_gone_is_no_longer_wanted() -> None:
    sim = in_weight()
    sim.command("evaluate", policy="theta-0001")
    sim.record(r.EvaluationDropped(policy="theta-0001", harness="h0000", reason="its weights are damaged"))
    assert not sim.state.wanted and isinstance(sim.next(), todo.SampleStep)


def test_set_changes_what_the_rules_read() -> None:
    sim = in_weight()
    assert sim.command("set", epochs=0.12).effect == "epochs 1.0 -> 0.12, from the next decision on"
    assert isinstance(sim.step(), todo.SampleStep) and isinstance(sim.step(), todo.TrainStep)
    assert isinstance(sim.next(), todo.EndPhase)
    assert sim.command("set", iterations="4").args == {"iterations": 4}  # as a word of a command line


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({}, "keys: rule, epochs"),
        ({"epoch": 1}, "no setting 'epoch'"),
        ({"iterations": 0}, "iterations must be above 0"),
        ({"iterations": -1}, "iterations must be above 0"),
        ({"iterations": 1.5}, "iterations"),
        ({"iterations": True}, "iterations"),
        ({"rule": "luck"}, "rule"),
        ({"epochs": float("nan")}, "epochs must be a finite number"),
        ({"epochs": float("inf")}, "epochs must be a finite number"),
        ({"epochs": "inf"}, "epochs must be a finite number"),
        ({"approval_timeout": -1}, "approval_timeout must be 0 or more"),
        ({"approval_timeout": float("inf")}, "approval_timeout must be a finite number"),
        ({"approval": "maybe"}, "approval"),
    ],
)
def test_set_refuses(args: dict[str, Any], words: str) -> None:
    assert words in refused(in_weight(), "set", **args)


def test_settings_of_zero_where_zero_means_something() -> None:
    assert in_weight().command("set", approval_timeout=0).args == {"approval_timeout": 0.0}


def test_stop_ends_the_run_resumable_and_nothing_more_is_taken() -> None:
    sim = in_weight()
    assert sim.command("stop").interrupt
    assert (sim.state.status, sim.state.reason) == ("stopped", "by ann")
    for what, args in EFFECTS:
        assert refused(sim, what, **args) == "the run is stopped: by ann"


@pytest.mark.parametrize("what", [name for name in CONTROLS if name != "set"])
def test_unknown_arguments_and_commands_are_named(what: str) -> None:
    assert f"{what} takes " in (said := refused(in_search(), what, colour="red")) and said.endswith("not colour")
    assert "there are pause, resume" in refused(in_search(), what + "e")


@pytest.mark.parametrize("value", [None, 3, 1.5, ["h0001"], {"a": 1}, True])
@pytest.mark.parametrize("what", ["pin", "approve", "veto", "rollback"])
def test_arguments_of_a_wrong_type_never_break_the_state(what: str, value: Any) -> None:
    sim = in_search()
    args = {"harness": value} | ({"reason": value} if what == "veto" else {})
    try:
        sim.command(what, **args)
    except Refused:
        return
    assert sim.state.harness in sim.state.harnesses and value is None


def test_the_settings_are_the_keys_of_set() -> None:
    assert CONTROLS["set"].args == Settings.__struct_fields__


def test_a_rollback_to_a_version_that_was_not_kept_is_refused_with_those_that_are(tmp_path: Path) -> None:
    sim, run = in_weight(), object.__new__(Run)
    for version in sim.state.versions.values():
        version.path = f"weights/{version.name}" if version.name != "theta-0000" else ""
    (tmp_path / "weights" / "theta-0002").mkdir(parents=True)
    run.state, run.rundir = sim.state, RunDir(tmp_path)
    with pytest.raises(Refused, match=r"theta-0001 is no longer kept .*; theta-0000, theta-0002 are"):
        run.command("a", "ann", "rollback", {"policy": "theta-0001"})
    effect, _ = run.command("b", "ann", "rollback", {"policy": "theta-0000"}, dry_run=True)
    assert "goes on from theta-0000" in effect
