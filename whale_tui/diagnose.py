"""`whale-tui diagnose`: which half holds a system back, by a short search and a short training, both from the start.

The rule (docs/method.md, "Diagnosis"): each half's gain is measured on D_harness as points per 1,000 episodes, paired
by task, with a 95% bootstrap interval over tasks. The half with the higher gain held the system back, if its interval
lies above zero and above the other's; otherwise it is undecided.

A search picks the best of many noisy scores, so that its winner's own score flatters: the winner is measured again on
fresh episodes (`harness.confirm`), and those count. D_test is not looked at.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from whale_tui import config
from whale_tui.loop.evaluation import difference
from whale_tui.loop.state import RunState
from whale_tui.rundir import RunDir, RunDirError
from whale_tui.service import discovery, launch
from whale_tui.study import Planned, carry_out

ITERATIONS = 6
Half = Literal["harness-limited", "weight-limited", "undecided"]


class Gain(Struct, frozen=True):
    """What a half gained: `points` of success on D_harness with their interval, for `episodes`, and per 1,000."""

    before: float
    after: float
    points: float
    low: float
    high: float
    episodes: int
    tasks: int

    def per_thousand(self, points: float) -> float:
        return 1000 * points / self.episodes if self.episodes else 0.0

    @property
    def rate(self) -> tuple[float, float, float]:
        return self.per_thousand(self.points), self.per_thousand(self.low), self.per_thousand(self.high)


class Diagnosis(Struct, frozen=True):
    half: Half
    words: str
    harness: Gain
    weight: Gain


def diagnose(target: Path, steps: int | None, overrides: Sequence[str], out: Path | None, *, json: bool = False) -> int:
    """Both runs, and what they say. Returns the exit status. Raises ConfigError or RunDirError."""
    file = launch.config_file(target)
    settings = config.load(file, overrides).config
    folder = out or Path(f"diagnose-{settings.run.name}")
    (search,), code = carry_out(file, [search_plan(settings, overrides)], folder / "runs")
    if code:
        return code
    spent = discovery.read_state(search)
    (training,), code = carry_out(file, [training_plan(settings, overrides, spent, steps)], folder / "runs")
    if code:
        return code
    found = read(search, training)
    print(f"\n{found.half}: {found.words}")
    if json:
        print(msgspec.json.encode(found).decode())
    return 0


def search_plan(settings: config.Config, overrides: Sequence[str]) -> Planned:
    """Six iterations under theta-0000, the winner confirmed on fresh episodes."""
    confirm = max(1, settings.harness.confirm)
    return Planned(
        "search",
        [*overrides, "run.condition=harness-only", f"schedule.iterations={ITERATIONS}", f"harness.confirm={confirm}",
         *_common("search")],
    )  # fmt: skip


def training_plan(settings: config.Config, overrides: Sequence[str], searched: RunState, steps: int | None) -> Planned:
    """One weight phase under h0, and the first iteration of a search, which measures h0 on D_harness again."""
    per_epoch = searched.steps_per_epoch
    if steps is None:
        configured = settings.settings(per_epoch).epochs * per_epoch
        cost = settings.weight.prompts_per_step * settings.weight.samples_per_task
        steps = max(1, min(int(configured + 1e-9), _spent(searched, "search", "smoke") // cost))
    epochs = (steps + 0.5) / per_epoch  # half a step over, so that no rounding loses one
    return Planned(
        "training",
        [*overrides, "run.condition=whale", "run.first_phase=weight", f"schedule.epochs={epochs:.9f}",
         "schedule.iterations=1", *_common("training")],
    )  # fmt: skip


def _common(name: str) -> list[str]:
    """One phase of it, with room to end by itself and nobody to ask."""
    return [
        "run.cycles=1", "run.budget_episodes=1000000", "harness.approval=auto", "test.samples=0", f"run.name={name}",
    ]  # fmt: skip


def read(search: RunDir, training: RunDir) -> Diagnosis:
    """The diagnosis from two finished runs. Raises RunDirError where one measured nothing."""
    searched, trained = discovery.read_state(search), discovery.read_state(training)
    base = _results(searched, "h0000")
    found = searched.harnesses[searched.harness]
    policy = searched.policy_hash
    if not base:
        raise RunDirError(f"{search.path}: h0000 was not measured; see {search.log}")
    if found.id == "h0000":
        fresh: Mapping[str, Sequence[float]] = base  # nothing better was found
    else:
        fresh = found.confirms[policy].results if policy in found.confirms else {}
    if not fresh:
        raise RunDirError(f"{search.path}: {found.id} was not confirmed; see {search.log}")
    after = _results(trained, "h0000")
    if not after:
        raise RunDirError(f"{training.path}: h0000 was not measured after training; see {training.log}")
    harness = gain(base, fresh, _spent(searched, "search", "smoke"))
    return decide(harness, gain(base, after, _spent(trained, "train")))


def gain(before: Mapping[str, Sequence[float]], after: Mapping[str, Sequence[float]], episodes: int) -> Gain:
    """From rewards by task, paired by task."""
    found = difference(after, before)
    i = found.interval
    return Gain(_mean(before), _mean(after), 100 * i.mean, 100 * i.low, 100 * i.high, episodes, found.tasks)


def decide(harness: Gain, weight: Gain) -> Diagnosis:
    """The rule, and its words."""
    told = f"searching {_words(harness)}; training {_words(weight)}"
    (_, h_low, h_high), (_, w_low, w_high) = harness.rate, weight.rate
    if h_low > max(0.0, w_high):
        return Diagnosis("harness-limited", f"{told}. Searching gains more for its episodes", harness, weight)
    if w_low > max(0.0, h_high):
        return Diagnosis("weight-limited", f"{told}. Training gains more for its episodes", harness, weight)
    why = "neither gain is above zero" if max(h_low, w_low) <= 0 else "the intervals overlap"
    return Diagnosis("undecided", f"{told}. It stays open: {why}", harness, weight)


def _words(g: Gain) -> str:
    rate, low, high = g.rate
    return (
        f"{g.before:.1%} -> {g.after:.1%} on {g.tasks} tasks for {g.episodes:,} episodes, "
        f"{rate:+.1f} [{low:+.1f}, {high:+.1f}] points per 1,000"
    )


def _results(state: RunState, harness: str) -> Mapping[str, Sequence[float]]:
    """Rewards by task on D_harness under the run's last policy."""
    score = state.harnesses[harness].scores.get(state.policy_hash)
    return score.results if score else {}


def _spent(state: RunState, *purposes: str) -> int:
    return sum(s.episodes for key, s in state.ledger.items() if key.partition("/")[2] in purposes)


def _mean(results: Mapping[str, Sequence[float]]) -> float:
    means = [sum(v) / len(v) for v in results.values() if v]
    return sum(means) / len(means) if means else 0.0
