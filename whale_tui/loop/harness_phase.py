"""The harness phase: Meta-Harness search, one iteration in its parts (method.md, "Harness phase").

Each function ends in one commit: proposals, checks, scores, outcomes. Which part comes next is the alternation's.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import math
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from whale_tui import records as r
from whale_tui.harness import leaks
from whale_tui.harness.checks import check as static_check
from whale_tui.harness.checks import source_hash
from whale_tui.loop import early, evaluation, holdout, retention
from whale_tui.loop.alternation import Ask, EndPhase
from whale_tui.loop.archive import read_archive, write_episodes, write_evaluation
from whale_tui.loop.rollouts import Job, Subject
from whale_tui.loop.state import Spend
from whale_tui.proposers import sessions
from whale_tui.proposers.base import Allowance, Proposer, ProposerFailure, Request
from whale_tui.proposers.turns import Turns
from whale_tui.records import Episode, Purpose, Score, Task

if TYPE_CHECKING:
    from whale_tui.loop.run import Run

BACKOFF = 1.0
"""Seconds that the pauses between attempts start from; each is twice the one before, at most a minute."""
TAIL = 40
"""Last lines of a session that a screen can show."""


async def propose(run: Run, iteration: int) -> None:
    """Ask for candidates whoever's turn it is. A session that fails never uses an iteration up: it is tried again with
    backoff where that may help, then left to the next proposer, then the run pauses."""
    proposer = run.proposer
    if proposer is None:
        raise ValueError("this run's candidates come from a person")
    _count_killed_session(run)
    reasons: list[str] = []
    for member in proposer.order(run.state.turns) if isinstance(proposer, Turns) else [proposer]:
        for attempt in range(1, run.config.proposer.retries + 2):
            if reached := _caps_reached(run):
                run.record(r.Paused(reason=reached))
                return
            failure = await _session(run, member, iteration, attempt)
            if failure is None:
                return
            if not failure.transient or attempt > run.config.proposer.retries:
                reasons.append(str(failure) if attempt == 1 else f"{failure} ({attempt} sessions)")
                break
            run.doing(f"iteration {iteration}: {member.name} failed, and is asked again", detail=str(failure)[:200])
            await asyncio.sleep(min(60.0, BACKOFF * 2.0**attempt))
    run.record(r.Paused(reason=f"the proposer failed: {'; '.join(reasons)}"))


async def _session(run: Run, proposer: Proposer, iteration: int, attempt: int) -> ProposerFailure | None:
    """One session of one proposer, into the journal with what it spent, however it ends."""
    state, start = run.state, time.perf_counter()
    doing = f"iteration {iteration}: {proposer.name} writes candidates"
    folder = _session_folder(run)
    said: deque[str] = deque(maxlen=TAIL)

    def report(line: str) -> None:
        said.append(line[:300])
        run.doing(doing, unit="candidates", detail=said[-1], tail=list(said))

    run.doing(doing, unit="candidates")
    request = _request(run, iteration, folder, report)
    spent = request.usage

    def failed(detail: str) -> r.Failure:
        return r.Failure(
            kind="proposer", detail=detail, session=folder.name if folder.exists() else "",
            prompt_tokens=spent.prompt_tokens, output_tokens=spent.output_tokens, dollars=spent.dollars,
            seconds=time.perf_counter() - start,
        )  # fmt: skip

    try:
        proposals = list(await proposer.propose(request))[: request.candidates]
    except ProposerFailure as failure:
        run.record(failed(f"attempt {attempt}: {failure}"))
        sessions.close(folder)
        return failure
    except asyncio.CancelledError:
        if folder.exists() or spent.tokens:
            run.record(failed(f"the session of {proposer.name} was dropped"))
        sessions.close(folder)
        raise
    events: list[r.AnyEvent] = [
        write_candidate(
            run, 
            number, p.source, parent=p.parent, hypothesis=p.hypothesis, proposer=proposer.name,
            iteration=iteration, also_from=p.also_from, warnings=p.warnings,
        )
        for number, p in enumerate(proposals, len(state.harnesses))
    ]  # fmt: skip
    names = [e.harness for e in events if isinstance(e, r.CandidateProposed)]
    if not names:
        last = f"; it said: {said[-1]}" if said else ""
        events.append(r.Warned(text=f"iteration {iteration}: {proposer.name} has no new idea{last}"))
    run.record(
        *events,
        r.ProposalsIn(
            iteration=iteration, candidates=names, seconds=time.perf_counter() - start,
            prompt_tokens=spent.prompt_tokens, output_tokens=spent.output_tokens, dollars=spent.dollars,
            session=folder.name if folder.exists() else "",
        ),
    )  # fmt: skip
    sessions.close(folder)
    return None


def _request(run: Run, iteration: int, folder: Path, report: Callable[[str], None]) -> Request:
    state, config = run.state, run.config.proposer
    settings, spent = state.settings, state.ledger.get("harness/propose", Spend())
    dollars, tokens = (settings.max_dollars, settings.max_tokens) if settings else (0.0, 0)
    return Request(
        archive=read_archive(run.rundir, state),
        incumbent=state.harness,
        brief=run.domain.brief,
        candidates=settings.candidates if settings else 1,
        iteration=state.total_iterations + 1,
        seed=_seed(state.seed, state.cycle, iteration),
        fst=state.condition == "fst",
        notes=[
            f"{c.id} {c.outcome}: {c.reason}"
            for c in state.harnesses.values()
            if c.outcome in ("vetoed", "invalid", "crash", "timeout")
        ]
        + [f"{c.id} warning: {text}" for c in state.harnesses.values() for text in c.warnings],
        answers={t.key: t.answers for t in run.tasks["harness"]} if config.show_answers else {},
        folder=folder,
        allowance=Allowance(
            tokens=min(config.session_tokens or math.inf, tokens - _tokens(spent) if tokens else math.inf),
            dollars=min(config.session_dollars or math.inf, dollars - spent.dollars if dollars else math.inf),
        ),
        report=report,
    )


def _caps_reached(run: Run) -> str:
    """Why nothing more may be spent on proposals, and the mend; empty while there is room."""
    spent, settings = run.state.ledger.get("harness/propose"), run.state.settings
    if spent is None or settings is None:
        return ""
    key = words = ""
    if settings.max_tokens and _tokens(spent) >= settings.max_tokens:
        key, words = "max_tokens", f"{_tokens(spent):,} of {settings.max_tokens:,} tokens"
    if settings.max_dollars and spent.dollars >= settings.max_dollars:
        key, words = "max_dollars", f"{spent.dollars:.2f} of {settings.max_dollars:.2f} dollars"
    mend = f"raise it with `whale-tui ctl {run.rundir.name} set {key}=..`, then resume"
    return f"the proposers have spent {words}; {mend}" if key else ""


def _tokens(spent: Spend) -> int:
    return spent.prompt_tokens + spent.output_tokens


def _session_folder(run: Run) -> Path:
    """proposer/it-0012, or it-0012-2 where a session of this iteration is in the journal already."""
    first = f"it-{run.state.total_iterations + 1:04d}"
    names = (first if n == 1 else f"{first}-{n}" for n in itertools.count(1))
    return run.rundir.proposer / next(name for name in names if name not in run.state.sessions)


def _count_killed_session(run: Run) -> None:
    """A session that the end of an engine cut short: what it had spent is counted."""
    folder = _session_folder(run)
    left = sessions.read(folder)
    if left is None:
        return
    run.record(
        r.Failure(
            kind="proposer", detail="the engine ended during a session; it is asked again", session=folder.name,
            prompt_tokens=left.usage.prompt_tokens, output_tokens=left.usage.output_tokens, dollars=left.usage.dollars,
        )
    )  # fmt: skip
    sessions.close(folder)


def write_candidate(
    run: Run, number: int, source: str, *, parent: str, hypothesis: str, proposer: str, iteration: int,
    also_from: Sequence[str] = (), warnings: Sequence[str] = (),
) -> r.CandidateProposed:  # fmt: skip
    """Put a candidate's files on disk and say so in an event, which the caller records."""
    name = f"h{number:04d}"
    proposal = {"hypothesis": hypothesis, "parent": parent, "proposer": proposer, "also_from": list(also_from)}
    run.rundir.write_harness(name, source, proposal)
    try:
        digest = source_hash(source)
    except (SyntaxError, ValueError):
        digest = hashlib.sha256(source.encode()).hexdigest()[:16]
    return r.CandidateProposed(
        harness=name, iteration=iteration, parent=parent, hypothesis=hypothesis, proposer=proposer,
        source_hash=digest, also_from=list(also_from), warnings=list(warnings),
    )  # fmt: skip


