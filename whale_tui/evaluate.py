"""`whale-tui eval`: pairs of a run on D_test, with intervals, and their differences task by task.

The scores go into the run's journal, as any test does, and no decision of the run looks at them. An engine that runs is
asked to measure; where none does, one is started that only measures and ends.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from whale_tui import opening
from whale_tui import records as r
from whale_tui.journal import Journal
from whale_tui.loop import control
from whale_tui.loop.evaluation import Difference, difference
from whale_tui.loop.state import RunState
from whale_tui.loop.words import words
from whale_tui.rundir import RunDir, RunDirError
from whale_tui.service import discovery, launch
from whale_tui.service.client import RunClient, Update
from whale_tui.service.launch import Wish

LABEL = "eval"
HEARTBEAT_SECONDS = 10.0
END_SECONDS = 30.0
"""How long an engine that only measures may take to end."""

Pair = tuple[str, str]


def evaluate(rundir: RunDir, names: Sequence[str], samples: int, *, json: bool = False) -> int:
    """Measure what is not measured yet, and print scores and differences. Returns the exit status.

    Raises RunDirError or JournalError.
    """
    if not 1 <= samples <= control.MOST_SAMPLES:
        print(f"whale-tui: --samples {samples}: from 1 to {control.MOST_SAMPLES}", file=sys.stderr)
        return opening.WRONG
    state = discovery.read_state(rundir)
    if state.settings is None:
        return opening.fail(f"{rundir.name} has not started: there is no pair to measure")
    try:
        pairs = list(dict.fromkeys(resolve(state, text) for text in names))
        for policy, harness in pairs:
            _may_be_measured(rundir, state, policy, harness, samples)
    except control.Refused as refusal:
        print(f"whale-tui: {refusal}", file=sys.stderr)
        return opening.REFUSED
    missing = [p for p in pairs if not state.measured(*p, samples)]
    if missing:
        refused = asyncio.run(_measure(rundir, missing, samples, len(state.tests), quiet=json))
        if refused:
            print(f"whale-tui: {refused}", file=sys.stderr)
            return opening.REFUSED
    measured = read(rundir, pairs, samples)
    if json:
        print(msgspec.json.encode(as_object(measured)).decode())
    else:
        print("\n".join(table(measured)))
    return 0


def resolve(state: RunState, text: str) -> Pair:
    """A pair by its name. Raises control.Refused."""
    if text == "best":
        best = state.best
        return (best.policy, best.harness) if best else (state.policy, state.harness)
    if text == "current":
        return state.policy, state.harness
    if text == "start":
        return "theta-0000", "h0000"
    policy, comma, harness = text.partition(",")
    if not comma:
        raise control.Refused(f"no pair {text!r}: give best, current, start or THETA,HARNESS")
    return policy.strip(), harness.strip()


def _may_be_measured(rundir: RunDir, state: RunState, policy: str, harness: str, samples: int) -> None:
    """Raises control.Refused. Also for a run that has ended, which takes no other command."""
    asked = {"policy": policy, "harness": harness, "samples": samples}
    control.CONTROLS["evaluate"].plan(state, asked, "")
    path = state.versions[policy].path
    if path and not (rundir.path / path).is_dir() and not state.measured(policy, harness, samples):
        kept = [v.name for v in state.versions.values() if not v.path or (rundir.path / v.path).is_dir()]
        raise control.Refused(f"{policy} is no longer kept (retention.keep_versions); {', '.join(kept)} are")


async def _measure(rundir: RunDir, pairs: Sequence[Pair], samples: int, known: int, *, quiet: bool) -> str:
    """Have the pairs measured and wait for it: for tests after the `known` first ones. Returns why an engine refused,
    or "". Raises RunDirError."""
    client = RunClient(rundir, opening.who())
    own = not rundir.is_locked()
    if own:
        wishes = [Wish(policy, harness, samples, LABEL) for policy, harness in pairs]
        await asyncio.to_thread(launch.start_engine, rundir, msgspec.json.encode(wishes).decode())
    else:
        for policy, harness in pairs:
            asked = {"policy": policy, "harness": harness, "samples": samples, "label": LABEL}
            reply = await client.command("evaluate", asked)
            if not reply.ok:
                return reply.effect
            if not quiet:
                print(reply.effect, flush=True)
    waiting, said = set(pairs), time.monotonic()
    async for update in client.follow():
        waiting -= {(t.policy, t.harness) for t in client.state.tests[known:] if t.samples >= samples}
        dropped = [e for e in update.events if isinstance(e, r.EvaluationDropped) and (e.policy, e.harness) in waiting]
        if dropped:
            return words(dropped[0])
        said = said if quiet else _tell(update, said)
        if not waiting:
            break
        if not update.live and not rundir.is_locked():
            raise RunDirError(launch.failure(rundir) or f"the engine of {rundir.name} is gone; see {rundir.log}")
    if own:
        await asyncio.to_thread(_until_free, rundir)
    return ""


def _until_free(rundir: RunDir) -> None:
    """Until the engine that measured is gone, so that the next command finds the run free."""
    deadline = time.monotonic() + END_SECONDS
    while rundir.is_locked() and time.monotonic() < deadline:
        time.sleep(0.05)


def _tell(update: Update, said: float) -> float:
    """Progress, now and then. Returns when something was last said."""
    activity = update.activity
    if activity is None or time.monotonic() - said < HEARTBEAT_SECONDS:
        return said
    of = f": {activity.done} of {activity.total}, {activity.accepted} accepted" if activity.total else ""
    print(f"{activity.doing}{of}", flush=True)
    return time.monotonic()


# --------------------------------------------------------------------------------------------------------- the result


class Measured(msgspec.Struct):
    """A pair's best-sampled test, with its rewards by task, and its difference to the first pair."""

    score: r.TestScore
    batch: r.Batch
    rewards: dict[str, list[float]]
    against: Difference | None = None


