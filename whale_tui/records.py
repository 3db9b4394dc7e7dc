"""Records: what the alternation writes down. One shape per word of the vocabulary, shared by engine and terminal.

Everything here is plain data (msgspec Structs): the journal stores it, the reducer folds it, the screen shows it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any, Literal

import msgspec
from msgspec import Struct, field

Phase = Literal["weight", "harness"]
Split = Literal["weight", "harness", "test"]
Decision = Literal["accept", "reject", "invalid"]
Purpose = Literal["train", "search", "smoke", "confirm", "holdout", "look", "test"]
Outcome = Literal["scored", "accepted", "vetoed", "rejected", "invalid", "crash", "timeout", "infra"]
"""Of a candidate. "rejected": stopped in the middle of its evaluation, so that it has no score (loop/early.py)."""
Condition = Literal["whale", "adaptive", "weight-only", "harness-only", "fst", "stagewise"]
RunStatus = Literal["new", "running", "paused", "finished", "stopped"]

BUDGETED: tuple[Purpose, ...] = ("train", "search", "smoke", "confirm", "holdout", "look")
"""Purposes that count against `run.budget_episodes`. Tests are measured, not spent: they never influence a decision."""


def content_hash(value: Any) -> str:
    """First 16 hex digits of the sha256 of a value's canonical JSON."""
    return hashlib.sha256(msgspec.json.encode(value, order="deterministic")).hexdigest()[:16]


# ---------------------------------------------------------------------------------------------- tasks and verdicts


class Task(Struct, frozen=True):
    """One problem. `public` is all that a harness sees; `private` is only ever read by the verifier."""

    key: str
    public: dict[str, Any]
    private: dict[str, Any]

    @property
    def hash(self) -> str:
        return content_hash([self.public, self.private])

    @property
    def answers(self) -> list[str]:
        """Every text and number of the private fields, at any depth: what no proposer may read."""
        found: list[str] = []
        waiting: list[Any] = [self.private]
        while waiting:
            value = waiting.pop()
            if isinstance(value, dict):
                waiting += value.values()
            elif isinstance(value, list | tuple):
                waiting += value
            elif isinstance(value, str | int | float) and not isinstance(value, bool) and value != "":
                found.append(str(value))
        return found


class Usage(Struct, frozen=True):
    """What a verdict cost where a model gave it: the calls of a judge, failed ones included."""

    calls: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    dollars: float = 0.0

    @classmethod
    def total(cls, parts: Iterable[Usage]) -> Usage:
        return cls(*(sum(column) for column in zip(*map(msgspec.structs.astuple, parts), strict=True)))


class Verdict(Struct, frozen=True):
    """`invalid` is a failure of the machinery: it has no reward and enters no average."""

    decision: Decision
    reason: str
    usage: Usage | None = None

    @property
    def reward(self) -> float | None:
        return None if self.decision == "invalid" else float(self.decision == "accept")


# --------------------------------------------------------------------------------------------------------- episodes


class Sampling(Struct, frozen=True):
    """Every sampling field, explicit: nothing is left to a model's or a server's defaults."""

    temperature: float = 1.0
    top_k: int = 20
    top_p: float = 1.0
    max_tokens: int = 256


class Call(Struct):
    """One request to the policy. `output_ids` are the sampled ids, end-of-turn included when it was sampled."""

    prompt_ids: list[int]
    output_ids: list[int]
    logprobs: list[float]
    finish_reason: Literal["stop", "length"]
    seed: int
    max_tokens: int

    def __post_init__(self) -> None:
        if len(self.output_ids) != len(self.logprobs):
            raise ValueError(f"{len(self.output_ids)} sampled ids but {len(self.logprobs)} log-probabilities")


class ToolUse(Struct):
    """One tool call of an episode; `result` is cut to a bounded length for the record. `after_call` places it."""

    name: str
    args: str
    result: str
    seconds: float
    after_call: int


