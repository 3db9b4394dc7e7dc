"""mean@k with its interval, and differences of two harnesses, against an independent computation."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as limits
from hypothesis import strategies as st

from tests.test_accepted import episode
from whale_tui.loop.evaluation import bootstrap, difference, mean_at_k, results


def reference(values: list[float], resamples: int = 20_000) -> tuple[float, float]:
    """The percentile bootstrap once more, vectorised, with its own seed and ten times the resamples."""
    rng = np.random.default_rng(12345)
    data = np.asarray(values)
    means = data[rng.integers(0, len(data), (resamples, len(data)))].mean(axis=1)
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)


@pytest.mark.parametrize("count", [20, 64, 256])
@pytest.mark.parametrize("rate", [0.03, 0.5, 0.9])
def test_the_interval_is_the_percentile_bootstrap(count: int, rate: float) -> None:
    rng = np.random.default_rng(count)
    values = (rng.binomial(8, rate, count) / 8).tolist()
    got, (low, high) = bootstrap(values), reference(values)
    slack = 0.2 * statistics.pstdev(values) / math.sqrt(count) + 1 / (8 * count)  # noise of resampling, and a grain
    assert got.mean == pytest.approx(sum(values) / count)
    assert got.low == pytest.approx(low, abs=slack)
    assert got.high == pytest.approx(high, abs=slack)


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(7)
    held = 0
    for _ in range(60):
        interval = bootstrap((rng.random(60) < 0.4).astype(float).tolist())
        held += interval.low <= 0.4 <= interval.high
    assert held >= 50  # 95% of 60 is 57


@limits(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from([n / 8 for n in range(9)]), max_size=12))
def test_the_same_data_give_the_same_interval_around_the_mean(values: list[float]) -> None:
    got = bootstrap(values)
    assert got == bootstrap(list(values))
    assert got.low <= got.mean + 1e-12 and got.mean <= got.high + 1e-12
    if values:
        assert min(values) <= got.low and got.high <= max(values)


def test_edges() -> None:
    assert (bootstrap([]).mean, bootstrap([]).low, bootstrap([]).high) == (0.0, 0.0, 0.0)
    one = bootstrap([0.25])
    assert (one.mean, one.low, one.high) == (0.25, 0.25, 0.25)


def test_results_leave_invalid_episodes_out() -> None:
    episodes = [
        episode("a", "t1"), episode("b", "t1", verdict="reject"), episode("c", "t1", verdict="invalid"),
        episode("d", "t2", verdict="invalid"),
    ]  # fmt: skip
    assert results(episodes) == {"t1": [1.0, 0.0]}


def test_mean_at_k_is_a_mean_over_tasks_not_over_episodes() -> None:
    by_task = {"t1": [1.0], "t2": [0.0, 0.0, 0.0]}
    assert mean_at_k(by_task).mean == 0.5


def test_difference_is_paired_by_task_with_what_was_won_and_lost() -> None:
    ours = {"a": [1.0], "b": [0.0], "c": [1.0, 0.0], "d": [1.0], "only": [1.0], "empty": []}
    theirs = {"a": [0.0], "b": [1.0], "c": [1.0, 0.0], "d": [0.0], "other": [0.0], "empty": [1.0]}
    got = difference(ours, theirs)
    assert (got.won, got.lost, got.tasks) == (["a", "d"], ["b"], 4)
    assert got.interval.mean == pytest.approx((1 - 1 + 0 + 1) / 4)
    back = difference(theirs, ours)
    assert (back.won, back.lost) == (got.lost, got.won)
    assert back.interval.mean == pytest.approx(-got.interval.mean)
    assert difference({}, ours).tasks == 0


def test_a_paired_difference_is_narrower_than_the_two_scores() -> None:
    """Hard and easy tasks are hard and easy for both: pairing takes that out."""
    ours = {f"t{n}": [float(n % 2)] for n in range(80)}
    theirs = {f"t{n}": [float(n % 2 and n != 1)] for n in range(80)}
    paired, alone = difference(ours, theirs).interval, mean_at_k(ours)
    assert paired.high - paired.low < (alone.high - alone.low) / 2
