"""The real search on the quickstart's task: from an h0 at nothing, what the rules find under the untrained small model.

    python -m benchmarks.search [--seeds 0 1 2] [--iterations 6] [--set KEY=VALUE ...]

Condition harness-only: theta-0000 stays. For each seed, the best score on D_harness after every iteration, then the
episodes and seconds it took. The bar is 8% within six iterations.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from whale_tui.journal import Journal
from whale_tui.loop.state import RunState, replay
from whale_tui.rundir import RunDir

CONFIG = Path(__file__).parent.parent / "sample_configs" / "quickstart.toml"
BAR = 0.08


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--iterations", type=int, default=6)
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE")
    options = parser.parse_args()
    print(f"{'seed':>4} {'h0':>7}  best after iteration 2 .. {options.iterations}", flush=True)
    for seed in options.seeds:
        start = time.perf_counter()
        state = search(seed, options.iterations, options.set)
        means = [point.value for point in state.points if point.kind == "iteration"]
        best = state.harnesses[state.harness]
        shown = " ".join("   -  " if mean is None else f"{mean:6.1%}" for mean in means[1:])
        spent = state.ledger["harness/search"]
        saved = f", {spent.saved:,} saved" if spent.saved else ""
        passed = next((n for n, mean in enumerate(means, 1) if (mean or 0.0) > BAR), None)
        print(
            f"{seed:4} {means[0] or 0.0:7.1%}  {shown}  ({best.id}; over {BAR:.0%} at iteration {passed}; "
            f"{state.budget_used:,} episodes{saved}; {time.perf_counter() - start:.0f} s)",
            flush=True,
        )


def search(seed: int, iterations: int, more: list[str]) -> RunState:
    """Run it in a folder of its own, and return the state that its journal holds."""
    changes = [
        f"run.name=search-{seed}", f"run.seed={seed}", 'run.condition="harness-only"', "run.cycles=1",
        f"schedule.iterations={iterations}", "test.samples=0", *more,
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        words = [word for change in changes for word in ("--set", change)]
        done = subprocess.run(
            [sys.executable, "-m", "whale_tui", "run", str(CONFIG), *words, "--headless"],
            env=os.environ | {"WHALE_RUNS": folder}, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        )  # fmt: skip
        if done.returncode:
            raise SystemExit(f"seed {seed}: {done.stdout[-500:]}{done.stderr[-1500:]}")
        journal = Journal(RunDir(Path(folder) / f"search-{seed}").journal, read_only=True)
        try:
            return replay(list(journal.events()))
        finally:
            journal.close()


if __name__ == "__main__":
    main()