class Episode(Struct):
    """One run of a harness on one task, with the identity of everything that produced it."""

    id: str
    cycle: int
    phase: Phase | None
    step: int
    iteration: int
    purpose: Purpose
    task: str
    task_hash: str
    sample: int
    policy: str
    policy_hash: str
    harness: str
    harness_hash: str
    tokenizer_hash: str
    sampling: Sampling
    calls: list[Call]
    tools: list[ToolUse]
    answer: str
    verdict: Decision
    reason: str
    truncated: bool
    reward: float | None
    seconds: float
    judge: Usage | None = None
    """What the verdict cost, where a model gave it. No part of the policy's tokens."""

    @property
    def prompt_tokens(self) -> int:
        return sum(len(call.prompt_ids) for call in self.calls)

    @property
    def output_tokens(self) -> int:
        return sum(len(call.output_ids) for call in self.calls)


class Batch(Struct):
    """What a set of episodes came to. The mean is over non-invalid episodes, None where there are none."""

    episodes: int = 0
    accepted: int = 0
    invalid: int = 0
    truncated: int = 0
    tasks: int = 0
    solved: int = 0
    """Distinct tasks with at least one accepted episode."""
    calls: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    seconds: float = 0.0
    mean: float | None = None
    judge: Usage | None = None
    """What their verdicts cost, where a model gave any."""

    @property
    def pass_at(self) -> float | None:
        return self.solved / self.tasks if self.tasks else None


def summarise(episodes: list[Episode], seconds: float) -> Batch:
    """Fold episodes into the counts that the step line, the scores and the ledger show."""
    valid = [e for e in episodes if e.verdict != "invalid"]
    accepted = [e for e in valid if e.verdict == "accept"]
    judged = [e.judge for e in episodes if e.judge is not None]
    return Batch(
        episodes=len(episodes),
        accepted=len(accepted),
        invalid=len(episodes) - len(valid),
        truncated=sum(e.truncated for e in episodes),
        tasks=len({e.task for e in valid}),
        solved=len({e.task for e in accepted}),
        calls=sum(len(e.calls) for e in episodes),
        prompt_tokens=sum(e.prompt_tokens for e in episodes),
        output_tokens=sum(e.output_tokens for e in episodes),
        seconds=seconds,
        mean=len(accepted) / len(valid) if valid else None,
        judge=Usage.total(judged) if judged else None,
    )


class Score(Struct):
    """A harness measured under one policy on one task set; compared only where `key` is equal."""

    policy: str
    policy_hash: str
    harness_hash: str
    tasks_hash: str
    sampling: Sampling
    batch: Batch
    results: dict[str, list[float]] = {}
    """Per task: the rewards of its non-invalid episodes."""
    segment: str = ""

    @property
    def key(self) -> str:
        return content_hash([self.policy_hash, self.harness_hash, self.tasks_hash, self.sampling])

    @property
    def mean(self) -> float | None:
        return self.batch.mean


class Part(Struct, frozen=True):
    """mean@k with its 95% interval over a part of D_test, n tasks."""

    mean: float
    low: float
    high: float
    n: int


class TestScore(Struct):
    """A pair on D_test: mean@k with a 95% interval (bootstrap over tasks)."""

    __test__ = False

    policy: str
    harness: str
    policy_hash: str
    harness_hash: str
    mean: float
    low: float
    high: float
    n: int
    samples: int
    pass_at: float
    label: str = ""
    parts: dict[str, Part] = {}
    """The same by subset, where tasks have a `subset`, `level` or `type`."""


# ----------------------------------------------------------------------------------------------------------- events
# Every event is one committed fact. The order of these classes is the order in which a run first meets them.


class Event(Struct, tag_field="type", kw_only=True):
    """Base of all events. `at` is Unix seconds; the journal gives each a sequence number."""

    at: float = 0.0


class RunStarted(Event, tag="run_started"):
    run: str
    condition: Condition
    seed: int
    domain: str
    model: str
    config_hash: str
    policy_hash: str
    harness_hash: str
    tokenizer_hash: str
    splits: dict[str, int]
    steps_per_epoch: int
    budget_episodes: int
    settings: Settings
    version: str


