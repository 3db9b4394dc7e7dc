"""What the seal costs: starting workers, and one `model.chat` through a worker's pipes.

    python benchmarks/sealed_workers.py [--workers 20] [--episodes 1000] [--calls 3]

The policy answers at once, so everything measured is overhead. Best of three rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from whale_tui.harness.worker import Limits, Reply, SealedWorker, can_seal

HARNESS = """
import json
import re

SYSTEM = "Answer with the shortest phrase, in <answer> tags."


def run(task, model, tools):
    text = task.question
    for _ in range(task.calls):
        reply = model.chat([{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}], max_tokens=32)
        found = re.search(r"<answer>(.*?)</answer>", reply.text)
        text = found.group(1) if found else reply.text
    return text
"""
PASSAGE = "The bridge over the river was opened in the year that the archive moved to the new building. " * 8


async def answer(messages: list[dict[str, str]], *_: object) -> Reply:
    return Reply("<answer>" + messages[-1]["content"] + "</answer>", "stop", 300, 20, 2, 64)


async def no_tool(*_: object) -> None:
    raise AssertionError


async def start_many(count: int) -> float:
    begin = time.perf_counter()
    workers = await asyncio.gather(*(SealedWorker.start(HARNESS) for _ in range(count)))
    seconds = time.perf_counter() - begin
    await asyncio.gather(*(worker.close() for worker in workers))
    return seconds


async def converse(worker: SealedWorker, episodes: int, calls: int) -> float:
    begin = time.perf_counter()
    task = {"question": PASSAGE, "calls": calls}
    ends = await asyncio.gather(*(worker.run_episode(task, answer, no_tool) for _ in range(episodes)))
    seconds = time.perf_counter() - begin
    assert all(end.answer == PASSAGE for end in ends), next(end for end in ends if end.answer != PASSAGE)
    return seconds


async def best(measure: Callable[[], Awaitable[float]]) -> float:
    return min([await measure() for _ in range(3)])


def resident_mb(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def main() -> None:
    options = argparse.ArgumentParser(description="Overhead of sealed workers.")
    options.add_argument("--workers", type=int, default=20)
    options.add_argument("--episodes", type=int, default=1000)
    options.add_argument("--calls", type=int, default=3)
    given = options.parse_args()
    sealable, how = can_seal()
    if not sealable:
        raise SystemExit(f"nothing to measure: {how}")
    print(f"{how}; {os.cpu_count()} cores\n")
    asyncio.run(table(given))


async def table(given: argparse.Namespace) -> None:
    one, many = await best(lambda: start_many(1)), await best(lambda: start_many(given.workers))
    worker = await SealedWorker.start(HARNESS, Limits())
    idle = resident_mb(worker.pid)
    single = await best(lambda: converse(worker, 1, 100))
    full = await best(lambda: converse(worker, given.episodes, given.calls))
    rows = [
        ("start one worker, harness loaded", f"{one * 1e3:.0f} ms", ""),
        (f"start {given.workers} workers at once", f"{many:.2f} s", "target 1 s"),
        ("one call, one episode open", f"{single / 100 * 1e3:.3f} ms", ""),
        (f"{given.episodes} episodes at once x {given.calls} calls", f"{full:.2f} s", ""),
        ("    a call", f"{full / given.episodes / given.calls * 1e3:.3f} ms", "target 0.3 ms"),
        ("memory of a worker, idle / after", f"{idle:.0f} / {resident_mb(worker.pid):.0f} MB", ""),
    ]
    await worker.close()
    for what, measured, target in rows:
        print(f"{what:42} {measured:>14}   {target}")


if __name__ == "__main__":
    main()
