"""The controls: what a person's command means for a run, as a pure function of its state.

`plan` says what a command would do and which events it commits. The engine commits them at once; the alternation
then does what the new state asks for. A refusal changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import msgspec
from msgspec import Struct

from whale_tui import records as r
from whale_tui.loop.state import RunState
from whale_tui.records import Settings

MOST_SAMPLES = 1000
"""Episodes a task of one evaluation that a person may ask for."""


class Refused(Exception):
    """The command can't be done now; the text says why and what would."""


class Plan(Struct):
    """`events` follow the command's own event in one commit. `interrupt`: drop what is in flight."""

    effect: str
    events: list[r.AnyEvent] = []
    args: dict[str, Any] = {}
    interrupt: bool = False


class Control(Struct, frozen=True):
    """One control, as help, completion and key bindings show it."""

    name: str
    help: str
    args: tuple[str, ...]
    plan: Callable[[RunState, dict[str, Any], str], Plan]


def plan(state: RunState, what: str, args: dict[str, Any], who: str) -> Plan:
    """What a command would do. Raises Refused."""
    control = CONTROLS.get(what)
    if control is None:
        raise Refused(f"no command {what!r}; there are {', '.join(CONTROLS)}")
    if state.status in ("finished", "stopped"):
        raise Refused(f"the run is {state.status}: {state.reason}")
    unknown = set(args) - set(control.args)
    if unknown and what != "set":
        takes = ", ".join(control.args) or "nothing"
        raise Refused(f"{what} takes {takes}, not {', '.join(sorted(unknown))}")
    planned = control.plan(state, args, who)
    planned.args = planned.args or args
    return planned


def _pause(state: RunState, args: dict[str, Any], who: str) -> Plan:
    if state.status == "paused":
        return Plan(effect="already paused")
    return Plan(effect="pauses at the next safe point", events=[r.Paused(reason=f"by {who}")])


def _resume(state: RunState, args: dict[str, Any], who: str) -> Plan:
    if state.status != "paused":
        return Plan(effect="already running")
    return Plan(effect="goes on now", events=[r.Resumed(reason=f"by {who}")])


def _switch(state: RunState, args: dict[str, Any], who: str) -> Plan:
    if state.phase is None:
        raise Refused("no phase is running: there is nothing to switch from")
    now = args.get("now") in (True, "true", "yes", 1)
    if state.switch == "now" or (state.switch and not now):
        when = "now" if state.switch == "now" else "at the next safe point"
        return Plan(effect=f"the {state.phase} phase already ends {when}", args={"now": state.switch == "now"})
    if now and state.open_step is not None:
        return Plan(effect=f"the weight phase ends once step {state.open_step.step} is trained", args={"now": True})
    if now:
        effect = f"the {state.phase} phase ends now; episodes in flight are dropped and not counted"
    else:
        unit = f"step {state.step + 1}" if state.phase == "weight" else f"iteration {state.iteration + 1}"
        effect = f"the {state.phase} phase ends after {unit}"
    return Plan(effect=effect, args={"now": now}, interrupt=now)


def _pin(state: RunState, args: dict[str, Any], who: str) -> Plan:
    harness = str(args.get("harness") or state.harness)
    candidate = _candidate(state, harness)
    if candidate.outcome in ("invalid", "crash", "timeout"):
        raise Refused(f"{harness} can't be pinned: it is {candidate.outcome} ({candidate.reason})")
    if not candidate.checked:
        raise Refused(f"{harness} can't be pinned: it has not passed the checks yet")
    if state.pinned == harness:
        return Plan(effect=f"{harness} is already pinned", args={"harness": harness})
    change = "" if harness == state.harness else f", in place of {state.harness} from the next step on"
    return Plan(effect=f"{harness} stays until it is unpinned{change}", args={"harness": harness})


def _unpin(state: RunState, args: dict[str, Any], who: str) -> Plan:
    return Plan(effect=f"{state.pinned} is no longer pinned" if state.pinned else "nothing was pinned")


def _approve(state: RunState, args: dict[str, Any], who: str) -> Plan:
    candidate = _candidate(state, str(args.get("harness", "")))
    if candidate.outcome not in (None, "scored"):
        raise Refused(f"{candidate.id} is {candidate.outcome}: it can't be approved")
    if candidate.decided == "approved" and (candidate.confirmed or not candidate.scores):
        return Plan(effect=f"{candidate.id} is already approved by {candidate.decided_by}")
    return Plan(effect=f"{candidate.id} {'may be accepted' if candidate.scores else 'will be evaluated'}")


def _veto(state: RunState, args: dict[str, Any], who: str) -> Plan:
    candidate = _candidate(state, str(args.get("harness", "")))
    reason = str(args.get("reason", "")).strip()
    if candidate.outcome == "vetoed":
        return Plan(effect=f"{candidate.id} is already vetoed by {candidate.decided_by}")
    if candidate.outcome not in (None, "scored"):
        raise Refused(f"{candidate.id} is {candidate.outcome}: it can't be vetoed")
    if not reason:
        raise Refused("a veto needs a reason: the proposer reads it")
    return Plan(
        effect=f"{candidate.id} is vetoed; its reason goes to the next proposal",
        args={"harness": candidate.id, "reason": reason},
        events=[r.CandidateOutcome(harness=candidate.id, outcome="vetoed", reason=reason)],
    )


