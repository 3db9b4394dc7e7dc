"""Events in words: one line each, for the log, for a pipe and for the events pane."""

from __future__ import annotations

from whale_tui import records as r
from whale_tui.records import Batch


def words(event: r.AnyEvent) -> str:
    """What happened, in one plain line."""
    match event:
        case r.RunStarted():
            splits = ", ".join(f"D_{k} {v:,}" for k, v in event.splits.items())
            return (
                f"run {event.run}: {event.condition} on {event.domain} with {event.model}, seed {event.seed} "
                f"({splits}; {event.steps_per_epoch} steps an epoch; budget {event.budget_episodes:,} episodes)"
            )
        case r.EngineStarted():
            return f"engine {event.pid} {'takes the run up again' if event.resumed else 'started'}"
        case r.Looked():
            return f"look at h0: {event.reason}"
        case r.PhaseStarted():
            return f"── cycle {event.cycle} · {event.phase} phase ── {event.reason}"
        case r.StepSampled():
            return f"step {event.step}: {event.policy} x {event.harness} {_batch(event.batch)}"
        case r.VersionPublished():
            gap = abs(event.probe_trainer - event.probe_rollout)
            changed = f"; {event.changed:.1%} of the weights changed" if event.changed is not None else ""
            return f"{event.policy} published and proved (probe differs by {gap:.1e}{changed})"
        case r.StepFinished():
            if event.skipped:
                return f"step {event.step}: no update ({event.skipped}); {event.policy} stays"
            loss = f", loss {event.loss:.3f}" if event.loss is not None else ""
            return f"step {event.step}: trained on {event.trained} episodes{loss} in {event.seconds:.1f} s"
        case r.CandidateProposed():
            return f"{event.harness} proposed by {event.proposer} from {event.parent}: {event.hypothesis}"
        case r.CandidateChecked():
            warned = f" (warning: {'; '.join(event.warnings)})" if event.warnings else ""
            return f"{event.harness} {'passes the checks' if event.ok else f'fails the checks: {event.reason}'}{warned}"
        case r.CandidateScored():
            extra = {"confirm": " in confirmation", "holdout": " on the held-out slice"}.get(event.purpose, "")
            warned = f" (warning: {'; '.join(event.warnings)})" if event.warnings else ""
            return f"{event.harness} under {event.score.policy}{extra}: {_batch(event.score.batch)}{warned}"
        case r.CandidateOutcome():
            if event.outcome == "rejected":
                return f"{event.harness} {event.reason}; {event.saved} episodes saved"
            return f"{event.harness} {event.outcome}: {event.reason}"
        case r.ProposalsIn():
            cost = f", {event.dollars:.2f} dollars" if event.dollars else ""
            return f"iteration {event.iteration}: {len(event.candidates)} candidates in {event.seconds:.1f} s{cost}"
        case r.IterationFinished():
            best = "nothing measured" if event.best_mean is None else f"best {event.best} at {event.best_mean:.1%}"
            return f"iteration {event.iteration} done: {best}"
        case r.HarnessAccepted():
            return f"{event.harness} accepted in place of {event.previous}: {event.reason}"
        case r.PhaseFinished():
            return f"{event.phase} phase of cycle {event.cycle} ended: {event.reason}"
        case r.CommandTaken():
            return f"{event.who}: {event.what}: {event.effect}"
        case r.Paused():
            return f"paused {event.reason}"
        case r.Resumed():
            return f"resumed {event.reason}"
        case r.Warned():
            return f"warning: {event.text}"
        case r.Failure():
            cost = f" (it had cost {event.dollars:.2f} dollars)" if event.dollars else ""
            return f"failure ({event.kind}): {event.detail}{cost}"
        case r.TestScored():
            s = event.score
            return (
                f"test ({s.label}): {s.policy} x {s.harness} mean@{s.samples} {s.mean:.1%} "
                f"[{s.low:.1%}, {s.high:.1%}] on {s.n} tasks, pass@{s.samples} {s.pass_at:.1%}"
            )
        case r.EvaluationDropped():
            return f"{event.policy} x {event.harness} is not measured: {event.reason}"
        case r.RunFinished():
            return f"run {event.status}: {event.reason}"


def _batch(b: Batch) -> str:
    mean = "nothing valid" if b.mean is None else f"{b.mean:.1%}"
    parts = [f"{mean} ({b.accepted} of {b.episodes} accepted"]
    if b.episodes > b.tasks:
        parts.append(f"{b.solved} of {b.tasks} tasks solved")
    if b.truncated:
        parts.append(f"{b.truncated} truncated")
    if b.invalid:
        parts.append(f"{b.invalid} invalid")
    return ", ".join(parts) + f") in {b.seconds:.1f} s"