async def check(run: Run, names: Sequence[str]) -> None:
    """Static checks, then one smoke episode each under the sealed worker. A failed check costs nothing more."""
    state = run.state
    dev = run.tasks["harness"]  # what is held out can't leak, and what is said of it here a proposer would read
    answers = [answer for task in dev for answer in task.answers]
    texts = [text for task in dev for text in leaks.task_texts(task.public)]
    base = run.rundir.harness_source("h0000") if state.condition == "fst" else None
    brief = run.domain.brief
    given = "\n".join([brief.text, str(brief.demonstrations), run.rundir.harness_source("h0000")])
    passed, events = [], []
    known = {c.source_hash for c in state.harnesses.values() if c.id not in names}
    for name in names:
        checked = static_check(
            run.rundir.harness_source(name), archive_hashes=known, answers=answers, texts=texts, fst_base=base,
            given=given,
        )  # fmt: skip
        known.add(state.harnesses[name].source_hash)
        leaked = [*state.harnesses[name].warnings, *checked.warnings]  # what its writer did, what it holds
        if checked.ok and leaked and run.config.harness.strict_leaks:
            checked.ok, checked.reason = False, f"leak: {leaked[0]}"
        event = r.CandidateChecked(harness=name, ok=checked.ok, reason=checked.reason, warnings=list(checked.warnings))
        events.append(event)
        if checked.ok:
            passed.append(event)
    segments = []
    if passed:
        task = random.Random(f"{state.seed}/smoke").choice(run.tasks["harness"])
        jobs = [Job(task, run.subject(e.harness), 0) for e in passed]
        episodes, _ = await run.episodes(jobs, "smoke", "smoke episodes", iteration=state.iteration + 1)
        for event, episode in zip(passed, episodes, strict=True):
            segment = run.journal.write_segment([episode])
            segments.append(segment)
            event.smoke, event.segment = r.summarise([episode], episode.seconds), segment.name
            if _harness_fault(episode):
                event.ok, event.reason = False, f"smoke episode: {episode.reason}"
    run.record(*events, segments=segments)


