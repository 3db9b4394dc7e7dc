"""The alternation: what to do next, as a pure function of the run's state (method.md).

The engine does what `next_action` says, writes down what came of it, and asks again. Nothing else decides. A run that
was killed asks with the state that its journal yields, and gets the same answer.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from whale_tui.config import Config, ConfigError
from whale_tui.loop import switching
from whale_tui.loop.state import Candidate, PhaseRecord, RunState
from whale_tui.records import Batch, Phase, Settings


class Look(Struct, frozen=True):
    """Sample a few training episodes under h0, to see which phase should come first."""


class StartPhase(Struct, frozen=True):
    phase: Phase
    cycle: int
    reason: str


class SampleStep(Struct, frozen=True):
    step: int


class TrainStep(Struct, frozen=True):
    """The open step's episodes are in the journal: update on the accepted ones and publish."""


class Evaluate(Struct, frozen=True):
    """Run harnesses on D_harness under the current policy, together."""

    harnesses: tuple[str, ...]


class Confirm(Struct, frozen=True):
    """More episodes for leader and runner-up before one is accepted."""

    harnesses: tuple[str, ...]


class HoldOut(Struct, frozen=True):
    """Score harnesses on the held-out slice, beside their dev scores. It decides nothing."""

    harnesses: tuple[str, ...]


class Propose(Struct, frozen=True):
    iteration: int


class Check(Struct, frozen=True):
    harnesses: tuple[str, ...]


class Ask(Struct, frozen=True):
    """Wait for a person to decide on candidates, or for the approval timeout; for their own proposal; or to unpin."""

    harnesses: tuple[str, ...]
    before: str
    """ "eval", "accept", "propose" or "unpin"."""


class EndIteration(Struct, frozen=True):
    iteration: int
    best: str
    mean: float | None
    measured: bool


class EndPhase(Struct, frozen=True):
    """Close the phase; in a harness phase `accept` becomes the harness (it may be the one that was there)."""

    reason: str
    accept: str = ""


class Test(Struct, frozen=True):
    """Measure a pair on D_test."""

    __test__ = False

    policy: str
    harness: str
    label: str
    samples: int
    asked: int = 0
    """Number of the wish that this answers; 0: a test that the config names."""


class Finish(Struct, frozen=True):
    reason: str


Action = (
    Look | StartPhase | SampleStep | TrainStep | Evaluate | Confirm | HoldOut | Propose | Check | Ask | EndIteration
    | EndPhase | Test | Finish
)  # fmt: skip


def next_action(state: RunState, config: Config) -> Action:
    """What the run does now. Raises ValueError for a state in which a run has not started."""
    if state.settings is None:
        raise ValueError("the run has not started")
    if state.wanted and state.open_step is None and state.switch != "now":
        w = state.wanted[0]
        label = w.label or f"asked by {w.who}"
        return Test(w.policy, w.harness, label, w.samples or config.test.samples or 1, w.number)
    if state.phase == "weight":
        return _weight(state, config, state.settings)
    if state.phase == "harness":
        return _harness(state, config, state.settings)
    return _between(state, config, state.settings)


# ---------------------------------------------------------------------------------------------------- between phases


def _between(state: RunState, config: Config, settings: Settings) -> Action:
    due, samples = config.test.at != "end", config.test.samples
    if not state.phases:
        if due and _untested(state, config, "theta-0000", "h0000"):
            return Test("theta-0000", "h0000", "start", samples)
        if _alternates(state) and config.run.first_phase == "auto" and state.looked is None:
            return Look()
    phase, cycle, reason = _following(state, config)
    over = _over(state, config, settings, phase, cycle)
    if over and _untested(state, config, "theta-0000", "h0000"):
        return Test("theta-0000", "h0000", "start", samples)
    if state.phases and _untested(state, config, state.policy, state.harness):
        cycle_over = config.test.at == "cycles" and cycle != state.cycle
        if over or cycle_over or config.test.at == "phases":
            return Test(state.policy, state.harness, "end" if over else f"cycle {state.cycle}", samples)
    if over:
        return Finish(over)
    if phase == "harness" and _skips_search(state, config):  # and no weight phase to go on with
        return Ask((), "unpin")
    return StartPhase(phase, cycle, reason)


