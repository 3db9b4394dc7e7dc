"""The reducer: events in, run state out. Engine and terminal run this same one, so both believe the same.

`reduce` reads no clock, no file and no configuration: replaying the journal yields the state at any prefix of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import msgspec
from msgspec import Struct

from whale_tui import records as r
from whale_tui.records import Batch, Outcome, Phase, Purpose, Score, Settings, TestScore, Usage


class Version(Struct):
    """A published policy version. theta-0000 is the base model: it has no path."""

    name: str
    hash: str
    parent: str = ""
    path: str = ""
    manifest_hash: str = ""
    probe_trainer: float = 0.0
    probe_rollout: float = 0.0
    cycle: int = 0


class Candidate(Struct):
    """A harness of the archive, from proposal to outcome. h0000 is the base harness."""

    id: str
    source_hash: str
    parent: str = ""
    also_from: list[str] = []
    hypothesis: str = ""
    proposer: str = ""
    cycle: int = 0
    iteration: int = 0
    checked: bool = False
    warnings: list[str] = []
    decided: Literal["", "approved", "vetoed"] = ""
    decided_by: str = ""
    confirmed: bool = False
    """Approved for acceptance as well (gate before-accept)."""
    outcome: Outcome | None = None
    reason: str = ""
    scores: dict[str, Score] = {}
    """Policy hash -> score on D_harness."""
    confirms: dict[str, Score] = {}
    """Policy hash -> the further episodes of `confirm`."""
    holdouts: dict[str, Score] = {}
    """Policy hash -> score on the held-out slice. It decides nothing, and no proposer sees it."""

    def mean(self, policy_hash: str) -> float | None:
        """Success rate on D_harness under one policy, search and confirmation pooled."""
        parts = [s.batch for s in (self.scores.get(policy_hash), self.confirms.get(policy_hash)) if s is not None]
        valid = sum(b.episodes - b.invalid for b in parts)
        return sum(b.accepted for b in parts) / valid if valid else None

    def held_out(self, policy_hash: str) -> float | None:
        """Success rate on the held-out slice under one policy; None where it was not measured."""
        score = self.holdouts.get(policy_hash)
        return score.mean if score else None


class Spend(Struct):
    """One line of the ledger."""

    episodes: int = 0
    calls: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    seconds: float = 0.0
    dollars: float = 0.0
    saved: int = 0
    """Episodes that early rejection left out."""

    def add(self, batch: Batch) -> None:
        self.episodes += batch.episodes
        self.calls += batch.calls
        self.prompt_tokens += batch.prompt_tokens
        self.output_tokens += batch.output_tokens
        self.seconds += batch.seconds

    def use(self, usage: Usage) -> None:
        self.calls += usage.calls
        self.prompt_tokens += usage.prompt_tokens
        self.output_tokens += usage.output_tokens
        self.dollars += usage.dollars


class Point(Struct):
    """A mark on the success chart. `x` is budgeted episodes used so far."""

    x: int
    kind: Literal["step", "iteration", "switch", "accept", "test"]
    phase: Phase | None
    value: float | None
    window: float | None = None
    label: str = ""
    batch: Batch | None = None


class PhaseRecord(Struct):
    """A phase that has run or is running, with its signal: step means, or best archive scores by iteration.

    A None in `signal` is a round in which nothing valid was measured: it never counts as "no improvement".
    """

    cycle: int
    phase: Phase
    why: str
    started_at: float
    episodes_before: int
    signal: list[float | None] = []
    ended: str = ""
    episodes: int = 0
    empty_in_a_row: int = 0
    start_value: float | None = None
    end_value: float | None = None
    policy: str = ""
    """The pair that it began with, and, once it has ended, the pair that it left."""
    harness: str = ""
    policy_after: str = ""
    harness_after: str = ""
    tasks: list[int] = []
    """Of a weight phase: tasks with a valid episode, by step."""


class Wanted(Struct):
    """A pair that a person wants measured on D_test; `number` counts such wishes, `samples` 0 is as configured."""

    number: int
    policy: str
    harness: str
    samples: int
    who: str
    label: str = ""
    """Of the score; empty: who asked for it."""


class RunState(Struct):
    """Everything known of a run. Owned by whoever reduces; others read it."""

    seq: int = 0
    run: str = ""
    condition: r.Condition = "whale"
    seed: int = 0
    domain: str = ""
    model: str = ""
    config_hash: str = ""
    tokenizer_hash: str = ""
    splits: dict[str, int] = {}
    steps_per_epoch: int = 0
    settings: Settings | None = None
    status: r.RunStatus = "new"
    reason: str = ""
    started_at: float = 0.0
    at: float = 0.0
    engine_starts: int = 0

    first_phase: Phase | None = None
    looked: Batch | None = None
    cycle: int = 0
    phase: Phase | None = None
    phases: list[PhaseRecord] = []
    step: int = 0
    """Steps finished in this weight phase; the open step is `step + 1`."""
    iteration: int = 0
    """Iterations finished in this harness phase."""
    total_steps: int = 0
    total_iterations: int = 0
    tasks_drawn: int = 0
    open_step: r.StepSampled | None = None
    proposed_for: int = 0
    """The iteration (of this phase) whose proposals are in."""
    turns: int = 0
    """Iterations whose proposals are in, over the whole run: whose turn it is to propose."""
    sessions: list[str] = []
    """Sessions of proposers that are in the ledger."""

    policy: str = ""
    harness: str = ""
    pinned: str = ""
    versions: dict[str, Version] = {}
    harnesses: dict[str, Candidate] = {}
    accepted: list[str] = []
    """Harnesses accepted, in order; the first is h0000."""
    switch: Literal["", "safe", "now"] = ""
    switch_by: str = ""

    ledger: dict[str, Spend] = {}
    """ "phase/purpose" -> what was spent; phase is "-" outside of phases."""
    tests: list[TestScore] = []
    wanted: list[Wanted] = []
    """Pairs to be measured at the next safe point, in order."""
    asked: int = 0
    points: list[Point] = []
    commands: dict[str, str] = {}
    """Command id -> its effect, so that sending one twice has one effect."""
    warnings: list[str] = []
    failures: int = 0

    # ------------------------------------------------------------------------------------------------ derived

    @property
    def episodes(self) -> int:
        """All episodes, tests included."""
        return sum(s.episodes for s in self.ledger.values())

    @property
    def budget_used(self) -> int:
        return sum(s.episodes for key, s in self.ledger.items() if key.partition("/")[2] in r.BUDGETED)

    @property
    def policy_hash(self) -> str:
        return self.versions[self.policy].hash

    @property
    def current_phase(self) -> PhaseRecord | None:
        return self.phases[-1] if self.phase else None

    def test_of(self, policy_hash: str, harness_hash: str, samples: int = 0) -> TestScore | None:
        """The pair's test with the most samples a task, if it has at least that many."""
        found = [t for t in self.tests if (t.policy_hash, t.harness_hash) == (policy_hash, harness_hash)]
        return max((t for t in found if t.samples >= samples), key=lambda t: t.samples, default=None)

    def measured(self, policy: str, harness: str, samples: int = 0) -> TestScore | None:
        """`test_of` by the names of a pair; a test of invalid episodes alone measured nothing."""
        found = self.test_of(self.versions[policy].hash, self.harnesses[harness].source_hash, samples)
        return found if found and found.n else None

    def awaited(self, policy: str, harness: str, samples: int = 0) -> Wanted | None:
        """A wish for a pair that covers so many samples."""
        return next(
            (w for w in self.wanted if (w.policy, w.harness) == (policy, harness) and w.samples >= samples), None
        )

    @property
    def start(self) -> TestScore | None:
        """The test of the pair that the run began with."""
        return self.measured("theta-0000", "h0000") if self.versions else None

    @property
    def best(self) -> TestScore | None:
        """Best pair seen on D_test: a report, never a decision. A test of invalid episodes alone measured none."""
        return max((t for t in self.tests if t.n), key=lambda t: t.mean, default=None)

    def ranking(self) -> list[Candidate]:
        """Harnesses measured under the current policy, best first: higher success, fewer calls, fewer tokens, earlier.

        This is the acceptance order of method.md. Vetoed, invalid and failed candidates take no part.
        """
        now = self.policy_hash
        measured = [c for c in self.harnesses.values() if now in c.scores and c.outcome in (None, "scored", "accepted")]

        def order(c: Candidate) -> tuple[float, float, float, str]:
            batch, mean = c.scores[now].batch, c.mean(now)
            per = max(1, batch.episodes)
            tokens = batch.prompt_tokens + batch.output_tokens
            return (-1.0 if mean is None else -mean, batch.calls / per, tokens / per, c.id)

        return sorted((c for c in measured if c.mean(now) is not None), key=order)

    def undecided(self) -> list[Candidate]:
        """Candidates that the search still owes an outcome, in order of proposal."""
        return [c for c in self.harnesses.values() if c.outcome is None and c.proposer]


