"""The switching rules against tables worked by hand from docs/method.md, and against what they say in words."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as limits
from hypothesis import strategies as st

from whale_tui.loop import switching
from whale_tui.loop.state import PhaseRecord, RunState
from whale_tui.loop.switching import fixed, patience, steps_of, windowed
from whale_tui.records import Phase, Settings


def settings(**changes: Any) -> Settings:
    values: dict[str, Any] = {
        "rule": "patience", "epochs": 0.6, "iterations": 6, "weight_min": 2, "weight_window": 2, "weight_patience": 2,
        "harness_min": 6, "harness_patience": 2, "harness_cap": 15, "candidates": 3, "budget_episodes": 1000,
        "approval": "auto", "approval_timeout": 0.0,
    }  # fmt: skip
    return Settings(**(values | changes))


# ------------------------------------------------------------------------------------------------------------- fixed


@pytest.mark.parametrize(
    ("epochs", "per_epoch", "steps"),
    [
        (0.6, 100, 60),
        (0.2, 100, 20),
        (0.6, 170, 102),
        (0.018, 170, 3),
        (0.999, 2, 1),
        (0.001, 10, 1),  # at least one step
        (0.3, 10, 3),
        (0.29, 100, 29),  # 28.999999999999996 as a float product
        (2.5, 4, 10),
    ],
)
def test_fixed_length_is_the_floor_of_epochs_in_steps(epochs: float, per_epoch: int, steps: int) -> None:
    assert steps_of(epochs, per_epoch) == steps
    rule = settings(rule="fixed", epochs=epochs)
    ends = [fixed(rule, "weight", [0.5] * n, per_epoch).end for n in range(steps + 2)]
    assert ends == [n >= steps for n in range(steps + 2)]


@given(st.integers(1, 40), st.integers(1, 400), st.integers(1, 300))
def test_fixed_length_for_any_exact_fraction(numerator: int, denominator: int, per_epoch: int) -> None:
    exact = numerator * per_epoch // denominator  # integer arithmetic: no rounding
    assert steps_of(numerator / denominator, per_epoch) == max(1, exact)


def test_fixed_harness_phase_counts_iterations_the_first_included() -> None:
    rule = settings(rule="fixed", iterations=3)
    assert [fixed(rule, "harness", [0.1] * n, 10).end for n in range(5)] == [False, False, False, True, True]
    assert "I = 3" in fixed(rule, "harness", [0.1], 10).words
    assert "2 more iterations" in fixed(rule, "harness", [0.1], 10).words


def test_fixed_counts_rounds_in_which_nothing_was_measured() -> None:
    assert fixed(settings(rule="fixed", iterations=3), "harness", [0.1, None, None], 10).end


# ------------------------------------------------------------------------------------------- patience, worked by hand

# (signal so far, end, best, best_at, since): min 2, window 2, patience 2, in steps
WEIGHT = [
    ([], False, None, None, 0),
    ([0.10], False, None, None, 0),  # the window is not full
    ([0.10, 0.20], False, 0.15, 2, 0),
    ([0.10, 0.20, 0.10], False, 0.15, 2, 1),  # 0.15 again is no new best
    ([0.10, 0.20, 0.10, 0.20], True, 0.15, 2, 2),
    ([0.10, 0.20, 0.10, 0.30], False, 0.20, 4, 0),
    ([0.10, 0.20, 0.10, 0.30, None], False, 0.20, 4, 0),  # nothing valid: no "no improvement"
    ([0.10, 0.20, 0.10, 0.30, None, 0.10], False, 0.20, 4, 1),  # window (0.30, 0.10): invalid ones are jumped over
    ([0.10, 0.20, 0.10, 0.30, None, 0.10, None], False, 0.20, 4, 1),
    ([0.10, 0.20, 0.10, 0.30, None, 0.10, None, 0.20], True, 0.20, 4, 2),
    ([None, None, None, None], False, None, None, 0),
]

# min 6, patience 2, cap 15, in iterations: the best archive score never falls
HARNESS = [
    ([0.1], False, 0.1, 1, 0),
    ([0.1] * 5, False, 0.1, 1, 4),  # patience is long over, the minimum is not reached
    ([0.1] * 6, True, 0.1, 1, 5),
    ([0.1, 0.1, 0.1, 0.1, 0.2, 0.2], False, 0.2, 5, 1),
    ([0.1, 0.1, 0.1, 0.1, 0.2, 0.2, 0.2], True, 0.2, 5, 2),
    ([0.1, 0.1, 0.1, 0.1, 0.2, 0.2, None, None], False, 0.2, 5, 1),
    ([0.1, 0.1, 0.1, 0.1, 0.2, 0.2, None, None, 0.2], True, 0.2, 5, 2),
    ([n / 100 for n in range(14)], False, 0.13, 14, 0),
    ([n / 100 for n in range(15)], True, 0.14, 15, 0),  # the cap, though it still improves
    ([None] * 14, False, None, None, 0),
    ([None] * 15, True, None, None, 0),
]


@pytest.mark.parametrize(("signal", "end", "best", "best_at", "since"), WEIGHT)
def test_weight_patience_by_hand(
    signal: list[float | None], end: bool, best: float | None, best_at: int | None, since: int
) -> None:
    decision = patience(settings(), "weight", signal)
    assert (decision.end, decision.best_at, decision.since_best) == (end, best_at, since)
    assert decision.best == (pytest.approx(best) if best is not None else None)


@pytest.mark.parametrize(("signal", "end", "best", "best_at", "since"), HARNESS)
def test_harness_patience_by_hand(
    signal: list[float | None], end: bool, best: float | None, best_at: int | None, since: int
) -> None:
    decision = patience(settings(), "harness", signal)
    assert (decision.end, decision.best, decision.best_at, decision.since_best) == (end, best, best_at, since)


def test_the_same_values_in_another_order_are_no_new_best() -> None:
    """0.3 + 0.2 + 0.1 and 0.2 + 0.1 + 0.3 differ in the last bit when summed from the left."""
    signal = [0.3, 0.2, 0.1] * 4
    decision = patience(settings(weight_window=3, weight_patience=100), "weight", signal)
    assert (decision.best_at, decision.since_best) == (3, 9)


def test_the_cap_comes_before_the_minimum() -> None:
    assert patience(settings(harness_min=9, harness_cap=4), "harness", [0.1, 0.2, 0.3, 0.4]).end


def test_decide_takes_the_rule_of_the_settings() -> None:
    phase = PhaseRecord(cycle=1, phase="harness", why="", started_at=0.0, episodes_before=0, signal=[0.1] * 6)
    state = RunState(settings=settings(iterations=7), phase="harness", phases=[phase], steps_per_epoch=10)
    assert switching.decide(state).end  # patience: 6 without a better one
    state.settings = settings(rule="fixed", iterations=7)
    assert not switching.decide(state).end
    with pytest.raises(ValueError, match="no phase"):
        switching.decide(RunState())


# -------------------------------------------------------------------------------------------------------- properties

rates = st.one_of(st.none(), st.sampled_from([n / 8 for n in range(9)]))
signals = st.lists(rates, max_size=24)
rules = st.builds(
    settings,
    weight_min=st.integers(1, 6), weight_window=st.integers(1, 5), weight_patience=st.integers(1, 5),
    harness_min=st.integers(1, 6), harness_patience=st.integers(1, 4), harness_cap=st.integers(6, 12),
)  # fmt: skip
phases = st.sampled_from(["weight", "harness"])


def reference(rule: Settings, phase: Phase, signal: list[float | None]) -> tuple[bool, float | None, int]:
    """The rule once more, told as a person would: walk the valid rounds, keep a best and a count since."""
    window = rule.weight_window if phase == "weight" else 1
    wait = rule.weight_patience if phase == "weight" else rule.harness_patience
    minimum = rule.weight_min if phase == "weight" else rule.harness_min
    valid: list[float] = []
    best, since = None, 0
    for value in signal:
        if value is None:
            continue
        valid.append(value)
        if len(valid) < window:
            continue
        mean = sum(valid[-window:]) / window  # eighths: exact in floats
        if best is None or mean > best:
            best, since = mean, 0
        else:
            since += 1
    end = len(signal) >= minimum and best is not None and since >= wait
    if phase == "harness" and len(signal) >= rule.harness_cap:
        end = True
    return end, best, since


@limits(max_examples=200)
@given(rules, phases, signals)
def test_patience_is_what_a_person_would_count(rule: Settings, phase: Phase, signal: list[float | None]) -> None:
    decision = patience(rule, phase, signal)
    assert (decision.end, decision.best, decision.since_best) == reference(rule, phase, signal)


@given(rules, phases, signals)
def test_never_before_the_minimum_and_always_at_the_cap(
    rule: Settings, phase: Phase, signal: list[float | None]
) -> None:
    decision = patience(rule, phase, signal)
    assert decision.done == len(signal)
    if decision.end:
        assert len(signal) >= decision.minimum
    if phase == "harness" and len(signal) >= rule.harness_cap:
        assert decision.end


@given(rules, phases, signals, st.integers(1, 5))
def test_rounds_without_a_measurement_change_neither_best_nor_counter(
    rule: Settings, phase: Phase, signal: list[float | None], more: int
) -> None:
    before, after = patience(rule, phase, signal), patience(rule, phase, signal + [None] * more)
    assert (after.best, after.best_at, after.since_best) == (before.best, before.best_at, before.since_best)
    without = patience(rule, phase, [v for v in signal if v is not None])
    assert (before.best, before.since_best) == (without.best, without.since_best)


@limits(max_examples=200)
@given(rules, phases, signals, st.sampled_from(["fixed", "patience"]), st.integers(1, 30))
def test_words_agree_with_the_decision_and_come_true(
    rule: Settings, phase: Phase, signal: list[float | None], kind: str, per_epoch: int
) -> None:
    """Replay what the words promise: with no new best, the phase ends after exactly that many more rounds."""

    def decide(history: list[float | None]) -> switching.Decision:
        return fixed(rule, phase, history, per_epoch) if kind == "fixed" else patience(rule, phase, history)

    decision = decide(signal)
    unit = "step" if phase == "weight" else "iteration"
    assert unit in decision.words
    future = re.search(r"ends after (\d+) more ", decision.words)
    assert decision.end == bool(re.search(r"the phase ends($| at its cap| \()", decision.words))
    if decision.best is not None and kind == "patience":
        assert f"{decision.best:.1%}" in decision.words
        assert f"{decision.since_best} of {decision.patience}" in decision.words
    if future is None:
        return
    assert not decision.end
    more, worst = int(future[1]), 0.0
    ended = [decide(signal + [worst] * n).end for n in range(1, more + 1)]
    if kind == "fixed" or decide(signal + [worst] * more).best == decision.best:
        assert ended == [False] * (more - 1) + [True]


@given(rules, signals)
def test_not_before_says_how_many_rounds_are_left(rule: Settings, signal: list[float | None]) -> None:
    decision = patience(rule, "weight", signal)
    to_go = re.search(r"\((\d+) to go\)", decision.words)
    assert bool(to_go) == (len(signal) < rule.weight_min)
    if to_go:
        assert int(to_go[1]) == rule.weight_min - len(signal)


@given(signals, st.integers(1, 6))
def test_windowed_is_the_mean_of_the_last_valid_values(signal: list[float | None], window: int) -> None:
    out = windowed(signal, window)
    assert len(out) == len(signal)
    for n, value in enumerate(out):
        valid = [v for v in signal[: n + 1] if v is not None]
        if signal[n] is None or len(valid) < window:
            assert value is None
        else:
            assert value is not None and math.isclose(value, sum(valid[-window:]) / window)
