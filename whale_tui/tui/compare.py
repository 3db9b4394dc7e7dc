"""A candidate against its parent on the same tasks, and numbers as the screen writes them."""

from __future__ import annotations

from whale_tui.loop.paired import Comparison, paired
from whale_tui.loop.state import Candidate, RunState

Compared = dict[tuple[str, str, str], Comparison | None]
"""(candidate, parent, policy hash) -> comparison. A score never changes once it is there, so neither does this."""


def against_parent(state: RunState, candidate: Candidate, known: Compared | None = None) -> Comparison | None:
    """Under the newest policy that both were measured under; None where there is none. `known` is filled and reused."""
    parent = state.harnesses.get(candidate.parent)
    if parent is None:
        return None
    for policy_hash in reversed(candidate.scores):
        if policy_hash in parent.scores:
            key = (candidate.id, parent.id, policy_hash)
            if known is not None and key in known:
                return known[key]
            found = paired(candidate.scores[policy_hash], parent.scores[policy_hash])
            if known is not None:
                known[key] = found
            return found
    return None


def newest_mean(state: RunState, candidate: Candidate) -> tuple[float | None, str]:
    """A harness's success rate under the current policy, or under the newest one it was measured under, and which."""
    if not state.policy:
        return None, ""
    mean = candidate.mean(state.policy_hash)
    if mean is not None:
        return mean, state.policy
    names = {v.hash: v.name for v in state.versions.values()}
    for policy_hash in reversed(candidate.scores):
        if (mean := candidate.mean(policy_hash)) is not None:
            return mean, names.get(policy_hash, policy_hash)
    return None, ""


def percent(value: float | None, places: int = 1) -> str:
    return "" if value is None else f"{value:.{places}%}"


def points(value: float, minus: str = "−") -> str:
    """A difference in percentage points, with its sign."""
    return f"{'+' if value >= 0 else minus}{abs(value) * 100:.1f}"


def duration(seconds: float) -> str:
    """Two units at most: 42 s, 3 min 20 s, 5 h 12 min, 2 d 4 h."""
    total = max(0, round(seconds))
    if total < 60:
        return f"{total} s"
    if total < 3600:
        return f"{total // 60} min {total % 60} s" if total < 600 else f"{total // 60} min"
    if total < 86400:
        return f"{total // 3600} h {total % 3600 // 60} min"
    return f"{total // 86400} d {total % 86400 // 3600} h"


def count(value: float) -> str:
    """12, 3,400, 1.2 M: short enough for a column."""
    if value < 100_000:
        return f"{value:,.0f}"
    if value < 1_000_000:
        return f"{value / 1000:.0f} k"
    return f"{value / 1e6:.1f} M" if value < 1e9 else f"{value / 1e9:.1f} G"


def eta(state: RunState) -> str:
    """Time for the rest of the budget at the pace so far; empty before there is a pace."""
    used, seconds = state.budget_used, sum(s.seconds for s in state.ledger.values())
    if not used or not seconds or state.settings is None or state.status in ("finished", "stopped"):
        return ""
    return duration((state.settings.budget_episodes - used) * seconds / used)