def _untested(state: RunState, config: Config, policy: str, harness: str) -> bool:
    pair = state.versions[policy].hash, state.harnesses[harness].source_hash
    return bool(config.test.samples) and state.test_of(*pair, config.test.samples) is None


def _following(state: RunState, config: Config) -> tuple[Phase, int, str]:
    """The phase that comes next, its cycle, and why. A cycle begins with its weight phase."""
    if state.condition == "weight-only":
        return "weight", state.cycle + 1, "condition weight-only"
    if state.condition == "harness-only":
        return "harness", state.cycle + 1, "condition harness-only"
    if not state.phases:
        first = state.first_phase or ("harness" if config.run.first_phase == "harness" else "weight")
        if state.condition == "stagewise":
            first = "weight"
        why = look_words(state.looked, config) if state.looked else f"first_phase = {config.run.first_phase}"
        return first, 1 if first == "weight" else 0, why
    if state.phases[-1].phase == "weight":
        if state.condition == "stagewise" and not _stage_over(state, config, state.settings):
            return "weight", state.cycle + 1, "stagewise: the weight budget comes first"
        if _alternates(state) and _skips_search(state, config):
            return "weight", state.cycle + 1, f"{state.pinned} is pinned: the harness phase is skipped"
        return "harness", state.cycle, "after the weight phase"
    if state.condition == "stagewise":
        return "harness", state.cycle + 1, "stagewise: the harness budget comes second"
    return "weight", state.cycle + 1, "after the harness phase"


def _over(state: RunState, config: Config, settings: Settings, phase: Phase, cycle: int) -> str:
    """Why no further phase starts, or nothing."""
    if config.run.cycles and cycle > config.run.cycles and state.condition != "stagewise":
        return f"{config.run.cycles} cycle{'s' if config.run.cycles > 1 else ''} done"
    if phase == "harness" and len(state.phases) > 1 and all(map(_found_nothing, state.phases[-2:])):
        return "two searches in a row had nothing to evaluate: the proposer has no more ideas"
    need = step_cost(config) if phase == "weight" else iteration_cost(state, config, settings, state.iteration == 0)
    left = settings.budget_episodes - state.budget_used
    if need > left:
        what = "step" if phase == "weight" else "iteration"
        return f"budget spent: {left} episodes left, the next {what} needs {need}"
    return ""


def _alternates(state: RunState) -> bool:
    return state.condition in ("whale", "adaptive", "fst")


def _skips_search(state: RunState, config: Config) -> bool:
    return bool(state.pinned) and config.harness.while_pinned == "skip"


def _found_nothing(phase: PhaseRecord) -> bool:
    """A search that cost no episode: under an unchanged policy the next one would be as empty, for ever."""
    return phase.phase == "harness" and bool(phase.signal) and phase.episodes == 0


def _stage_over(state: RunState, config: Config, settings: Settings | None) -> bool:
    """Stagewise: whether the weight half of the budget is spent."""
    budget = settings.budget_episodes if settings else 0
    return state.budget_used + step_cost(config) > budget * config.schedule.stagewise_weight_share


def first_phase_of(looked: Batch, config: Config) -> Phase:
    """The rule of `first_phase = "auto"` (method.md, "Which phase comes first"). Invalid episodes say nothing."""
    return "harness" if looked.accepted < config.run.look_share * (looked.episodes - looked.invalid) else "weight"


def look_words(looked: Batch, config: Config) -> str:
    """What `first_phase_of` decided, and why."""
    valid, limit = looked.episodes - looked.invalid, f"{config.run.look_share:.0%}"
    if not valid:
        return "the look at h0 measured nothing, so weights first, the paper's order"
    share = f"h0 accepts {looked.accepted} of {valid} episodes"
    if first_phase_of(looked, config) == "harness":
        return f"{share}, under {limit}: weight training would have nothing to keep, so search first"
    return f"{share}, at least {limit}: enough to train on, so weights first"