def _rollback(state: RunState, args: dict[str, Any], who: str) -> Plan:
    policy, harness = str(args.get("policy") or state.policy), str(args.get("harness") or state.harness)
    if policy not in state.versions:
        raise Refused(f"no policy version {policy}; there are {', '.join(state.versions)}")
    candidate = _candidate(state, harness)
    if candidate.outcome in ("invalid", "crash", "timeout") or not candidate.checked:
        raise Refused(f"{harness} can't be gone back to: it is {candidate.outcome or 'not checked yet'}")
    if state.pinned and harness != state.pinned:
        raise Refused(f"{state.pinned} is pinned: unpin it first")
    if (policy, harness) == (state.policy, state.harness):
        return Plan(effect=f"{policy} with {harness} is the current pair", args={"policy": policy, "harness": harness})
    open_step = state.open_step is not None and policy != state.policy
    dropped = f"; step {state.step + 1} is not trained" if open_step else ""
    return Plan(
        effect=f"goes on from {policy} with {harness} at the next safe point{dropped}",
        args={"policy": policy, "harness": harness},
        interrupt=True,
    )


def _evaluate(state: RunState, args: dict[str, Any], who: str) -> Plan:
    policy, harness = str(args.get("policy") or state.policy), str(args.get("harness") or state.harness)
    if policy not in state.versions:
        raise Refused(f"no policy version {policy}; there are {', '.join(state.versions)}")
    candidate = _candidate(state, harness)
    if candidate.outcome in ("invalid", "crash", "timeout") or not candidate.checked:
        raise Refused(f"{harness} can't be measured: it is {candidate.outcome or 'not checked yet'}")
    if not state.splits.get("test"):
        raise Refused("D_test has no tasks to measure a pair on")
    try:
        samples = int(args.get("samples") or 0)
    except (TypeError, ValueError):
        raise Refused("samples is the number of episodes a task") from None
    if not 0 <= samples <= MOST_SAMPLES:
        raise Refused(f"samples must be from 1 to {MOST_SAMPLES}")
    wish = {"policy": policy, "harness": harness} | ({"samples": samples} if samples else {})
    if label := str(args.get("label") or "")[:40]:
        wish["label"] = label
    if test := state.measured(policy, harness, samples):
        mean = f"mean@{test.samples} {test.mean:.1%} [{test.low:.1%}, {test.high:.1%}] on D_test"
        return Plan(effect=f"{policy} with {harness} is measured already: {mean}", args=wish)
    when = "once the run is resumed" if state.status == "paused" else "at the next safe point"
    if state.awaited(policy, harness, samples):
        return Plan(effect=f"{policy} with {harness} is already to be measured {when}", args=wish)
    often = f", {samples} episodes a task" if samples else ""
    return Plan(effect=f"{policy} with {harness} is measured on D_test {when}{often}; it decides nothing", args=wish)


def _set(state: RunState, args: dict[str, Any], who: str) -> Plan:
    if not args or state.settings is None:
        raise Refused(f"set KEY=VALUE; keys: {', '.join(Settings.__struct_fields__)}")
    known = set(Settings.__struct_fields__)
    for key in args:
        if key not in known:
            raise Refused(f"no setting {key!r}; there are {', '.join(sorted(known))}")
    try:
        changed = msgspec.convert(msgspec.to_builtins(state.settings) | args, Settings, strict=False)
    except msgspec.ValidationError as error:
        raise Refused(f"set: {error}") from None
    values = {key: getattr(changed, key) for key in args}
    for key, value in values.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise Refused(f"{key} must be a finite number")
        if isinstance(value, int | float) and (value < 0 or (value == 0 and key != "approval_timeout")):
            raise Refused(f"{key} must be above 0" if key != "approval_timeout" else f"{key} must be 0 or more")
    words = ", ".join(f"{k} {getattr(state.settings, k)} -> {v}" for k, v in values.items())
    return Plan(effect=f"{words}, from the next decision on", args=values)


def _stop(state: RunState, args: dict[str, Any], who: str) -> Plan:
    return Plan(
        effect="stops now, resumable; episodes in flight are dropped and not counted",
        events=[r.RunFinished(status="stopped", reason=f"by {who}")],
        interrupt=True,
    )


def _candidate(state: RunState, harness: str) -> Any:
    try:
        return state.harnesses[harness]
    except KeyError:
        raise Refused(f"no harness {harness or '(none given)'}; there are {', '.join(state.harnesses)}") from None


CONTROLS = {
    c.name: c
    for c in (
        Control("pause", "stop at the next safe point until resumed", (), _pause),
        Control("resume", "go on after a pause", (), _resume),
        Control("switch", "end the phase at the next safe point, or at once (now)", ("now",), _switch),
        Control("pin", "keep a harness in place: harness phases are skipped", ("harness",), _pin),
        Control("unpin", "let the search change the harness again", (), _unpin),
        Control("approve", "let a waiting candidate go on", ("harness",), _approve),
        Control("veto", "refuse a candidate, with a reason for the proposer", ("harness", "reason"), _veto),
        Control("rollback", "go on from an earlier pair", ("policy", "harness"), _rollback),
        Control(
            "evaluate",
            "measure a pair on D_test; no decision uses it",
            ("policy", "harness", "samples", "label"),
            _evaluate,
        ),
        Control("set", "change a setting for the phases to come", tuple(Settings.__struct_fields__), _set),
        Control("stop", "end the run, resumable", (), _stop),
    )
}
