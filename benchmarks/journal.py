"""The journal: episode records a second with token ids and log-probabilities; attach, resume and filters from 10^3 on.

    python -m benchmarks.journal [largest, default 100000]

`resume` is what an engine does with it before it goes on; `check` is the reading of every page, which an engine does
while it loads its model. `found` is a filter with matches, `none` a text that nothing holds.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from whale_tui.journal import Journal
from whale_tui.loop.state import replay
from whale_tui.records import Call, Episode, RunStarted, Sampling, Settings, StepFinished, StepSampled, summarise
from whale_tui.rundir import RunDir

PROMPT, OUTPUT, BATCH = 200, 32, 1000


def episodes(count: int, step: int) -> list[Episode]:
    """Records as the quickstart makes them: prompts that begin alike, sampled ids, log-probabilities."""
    draw = random.Random(step)
    shared = [draw.randrange(49152) for _ in range(PROMPT - 40)]
    made = []
    for n in range(count):
        verdict = "accept" if n % 3 == 0 else "reject"
        call = Call(
            prompt_ids=shared + [draw.randrange(49152) for _ in range(40)],
            output_ids=[draw.randrange(49152) for _ in range(OUTPUT)],
            logprobs=[-draw.random() for _ in range(OUTPUT)], finish_reason="stop", seed=n, max_tokens=OUTPUT,
        )  # fmt: skip
        made.append(
            Episode(
                id=f"1.s{step}.train.theta-0000.h0000.t{n}.0", cycle=1, phase="weight", step=step, iteration=0,
                purpose="train", task=f"t{n % 500}", task_hash="x", sample=0, policy=f"theta-{step % 50:04d}",
                policy_hash="p", harness=f"h{step % 40:04d}", harness_hash="h", tokenizer_hash="t",
                sampling=Sampling(), calls=[call], tools=[], answer=f"answer {n}", verdict=verdict, reason="as sampled",
                truncated=False, reward=float(verdict == "accept"), seconds=0.1,
            )
        )  # fmt: skip
    return made


def fill(folder: Path, count: int) -> float:
    """Write `count` episode records in steps; returns records a second, the making of them not counted."""
    run = RunDir(folder)
    run.create()
    journal, spent = Journal(run.journal), 0.0
    settings = Settings(
        rule="fixed", epochs=1, iterations=1, weight_min=1, weight_window=1, weight_patience=1, harness_min=1,
        harness_patience=1, harness_cap=1, candidates=1, budget_episodes=1, approval="auto", approval_timeout=0,
    )  # fmt: skip
    journal.commit([
        RunStarted(run="bench", condition="whale", seed=0, domain="d", model="m", config_hash="c", policy_hash="p",
                   harness_hash="h", tokenizer_hash="t", splits={}, steps_per_epoch=1, budget_episodes=1,
                   settings=settings, version="0")
    ])  # fmt: skip
    batch = min(BATCH, count)
    for step in range(count // batch):
        records = episodes(batch, step)
        start = time.perf_counter()
        segment = journal.write_segment(records)
        journal.commit(
            [StepSampled(step=step, policy="theta-0000", harness="h0000", tasks_drawn=step,
                         batch=summarise(records, 1.0), segment=segment.name)],
            [segment],
        )  # fmt: skip
        spent += time.perf_counter() - start
    journal.close()
    return count / spent


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Milliseconds, and what it gave."""
    start = time.perf_counter()
    result = call()
    return (time.perf_counter() - start) * 1e3, result


def resume(path: Path) -> None:
    journal = Journal(path)
    replay([e for e in journal.events() if not isinstance(e, StepFinished)])
    journal.counts()
    journal.close()


def main() -> None:
    largest = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    columns = ["records/s", "MB", "attach", "resume", "check", "page", "found", "none", "one"]
    print(f"{'episodes':>9} " + " ".join(f"{column:>9}" for column in columns) + "   (ms)")
    size = 1_000
    while size <= largest:
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            rate = fill(folder, size)
            total = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file()) / 1e6
            path = folder / "journal.sqlite"

            def attach(path: Path = path) -> Journal:
                journal = Journal(path, read_only=True)
                replay([e for e in journal.events() if not isinstance(e, StepFinished)])
                return journal

            attached, journal = timed(attach)
            resumed, _ = timed(partial(resume, path))
            checked, _ = timed(journal.verify)
            paged, rows = timed(partial(journal.page, limit=100))
            found, _ = timed(partial(journal.page, limit=100, verdict="accept", harness="h0000"))
            none, _ = timed(partial(journal.page, limit=100, text="nothing holds this"))
            one, _ = timed(partial(journal.episode, rows[50]))
            figures = [attached, resumed, checked, paged, found, none, one]
            print(f"{size:9,} {rate:9,.0f} {total:9.1f} " + " ".join(f"{f:9.1f}" for f in figures), flush=True)
            journal.close()
        size *= 10


if __name__ == "__main__":
    main()
