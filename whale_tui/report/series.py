"""What one run's journal says, as data for figures and tables.

Events alone are read, never episodes, so that a run of a million episodes takes a moment. Whatever is missing (a run
that was killed, has not begun, or holds one phase) is simply not there: every list may be empty.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
from msgspec import Struct

from whale_tui import records as r
from whale_tui.harness.diffs import Hunk, unified
from whale_tui.journal import Journal, JournalError
from whale_tui.loop.limiting import Gain, Limit, limiting
from whale_tui.loop.state import PhaseRecord, Point, RunState, reduce
from whale_tui.rundir import RunDir
from whale_tui.service import discovery

START = ("theta-0000", "h0000")
MOST_ROWS = 200
"""Harnesses of the lineage table, and of the grid; the best and the accepted ones stay."""


class Tested(Struct):
    """A pair on D_test, `x` budgeted episodes into the run. `on_course`: it was the run's pair then."""

    x: int
    score: r.TestScore
    batch: r.Batch
    segment: str
    on_course: bool


class HeldOut(Struct):
    x: int
    harness: str
    mean: float


class PhaseRow(Struct):
    """A phase with what it came to. `epochs`: the realised E of a weight phase; rounds are the I of a harness phase."""

    cycle: int
    phase: r.Phase
    rounds: int
    epochs: float | None
    episodes: int
    before: str
    after: str
    ended: str
    gain: Gain | None


class Accepted(Struct):
    """A harness that took another's place, as a diff against that one. `missing`: a source that can't be read."""

    harness: str
    previous: str
    hypothesis: str
    proposer: str
    reason: str
    x: int
    hunks: list[Hunk]
    missing: str = ""


class LineageRow(Struct):
    """A harness of the archive; `cells` by the columns of the grid: success rate on D_harness, episodes, D_test."""

    id: str
    parent: str
    hypothesis: str
    proposer: str
    outcome: str
    cells: list[tuple[float, int, float | None] | None]


class Lineage(Struct):
    versions: list[str] = []
    rows: list[LineageRow] = []
    left_out: int = 0


class Course(Struct):
    """One run. `problem`: what of its journal can't be read."""

    name: str
    path: str
    seen: str
    problem: str
    state: RunState
    tests: list[Tested]
    held_out: list[HeldOut]
    phases: list[PhaseRow]
    accepted: list[Accepted]
    lineage: Lineage
    limit: Limit

    @property
    def points(self) -> list[Point]:
        return self.state.points

    @property
    def start(self) -> Tested | None:
        """The test of the pair that the run began with."""
        found = [t for t in self.tests if (t.score.policy, t.score.harness) == START]
        return max(found, key=lambda t: t.score.samples, default=None)

    @property
    def last(self) -> Tested | None:
        """The last pair of the course that was measured: for a finished run, the one it ended with. The pair that it
        began with is the last one only of a run that has ended and never left it."""
        found = max((t for t in self.tests if t.on_course), key=lambda t: (t.x, t.score.samples), default=None)
        stayed = self.seen == "finished" and (self.state.policy, self.state.harness) == START
        begun = found is not None and (found.score.policy, found.score.harness) == START
        return None if begun and not stayed else found

    @property
    def best(self) -> Tested | None:
        """The best pair seen on D_test. It is chosen by the numbers it is reported with, so that it flatters."""
        return max(self.tests, key=lambda t: t.score.mean, default=None)


def course(rundir: RunDir) -> Course:
    """Read a run. A journal that is damaged counts up to its last good event; one that isn't there is an empty run."""
    state, problem = RunState(), ""
    tests: list[Tested] = []
    held_out: list[HeldOut] = []
    acceptances: list[tuple[int, r.HarnessAccepted]] = []
    try:
        journal = Journal(rundir.journal, read_only=True) if rundir.journal.exists() else None
        for event in journal.events() if journal is not None else ():
            reduce(state, event)
            match event:
                case r.TestScored(score=score) if score.n:
                    pair = score.policy, score.harness
                    begun = pair == START
                    x = 0 if begun else state.budget_used
                    on_course = begun or pair == (state.policy, state.harness)
                    tests.append(Tested(x, score, event.batch, event.segment, on_course))
                case r.CandidateScored(purpose="holdout", score=held) if held.mean is not None:
                    held_out.append(HeldOut(state.budget_used, event.harness, held.mean))
                case r.HarnessAccepted():
                    acceptances.append((state.budget_used, event))
        if journal is not None:
            journal.close()
    except JournalError as error:
        problem = str(error)
    return Course(
        name=state.run or rundir.name, path=str(rundir.path), seen=discovery.status_of(rundir, state), problem=problem,
        state=state, tests=tests, held_out=held_out, phases=[_phase(state, phase) for phase in state.phases],
        accepted=[_accepted(rundir, state, x, event) for x, event in acceptances], lineage=_lineage(state),
        limit=limiting(state),
    )  # fmt: skip


