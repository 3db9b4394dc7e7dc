"""How many episodes a run takes, and about how long: from its config, the sizes of its splits, and a few timed ones."""

from __future__ import annotations

import math

from msgspec import Struct

from whale_tui.config import Config, ConfigError
from whale_tui.doctor.checkup import Checkup, Finding, NotTried, ok
from whale_tui.loop.alternation import iteration_cost, step_cost
from whale_tui.loop.state import RunState

TESTS = {"end": 2, "ends": 2}
"""Tests by test.at, where it isn't one a cycle or one a phase."""


class Forecast(Struct, frozen=True):
    """Episodes of a whole run, at most, with phases of fixed length; `cycles` is how many of them the budget holds."""

    train: int
    search: int
    test: int
    cycles: float


def forecast(config: Config, sizes: dict[str, int]) -> Forecast:
    """Raises ConfigError where an epoch has no step."""
    settings = config.settings(config.steps_per_epoch(sizes["weight"]))
    probe = RunState(splits=sizes, condition=config.run.condition)
    epochs = config.schedule.epochs * config.steps_per_epoch(sizes["weight"])
    steps = settings.weight_min if settings.rule == "patience" else max(1, math.floor(epochs + 1e-9))
    rounds = settings.harness_min if settings.rule == "patience" else settings.iterations
    train = steps * step_cost(config)
    search = iteration_cost(probe, config, settings, first=True)
    search += (rounds - 1) * iteration_cost(probe, config, settings, first=False)
    if config.run.condition == "weight-only":
        search = 0
    elif config.run.condition == "harness-only":
        train = 0
    cycle, budget = train + search, settings.budget_episodes
    if config.run.condition == "stagewise":
        share = config.schedule.stagewise_weight_share
        train, search, cycles = round(budget * share), budget - round(budget * share), 1.0
    else:
        cycles = min(budget / cycle, config.run.cycles or math.inf)
        train, search = round(train * cycles), round(search * cycles)
    tests = TESTS.get(config.test.at, 1 + math.ceil(cycles) * (2 if config.test.at == "phases" else 1))
    return Forecast(train, search, tests * config.test.samples * sizes["test"], cycles)


def length(checkup: Checkup) -> Finding:
    """Episodes of the run and, where some were timed, about how long they take. An estimate."""
    try:
        f = forecast(checkup.config, {split: len(tasks) for split, tasks in checkup.tasks().items()})
    except ConfigError as error:
        raise NotTried(str(error)) from None
    least = " at least, phases end by patience" if checkup.config.run.condition == "adaptive" else " at most"
    whole = f.train + f.search + f.test
    text = f"about {whole:,} episodes{least}: training {f.train:,}, search {f.search:,}, tests {f.test:,}"
    if checkup.timed is None:
        return ok(text)
    t = checkup.timed
    seconds = whole * t.seconds / t.episodes
    rate = f"{t.tokens / t.seconds:,.0f} tokens a second over {t.episodes} episodes of h0"
    return ok(f"{text}; sampling about {in_words(seconds)} (an estimate from {rate}), training comes on top")


def in_words(seconds: float) -> str:
    for size, unit in ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes")):
        if seconds >= 1.5 * size:
            return f"{seconds / size:,.0f} {unit}"
    return f"{max(1, round(seconds))} seconds"