async def evaluate(run: Run, names: Sequence[str]) -> None:
    """Run harnesses on the dev tasks of D_harness under the current policy, all of them together.

    With early rejection, slice by slice; what is cut within an evaluation is done again from its first slice."""
    state, options, tasks = run.state, run.config.harness, run.tasks["harness"]
    leader = _leader(run) if options.early_rejection else None
    measured = [Measured(run.subject(name)) for name in names]
    done: list[Task] = []
    for piece in early.slices(tasks, options.early_slice, state.seed) if leader else [list(tasks)]:
        going = [m for m in measured if not m.rejected]
        if not going:
            break
        what = f"iteration {state.iteration + 1}: evaluating {', '.join(m.subject.id for m in going)}"
        done += piece
        left = len(tasks) - len(done)
        spent = sum(len(m.episodes) + len(m.spoilt) for m in measured)
        await _measure(run, going, piece, "search", what, reserve=spent + left * len(going))
        if leader and left:
            ahead = {task.key for task in tasks} - {task.key for task in done}
            for m in going:
                if state.harnesses[m.subject.id].outcome is None:  # the incumbents are measured in full
                    results = evaluation.results(m.episodes)
                    m.rejected = early.rejection(results, sorted(ahead), leader, options.early_rejection)
                    m.saved = left if m.rejected else 0
    _record(run, measured, "search")


async def confirm(run: Run, names: Sequence[str]) -> None:
    """`confirm` more episodes per task, on other random streams than the search's."""
    measured = [Measured(run.subject(name)) for name in names]
    what = f"confirming {', '.join(names)}"
    samples = range(1, 1 + run.config.harness.confirm)
    await _measure(run, measured, run.tasks["harness"], "confirm", what, samples=samples)
    _record(run, measured, "confirm")