def replay(events: list[r.AnyEvent]) -> RunState:
    """State after a run of events. The sequence number is the count of events."""
    state = RunState()
    for event in events:
        reduce(state, event)
    return state


def reduce(state: RunState, event: r.AnyEvent) -> RunState:
    """Apply one event in place and return the state."""
    state.seq += 1
    state.at = event.at
    _REDUCERS[type(event)](state, event)
    return state


def snapshot(state: RunState) -> RunState:
    """A copy that shares nothing with the original."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(state), type=RunState)


# ---------------------------------------------------------------------------------------------------------- reducers


def _spend(state: RunState, purpose: Purpose, batch: Batch | None) -> None:
    """A batch into the ledger; what its verdicts cost is a line of its own, "phase/judge", without episodes."""
    if batch is None:
        return
    phase = state.phase or "-"
    state.ledger.setdefault(f"{phase}/{purpose}", Spend()).add(batch)
    if batch.judge is not None:
        state.ledger.setdefault(f"{phase}/judge", Spend()).use(batch.judge)


def _mark(state: RunState, kind: str, value: float | None, **more: object) -> None:
    state.points.append(
        msgspec.convert({"x": state.budget_used, "kind": kind, "phase": state.phase, "value": value} | more, Point)
    )


def _run_started(s: RunState, e: r.RunStarted) -> None:
    s.run, s.condition, s.seed, s.domain, s.model = e.run, e.condition, e.seed, e.domain, e.model
    s.config_hash, s.tokenizer_hash, s.splits = e.config_hash, e.tokenizer_hash, e.splits
    s.steps_per_epoch, s.settings = e.steps_per_epoch, msgspec.structs.replace(e.settings)
    s.status, s.started_at = "running", e.at
    s.policy, s.harness = "theta-0000", "h0000"
    s.versions[s.policy] = Version(name=s.policy, hash=e.policy_hash)
    s.harnesses[s.harness] = Candidate(
        id=s.harness, source_hash=e.harness_hash, checked=True, outcome="accepted", hypothesis="the base harness"
    )
    s.accepted.append(s.harness)


def _engine_started(s: RunState, e: r.EngineStarted) -> None:
    s.engine_starts += 1
    if s.status == "stopped":
        s.status, s.reason = "running", ""


def _looked(s: RunState, e: r.Looked) -> None:
    _spend(s, "look", e.batch)
    s.looked, s.first_phase = e.batch, e.first


def _phase_started(s: RunState, e: r.PhaseStarted) -> None:
    s.cycle, s.phase, s.step, s.iteration, s.proposed_for = e.cycle, e.phase, 0, 0, 0
    s.first_phase = s.first_phase or e.phase
    s.phases.append(
        PhaseRecord(
            cycle=e.cycle,
            phase=e.phase,
            why=e.reason,
            started_at=e.at,
            episodes_before=s.budget_used,
            policy=s.policy,
            harness=s.harness,
        )
    )
    _mark(s, "switch", None, label=f"{e.phase} phase")


def _step_sampled(s: RunState, e: r.StepSampled) -> None:
    _spend(s, "train", e.batch)
    s.open_step, s.tasks_drawn = e, e.tasks_drawn


def _version_published(s: RunState, e: r.VersionPublished) -> None:
    s.versions[e.policy] = Version(
        name=e.policy, hash=e.hash, parent=e.parent, path=e.path, manifest_hash=e.manifest_hash,
        probe_trainer=e.probe_trainer, probe_rollout=e.probe_rollout, cycle=s.cycle,
    )  # fmt: skip
    s.policy = e.policy


def _step_finished(s: RunState, e: r.StepFinished) -> None:
    sampled, phase = s.open_step, s.phases[-1]
    if sampled is None:
        raise ValueError(f"step {e.step} finished but was never sampled")
    s.open_step, s.step, s.total_steps = None, e.step, s.total_steps + 1
    phase.signal.append(sampled.batch.mean)
    phase.tasks.append(sampled.batch.tasks)
    phase.empty_in_a_row = 0 if e.trained else phase.empty_in_a_row + 1
    s.ledger["weight/train"].seconds += e.seconds
    window = s.settings.weight_window if s.settings else 1
    valid = [v for v in phase.signal if v is not None][-window:]
    _mark(
        s, "step", sampled.batch.mean, window=sum(valid) / len(valid) if valid else None, batch=sampled.batch,
        label=f"{s.cycle}.{e.step}",
    )  # fmt: skip


def _candidate_proposed(s: RunState, e: r.CandidateProposed) -> None:
    s.harnesses[e.harness] = Candidate(
        id=e.harness, source_hash=e.source_hash, parent=e.parent, also_from=e.also_from, hypothesis=e.hypothesis,
        proposer=e.proposer, cycle=s.cycle, iteration=e.iteration, warnings=e.warnings,
    )  # fmt: skip
    if s.phase == "harness":
        _proposed(s, e.iteration)


def _proposed(s: RunState, iteration: int) -> None:
    s.turns += s.proposed_for != iteration
    s.proposed_for = iteration


def _session(s: RunState, e: r.ProposalsIn | r.Failure) -> None:
    """What a proposer's session spent, whatever came of it."""
    spend = s.ledger.setdefault("harness/propose", Spend())
    spend.prompt_tokens += e.prompt_tokens
    spend.output_tokens += e.output_tokens
    spend.dollars += e.dollars
    spend.seconds += e.seconds
    if e.session:
        s.sessions.append(e.session)


