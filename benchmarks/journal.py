"""The journal: episode records a second with token ids and log-probabilities; attach and filter times from 10^3 on.

python -m benchmarks.journal [largest, default 100000]
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from pathlib import Path

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


def main() -> None:
    largest = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    print(
        f"{'episodes':>9} {'records/s':>10} {'MB':>7} {'attach ms':>10} {'page ms':>8} {'filter ms':>10} {'one ms':>7}"
    )
    size = 1_000
    while size <= largest:
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            rate = fill(folder, size)
            start = time.perf_counter()
            journal = Journal(folder / "journal.sqlite", read_only=True)
            replay([e for e in journal.events() if not isinstance(e, StepFinished)])
            attach = time.perf_counter() - start
            start = time.perf_counter()
            rows = journal.page(limit=100)
            page = time.perf_counter() - start
            start = time.perf_counter()
            journal.page(limit=100, verdict="accept", harness="h0000")
            filtered = time.perf_counter() - start
            start = time.perf_counter()
            journal.episode(rows[50])
            one = time.perf_counter() - start
            total = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file()) / 1e6
            print(
                f"{size:9,} {rate:10,.0f} {total:7.1f} {attach * 1e3:10.1f} {page * 1e3:8.1f} {filtered * 1e3:10.1f} "
                f"{one * 1e3:7.1f}"
            )
            journal.close()
        size *= 10


if __name__ == "__main__":
    main()
