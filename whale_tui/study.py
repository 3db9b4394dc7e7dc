"""`whale-tui compare`: the conditions of a study, one run each and seed, one after another at equal budgets.

Every run is an ordinary one in OUT/runs, so that it can be watched, steered and reported by itself. Asked again, the
study skips what has finished and goes on with what has not: a kill of anything costs no more than it costs a run.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from msgspec import Struct

from whale_tui import config, opening
from whale_tui.records import Condition
from whale_tui.report import page
from whale_tui.rundir import RunDir, RunDirError
from whale_tui.service import discovery, launch, lines

ALL = ",".join(get_args(Condition))


class Planned(Struct):
    """One run of a study: its name in the runs folder, and what it changes of the config."""

    name: str
    overrides: list[str]


def compare(
    target: Path, conditions: str, seeds: str, budget: int | None, overrides: Sequence[str], out: Path | None
) -> int:
    """The runs of a study and its report. Returns the exit status. Raises ConfigError or RunDirError."""
    file = launch.config_file(target)
    plans = plan(_conditions(conditions), _seeds(seeds), budget, overrides)
    folder = out or Path(f"study-{config.load(file, overrides).config.run.name}")
    rundirs, code = carry_out(file, plans, folder / "runs")
    if rundirs:
        made = page.write(rundirs, folder / "report")
        print(f"\n{made.text}\nwrote {made.html} and {made.markdown}", flush=True)
    return code


def plan(
    conditions: Sequence[str], seeds: Sequence[int], budget: int | None, overrides: Sequence[str]
) -> list[Planned]:
    """The runs, seed by seed, so that a study that is cut short still compares the conditions.

    `run.cycles` is 0: what ends a run is its budget, the same for all.
    """
    more = [f"run.budget_episodes={budget}"] if budget else []
    return [
        Planned(
            f"{condition}-{seed}",
            [*overrides, *more, "run.cycles=0", f"run.condition={condition}", f"run.seed={seed}",
             f"run.name={condition}-{seed}"],
        )
        for seed in seeds
        for condition in conditions
    ]  # fmt: skip


def carry_out(file: Path, plans: Sequence[Planned], folder: Path) -> tuple[list[RunDir], int]:
    """Do the runs that have not finished. Returns those that exist, and the exit status: 0, 1 where a run failed, 130
    where it was stopped. Raises ConfigError before anything runs where one of them can't be."""
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    rundirs = [launch.prepare(file, planned.overrides, into=folder) for planned in plans]
    started, failed = time.monotonic(), False
    for number, rundir in enumerate(rundirs, 1):
        print(f"\n== {number} of {len(rundirs)}: {rundir.name}", flush=True)
        if discovery.read_state(rundir).status != "finished":
            try:
                launch.start_engine(rundir)
                code = asyncio.run(lines.follow(rundir, opening.who(), stop_on_interrupt=True))
            except RunDirError as error:
                code = opening.fail(str(error))
            state = discovery.read_state(rundir)
            if code == opening.INTERRUPTED or state.status == "stopped":
                print("the study goes on with the same command", flush=True)
                return rundirs[:number], opening.INTERRUPTED
            failed = failed or code != 0
        print(_line(rundir, number, len(rundirs), time.monotonic() - started), flush=True)
    if failed:
        print("whale-tui: a run failed; mend what it says, and the same command goes on", file=sys.stderr)
    return rundirs, opening.FAILED if failed else 0


def _line(rundir: RunDir, number: int, total: int, seconds: float) -> str:
    """Where a run of the study stands."""
    state = discovery.read_state(rundir)
    last = state.measured(state.policy, state.harness) if state.versions else None
    score = f", mean@{last.samples} {last.mean:.1%} [{last.low:.1%}, {last.high:.1%}]" if last else ""
    seen = discovery.status_of(rundir, state)
    return f"-- {rundir.name}: {seen}, {state.budget_used:,} episodes{score}; {number} of {total} in {seconds:.0f} s"


def _conditions(text: str) -> list[str]:
    """Raises ConfigError."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in get_args(Condition)]
    if unknown or not names:
        raise config.ConfigError(f"--conditions: no condition {', '.join(unknown) or text!r}; there are {ALL}")
    return list(dict.fromkeys(names))


def _seeds(text: str) -> list[int]:
    """Raises ConfigError."""
    try:
        seeds = [int(seed) for seed in text.split(",") if seed.strip()]
    except ValueError:
        seeds = []
    if not seeds or min(seeds) < 0:
        raise config.ConfigError(f"--seeds: {text!r} is not a list of numbers such as 1,2,3")
    return list(dict.fromkeys(seeds))