def _candidate_checked(s: RunState, e: r.CandidateChecked) -> None:
    candidate = s.harnesses[e.harness]
    _spend(s, "smoke", e.smoke)
    candidate.checked, candidate.warnings = e.ok, _with(candidate.warnings, e.warnings)
    if not e.ok and candidate.outcome is None:
        candidate.outcome, candidate.reason = "invalid", e.reason


def _candidate_scored(s: RunState, e: r.CandidateScored) -> None:
    candidate = s.harnesses[e.harness]
    _spend(s, e.purpose, e.score.batch)
    scores = {"confirm": candidate.confirms, "holdout": candidate.holdouts}.get(e.purpose, candidate.scores)
    scores[e.score.policy_hash] = e.score
    candidate.warnings = _with(candidate.warnings, e.warnings)
    candidate.outcome = candidate.outcome or "scored"


def _with(known: list[str], more: list[str]) -> list[str]:
    return [*known, *(text for text in more if text not in known)]


def _candidate_outcome(s: RunState, e: r.CandidateOutcome) -> None:
    candidate = s.harnesses[e.harness]
    _spend(s, e.purpose, e.batch)
    if e.saved:
        s.ledger.setdefault(f"{s.phase or '-'}/{e.purpose}", Spend()).saved += e.saved
    candidate.warnings = _with(candidate.warnings, e.warnings)
    if candidate.outcome != "vetoed":  # a person's reason stays, whatever an evaluation in flight comes to
        candidate.outcome, candidate.reason = e.outcome, e.reason
    if e.outcome == "vetoed":
        candidate.decided = "vetoed"


