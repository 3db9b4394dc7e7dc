"""The switching rules: pure functions of a phase's signal history, with the reason in words (method.md, "Switching").

A weight phase counts steps and watches the mean success over a window of steps; a harness phase counts iterations and
watches the archive's best score. A round whose signal is None (nothing valid was measured) lengthens the phase but
never counts as "no improvement".
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from msgspec import Struct

from whale_tui.loop.state import RunState
from whale_tui.records import Phase, Settings

Signal = Sequence[float | None]


class Decision(Struct, frozen=True):
    """What the rule says now: counters for the screen, and in `words` what it decides, why, and when it does next."""

    end: bool
    words: str
    done: int
    minimum: int
    """Rounds before which the phase can't end."""
    most: int | None
    """Rounds at which it ends regardless."""
    since_best: int | None = None
    patience: int | None = None
    best: float | None = None
    best_at: int | None = None
    """Round, from 1, at which the best was set."""


def decide(state: RunState) -> Decision:
    """The rule of the running phase. The state must be in a phase."""
    phase, settings = state.current_phase, state.settings
    if phase is None or settings is None:
        raise ValueError("no phase is running")
    if settings.rule == "patience":
        return patience(settings, phase.phase, phase.signal)
    return fixed(settings, phase.phase, phase.signal, state.steps_per_epoch)


def fixed(settings: Settings, phase: Phase, signal: Signal, steps_per_epoch: int) -> Decision:
    """fixed(E, I): E epochs of steps, I iterations."""
    done = len(signal)
    if phase == "weight":
        length, unit = steps_of(settings.epochs, steps_per_epoch), "step"
        why = f"E = {settings.epochs:g} epochs of {_count(steps_per_epoch, unit)}"
    else:
        length, unit = settings.iterations, "iteration"
        why = f"I = {length}"
    best, best_at = _best(signal)
    if done >= length:
        words = f"{_count(done, unit)} done: the phase ends ({why})"
    else:
        words = f"{unit} {done + 1} of {length} ({why}): the phase ends after {_count(length - done, f'more {unit}')}"
    return Decision(end=done >= length, words=words, done=done, minimum=length, most=length, best=best, best_at=best_at)


def patience(settings: Settings, phase: Phase, signal: Signal) -> Decision:
    """The patience rule. Weight: window, min and patience in steps. Harness: min, patience and cap in iterations."""
    if phase == "weight":
        minimum, wait, window, most, unit = (
            settings.weight_min, settings.weight_patience, settings.weight_window, None, "step",
        )  # fmt: skip
        what = f"mean of the last {_count(window, unit)}" if window > 1 else "success rate"
    else:
        minimum, wait, window, most, unit = (
            settings.harness_min, settings.harness_patience, 1, settings.harness_cap, "iteration",
        )  # fmt: skip
        what = "best archive score"

    done, watched = len(signal), windowed(signal, window)
    best, best_at = _best(watched)
    since = sum(v is not None for v in watched[best_at:]) if best_at is not None else 0

    counters = f"{unit} {done}, {what} best {best:.1%} at {unit} {best_at}, {since} of {wait} without a new best" if (
        best is not None
    ) else f"{unit} {done}, no {what} yet"  # fmt: skip
    if most is not None and done >= most:
        end, words = True, f"{counters}: the phase ends at its cap of {_count(most, unit)}"
    elif done < minimum:
        end, words = False, f"{counters}: not before {_count(minimum, unit)} ({minimum - done} to go)"
    elif best is not None and since >= wait:
        end, words = True, f"{counters}: the phase ends"
    elif best is None:
        end, words = False, f"{counters}: the phase ends after a first best and {_count(wait, unit)} without a new one"
    elif most is not None and most - done <= wait - since:
        end, words = False, f"{counters}: the phase ends after {_count(most - done, f'more {unit}')}, at its cap"
    else:
        more = _count(wait - since, f"more {unit}")
        end, words = False, f"{counters}: the phase ends after {more} without a new best"
    return Decision(
        end=end, words=words, done=done, minimum=minimum, most=most, since_best=since, patience=wait, best=best,
        best_at=best_at,
    )  # fmt: skip


def steps_of(epochs: float, steps_per_epoch: int) -> int:
    """Steps of E epochs: at least one."""
    return max(1, math.floor(epochs * steps_per_epoch + 1e-9))


def windowed(signal: Signal, window: int) -> list[float | None]:
    """Mean over the last `window` valid values, at each round; None where the round or the window has too few."""
    out: list[float | None] = []
    valid: list[float] = []
    for value in signal:
        if value is not None:
            valid.append(value)
        # fsum: exact, so that the same values in another order are no new best.
        out.append(math.fsum(valid[-window:]) / window if value is not None and len(valid) >= window else None)
    return out


def _best(values: Signal) -> tuple[float | None, int | None]:
    """The highest value and the round that first reached it (a later equal one is no new best)."""
    best, at = None, None
    for number, value in enumerate(values, 1):
        if value is not None and (best is None or value > best):
            best, at = value, number
    return best, at


def _count(n: int, unit: str) -> str:
    return f"{n} {unit}{'' if n == 1 else 's'}"
