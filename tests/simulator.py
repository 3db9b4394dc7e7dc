"""A run without engine, model or disk: every action of the alternation is answered with plausible events.

The real `next_action`, reducer and controls decide; the simulator only makes up what came of each action, from a
`World` that says how good each harness is under each policy.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from whale_tui import records as r
from whale_tui.config import Config, convert
from whale_tui.loop import alternation as todo
from whale_tui.loop import control
from whale_tui.loop.state import RunState, reduce
from whale_tui.records import Batch, Sampling, Score

SPLITS = {"weight": 100, "harness": 10, "test": 5}


def make_config(**changes: Any) -> Config:
    """Small: 4 tasks x 2 episodes a step, 10 D_harness tasks, 2 candidates. `table__key=value` changes a value."""
    raw: dict[str, dict[str, Any]] = {
        "run": {"budget_episodes": 400},
        "weight": {"prompts_per_step": 4, "samples_per_task": 2, "empty_steps": 10},
        "harness": {"candidates": 2},
        "schedule": {"epochs": 0.08, "iterations": 3},  # 2 steps of 25, 3 iterations
        "test": {"samples": 0},
    }
    for key, value in changes.items():
        table, _, name = key.partition("__")
        raw.setdefault(table, {})[name] = value
    return convert(raw)


class World:
    """What comes of things. Every method may be replaced by a test."""

    def __init__(self, seed: int = 0) -> None:
        self.random = random.Random(seed)
        self.rates: dict[str, float] = {"h0000": 0.5}

    def rate(self, sim: Simulator, harness: str) -> float:
        return self.rates.get(harness, 0.5)

    def batch(self, sim: Simulator, harness: str, episodes: int, purpose: str) -> Batch:
        return batch(episodes, round(episodes * self.rate(sim, harness)))

    def trained(self, sim: Simulator, sampled: Batch) -> int:
        return sampled.accepted

    def proposals(self, sim: Simulator, wanted: int) -> int:
        return wanted

    def check(self, sim: Simulator, harness: str) -> bool:
        return True

    def outcome(self, sim: Simulator, harness: str) -> r.Outcome:
        return "scored"

    def person(self, sim: Simulator, action: todo.Ask) -> bool:
        """Answer an Ask by commands. False: nobody is there."""
        return False


def batch(episodes: int, accepted: int, invalid: int = 0, calls: int | None = None, tokens: int | None = None) -> Batch:
    valid = episodes - invalid
    return Batch(
        episodes=episodes, accepted=accepted, invalid=invalid, tasks=episodes, solved=accepted,
        calls=episodes if calls is None else calls, prompt_tokens=10 * episodes,
        output_tokens=10 * episodes if tokens is None else tokens, seconds=1.0,
        mean=accepted / valid if valid else None,
    )  # fmt: skip


class Simulator:
    def __init__(self, config: Config, world: World | None = None, splits: dict[str, int] | None = None) -> None:
        self.config, self.world = config, world or World()
        self.state = RunState()
        self.events: list[r.AnyEvent] = []
        self.actions: list[todo.Action] = []
        splits = splits or SPLITS
        per_epoch = config.steps_per_epoch(splits["weight"])
        self.record(
            r.RunStarted(
                run="sim", condition=config.run.condition, seed=0, domain="d", model="m", config_hash="c",
                policy_hash="p0", harness_hash="s-h0000", tokenizer_hash="t", splits=splits, steps_per_epoch=per_epoch,
                budget_episodes=config.run.budget_episodes, settings=config.settings(per_epoch), version="0",
            ),
            r.EngineStarted(pid=1, resumed=False),
        )  # fmt: skip

    def record(self, *events: r.AnyEvent) -> None:
        for event in events:
            event.at = 1.0 + len(self.events)
            self.events.append(event)
            reduce(self.state, event)

    def command(self, what: str, who: str = "ann", **args: Any) -> control.Plan:
        planned = control.plan(self.state, what, args, who)
        id = f"c{len(self.state.commands)}"
        self.record(r.CommandTaken(id=id, who=who, what=what, args=planned.args, effect=planned.effect))
        self.record(*planned.events)
        return planned

    def propose(self, iteration: int | None = None, proposer: str = "person") -> str:
        name = f"h{len(self.state.harnesses):04d}"
        self.record(
            r.CandidateProposed(
                harness=name, iteration=iteration or self.state.iteration + 1, parent=self.state.harness,
                hypothesis=f"idea {name}", proposer=proposer, source_hash=f"s-{name}",
            )
        )  # fmt: skip
        return name

    # ------------------------------------------------------------------------------------------------- the loop

    def next(self) -> todo.Action:
        return todo.next_action(self.state, self.config)

    def step(self) -> todo.Action:
        """One action, done."""
        action = self.next()
        self.actions.append(action)
        self.perform(action)
        return action

    def until(self, stop: Callable[[todo.Action], bool] | type, limit: int = 2000) -> todo.Action:
        """Perform actions until the next one (not yet performed) is as wanted."""
        for _ in range(limit):
            action = self.next()
            if isinstance(action, stop) if isinstance(stop, type) else stop(action):
                return action
            before = len(self.events)
            self.step()
            if self.state.status == "finished":
                raise AssertionError(f"finished ({self.state.reason}) before {stop}")
            assert len(self.events) > before, f"{action} repeats for ever"
        raise AssertionError(f"no {stop} in {limit} actions; the last was {self.actions[-1]}")

    def run(self, limit: int = 3000) -> Simulator:
        """To the end, or to an Ask that nobody answers. No action may leave the state as it was."""
        for _ in range(limit):
            before = len(self.events)
            action = self.step()
            assert self.state.budget_used <= budget(self.state), f"{action} overspent: {self.state.budget_used}"
            if self.state.status == "finished":
                return self
            if len(self.events) == before:
                assert isinstance(action, todo.Ask), f"{action} repeats for ever"
                return self
        raise AssertionError(f"not over after {limit} actions: {self.actions[-8:]}")

    def perform(self, action: todo.Action) -> None:
        s, world = self.state, self.world
        match action:
            case todo.Look():
                got = world.batch(self, "h0000", min(self.config.run.look_episodes, s.splits["weight"]), "look")
                first, why = todo.first_phase_of(got, self.config), todo.look_words(got, self.config)
                self.record(r.Looked(batch=got, first=first, reason=why, segment="look"))
            case todo.StartPhase():
                self.record(r.PhaseStarted(cycle=action.cycle, phase=action.phase, reason=action.reason))
            case todo.SampleStep():
                count = self.config.weight.prompts_per_step
                got = world.batch(self, s.harness, todo.step_cost(self.config), "train")
                self.record(
                    r.StepSampled(
                        step=action.step, policy=s.policy, harness=s.harness, tasks_drawn=s.tasks_drawn + count,
                        batch=got, segment="s",
                    )
                )  # fmt: skip
            case todo.TrainStep():
                self._train()
            case todo.Evaluate():
                for harness in action.harnesses:
                    self._evaluate(harness, "search", s.splits["harness"])
            case todo.Confirm():
                for harness in action.harnesses:
                    self._evaluate(harness, "confirm", s.splits["harness"] * self.config.harness.confirm)
            case todo.HoldOut():
                for harness in action.harnesses:
                    self._evaluate(harness, "holdout", s.splits["holdout"])
            case todo.Propose():
                wanted = s.settings.candidates if s.settings else 0
                made = [self.propose(action.iteration, "rules") for _ in range(world.proposals(self, wanted))]
                self.record(r.ProposalsIn(iteration=action.iteration, candidates=made, seconds=1.0))
            case todo.Check():
                for harness in action.harnesses:
                    ok = world.check(self, harness)
                    smoke = batch(1, 0) if ok else None
                    self.record(r.CandidateChecked(harness=harness, ok=ok, reason="" if ok else "bad", smoke=smoke))
            case todo.Ask():
                world.person(self, action)
            case todo.EndIteration():
                self.record(
                    r.IterationFinished(
                        iteration=action.iteration, best=action.best, best_mean=action.mean, measured=action.measured
                    )
                )
            case todo.EndPhase():
                if action.accept and action.accept != s.harness:
                    self.record(r.HarnessAccepted(harness=action.accept, previous=s.harness, reason="best"))
                assert s.phase is not None
                self.record(r.PhaseFinished(cycle=s.cycle, phase=s.phase, reason=action.reason))
            case todo.Test():
                self._test(action)
            case todo.Finish():
                self.record(r.RunFinished(status="finished", reason=action.reason))

    def _train(self) -> None:
        s = self.state
        assert s.open_step is not None
        trained = 0 if s.policy != s.open_step.policy else self.world.trained(self, s.open_step.batch)
        if trained:
            number = len(s.versions)
            self.record(
                r.VersionPublished(
                    policy=f"theta-{number:04d}", hash=f"p{number}", parent=s.policy, path="w", manifest_hash="m",
                    probe_trainer=-1.0, probe_rollout=-1.0,
                )
            )  # fmt: skip
        self.record(
            r.StepFinished(
                step=s.open_step.step, policy=s.policy, trained=trained, trained_tokens=trained, seconds=1.0,
                loss=1.0 if trained else None, grad_norm=1.0, skipped="" if trained else "nothing accepted",
            )
        )  # fmt: skip

    def _evaluate(self, harness: str, purpose: r.Purpose, episodes: int) -> None:
        s = self.state
        outcome = self.world.outcome(self, harness) if purpose == "search" and harness != s.harness else "scored"
        if outcome != "scored":
            invalid, done = episodes if outcome == "infra" else 0, episodes // 2 if outcome == "rejected" else episodes
            self.record(
                r.CandidateOutcome(
                    harness=harness, outcome=outcome, reason=outcome, batch=batch(done, 0, invalid), segment="s",
                    saved=episodes - done,
                )
            )  # fmt: skip
            return
        got = self.world.batch(self, harness, episodes, purpose)
        score = Score(
            policy=s.policy, policy_hash=s.policy_hash, harness_hash=s.harnesses[harness].source_hash, tasks_hash="d",
            sampling=Sampling(), batch=got, segment="s",
            results={f"t{n}": [float(n < got.accepted)] for n in range(got.episodes)},
        )  # fmt: skip
        self.record(r.CandidateScored(harness=harness, iteration=s.iteration + 1, score=score, purpose=purpose))

    def _test(self, action: todo.Test) -> None:
        s = self.state
        mean = self.world.rate(self, action.harness)
        score = r.TestScore(
            policy=action.policy, harness=action.harness, policy_hash=s.versions[action.policy].hash,
            harness_hash=s.harnesses[action.harness].source_hash, mean=mean, low=mean, high=mean, n=s.splits["test"],
            samples=action.samples, pass_at=mean, label=action.label,
        )  # fmt: skip
        count = s.splits["test"] * action.samples
        self.record(r.TestScored(score=score, batch=batch(count, round(count * mean)), segment="t"))

    # ------------------------------------------------------------------------------------------------- questions

    @property
    def phases(self) -> list[str]:
        """The phases so far, e.g. ["1w", "1h", "2w"]."""
        return [f"{p.cycle}{p.phase[0]}" for p in self.state.phases]


def budget(state: RunState) -> int:
    return state.settings.budget_episodes if state.settings else 0