# -------------------------------------------------------------------------------------------------------- the phases


def _weight(state: RunState, config: Config, settings: Settings) -> Action:
    if state.open_step is not None:
        return TrainStep()
    if state.switch:
        return EndPhase(_switched(state))
    empty = state.phases[-1].empty_in_a_row
    if empty >= config.weight.empty_steps:
        return EndPhase(f"{empty} steps in a row trained on nothing")
    decision = switching.decide(state)
    if decision.end:
        return EndPhase(decision.words)
    left = settings.budget_episodes - state.budget_used
    if step_cost(config) > left:
        return EndPhase(f"budget: {left} episodes left, a step needs {step_cost(config)}")
    if state.condition == "stagewise" and state.step and _stage_over(state, config, settings):
        return EndPhase("stagewise: the weight budget is spent")
    return SampleStep(state.step + 1)


def _harness(state: RunState, config: Config, settings: Settings) -> Action:
    if state.switch == "now":
        return _close(state, config, settings, _switched(state))
    if _skips_search(state, config):
        return _close(state, config, settings, "a harness was pinned")
    left = settings.budget_episodes - state.budget_used
    if state.iteration == 0:
        return _first_iteration(state, config, settings, left)
    if state.policy_hash not in state.harnesses[state.harness].scores and state.splits["harness"] <= left:
        return Evaluate((state.harness,))  # after a rollback: the incoming harness takes part under this policy too
    waiting = state.undecided()
    unchecked = tuple(c.id for c in waiting if not c.checked)
    need = len(unchecked) + len(waiting) * state.splits["harness"]
    if need > left:
        return _close(state, config, settings, f"budget: {left} episodes left, the candidates need {need}")
    if unchecked:
        return Check(unchecked)
    if settings.approval == "before-eval":
        asked = tuple(c.id for c in waiting if not c.decided and c.proposer != "person")
        if asked:
            return Ask(asked, "eval")
    if waiting:
        return Evaluate(tuple(c.id for c in waiting))
    if state.proposed_for > state.iteration:
        if (held_out := _hold_out(state, left)) is not None:
            return held_out
        ranking = state.ranking()
        measured = any(
            c.iteration == state.proposed_for
            and c.cycle == state.cycle
            and (state.policy_hash in c.scores or c.outcome == "rejected")
            for c in state.harnesses.values()
        )
        return EndIteration(
            state.iteration + 1,
            ranking[0].id if ranking else state.harness,
            ranking[0].mean(state.policy_hash) if ranking else None,
            measured,
        )
    if state.switch:
        return _close(state, config, settings, _switched(state))
    decision = switching.decide(state)
    if decision.end:
        return _close(state, config, settings, decision.words)
    need = iteration_cost(state, config, settings, first=False)
    if need > left:
        return _close(state, config, settings, f"budget: {left} episodes left, an iteration needs up to {need}")
    person = config.proposer.whose(state.turns) == "person"
    return Ask((), "propose") if person else Propose(state.iteration + 1)


def _first_iteration(state: RunState, config: Config, settings: Settings, left: int) -> Action:
    """Iteration 1 measures the incoming harness under the new policy, and the incumbents that matter."""
    now = state.policy_hash
    due = tuple(h for h in [state.harness, *_revisited(state, config)] if now not in state.harnesses[h].scores)
    need = len(due) * state.splits["harness"]
    if need > left:
        return _close(state, config, settings, f"budget: {left} episodes left, the incoming harness needs {need}")
    if due:
        return Evaluate(due)
    if (held_out := _hold_out(state, left)) is not None:
        return held_out
    ranking = state.ranking()
    best = ranking[0] if ranking else None
    return EndIteration(1, best.id if best else state.harness, best.mean(now) if best else None, best is not None)