def _phase(state: RunState, phase: PhaseRecord) -> PhaseRow:
    limit = limiting(msgspec.structs.replace(state, phases=[phase]))
    epochs = len(phase.signal) / state.steps_per_epoch if phase.phase == "weight" and state.steps_per_epoch else None
    return PhaseRow(
        cycle=phase.cycle, phase=phase.phase, rounds=len(phase.signal), epochs=epochs,
        episodes=phase.episodes or state.budget_used - phase.episodes_before,
        before=f"{phase.policy} × {phase.harness}",
        after=f"{phase.policy_after} × {phase.harness_after}" if phase.ended else "",
        ended=phase.ended, gain=limit.weight if phase.phase == "weight" else limit.harness,
    )  # fmt: skip


def _accepted(rundir: RunDir, state: RunState, x: int, event: r.HarnessAccepted) -> Accepted:
    candidate = state.harnesses[event.harness]
    made = Accepted(
        harness=event.harness, previous=event.previous, hypothesis=candidate.hypothesis, proposer=candidate.proposer,
        reason=event.reason, x=x, hunks=[],
    )  # fmt: skip
    try:
        made.hunks = unified(rundir.harness_source(event.previous), rundir.harness_source(event.harness))
    except (OSError, UnicodeDecodeError) as error:
        made.missing = f"its source can't be read: {error}"
    return made


def _lineage(state: RunState) -> Lineage:
    """Harnesses by the policy versions that any was measured under."""
    measured = {h for c in state.harnesses.values() for h in c.scores} | {t.policy_hash for t in state.tests}
    columns = [(v.hash, v.name) for v in state.versions.values() if v.hash in measured]
    rows, best = [], {}
    for c in state.harnesses.values():
        cells: list[tuple[float, int, float | None] | None] = []
        for policy_hash, _ in columns:
            mean, test = c.mean(policy_hash), state.test_of(policy_hash, c.source_hash)
            parts = [s.batch for s in (c.scores.get(policy_hash), c.confirms.get(policy_hash)) if s is not None]
            count = sum(b.episodes - b.invalid for b in parts)
            known = mean is not None or (test is not None and test.n)
            tested = test.mean if test is not None and test.n else None
            cells.append((math.nan if mean is None else mean, count, tested) if known else None)
        best[c.id] = max((cell[0] for cell in cells if cell and not math.isnan(cell[0])), default=-1.0)
        rows.append(LineageRow(c.id, c.parent, c.hypothesis, c.proposer, c.outcome or "waiting", cells))
    kept = {*state.accepted, *sorted(best, key=lambda h: -best[h])[:MOST_ROWS]}
    return Lineage([name for _, name in columns], [row for row in rows if row.id in kept], len(rows) - len(kept))


# -------------------------------------------------------------------------------------------------- cost and gain


def half_gain(rows: Sequence[PhaseRow], half: r.Phase) -> Gain | None:
    """Points per 1,000 episodes of a half over all its phases, weighted by their episodes, as if they were independent.
    Its `cycle` is the last one."""
    found = [(row.gain, row.episodes) for row in rows if row.phase == half and row.gain is not None and row.episodes]
    total = sum(episodes for _, episodes in found)
    if not found:
        return None
    mean = sum(gain.mean * episodes for gain, episodes in found) / total
    below = math.sqrt(sum(((gain.mean - gain.low) * episodes) ** 2 for gain, episodes in found)) / total
    above = math.sqrt(sum(((gain.high - gain.mean) * episodes) ** 2 for gain, episodes in found)) / total
    return Gain(mean, mean - below, mean + above, found[-1][0].cycle)


class Cost(Struct):
    """What a run spent without its tests, and by points of D_test gained where it gained any."""

    episodes: int = 0
    tokens: int = 0
    seconds: float = 0.0
    dollars: float = 0.0
    test_episodes: int = 0
    points: float | None = None

    def a_point(self, spent: float) -> float | None:
        return spent / self.points if self.points and self.points > 0 else None


def cost(course: Course) -> Cost:
    made = Cost()
    for key, spend in course.state.ledger.items():
        if key.endswith("/test"):
            made.test_episodes += spend.episodes
            continue
        made.episodes += spend.episodes
        made.tokens += spend.prompt_tokens + spend.output_tokens
        made.seconds += spend.seconds
        made.dollars += spend.dollars
    if course.start is not None and course.last is not None:
        made.points = 100 * (course.last.score.mean - course.start.score.mean)
    return made
