"""Weight steps and harness iterations of a real run, and the engine's own share of them.

    python -m benchmarks.steps [--tasks 24] [--samples 8] [--steps 2] [--iterations 2] [--set KEY=VALUE ...]

The quickstart's engine runs here, in this process, with a policy worker and sealed harnesses as ever, from a harness
that the model does something with. Every call of the policy, tool and verifier is timed. What is left of an action's
time is the engine's own: episodes' bookkeeping, sealed workers, tokenizing, the journal, and the rules that write
candidates. The first step's training includes loading the trainer. With `--set 'domain.harness=""'
'run.first_phase="harness"'` the search comes first, from the base harness, for which the rules know three changes each
time.
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import logging
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from msgspec import Struct

from benchmarks import _floor
from whale_tui import records as r
from whale_tui.config import load
from whale_tui.journal import Journal, Segment
from whale_tui.loop import rollouts
from whale_tui.loop.run import Run
from whale_tui.policy.client import TransformersEngine
from whale_tui.policy.source import EMBEDDED, resolve
from whale_tui.rundir import RunDir
from whale_tui.service import engine, launch

CONFIG = Path(__file__).parent.parent / "sample_configs" / "quickstart.toml"
HARNESS = Path(__file__).parent / "harnesses" / "encyclopedia.py"
KINDS = {"advance": "sampling", "drop": "sampling", "train": "training"}
"""Call of the policy worker -> what it is; all others publish or restore a version."""


class Clock:
    """Time within calls, by kind, overlaps counted once; `any` is that of all kinds together."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = defaultdict(float)
        self._open: dict[str, int] = defaultdict(int)
        self._since: dict[str, float] = {}

    @contextmanager
    def within(self, kind: str) -> Iterator[None]:
        for name in (kind, "any"):
            self._open[name] += 1
            if self._open[name] == 1:
                self._since[name] = time.perf_counter()
        try:
            yield
        finally:
            for name in (kind, "any"):
                self._open[name] -= 1
                if not self._open[name]:
                    self.spent[name] += time.perf_counter() - self._since[name]

    def around(self, kind: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same call, timed; where it gives something to wait for, that too."""

        async def waited(result: Any) -> Any:
            with self.within(kind):
                return await result

        def timed(*args: Any, **named: Any) -> Any:
            with self.within(kind):
                result = call(*args, **named)
            return waited(result) if inspect.isawaitable(result) else result

        return timed


class Done(Struct):
    """An action of the engine: seconds, of these by kind, and how many events the journal held after it."""

    name: str
    seconds: float
    spent: dict[str, float]
    events: int
    floor: float = 0.0

    @property
    def is_of_step(self) -> bool:
        return self.name in ("SampleStep", "TrainStep")


def watch(clock: Clock) -> list[Done]:
    """Time the engine's calls from here on. Returns a list that fills with its actions."""
    actions: list[Done] = []
    call, perform, record = TransformersEngine._call, Run._perform, Run.record
    events = 0

    async def timed_call(self: TransformersEngine, ask: Any) -> Any:
        with clock.within(KINDS.get(ask.__struct_config__.tag, "publishing")):
            return await call(self, ask)

    def counted_record(self: Run, *made: r.AnyEvent, segments: Sequence[Segment] = ()) -> None:
        nonlocal events
        events += len(made)
        record(self, *made, segments=segments)

    async def timed_perform(self: Run, action: Any) -> None:
        before, started = dict(clock.spent), time.perf_counter()
        await perform(self, action)
        spent = {kind: seconds - before.get(kind, 0.0) for kind, seconds in clock.spent.items()}
        name, harnesses = type(action).__name__, getattr(action, "harnesses", ())
        name += f" {len(harnesses)}" if harnesses else ""
        actions.append(Done(name, time.perf_counter() - started, spent, events))

    TransformersEngine._call = timed_call  # type: ignore[method-assign]
    Run._perform = timed_perform  # type: ignore[method-assign]
    Run.record = counted_record  # type: ignore[method-assign]
    rollouts.use_tool = clock.around("tools", rollouts.use_tool)  # type: ignore[assignment]
    rollouts.judge = clock.around("verifying", rollouts.judge)  # type: ignore[assignment]
    return actions


def show(name: str, seconds: float, floor: float, spent: dict[str, float]) -> None:
    parts = [spent.get(kind, 0.0) for kind in ("sampling", "training", "publishing", "tools", "verifying")]
    own = seconds - spent.get("any", 0.0)
    cells = "".join(f" {part:10.2f}" for part in (seconds, floor, *parts, own))
    print(f"{name:20}{cells} {own / seconds:10.1%}")


def set_floors(actions: Sequence[Done], run: RunDir) -> None:
    """Seconds of matrix products that each action can't do without."""
    flops, size = _floor.flops(), _floor.size_of(resolve(EMBEDDED))
    journal = Journal(run.journal, read_only=True)
    work, events, seen = _floor.Work(journal, load(run.config).config.weight, size), list(journal.events()), 0
    for action in actions:
        action.floor = work.of(events[seen : action.events]) / flops
        seen = action.events
    journal.close()
    print(f"{flops / 1e9:.0f} GFLOPS")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=24)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--iterations", type=int, default=2)
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE")
    options = parser.parse_args()
    changes = [
        "run.name=steps", 'run.first_phase="weight"', "run.cycles=1", "run.budget_episodes=100000", "test.samples=0",
        f'domain.harness="{HARNESS}"', f"weight.prompts_per_step={options.tasks}",
        f"weight.samples_per_task={options.samples}",
        f"schedule.epochs={(options.steps + 0.5) / (4096 // options.tasks)}",
        f"schedule.iterations={options.iterations}", *options.set,
    ]  # fmt: skip
    clock = Clock()
    actions = watch(clock)
    logging.basicConfig(format="%(message)s", level=logging.WARNING, stream=sys.stderr)
    with tempfile.TemporaryDirectory() as folder:
        run = launch.prepare(CONFIG, changes, into=Path(folder))
        asyncio.run(engine._serve(run))
        set_floors(actions, run)
    columns = ["seconds", "floor", "sampling", "training", "publishing", "tools", "verifying", "own", "share"]
    print(f"{'action':20} " + " ".join(f"{column:>10}" for column in columns))
    for action in actions:
        if action.seconds > 0.005:
            show(action.name, action.seconds, action.floor, action.spent)
    for what, count in (("step", options.steps), ("iteration", options.iterations)):
        of = [action for action in actions if action.is_of_step == (what == "step")]
        kinds: dict[str, float] = defaultdict(float)
        for action in of:
            for kind, value in action.spent.items():
                kinds[kind] += value / count
        show(f"a {what}, of {count}", sum(a.seconds for a in of) / count, sum(a.floor for a in of) / count, kinds)


if __name__ == "__main__":
    main()
