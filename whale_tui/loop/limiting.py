"""Which half holds the system back: `harness-limited`, `weight-limited` or `undecided`, a pure function of the state.

The rule (method.md, "Which half holds the system back"): from the last phase of each half, the gain in points per 1,000
episodes with its 95% interval. The half that gains more for the same episodes is the one that held the system back, if
the two intervals do not overlap; otherwise it is undecided.

- A harness phase gained what the accepted harness scores above the incoming one, on the same D_harness tasks under the
  same policy. Where none was accepted the gain is 0, and at most the upper end of the best challenger's interval.
- A weight phase gained what the same harness scores above itself on D_harness, under the last policy against the first.
  Before both are measured: the mean of its last window of steps against its first, as means over that many tasks.
"""

from __future__ import annotations

import math
from typing import Literal

from msgspec import Struct

from whale_tui.loop.paired import paired
from whale_tui.loop.state import PhaseRecord, RunState
from whale_tui.records import Phase, Score

Half = Literal["harness-limited", "weight-limited", "undecided"]


class Gain(Struct, frozen=True):
    """Points per 1,000 episodes, with the 95% interval."""

    mean: float
    low: float
    high: float
    cycle: int


class Limit(Struct, frozen=True):
    half: Half
    words: str
    brief: str
    weight: Gain | None = None
    harness: Gain | None = None

    def told(self, width: int, dot: str) -> str:
        """In one line of that width."""
        text = f"{self.half} {dot} {self.brief}"
        return text if len(text) <= width else self.half


def limiting(state: RunState) -> Limit:
    """What the last phases say."""
    weight, harness = (_last(state, phase) for phase in ("weight", "harness"))
    if weight is None or harness is None:
        missing = "search" if harness is None else "weight phase"
        cheap = "; a short one (6 iterations) is the cheap test" if harness is None and not state.phases else ""
        words = f"no {missing} has been measured yet"
        return Limit("undecided", words + cheap, words, weight, harness)
    brief = f"search {harness.mean:+.0f}, training {weight.mean:+.0f} points per 1,000 episodes"
    told = f"harness {_words(harness)}, weight {_words(weight)} points per 1,000 episodes"
    if harness.low > weight.high:
        return Limit("harness-limited", f"searching gains more: {told}", brief, weight, harness)
    if weight.low > harness.high:
        return Limit("weight-limited", f"training gains more: {told}", brief, weight, harness)
    return Limit("undecided", f"the intervals overlap: {told}", brief, weight, harness)


def _last(state: RunState, half: Phase) -> Gain | None:
    """The newest finished phase of a half that measured a gain."""
    for phase in reversed(state.phases):
        if phase.phase == half and phase.ended and phase.episodes:
            found = _of_training(state, phase) if half == "weight" else _of_search(state, phase)
            if found is not None:
                mean, low, high = (100_000 * value / phase.episodes for value in found)
                return Gain(mean, low, high, phase.cycle)
    return None


def _of_search(state: RunState, phase: PhaseRecord) -> tuple[float, float, float] | None:
    policy = state.versions[phase.policy].hash
    incoming = state.harnesses[phase.harness].scores.get(policy)
    if incoming is None:
        return None
    if phase.harness_after != phase.harness:
        accepted = state.harnesses[phase.harness_after].scores.get(policy)
        return _paired(accepted, incoming) if accepted is not None else None
    others = [c.scores[policy] for c in state.harnesses.values() if policy in c.scores and c.id != phase.harness]
    best = max(others, key=lambda score: score.mean or 0.0, default=None)
    found = _paired(best, incoming) if best is not None else None
    return (0.0, 0.0, max(0.0, found[2])) if found else None


def _of_training(state: RunState, phase: PhaseRecord) -> tuple[float, float, float] | None:
    scores = state.harnesses[phase.harness].scores
    before, after = (scores.get(state.versions[policy].hash) for policy in (phase.policy, phase.policy_after))
    if before is not None and after is not None and before is not after:
        return _paired(after, before)
    steps = [
        (value, max(1, tasks)) for value, tasks in zip(phase.signal, phase.tasks, strict=False) if value is not None
    ]
    window = min(state.settings.weight_window if state.settings else 1, len(steps) // 2)
    if window < 1:
        return None
    (first, n), (last, m) = _pooled(steps[:window]), _pooled(steps[-window:])
    spread = 1.96 * math.sqrt(first * (1 - first) / n + last * (1 - last) / m)
    return last - first, last - first - spread, last - first + spread


def _pooled(steps: list[tuple[float, int]]) -> tuple[float, int]:
    total = sum(tasks for _, tasks in steps)
    return sum(value * tasks for value, tasks in steps) / total, total


def _paired(score: Score, base: Score) -> tuple[float, float, float] | None:
    """Mean difference and its interval; None where one task alone was measured by both, or none."""
    found = paired(score, base)
    return (found.difference, found.low, found.high) if found is not None and found.tasks > 1 else None


def _words(gain: Gain) -> str:
    return f"{gain.mean:+.1f} [{gain.low:+.1f}, {gain.high:+.1f}]"
