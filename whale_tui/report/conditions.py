"""Runs of several conditions side by side: one row a condition, means over seeds with spread and interval.

The intervals resample both seeds and tasks (a seed is one training run, a task one problem of D_test that all runs
share), so that they speak of another run on other tasks. With two or three seeds the seeds' part of it is rough: the
spread stands beside it. Differences are paired: the same seed, the same task, the same chances.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
from msgspec import Struct

from whale_tui.journal import Journal, JournalError
from whale_tui.loop.evaluation import RESAMPLES, Interval
from whale_tui.report.series import Cost, Course, Tested, cost, half_gain
from whale_tui.rundir import RunDir

ORDER = ("harness-only", "weight-only", "fst", "whale", "adaptive", "stagewise")
"""The paper's, then ours."""
Rewards: TypeAlias = Mapping[str, Sequence[float]]
"""Task -> rewards of one pair."""


class Spread(Struct):
    """A mean over seeds, its standard deviation (None for one seed) and its 95% interval over seeds and tasks."""

    mean: float
    deviation: float | None
    low: float
    high: float
    seeds: int


class Row(Struct):
    """One condition. `ended`: how many of its runs are finished."""

    condition: str
    seeds: list[int]
    ended: int
    samples: int
    start: Spread | None
    last: Spread | None
    best: Spread | None
    gain_weight: float | None
    gain_harness: float | None
    cost: Cost


class Against(Struct):
    """A condition minus another, over the seeds that both have."""

    condition: str
    other: str
    difference: Spread
    won: int
    lost: int
    tasks: int


class Study(Struct):
    rows: list[Row]
    against: list[Against]


def study(courses: Sequence[Course]) -> Study:
    """Rows by condition. Differences are the reference's (whale where there is one) minus each other's, last pairs."""
    by: dict[str, list[Course]] = {}
    for course in courses:
        if course.state.settings is not None:
            by.setdefault(course.state.condition, []).append(course)
    names = sorted(by, key=lambda c: ORDER.index(c) if c in ORDER else len(ORDER))
    last = {c: _rewards(by[c], lambda course: course.last) for c in names}
    reference = next((c for c in ("whale", "adaptive") if c in names), names[0] if names else "")
    against = [found for c in names if c != reference and (found := _against(reference, c, last)) is not None]
    return Study([_row(c, by[c], list(last[c].values())) for c in names], against)


def _row(condition: str, courses: Sequence[Course], last: Sequence[Rewards]) -> Row:
    halves = {h: [half_gain(c.phases, h) for c in courses] for h in ("weight", "harness")}
    means = {h: [g.mean for g in found if g is not None] for h, found in halves.items()}
    costs = [cost(course) for course in courses]
    points = [c.points for c in costs if c.points is not None]
    tested = [course.last for course in courses if course.last is not None]
    return Row(
        condition=condition, seeds=sorted(course.state.seed for course in courses),
        ended=sum(course.seen == "finished" for course in courses),
        samples=min((t.score.samples for t in tested), default=0),
        start=spread(list(_rewards(courses, lambda course: course.start).values())),
        last=spread(last), best=spread(list(_rewards(courses, lambda course: course.best).values())),
        gain_weight=statistics.fmean(means["weight"]) if means["weight"] else None,
        gain_harness=statistics.fmean(means["harness"]) if means["harness"] else None,
        cost=Cost(
            episodes=round(statistics.fmean(c.episodes for c in costs)),
            tokens=round(statistics.fmean(c.tokens for c in costs)),
            seconds=statistics.fmean(c.seconds for c in costs),
            dollars=statistics.fmean(c.dollars for c in costs),
            test_episodes=round(statistics.fmean(c.test_episodes for c in costs)),
            points=statistics.fmean(points) if points else None,
        ),
    )  # fmt: skip


def _against(ours: str, theirs: str, rewards: Mapping[str, Mapping[int, Rewards]]) -> Against | None:
    seeds = sorted(set(rewards[ours]) & set(rewards[theirs]))
    gaps = [gap for seed in seeds if (gap := _gaps(rewards[ours][seed], rewards[theirs][seed]))]
    found = spread([{task: [value] for task, value in gap.items()} for gap in gaps])
    if found is None:
        return None
    tasks = {task: statistics.fmean(gap[task] for gap in gaps if task in gap) for gap in gaps for task in gap}
    won, lost = sum(v > 0 for v in tasks.values()), sum(v < 0 for v in tasks.values())
    return Against(ours, theirs, found, won, lost, len(tasks))


def _gaps(ours: Rewards, theirs: Rewards) -> dict[str, float]:
    """Task -> difference of the means, where both have valid episodes."""
    both = [task for task in ours if ours[task] and theirs.get(task)]
    return {task: statistics.fmean(ours[task]) - statistics.fmean(theirs[task]) for task in both}


def _rewards(courses: Sequence[Course], which: Callable[[Course], Tested | None]) -> dict[int, Rewards]:
    """Seed -> rewards of a pair of its run. Of two runs with one seed the later counts."""
    found: dict[int, Rewards] = {}
    for course in courses:
        tested = which(course)
        if tested is not None and (rewards := rewards_of(course, tested)):
            found[course.state.seed] = rewards
    return found


def rewards_of(course: Course, tested: Tested) -> Rewards:
    """Task -> rewards of a test, from the index of episodes. Empty where it can't be read."""
    rundir = RunDir(Path(course.path))
    try:
        journal = Journal(rundir.journal, read_only=True)
        try:
            return journal.rewards(tested.segment)
        finally:
            journal.close()
    except JournalError:
        return {}


def spread(by_seed: Sequence[Rewards]) -> Spread | None:
    """mean@k over seeds, with a 95% percentile bootstrap that draws seeds and then tasks. None for no seed.

    Tasks are those that every seed has results for, and one draw of tasks serves all seeds.
    """
    if not by_seed:
        return None
    tasks = sorted(set.intersection(*(set(rewards) for rewards in by_seed)))
    if not tasks:
        return None
    table = np.array([[statistics.fmean(rewards[task]) for task in tasks] for rewards in by_seed])
    interval = two_level(table)
    deviation = statistics.stdev(table.mean(axis=1).tolist()) if len(by_seed) > 1 else None
    return Spread(interval.mean, deviation, interval.low, interval.high, len(by_seed))


def two_level(table: np.ndarray) -> Interval:
    """Mean of a table (seeds, tasks) and its 95% percentile interval over draws of rows and of columns, both with
    replacement. The same table gives the same interval."""
    seeds, tasks = table.shape
    draw = np.random.default_rng([seeds, tasks])
    rows = draw.integers(0, seeds, (RESAMPLES, seeds))
    columns = draw.integers(0, tasks, (RESAMPLES, tasks))
    counts = np.zeros((RESAMPLES, seeds))
    np.add.at(counts, (np.arange(RESAMPLES)[:, None], rows), 1.0 / seeds)
    times = np.zeros((RESAMPLES, tasks))
    np.add.at(times, (np.arange(RESAMPLES)[:, None], columns), 1.0 / tasks)
    means = np.sort(np.einsum("rs,st,rt->r", counts, table, times, optimize=True))
    return Interval(float(table.mean()), float(means[int(0.025 * RESAMPLES)]), float(means[int(0.975 * RESAMPLES) - 1]))