def read(rundir: RunDir, pairs: Sequence[Pair], samples: int) -> list[Measured]:
    """The scores of pairs from the journal. Raises JournalError; RunDirError where one measured nothing valid."""
    journal = Journal(rundir.journal, read_only=True)
    try:
        found: dict[Pair, r.TestScored] = {}
        for event in journal.events():
            if isinstance(event, r.TestScored) and event.score.samples >= samples and event.score.n:
                name = event.score.policy, event.score.harness
                if name not in found or event.score.samples > found[name].score.samples:
                    found[name] = event
        for name in pairs:
            if name not in found:
                raise RunDirError(f"every episode of {' with '.join(name)} was invalid: see {rundir.log}")
        measured = [Measured(found[p].score, found[p].batch, journal.rewards(found[p].segment)) for p in pairs]
    finally:
        journal.close()
    for other in measured[1:]:
        other.against = difference(other.rewards, measured[0].rewards)
    return measured


def as_object(measured: Sequence[Measured]) -> list[dict[str, Any]]:
    """What --json prints: a pair each, in the order given."""
    out = []
    for m in measured:
        s, d = m.score, m.against
        out.append(
            {
                "policy": s.policy, "harness": s.harness, "samples": s.samples, "tasks": s.n, "mean": s.mean,
                "low": s.low, "high": s.high, "pass": s.pass_at, "episodes": m.batch.episodes,
                "truncated": m.batch.truncated, "invalid": m.batch.invalid, "label": s.label,
                "parts": msgspec.to_builtins(s.parts),
                "against_first": d and {
                    "mean": d.interval.mean, "low": d.interval.low, "high": d.interval.high, "tasks": d.tasks,
                    "won": len(d.won), "lost": len(d.lost),
                },
            }
        )  # fmt: skip
    return out


def table(measured: Sequence[Measured]) -> list[str]:
    """The same as lines."""
    out = []
    for m in measured:
        s, b = m.score, m.batch
        out.append(
            f"{s.policy} x {s.harness}: mean@{s.samples} {s.mean:.1%} [{s.low:.1%}, {s.high:.1%}] on {s.n} tasks, "
            f"pass@{s.samples} {s.pass_at:.1%}, {b.truncated} truncated and {b.invalid} invalid of {b.episodes}"
        )
        out += [f"  {name}: {p.mean:.1%} [{p.low:.1%}, {p.high:.1%}] on {p.n}" for name, p in s.parts.items()]
    first = measured[0].score
    for m in measured[1:]:
        s, d = m.score, m.against
        assert d is not None
        i = d.interval
        out.append(
            f"{s.policy} x {s.harness} minus {first.policy} x {first.harness}: {100 * i.mean:+.1f} points "
            f"[{100 * i.low:+.1f}, {100 * i.high:+.1f}], {len(d.won)} tasks better, {len(d.lost)} worse of {d.tasks}"
        )
    return out