async def hold_out(run: Run, names: Sequence[str]) -> None:
    """Score harnesses on the held-out slice, and warn where it tells another story than the dev tasks."""
    measured = [Measured(run.subject(name)) for name in names]
    what = f"scoring {', '.join(names)} on the held-out tasks"
    await _measure(run, measured, run.holdout, "holdout", what)
    _record(run, measured, "holdout")


class Measured(Struct):
    """A harness and the episodes that it has had of one evaluation."""

    subject: Subject
    episodes: list[Episode] = []
    spoilt: list[Episode] = []
    """Those that the machinery ended and that were run again: paid for, and no result."""
    seconds: float = 0.0
    rejected: str = ""
    """Why it goes no further (early rejection)."""
    saved: int = 0


async def _measure(
    run: Run, measured: Sequence[Measured], tasks: Sequence[Task], purpose: Purpose, what: str,
    *, samples: Sequence[int] = (0,), reserve: int = 0,
) -> None:  # fmt: skip
    """One batch of episodes. Those that come out invalid run again, as far as `infra_retries` and the budget go;
    `reserve` episodes of the budget are spoken for."""
    jobs = [Job(task, m.subject, sample) for m in measured for task in tasks for sample in samples]
    owner = {m.subject.id: m for m in measured}
    got, total = await run.episodes(jobs, purpose, what, iteration=run.state.iteration + 1)
    seconds, spent = total.seconds, len(jobs)
    for attempt in range(1, run.config.harness.infra_retries + 1):
        again = [n for n, episode in enumerate(got) if episode.verdict == "invalid"]
        if not again or len(again) > _budget_left(run) - spent - reserve:
            break
        run.record(
            r.Failure(kind="invalid-episodes", detail=f"{len(again)} run again ({attempt}): {got[again[0]].reason}")
        )
        anew, more = await run.episodes([jobs[n] for n in again], purpose, what, iteration=run.state.iteration + 1)
        seconds, spent = seconds + more.seconds, spent + len(again)
        for n, episode in zip(again, anew, strict=True):
            owner[got[n].harness].spoilt.append(got[n])
            got[n] = episode
            episode.id += f".again{attempt}"
    for episode in got:
        owner[episode.harness].episodes.append(episode)
    for m in measured:
        m.seconds += seconds / len(measured)


def _record(run: Run, measured: Sequence[Measured], purpose: Purpose) -> None:
    """What an evaluation came to, in one commit: scores, outcomes, warnings, episodes."""
    state, segments = run.state, []
    events: list[r.AnyEvent] = []
    tasks = run.holdout if purpose == "holdout" else run.tasks["harness"]
    by_key = {task.key: task for task in tasks}
    version = state.versions[state.policy]
    for m in measured:
        everything = m.episodes + m.spoilt
        batch = r.summarise(everything, m.seconds)
        segment = run.journal.write_segment(everything)
        segments.append(segment)
        candidate, warnings = state.harnesses[m.subject.id], []
        failed, name = None, candidate.id
        if purpose == "search":
            unsaid = _unsaid(run, m.episodes)
            warnings = [unsaid] if unsaid else []
            if name != state.harness:
                failed = _failed(m, unsaid if run.config.harness.answer_from_samples == "strict" else "")
        if failed is not None:
            kind, reason = failed
            events.append(
                r.CandidateOutcome(
                    harness=name, outcome=kind, reason=reason, batch=batch, segment=segment.name, purpose=purpose,
                    saved=m.saved, warnings=warnings,
                )
            )  # fmt: skip
            if kind == "rejected":
                write_episodes(run.rundir, name, m.episodes, run.chat, by_key)
            continue
        score = Score(
            policy=version.name, policy_hash=version.hash, harness_hash=m.subject.hash, tasks_hash=_tasks_hash(tasks),
            sampling=run.rollouts.sampling, batch=batch, results=evaluation.results(m.episodes), segment=segment.name,
        )  # fmt: skip
        if purpose != "holdout":  # the files beside a harness are a proposer's to read
            write_evaluation(run.rundir, name, score, m.episodes, run.chat, by_key)
        events.append(
            r.CandidateScored(
                harness=name, iteration=state.iteration + 1, score=score, purpose=purpose, warnings=warnings
            )
        )
        if purpose == "holdout" and (apart := holdout.warning(name, candidate.scores[version.hash], score)):
            events.append(r.Warned(text=apart))
    run.record(*events, segments=segments)


