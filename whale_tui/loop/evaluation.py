"""Measuring pairs: mean@k on D_test with an interval, and the difference of two scores on the same tasks."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from msgspec import Struct

from whale_tui import records as r
from whale_tui.records import Episode, Task

if TYPE_CHECKING:
    from whale_tui.loop.alternation import Test
    from whale_tui.loop.run import Run

RESAMPLES = 2000


class Interval(Struct, frozen=True):
    mean: float
    low: float
    high: float


class Difference(Struct, frozen=True):
    """One harness against another on the tasks both have results for."""

    interval: Interval
    won: list[str]
    lost: list[str]
    tasks: int


def results(episodes: Sequence[Episode]) -> dict[str, list[float]]:
    """Task -> rewards of its non-invalid episodes. Tasks without one are left out."""
    out: dict[str, list[float]] = {}
    for episode in episodes:
        if episode.reward is not None:
            out.setdefault(episode.task, []).append(episode.reward)
    return out


def mean_at_k(by_task: Mapping[str, Sequence[float]]) -> Interval:
    """Mean over tasks of the mean reward, with a 95% percentile bootstrap over tasks (same data, same answer)."""
    return bootstrap([sum(v) / len(v) for v in by_task.values() if v])


def difference(ours: Mapping[str, Sequence[float]], theirs: Mapping[str, Sequence[float]]) -> Difference:
    """Paired by task: the mean difference with its interval, and the tasks won and lost."""
    both = sorted(task for task in set(ours) & set(theirs) if ours[task] and theirs[task])
    deltas = {t: sum(ours[t]) / len(ours[t]) - sum(theirs[t]) / len(theirs[t]) for t in both}
    return Difference(
        interval=bootstrap(list(deltas.values())),
        won=[t for t in both if deltas[t] > 0],
        lost=[t for t in both if deltas[t] < 0],
        tasks=len(both),
    )


def bootstrap(values: Sequence[float]) -> Interval:
    """Mean and 95% percentile interval over resamples of the values. All zero for no values."""
    n = len(values)
    if n == 0:
        return Interval(0.0, 0.0, 0.0)
    draw = random.Random(n)
    means = sorted(sum(draw.choices(values, k=n)) / n for _ in range(RESAMPLES))
    return Interval(sum(values) / n, means[int(0.025 * RESAMPLES)], means[int(0.975 * RESAMPLES) - 1])


SUBSETS = ("subset", "level", "type")
"""Fields of a task that name the part of D_test it belongs to; the first that a task has counts."""


def subset(task: Task) -> str:
    """The part of D_test that a task belongs to, "" where it names none."""
    for fields in (task.public, task.private):
        for name in SUBSETS:
            if isinstance(value := fields.get(name), str | int):
                return "".join(c if c.isprintable() else "?" for c in f"{name} {value}"[:80])
    return ""


def parts(tasks: Iterable[Task], by_task: Mapping[str, Sequence[float]]) -> dict[str, r.Part]:
    """mean@k of each subset, in the order of their names."""
    groups: dict[str, dict[str, Sequence[float]]] = {}
    for task in tasks:
        if (name := subset(task)) and task.key in by_task:
            groups.setdefault(name, {})[task.key] = by_task[task.key]
    return {
        name: r.Part(i.mean, i.low, i.high, len(groups[name]))
        for name in sorted(groups)
        for i in [mean_at_k(groups[name])]
    }


async def test(run: Run, action: Test) -> None:
    """mean@k of a pair on D_test. It influences nothing: not the decisions, nor the random streams of what follows.

    Every pair meets the same chances there (rollouts.py, `call_seed`), so that any two can be compared task by task.
    """
    from whale_tui.loop.rollouts import Job

    state, samples = run.state, action.samples
    subject, version = run.subject(action.harness), state.versions[action.policy]
    jobs = [Job(task, subject, k) for task in run.tasks["test"] for k in range(samples)]
    what = f"testing {version.name} x {subject.id} on D_test"
    if action.asked:
        what += f" ({action.label})"
    episodes, batch = await run.episodes(
        jobs, "test", what, step=action.asked, iteration=action.asked, policy=version.name
    )
    by_task = results(episodes)
    interval = mean_at_k(by_task)
    score = r.TestScore(
        policy=version.name, harness=subject.id, policy_hash=version.hash, harness_hash=subject.hash,
        mean=interval.mean, low=interval.low, high=interval.high, n=len(by_task), samples=samples,
        pass_at=batch.pass_at or 0.0, label=action.label, parts=parts(run.tasks["test"], by_task),
    )  # fmt: skip
    segment = run.journal.write_segment(episodes)
    run.record(r.TestScored(score=score, batch=batch, segment=segment.name), segments=[segment])
