"""A run as plain text: progress lines where there is no screen, its status, and its result."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from typing import Any

from whale_tui import records as r
from whale_tui.loop import switching
from whale_tui.loop.limiting import limiting
from whale_tui.loop.state import RunState
from whale_tui.loop.words import words
from whale_tui.rundir import RunDir
from whale_tui.service import launch
from whale_tui.service.client import RunClient, Update

QUIET = (r.CandidateChecked, r.ProposalsIn, r.VersionPublished)
"""Events that say nothing a newcomer needs while all goes well."""
HEARTBEAT_SECONDS = 10.0


async def follow(rundir: RunDir, who: str, *, stop_on_interrupt: bool) -> int:
    """Print what happens until the run ends. Returns 0 when it finished or was stopped, 1 when its engine failed."""
    client = RunClient(rundir, who)
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    stopping = False

    def interrupted() -> None:
        nonlocal stopping
        if stop_on_interrupt and not stopping:
            stopping = True
            print("stopping the run; it can be resumed", flush=True)
            asked.append(loop.create_task(_stop(client)))
        elif task is not None:
            task.cancel()

    asked: list[asyncio.Task[None]] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, interrupted)
    teller = _Teller()
    try:
        async for update in client.follow():
            teller.tell(update, client.state)
            if client.state.status in ("finished", "stopped") and not rundir.is_locked():
                print(result(client.state), flush=True)
                return 0
            if not update.live and not rundir.is_locked() and (teller.connected or not update.events):
                why = launch.failure(rundir) or f"the engine of {rundir.name} is gone; see {rundir.log}"
                print(f"whale-tui: {why}\ngo on with: whale-tui run {rundir.path}", file=sys.stderr)
                return 1
    except asyncio.CancelledError:
        return 130
    return 0


async def _stop(client: RunClient) -> None:
    with contextlib.suppress(ConnectionError):
        reply = await client.command("stop")
        if not reply.ok:  # not up yet: SIGTERM ends an engine that is still starting
            info = client.rundir.engine_info()
            if info is not None:
                os.kill(info.pid, signal.SIGTERM)


class _Teller:
    """Prints events as they come, and what is going on when nothing has been said for a while."""

    def __init__(self) -> None:
        self.start, self.said, self.doing, self.connected = time.time(), 0.0, "", False

    def tell(self, update: Update, state: RunState) -> None:
        self.connected = self.connected or update.live
        for event in update.events:
            if not isinstance(event, QUIET) or getattr(event, "ok", True) is False:
                self._say(words(event), event.at)
            if isinstance(event, r.StepFinished | r.IterationFinished) and event is update.events[-1]:
                self._say(f"  {switching.decide(state).words}", event.at)
        a = update.activity
        if a is None or (a.doing == self.doing and time.time() - self.said < HEARTBEAT_SECONDS):
            return
        if a.total or a.doing != self.doing:
            self.doing = a.doing
            if a.done and a.total:
                self._say(f"  {a.doing}: {a.done} of {a.total}, {a.accepted} accepted", time.time())
            elif not a.total:
                self._say(f"  {a.doing}{f' ({a.detail})' if a.detail else ''}", time.time())

    def _say(self, text: str, at: float) -> None:
        self.said = time.time()
        seconds = max(0, int(at - self.start))
        print(f"{seconds // 60:3d}:{seconds % 60:02d} {text}", flush=True)


def status(name: str, state: RunState, seen: str) -> dict[str, Any]:
    """The object of `status --json`."""

    def pair(test: r.TestScore | None) -> dict[str, Any] | None:
        if test is None:
            return None
        return {
            "policy": test.policy, "harness": test.harness, "mean": test.mean, "low": test.low, "high": test.high,
            "n": test.n, "samples": test.samples,
        }  # fmt: skip

    limit = limiting(state)
    return {
        "run": name, "state": seen, "reason": state.reason, "condition": state.condition, "cycle": state.cycle,
        "phase": state.phase, "step": state.step, "iteration": state.iteration, "policy": state.policy,
        "harness": state.harness, "pinned": state.pinned or None, "episodes": state.episodes,
        "budget_used": state.budget_used, "budget": state.settings.budget_episodes if state.settings else None,
        "limited": {"half": limit.half, "words": limit.words, "weight": limit.weight, "harness": limit.harness},
        "start": pair(state.start), "best": pair(state.best),
        "ledger": {k: {f: getattr(v, f) for f in v.__struct_fields__} for k, v in state.ledger.items()},
        "held_out": _held_out(state),
        "phases": [f"{p.cycle}:{p.phase}" for p in state.phases], "events": state.seq, "warnings": len(state.warnings),
        "failures": state.failures,
    }  # fmt: skip


def _held_out(state: RunState) -> dict[str, float]:
    """Harness -> score on the held-out slice under the current policy."""
    means = {c.id: c.held_out(state.policy_hash) for c in state.harnesses.values()} if state.policy else {}
    return {name: mean for name, mean in means.items() if mean is not None}


def describe(name: str, state: RunState, seen: str) -> str:
    """The same in a few lines."""
    if state.settings is None:
        return f"{name}: {seen}; nothing has run yet"
    out = [f"{name}: {seen}{f' ({state.reason})' if state.reason else ''}, {state.condition} on {state.domain}"]
    if state.phase:
        out.append(f"cycle {state.cycle}, {state.phase} phase: {switching.decide(state).words}")
    out.append(f"pair {state.policy} x {state.harness}{f', pinned {state.pinned}' if state.pinned else ''}")
    for harness in dict.fromkeys([*(c.id for c in state.ranking()[:1]), state.harness]):
        candidate = state.harnesses[harness]
        if (held_out := candidate.held_out(state.policy_hash)) is not None:
            out.append(f"held out: {harness} {held_out:.1%}, dev {candidate.mean(state.policy_hash) or 0:.1%}")
    limit = limiting(state)
    out.append(f"{limit.half}: {limit.words}")
    out.append(f"{state.budget_used:,} of {state.settings.budget_episodes:,} episodes of budget used")
    if state.tests:
        out.append(result(state))
    if seen == "crashed":
        out.append(f"its engine is gone; go on with: whale-tui run {name}")
    return "\n".join(out)


def result(state: RunState) -> str:
    """What the run came to: start, best pair, and what it cost."""
    out = []
    if state.tests:
        start, best = state.start or state.tests[0], state.best or state.tests[0]
        for label, t in (("start", start), ("best ", best)):
            out.append(
                f"{label} {t.policy} x {t.harness}: mean@{t.samples} {t.mean:.1%} [{t.low:.1%}, {t.high:.1%}] on D_test"
            )
    for key, spend in sorted(state.ledger.items()):
        tokens = spend.prompt_tokens + spend.output_tokens
        dollars = f", {spend.dollars:.2f} dollars" if spend.dollars else ""
        saved = f", {spend.saved:,} episodes saved by early rejection" if spend.saved else ""
        cost = f"{spend.episodes:7,} episodes {tokens:11,} tokens {spend.seconds:8.1f} s{dollars}{saved}"
        out.append(f"cost  {key:16} {cost}")
    return "\n".join(out)