class Settings(Struct):
    """What a person may change while a run goes on; the config gives the first values."""

    rule: Literal["fixed", "patience"]
    epochs: float
    iterations: int
    weight_min: int
    weight_window: int
    weight_patience: int
    harness_min: int
    harness_patience: int
    harness_cap: int
    candidates: int
    budget_episodes: int
    approval: Literal["auto", "before-eval", "before-accept"]
    approval_timeout: float
    max_dollars: float = 0.0
    max_tokens: int = 0
    """What proposers may spend over the whole run; 0 is no limit."""


class EngineStarted(Event, tag="engine_started"):
    """A process took the run up: at the start, or after a stop or a kill."""

    pid: int
    resumed: bool


class Looked(Event, tag="looked"):
    """The short look at h0 that `first_phase = "auto"` decides by."""

    batch: Batch
    first: Phase
    reason: str
    segment: str


class PhaseStarted(Event, tag="phase_started"):
    cycle: int
    phase: Phase
    reason: str


class StepSampled(Event, tag="step_sampled"):
    """The episodes of a step are on disk and in the ledger; the update has not happened yet."""

    step: int
    policy: str
    harness: str
    tasks_drawn: int
    """Position in the task order after this step, over the whole run."""
    batch: Batch
    segment: str


class VersionPublished(Event, tag="version_published"):
    """A policy version whose service the rollout engine has proved (records.md, invariant 5)."""

    policy: str
    hash: str
    parent: str
    path: str
    manifest_hash: str
    probe_trainer: float
    probe_rollout: float
    changed: float | None = None
    """Share of the weights that differ, as served, from those of the version before; None where it isn't known."""


class StepFinished(Event, tag="step_finished"):
    step: int
    policy: str
    """The version that the next step samples from; unchanged where `skipped` says why."""
    trained: int
    trained_tokens: int
    loss: float | None
    grad_norm: float | None
    seconds: float
    skipped: str = ""


class CandidateProposed(Event, tag="candidate_proposed"):
    harness: str
    iteration: int
    parent: str
    hypothesis: str
    proposer: str
    source_hash: str
    also_from: list[str] = []
    """Further parents, for a crossover."""
    warnings: list[str] = []
    """What its proposer did in writing it, e.g. reads outside its folder."""


class CandidateChecked(Event, tag="candidate_checked"):
    harness: str
    ok: bool
    reason: str
    warnings: list[str] = []
    smoke: Batch | None = None
    segment: str = ""


class CandidateScored(Event, tag="candidate_scored"):
    harness: str
    iteration: int
    score: Score
    purpose: Purpose = "search"
    warnings: list[str] = []
    """What its episodes showed, for its card and for the next proposal."""


class CandidateOutcome(Event, tag="candidate_outcome"):
    harness: str
    outcome: Outcome
    reason: str
    purpose: Purpose = "search"
    batch: Batch | None = None
    """Episodes spent before it failed, so that the ledger misses none."""
    segment: str = ""
    saved: int = 0
    """Episodes of a full evaluation that early rejection left out."""
    warnings: list[str] = []


class ProposalsIn(Event, tag="proposals_in"):
    """The proposer's session for an iteration is over, with what it cost (tokens and dollars are its own)."""

    iteration: int
    candidates: list[str]
    seconds: float
    prompt_tokens: int = 0
    output_tokens: int = 0
    dollars: float = 0.0
    session: str = ""
    """Its folder under proposer/, where it kept one."""


class IterationFinished(Event, tag="iteration_finished"):
    iteration: int
    best: str
    best_mean: float | None
    measured: bool
    """False where nothing was scored (all vetoed, infra): such an iteration is no "no improvement"."""


class HarnessAccepted(Event, tag="harness_accepted"):
    harness: str
    previous: str
    reason: str


class PhaseFinished(Event, tag="phase_finished"):
    cycle: int
    phase: Phase
    reason: str


