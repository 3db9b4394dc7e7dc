"""The harness phase: Meta-Harness search, one iteration in its parts (method.md, "Harness phase").

Each function ends in one commit: proposals, checks, scores, outcomes. Which part comes next is the alternation's.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from whale_tui import records as r
from whale_tui.harness.checks import check as static_check
from whale_tui.harness.checks import source_hash
from whale_tui.loop import evaluation, retention
from whale_tui.loop.alternation import Ask, EndPhase
from whale_tui.loop.archive import read_archive, write_evaluation
from whale_tui.loop.rollouts import Job
from whale_tui.proposers.base import ProposerFailure, Request
from whale_tui.records import Episode, Purpose, Score, Task

if TYPE_CHECKING:
    from whale_tui.loop.run import Run


async def propose(run: Run, iteration: int) -> None:
    """Ask the proposer for candidates. A transient failure is retried and never uses an iteration up."""
    state, start, proposer = run.state, time.perf_counter(), run.proposer
    if proposer is None:
        raise ValueError("this run's candidates come from a person")
    run.doing(f"iteration {iteration}: {proposer.name} writes candidates", unit="candidates")
    request = Request(
        archive=read_archive(run.rundir, state),
        incumbent=state.harness,
        brief=run.domain.brief,
        candidates=state.settings.candidates if state.settings else 1,
        iteration=state.total_iterations + 1,
        seed=_seed(state.seed, state.cycle, iteration),
        fst=state.condition == "fst",
        notes=[
            f"{c.id} {c.outcome}: {c.reason}"
            for c in state.harnesses.values()
            if c.outcome in ("vetoed", "invalid", "crash", "timeout")
        ],
    )
    attempt = 0
    while True:
        try:
            proposals = list(await proposer.propose(request))[: request.candidates]
            break
        except ProposerFailure as failure:
            attempt += 1
            run.record(r.Failure(kind="proposer", detail=f"attempt {attempt}: {failure}"))
            if attempt > run.config.proposer.retries:
                run.record(r.Paused(reason=f"the proposer failed {attempt} times: {failure}"))
                return
            await asyncio.sleep(min(60.0, 2.0**attempt))
    events: list[r.AnyEvent] = [
        write_candidate(
            run, 
            number, p.source, parent=p.parent, hypothesis=p.hypothesis, proposer=proposer.name,
            iteration=iteration, also_from=p.also_from,
        )
        for number, p in enumerate(proposals, len(state.harnesses))
    ]  # fmt: skip
    names = [e.harness for e in events if isinstance(e, r.CandidateProposed)]
    if not names:
        events.append(r.Warned(text=f"iteration {iteration}: {proposer.name} has no new idea"))
    seconds = time.perf_counter() - start
    run.record(*events, r.ProposalsIn(iteration=iteration, candidates=names, seconds=seconds))


def write_candidate(
    run: Run, number: int, source: str, *, parent: str, hypothesis: str, proposer: str, iteration: int,
    also_from: Sequence[str] = (),
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
        source_hash=digest, also_from=list(also_from),
    )  # fmt: skip


async def check(run: Run, names: Sequence[str]) -> None:
    """Static checks, then one smoke episode each under the sealed worker. A failed check costs nothing more."""
    state = run.state
    answers = [answer for task in run.tasks["harness"] for answer in task.answers]
    base = run.rundir.harness_source("h0000") if state.condition == "fst" else None
    brief = run.domain.brief
    given = brief.text + str(brief.demonstrations)
    passed, events = [], []
    known = {c.source_hash for c in state.harnesses.values() if c.id not in names}
    for name in names:
        checked = static_check(
            run.rundir.harness_source(name), archive_hashes=known, answers=answers, fst_base=base, given=given
        )
        known.add(state.harnesses[name].source_hash)
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
    """Run harnesses on D_harness under the current policy, all of them together."""
    await _score(run, names, "search", samples=1, first=0)


async def confirm(run: Run, names: Sequence[str]) -> None:
    """`confirm` more episodes per task, on other random streams than the search's."""
    await _score(run, names, "confirm", samples=run.config.harness.confirm, first=1)


async def _score(run: Run, names: Sequence[str], purpose: Purpose, samples: int, first: int) -> None:
    state, tasks = run.state, run.tasks["harness"]
    iteration = state.iteration + 1
    subjects = [run.subject(name) for name in names]
    jobs = [Job(t, s, first + k) for s in subjects for t in tasks for k in range(samples)]
    what = f"iteration {iteration}: " + ("confirming " if purpose == "confirm" else "evaluating ") + ", ".join(names)
    version = state.versions[state.policy]
    episodes, total = await run.episodes(jobs, purpose, what, iteration=iteration)
    events: list[r.AnyEvent] = []
    segments = []
    for subject in subjects:
        own = [e for e in episodes if e.harness == subject.id]
        batch = r.summarise(own, total.seconds * len(own) / len(episodes))
        segment = run.journal.write_segment(own)
        segments.append(segment)
        outcome = _failed(own) if purpose == "search" and subject.id != state.harness else None
        if outcome is not None:
            kind, reason = outcome
            events.append(
                r.CandidateOutcome(
                    harness=subject.id,
                    outcome=kind,
                    reason=reason,
                    batch=batch,
                    segment=segment.name,
                    purpose=purpose,
                )
            )
            continue
        score = Score(
            policy=version.name, policy_hash=version.hash, harness_hash=subject.hash, tasks_hash=_tasks_hash(tasks),
            sampling=run.rollouts.sampling, batch=batch, results=evaluation.results(own), segment=segment.name,
        )  # fmt: skip
        write_evaluation(run.rundir, subject.id, score, own, run.chat, {t.key: t for t in tasks})
        events.append(r.CandidateScored(harness=subject.id, iteration=iteration, score=score, purpose=purpose))
    run.record(*events, segments=segments)


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


def _failed(episodes: Sequence[Episode]) -> tuple[r.Outcome, str] | None:
    """The outcome of a candidate that can't be scored: nothing it ran came to an answer."""
    if all(e.verdict == "invalid" for e in episodes):
        return "infra", episodes[0].reason
    valid = [e for e in episodes if e.verdict != "invalid"]
    if all(_harness_fault(e) for e in valid):
        kind: r.Outcome = "timeout" if all(e.reason.startswith("timeout:") for e in valid) else "crash"
        return kind, valid[0].reason
    return None


def _tasks_hash(tasks: Sequence[Task]) -> str:
    return r.content_hash([task.hash for task in tasks])


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _seed(*parts: Any) -> int:
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:4])