def _revisited(state: RunState, config: Config) -> list[str]:
    """The archive's best others under the policy that most of them were last measured under."""
    last: dict[str, float] = {}
    order = {v.hash: n for n, v in enumerate(state.versions.values())}
    newest = max(
        (order.get(h, -1) for c in state.harnesses.values() for h in c.scores if h != state.policy_hash), default=None
    )
    for candidate in state.harnesses.values():
        for policy_hash in candidate.scores:
            mean = candidate.mean(policy_hash)
            if order.get(policy_hash) == newest and mean is not None and candidate.outcome in ("scored", "accepted"):
                last[candidate.id] = mean
    others = sorted((h for h in last if h != state.harness), key=lambda h: (-last[h], h))
    return others[: config.harness.revisit]


def _close(state: RunState, config: Config, settings: Settings, reason: str) -> Action:
    """The acceptance rule: the best of the ranking, confirmed and approved where that is asked for."""
    if state.pinned:
        return EndPhase(f"{reason}; {state.pinned} is pinned, so nothing is accepted", state.harness)
    ranking, now = state.ranking(), state.policy_hash
    if not ranking or state.harnesses[state.harness].mean(now) is None:  # the incoming harness takes part, or none does
        return EndPhase(f"{reason}; {state.harness} was not measured under {state.policy}, so it stays", state.harness)
    leader = ranking[0]
    if config.harness.confirm and leader.id != state.harness and state.switch != "now":
        due = tuple(c.id for c in ranking[:2] if now not in c.confirms)
        need = len(due) * config.harness.confirm * state.splits["harness"]
        if due and need <= settings.budget_episodes - state.budget_used:
            return Confirm(due)
    held_out = _hold_out(state, settings.budget_episodes - state.budget_used)
    if held_out is not None and state.switch != "now":  # confirmation may have brought another to the front
        return held_out
    if settings.approval == "before-accept" and leader.id != state.harness and not _may_be_accepted(leader):
        return Ask((leader.id,), "accept")
    return EndPhase(reason, leader.id)


def _hold_out(state: RunState, left: int) -> HoldOut | None:
    """The leader and the harness that it would replace, where they have no held-out score and the budget allows."""
    size, now = state.splits.get("holdout", 0), state.policy_hash
    if not size:
        return None
    names = dict.fromkeys([state.harness, *(c.id for c in state.ranking()[:1])])
    harnesses = [state.harnesses[name] for name in names]
    due = tuple(c.id for c in harnesses if now in c.scores and now not in c.holdouts)
    return HoldOut(due) if due and len(due) * size <= left else None


def _may_be_accepted(candidate: Candidate) -> bool:
    return candidate.confirmed or candidate.outcome == "accepted" or candidate.proposer == "person"


def _switched(state: RunState) -> str:
    return f"switched by {state.switch_by}" + (" at once" if state.switch == "now" else " at a safe point")


# ------------------------------------------------------------------------------------------------------------- costs


def step_cost(config: Config) -> int:
    """Episodes of one step."""
    return config.weight.prompts_per_step * config.weight.samples_per_task


def iteration_cost(state: RunState, config: Config, settings: Settings, first: bool) -> int:
    """Most episodes that one iteration can take: a smoke episode and an evaluation for each candidate, and the held-out
    slice for a new leader."""
    dev, held_out = state.splits["harness"], state.splits.get("holdout", 0)
    if first:
        return (1 + config.harness.revisit) * dev + (2 if config.harness.revisit else 1) * held_out
    return settings.candidates * (dev + 1) + held_out


def refuse_small_budget(config: Config, settings: Settings, splits: Mapping[str, int]) -> None:
    """Raises ConfigError where the budget holds no round of what the condition runs."""
    probe = RunState(splits=dict(splits), condition=config.run.condition)
    step, more = step_cost(config), iteration_cost(probe, config, settings, first=False)
    search = iteration_cost(probe, config, settings, first=True) + more
    need = {"weight-only": step, "harness-only": search}.get(config.run.condition, max(step, search))
    if config.run.first_phase == "auto" and config.run.condition in ("whale", "adaptive", "fst"):
        need += min(config.run.look_episodes, splits["weight"])
    if settings.budget_episodes < need:
        raise ConfigError(
            f"run.budget_episodes = {settings.budget_episodes} is too small for one round: "
            f"a step takes {step} episodes, a search of one iteration {search}; set it to {need} or more"
        )