def _proposals_in(s: RunState, e: r.ProposalsIn) -> None:
    _proposed(s, e.iteration)
    _session(s, e)


def _iteration_finished(s: RunState, e: r.IterationFinished) -> None:
    s.iteration, s.total_iterations = e.iteration, s.total_iterations + 1
    s.phases[-1].signal.append(e.best_mean if e.measured else None)
    _mark(s, "iteration", e.best_mean, label=f"{s.cycle}.{e.iteration}")


def _harness_accepted(s: RunState, e: r.HarnessAccepted) -> None:
    s.harness = e.harness
    s.harnesses[e.harness].outcome = "accepted"
    s.accepted.append(e.harness)
    _mark(s, "accept", s.harnesses[e.harness].mean(s.policy_hash), label=e.harness)


def _phase_finished(s: RunState, e: r.PhaseFinished) -> None:
    phase = s.phases[-1]
    phase.ended, phase.episodes = e.reason, s.budget_used - phase.episodes_before
    phase.policy_after, phase.harness_after = s.policy, s.harness
    values = [v for v in phase.signal if v is not None]
    phase.start_value, phase.end_value = (values[0], values[-1]) if values else (None, None)
    s.phase, s.switch, s.switch_by = None, "", ""


def _command(s: RunState, e: r.CommandTaken) -> None:
    s.commands[e.id] = e.effect
    match e.what:
        case "switch":
            kind: Literal["safe", "now"] = "now" if e.args.get("now") else "safe"
            if s.switch not in (kind, "now"):
                s.switch, s.switch_by = kind, e.who
        case "pin":
            s.pinned = s.harness = e.args["harness"]
        case "unpin":
            s.pinned = ""
        case "approve":
            candidate = s.harnesses[e.args["harness"]]
            if candidate.decided != "approved" or (candidate.scores and not candidate.confirmed):
                candidate.confirmed = bool(candidate.scores)
                candidate.decided, candidate.decided_by = "approved", e.who
        case "veto":
            candidate = s.harnesses[e.args["harness"]]
            if candidate.outcome != "vetoed":
                candidate.decided_by = e.who
        case "rollback":
            s.policy, s.harness = e.args["policy"], e.args["harness"]
        case "evaluate":
            pair = e.args["policy"], e.args["harness"]
            samples = e.args.get("samples", 0)
            if not s.measured(*pair, samples) and not s.awaited(*pair, samples):
                s.asked += 1
                s.wanted.append(Wanted(s.asked, *pair, samples, e.who, e.args.get("label", "")))
        case "set" if s.settings:
            s.settings = msgspec.structs.replace(s.settings, **e.args)
        case _:
            pass


