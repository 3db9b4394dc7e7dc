"""Two scores task by task: what a candidate wins and loses against its parent, a phase against where it began."""

from __future__ import annotations

import math

from msgspec import Struct

from whale_tui.records import Score


class Comparison(Struct, frozen=True):
    """Paired over tasks. `difference` with its 95% interval (normal, over tasks); won: better than the parent there."""

    won: int
    lost: int
    tied: int
    difference: float
    low: float
    high: float

    @property
    def tasks(self) -> int:
        return self.won + self.lost + self.tied


def paired(score: Score, base: Score) -> Comparison | None:
    """Difference of two scores over the tasks that both measured."""
    theirs = base.results.get
    gaps = [
        (ours[0] if len(ours) == 1 else sum(ours) / len(ours))
        - (other[0] if len(other) == 1 else sum(other) / len(other))
        for task, ours in score.results.items()
        if ours and (other := theirs(task))
    ]
    if not gaps:
        return None
    n, mean = len(gaps), sum(gaps) / len(gaps)
    squares = max(0.0, sum([g * g for g in gaps]) - n * mean * mean)
    spread = math.sqrt(squares / max(1, n - 1) / n)
    won, lost = sum(g > 0 for g in gaps), sum(g < 0 for g in gaps)
    return Comparison(won, lost, n - won - lost, mean, mean - 1.96 * spread, mean + 1.96 * spread)