def _leader(run: Run) -> early.Leader | None:
    """The best harness that is measured in full under this policy. None: there is none to be behind."""
    now = run.state.policy_hash
    for candidate in run.state.ranking():
        return early.Leader(candidate.id, candidate.mean(now) or 0.0, candidate.scores[now].results)
    return None


def _budget_left(run: Run) -> int:
    settings = run.state.settings
    return settings.budget_episodes - run.state.budget_used if settings else 0


def _unsaid(run: Run, episodes: Sequence[Episode]) -> str:
    """The warning that answers do not stem from what the policy said; empty where it is not asked for."""
    if run.config.harness.answer_from_samples == "off":
        return ""
    said = ((e.answer, [run.chat.decode(c.output_ids) for c in e.calls]) for e in episodes if e.verdict != "invalid")
    return leaks.unsaid_words(*leaks.unsaid(said))


async def ask(run: Run, action: Ask) -> None:
    """Wait for a person. After the approval timeout the candidates go on without one, and the journal says so."""
    what = {"propose": "a harness to be proposed", "unpin": f"{run.state.pinned} to be unpinned"}.get(
        action.before, f"{', '.join(action.harnesses)} before {action.before}"
    )
    run.doing(f"waiting for a person: {what}", unit="candidates")
    settings = run.state.settings
    timeout = settings.approval_timeout if settings and action.harnesses else 0.0
    seen, start = run.state.seq, time.monotonic()
    while run.state.seq == seen:
        left = timeout - (time.monotonic() - start) if timeout else None
        if left is not None and left <= 0:
            for name in action.harnesses:
                run.command(
                    f"timeout-{name}-{action.before}", f"timeout of {timeout:g} s", "approve", {"harness": name}
                )
            return
        await run.something_happens(left)


def end_phase(run: Run, action: EndPhase) -> None:
    state = run.state
    events: list[r.AnyEvent] = []
    if action.accept and action.accept != state.harness:
        best, before = state.harnesses[action.accept], state.harnesses[state.harness]
        new, old = best.mean(state.policy_hash), before.mean(state.policy_hash)
        against = f" against {old:.1%} of {before.id}" if old is not None else ""
        events.append(
            r.HarnessAccepted(
                harness=best.id,
                previous=before.id,
                reason=f"{new or 0:.1%} on D_harness{against} under {state.policy}",
            )
        )
    reason = action.reason
    if action.accept and action.accept == state.harness:
        reason += f"; {state.harness} stays"
    assert state.phase is not None
    run.record(*events, r.PhaseFinished(cycle=state.cycle, phase=state.phase, reason=reason))
    retention.clean(run.rundir, run.state, run.config.retention.keep_versions)


def _harness_fault(episode: Episode) -> bool:
    """Whether an episode was ended by its harness's code rather than judged."""
    return episode.verdict == "reject" and episode.reason.startswith(("error:", "timeout:", "flood:"))


def _failed(measured: Measured, unsaid: str) -> tuple[r.Outcome, str] | None:
    """The outcome of a candidate that has no score: nothing it ran came to an answer, or it went no further."""
    episodes = measured.episodes
    valid = [e for e in episodes if e.verdict != "invalid"]
    if not valid:
        return "infra", episodes[0].reason
    if all(_harness_fault(e) for e in valid):
        kind: r.Outcome = "timeout" if all(e.reason.startswith("timeout:") for e in valid) else "crash"
        return kind, valid[0].reason
    if unsaid:
        return "invalid", unsaid
    return ("rejected", measured.rejected) if measured.rejected else None


def _tasks_hash(tasks: Sequence[Task]) -> str:
    return r.content_hash([task.hash for task in tasks])


def _seed(*parts: Any) -> int:
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:4])
