"""From a command to what a person waits for: the help, the quickstart's first episode, its first pair at 80%.

    python -m benchmarks.start [--until first | phases | bar | end] [--seed 0] [--set KEY=VALUE ...]

The model is in the cache; every run starts in an empty folder. Times are from the start of the command to the commit in
the journal that holds it; the floor beside is what this machine's matrix products need for the tokens until then.
"""

from __future__ import annotations

import argparse
import os
import resource
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks import _floor
from whale_tui import records as r
from whale_tui.config import load
from whale_tui.journal import Journal
from whale_tui.policy.source import EMBEDDED, resolve
from whale_tui.rundir import RunDir

CONFIG = Path(__file__).parent.parent / "sample_configs" / "quickstart.toml"
PROGRAM = Path(os.sys.executable).with_name("whale-tui")
BAR = 0.80


def help_seconds() -> tuple[float, float]:
    """Wall and processor time of `whale-tui --help`, each the median of 5."""
    wall, processor = [], []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        started = time.perf_counter()
        subprocess.run([PROGRAM, "--help"], stdout=subprocess.DEVNULL, check=True)
        wall.append(time.perf_counter() - started)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        processor.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return statistics.median(wall), statistics.median(processor)


def best_of(event: r.AnyEvent) -> float:
    """The success rate that an event measured of a pair, 0 where it did not."""
    match event:
        case r.CandidateScored():
            rewards = [sum(of) / len(of) for of in event.score.results.values() if of]
            return sum(rewards) / len(rewards) if rewards else 0.0
        case r.TestScored():
            return event.score.mean
    return 0.0


STAGES: dict[str, tuple[str, Callable[[r.AnyEvent], bool]]] = {
    "loaded": ("the engine has its model", lambda e: isinstance(e, r.RunStarted)),
    "first": ("the first episodes are in the journal", lambda e: bool(getattr(e, "segment", ""))),
    "found": ("a search has found a harness", lambda e: isinstance(e, r.HarnessAccepted)),
    "phases": ("both kinds of phase were seen", lambda e: isinstance(e, r.StepFinished)),
    "bar": (f"a pair scores {BAR:.0%} on D_harness or D_test", lambda e: best_of(e) >= BAR),
    "end": ("the run is finished", lambda e: isinstance(e, r.RunFinished)),
}


def quickstart(seed: int, until: str, more: list[str]) -> None:
    changes = ["run.name=start", f"run.seed={seed}", *more]
    with tempfile.TemporaryDirectory() as folder:
        words = [word for change in changes for word in ("--set", change)]
        started = time.time()
        process = subprocess.Popen(
            [PROGRAM, "run", CONFIG, *words, "--headless"], env=os.environ | {"WHALE_RUNS": folder},
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        run, seen, after = RunDir(Path(folder) / "start"), dict[str, float](), 0
        alive = True
        while alive and until not in seen:
            alive = process.poll() is None
            time.sleep(0.2)
            if not run.journal.exists():
                continue
            journal = Journal(run.journal, read_only=True)
            for event in journal.events(after):
                after += 1
                seen |= {
                    stage: event.at - started
                    for stage, (_, reached) in STAGES.items()
                    if stage not in seen and reached(event)
                }
            journal.close()
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        process.wait(60)
        show(run, seen, started)


def show(run: RunDir, seen: dict[str, float], started: float) -> None:
    """Each stage that was reached, with its floor, and what pairs scored on the way."""
    flops, size = _floor.flops(), _floor.size_of(resolve(EMBEDDED))
    journal, work, scores = Journal(run.journal, read_only=True), 0.0, ""
    print(f"{flops / 1e9:.0f} GFLOPS; seconds, and of these at least")
    of = _floor.Work(journal, load(run.config).config.weight, size)
    done = list(journal.events())
    for number, event in enumerate(done):
        work += of.of([event])
        if isinstance(event, r.CandidateScored):
            scores += f" {event.harness} {best_of(event):.1%}"
        if number + 1 < len(done) and done[number + 1].at == event.at:
            continue  # of one commit
        for stage, (what, _) in STAGES.items():
            if stage in seen and abs(event.at - started - seen[stage]) < 1e-6:
                print(f"  {what:45} {seen.pop(stage):8.1f} {work / flops:8.1f}  {scores}")
                scores = ""
    journal.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--until", choices=list(STAGES), default="first")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE")
    options = parser.parse_args()
    resolve(EMBEDDED, print)
    wall, processor = help_seconds()
    print(f"{'whale-tui --help, median of 5':45} {wall:8.2f} s   (processor {processor:.2f} s)")
    quickstart(options.seed, options.until, options.set)


if __name__ == "__main__":
    main()