class CommandTaken(Event, tag="command"):
    """A control that had an effect, once, whoever sent it and however often (`id` is the idempotency key)."""

    id: str
    who: str
    what: str
    args: dict[str, Any] = {}
    effect: str = ""


class Paused(Event, tag="paused"):
    reason: str


class Resumed(Event, tag="resumed"):
    reason: str


class Warned(Event, tag="warning"):
    text: str


class Failure(Event, tag="failure"):
    """Something of the machinery failed. It is never a result. Episodes it ended are `invalid`."""

    kind: str
    detail: str
    session: str = ""
    """Of a proposer's session that failed: its folder under proposer/, and what it had spent."""
    prompt_tokens: int = 0
    output_tokens: int = 0
    dollars: float = 0.0
    seconds: float = 0.0


class TestScored(Event, tag="test_scored"):
    __test__ = False

    score: TestScore
    batch: Batch
    segment: str


class EvaluationDropped(Event, tag="evaluation_dropped"):
    """A pair that a person wanted measured can't be: its weights are gone or damaged."""

    policy: str
    harness: str
    reason: str


class RunFinished(Event, tag="run_finished"):
    status: Literal["finished", "stopped"]
    reason: str


AnyEvent = (
    RunStarted
    | EngineStarted
    | Looked
    | PhaseStarted
    | StepSampled
    | VersionPublished
    | StepFinished
    | CandidateProposed
    | CandidateChecked
    | CandidateScored
    | CandidateOutcome
    | ProposalsIn
    | IterationFinished
    | HarnessAccepted
    | PhaseFinished
    | CommandTaken
    | Paused
    | Resumed
    | Warned
    | Failure
    | TestScored
    | EvaluationDropped
    | RunFinished
)

event_decoder = msgspec.json.Decoder(AnyEvent)
encode_event = msgspec.json.Encoder().encode

# ------------------------------------------------------------------------------------------------- the proposer's side


class Demonstration(Struct, frozen=True):
    """A worked example of a domain's brief. It belongs to no split."""

    task: dict[str, Any]
    tools: list[dict[str, Any]] = []
    """Tool uses in order: {"name", "args", "result"}."""
    answer: str = ""


class Brief(Struct, frozen=True):
    """What a proposer is told of a domain: what may change, what is fixed, what the tools do, worked demonstrations."""

    text: str
    tools: dict[str, str]
    demonstrations: list[Demonstration] = field(default_factory=list)


class Archived(Struct):
    """One harness of the archive as a proposer reads it: no reference answer, nothing of D_test."""

    id: str
    source: str
    parent: str
    hypothesis: str
    proposer: str
    outcome: Outcome | None
    reason: str
    """The outcome's reason in words; for a veto, the person's own."""
    iteration: int
    cycle: int
    mean: float | None = None
    """Under the current policy. None: not measured under it."""
    older_means: dict[str, float] = field(default_factory=dict)
    """Policy version -> mean, for versions that are no longer current."""
    calls: int = 0
    tokens: int = 0
    episodes: list[ArchivedEpisode] = field(default_factory=list)
    intervals: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Policy version -> 95% interval of its mean, the current one's among them."""
    results: dict[str, float] = field(default_factory=dict)
    """Task key -> mean reward, under the newest policy that it was measured under."""
    policy: str = ""
    """That policy version; empty where it was never measured."""
    warnings: list[str] = field(default_factory=list)
    """What the leak checks say of it (harness/leaks.py)."""


class ArchivedEpisode(Struct):
    """An episode as text. Only of D_harness tasks."""

    task: dict[str, Any]
    outputs: list[str]
    tools: list[ToolUse]
    answer: str
    verdict: Decision
    reason: str
    truncated: bool
    key: str = ""


class Proposal(Struct):
    """One candidate as a proposer hands it over."""

    source: str
    parent: str
    hypothesis: str
    also_from: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    """For its card: what the session that wrote it did and should not have done."""