def _paused(s: RunState, e: r.Paused) -> None:
    s.status, s.reason = "paused", e.reason


def _resumed(s: RunState, e: r.Resumed) -> None:
    s.status, s.reason = "running", ""


def _warned(s: RunState, e: r.Warned) -> None:
    s.warnings.append(e.text)


def _failure(s: RunState, e: r.Failure) -> None:
    s.failures += 1
    if e.session or e.seconds:
        _session(s, e)


def _test_scored(s: RunState, e: r.TestScored) -> None:
    _spend(s, "test", e.batch)
    s.tests.append(e.score)
    _no_longer_wanted(s, e.score.policy, e.score.harness, e.score.samples)
    pair, label = (e.score.policy, e.score.harness), f"{e.score.policy} {e.score.harness}"
    if pair == ("theta-0000", "h0000"):
        _mark(s, "test", e.score.mean, label=label, x=0, phase=None)  # how the run began, whenever it was measured
    elif pair == (s.policy, s.harness):  # another pair is no point of the run's course
        _mark(s, "test", e.score.mean, label=label)


def _evaluation_dropped(s: RunState, e: r.EvaluationDropped) -> None:
    _no_longer_wanted(s, e.policy, e.harness)


def _no_longer_wanted(s: RunState, policy: str, harness: str, samples: int | None = None) -> None:
    s.wanted = [
        w for w in s.wanted
        if (w.policy, w.harness) != (policy, harness) or (samples is not None and w.samples > samples)
    ]  # fmt: skip


def _run_finished(s: RunState, e: r.RunFinished) -> None:
    s.status, s.reason = e.status, e.reason


_REDUCERS: dict[type, Callable[[RunState, Any], None]] = {
    r.RunStarted: _run_started,
    r.EngineStarted: _engine_started,
    r.Looked: _looked,
    r.PhaseStarted: _phase_started,
    r.StepSampled: _step_sampled,
    r.VersionPublished: _version_published,
    r.StepFinished: _step_finished,
    r.CandidateProposed: _candidate_proposed,
    r.CandidateChecked: _candidate_checked,
    r.CandidateScored: _candidate_scored,
    r.CandidateOutcome: _candidate_outcome,
    r.ProposalsIn: _proposals_in,
    r.IterationFinished: _iteration_finished,
    r.HarnessAccepted: _harness_accepted,
    r.PhaseFinished: _phase_finished,
    r.CommandTaken: _command,
    r.Paused: _paused,
    r.Resumed: _resumed,
    r.Warned: _warned,
    r.Failure: _failure,
    r.TestScored: _test_scored,
    r.EvaluationDropped: _evaluation_dropped,
    r.RunFinished: _run_finished,
}
