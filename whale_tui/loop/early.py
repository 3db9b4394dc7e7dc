"""Early rejection: stop evaluating a candidate that has hardly a chance left to reach the leader.

Candidates are evaluated slice by slice, all of them on the same tasks in the same order. After each slice but the
last, a candidate that is behind the leader on the tasks both have done is rejected when its chance to end at the
leader's success rate or above it is under `harness.early_rejection`.

The chance is exact and has nothing to tune: the candidate's success is taken to have one unknown rate on tasks that the
leader solved and another on those it did not, each uniform on [0, 1] before the first task. What is left of either kind
is then beta-binomial, and the two add up. Pairing with the leader's own results takes out how hard the tasks of a
slice happened to be. Read as a forecast it is calibrated: of the candidates rejected at 0.05, fewer than 5 in 100 would
have ended at the leader or above it, however often one looks. A candidate that is not behind on the tasks both have
done goes on whatever the chance says, so one that solves all that the leader solves is never rejected.

A slice is no commit: a run that is killed within an evaluation does that evaluation again, and gets the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from msgspec import Struct

from whale_tui.records import Task, content_hash

Results = Mapping[str, Sequence[float]]
"""Task key -> rewards of its non-invalid episodes; the first counts."""


class Leader(Struct, frozen=True):
    """The harness to beat: its success rate (confirmations pooled) and its results in the search."""

    id: str
    mean: float
    results: Results


def slices(tasks: Sequence[Task], size: int, seed: int) -> Iterator[list[Task]]:
    """The tasks in an order of the run's own (files are often sorted by difficulty), in pieces of `size`."""
    order = sorted(tasks, key=lambda task: content_hash([seed, "slices", task.hash]))
    for start in range(0, len(order), size):
        yield order[start : start + size]


def rejection(results: Results, left: Sequence[str], leader: Leader, least: float) -> str:
    """Why a candidate with these results, and the tasks `left` to do, goes no further; empty where it goes on."""
    both = [task for task in results if results[task] and leader.results.get(task)]
    ours, theirs = (sum(r[task][0] for task in both) for r in (results, leader.results))
    if ours >= theirs:
        return ""
    found = chance(results, left, leader)
    if found >= least:
        return ""
    done = sum(bool(rewards) for rewards in results.values())
    return (
        f"rejected early after {done} of {done + len(left)} tasks: {_percent(found)} chance to reach {leader.id} "
        f"({ours:g} of {len(both)} solved, {leader.id} solved {theirs:g} of them)"
    )


def chance(results: Results, left: Sequence[str], leader: Leader) -> float:
    """Probability that the candidate's success rate over all these tasks ends at the leader's or above it."""
    done = {task: rewards[0] >= 0.5 for task, rewards in results.items() if rewards}
    solved = {task for task, rewards in leader.results.items() if rewards and rewards[0] >= 0.5}
    need = math.ceil(leader.mean * (len(done) + len(left)) - 1e-9) - sum(done.values())
    kinds = []
    for kind in (True, False):
        seen = [success for task, success in done.items() if (task in solved) == kind]
        kinds.append(forecast(sum(seen), len(seen), sum((task in solved) == kind for task in left)))
    hard, easy = kinds
    above = [sum(easy[n:]) for n in range(len(easy) + 1)]  # of the second kind at least n
    return sum(p * above[min(max(0, need - n), len(above) - 1)] for n, p in enumerate(hard))


def forecast(successes: int, seen: int, left: int) -> list[float]:
    """Probability of 0, 1, ... `left` more successes after `successes` of `seen` (uniform prior, beta-binomial)."""
    failures, ways = seen - successes, math.comb(left + seen + 1, left)
    return [
        math.comb(n + successes, successes) * math.comb(left - n + failures, failures) / ways for n in range(left + 1)
    ]


def _percent(value: float) -> str:
    return "under 0.1%" if value < 0.001 else f"{value:.1%}" if value < 0.01 else f"{value:.0%}"
