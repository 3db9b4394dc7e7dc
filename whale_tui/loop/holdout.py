"""The held-out slice: tasks of D_harness that no proposer sees, and the warning when they tell another story.

`harness.holdout` tasks are set aside once, by a hash of run seed and task. The incoming harness and each leader of a
search are scored on them beside the dev score, which is over the rest. The held-out score decides nothing.

When is a gap more than chance? A harness that was not fitted to the dev tasks would find the two sets alike, since the
slice is a random one: with K tasks solved in all, how many of them lie among the dev tasks is hypergeometric (Fisher's
exact test, one-sided). A warning goes out where a gap as large has a probability under APART. It says nothing of why:
a leader is chosen for its dev score among many, and luck chosen often enough is what overfitting to a task set is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from whale_tui.records import Batch, Score, Task, content_hash

APART = 0.025


def set_aside(tasks: Sequence[Task], count: int, seed: int) -> tuple[list[Task], list[Task]]:
    """The dev tasks and the held-out ones, each in the order they came in."""
    order = sorted(tasks, key=lambda task: content_hash([seed, "holdout", task.hash]))
    held = {task.key for task in order[:count]}
    return [t for t in tasks if t.key not in held], [t for t in tasks if t.key in held]


def gap_chance(dev: Batch, held: Batch) -> float:
    """Probability of a dev score this far above the held-out one, or farther, where the two sets are alike.

    Of the search's own episodes: one for each task."""
    n, m = dev.episodes - dev.invalid, held.episodes - held.invalid
    solved = dev.accepted + held.accepted
    ways = math.comb(n + m, solved)
    return sum(math.comb(n, k) * math.comb(m, solved - k) for k in range(dev.accepted, min(n, solved) + 1)) / ways


def warning(harness: str, dev: Score, held: Score) -> str:
    """The warning in words; empty where the two scores agree, or one of them measured nothing."""
    if dev.mean is None or held.mean is None or dev.mean <= held.mean:
        return ""
    chance = gap_chance(dev.batch, held.batch)
    if chance >= APART:
        return ""
    return (
        f"{harness} does better on what the proposer sees: {dev.mean:.1%} on {dev.batch.episodes} dev tasks, "
        f"{held.mean:.1%} on {held.batch.episodes} held out (such a gap by chance: {max(chance, 0.001):.1%})"
    )
