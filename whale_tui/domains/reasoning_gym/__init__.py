"""Questions of reasoning-gym (the extra `reasoning-gym`): any of its generators, scored by that generator itself.

An answer is text that nobody has read, so it is scored in a sealed worker (`scorer.py`), with limits on time and
memory. What an answer makes of its scoring, too slow, too large, an exception, is a rejection: were it `invalid`, a
harness could take its failures out of the average.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import difflib
import hashlib
import pickle
import sys
import tempfile
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, Struct

from whale_tui.domains import tables
from whale_tui.domains.base import DomainError, Known, Tool, read_brief, read_h0
from whale_tui.domains.reasoning_gym.edits import RULES
from whale_tui.harness.worker import Limits, SealedWorker
from whale_tui.records import Demonstration, Episode, Split, Task, Verdict

PIP = 'pip install "whale-tui[reasoning-gym]"'
WORKERS = 2
"""Answers that are scored at once, each in a worker of its own, so that who is slow is never in question."""
TRIES = 2
"""Workers that an answer may cost before the loss is its own."""
SHOWN = 12
SCORE = """
import whale_tui_scorer


def run(task, model, tools):
    return repr(whale_tui_scorer.score(task["entry"], task["answer"]))
"""
Size = Annotated[int, Meta(ge=1)]


class Options(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """[domain.options] of reasoning-gym."""

    generator: str
    """Name of the generator, e.g. "basic_arithmetic"."""
    config: dict[str, Any] = {}
    """[domain.options.config]: the generator's own keys."""
    seed: int = 0
    """Another seed is another set of questions. Each split has a seed of its own that follows from it."""
    weight: Size = 4096
    """Tasks of D_weight."""
    harness: Size = 128
    """Tasks of D_harness."""
    test: Size = 256
    """Tasks of D_test."""
    accept_from: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0
    """The least score that is accepted."""
    score_seconds: Annotated[float, Meta(gt=0)] = 10.0
    """Seconds that scoring one answer may take; past it the answer is rejected."""
    score_memory_mb: Size = 2048
    """Address space of a scoring worker."""


class ReasoningGym:
    name = "reasoning_gym"
    edits = RULES

    def __init__(self, options: Options) -> None:
        self.options, self.report = options, tables.Report()
        self._entries: dict[str, dict[str, Any]] = {}
        seen: set[str] = set()
        sizes = {"demonstrations": SHOWN, "test": options.test, "harness": options.harness, "weight": options.weight}
        drawn = {split: list(self._draw(split, size, seen)) for split, size in sizes.items()}
        shown = [task for task in drawn.pop("demonstrations") if task.private["answer"]]
        splits: dict[Split, list[Task]] = {split: drawn[split] for split in tables.SPLITS}
        self._tasks = tables.assemble(splits, self.report)
        self.h0 = read_h0(__file__)
        demonstrations = [Demonstration(task.public, [], task.private["answer"]) for task in shown]
        self.brief = read_brief(__file__, tools={}, demonstrations=demonstrations)
        self._free: asyncio.LifoQueue[SealedWorker | None] | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def tasks(self, split: Split) -> Sequence[Task]:
        return self._tasks[split]

    def tools(self, task: Task) -> Mapping[str, Tool]:
        return {}

    async def verify(self, task: Task, answer: str, episode: Episode) -> Verdict:
        """The generator's score of the answer. Raises where no worker can be started."""
        if not answer.strip():
            return Verdict("reject", "no answer")
        score = await self._score(task, answer)
        if isinstance(score, str):
            return Verdict("reject", score)
        accepted = score >= self.options.accept_from
        return Verdict("accept" if accepted else "reject", f"score {score:.3g}")

    async def preflight(self) -> list[str]:
        """Whether the generator accepts its own answers behind the seal."""
        task = next((t for t in self._tasks["harness"] if t.private["answer"]), None)
        if task is None:
            return []  # this generator knows no answer beforehand, it can only check one
        try:
            score = await self._score(task, task.private["answer"])
        except Exception as error:
            return [f"{self.options.generator}: answers can't be scored: {error}"]
        if isinstance(score, float) and score >= self.options.accept_from:
            return []
        return [f"{self.options.generator} rejects its own answer to {task.key}: {score}; take another generator"]

    def known_answers(self) -> Iterator[Known]:
        """The generator's own answers, where it knows any, and some that are none."""
        for task in self._tasks["weight"][:4]:
            if task.private["answer"]:
                yield Known(task, task.private["answer"], "accept")
            yield Known(task, "", "reject")
            yield Known(task, "qwxz this is no answer", "reject")

    async def close(self) -> None:
        """End the scoring workers."""
        while self._free is not None and not self._free.empty():
            worker = self._free.get_nowait()
            if worker is not None:
                await worker.close()
        if self._folder is not None:
            self._folder.cleanup()
        self._free = self._folder = None

    def _draw(self, split: str, size: int, seen: set[str]) -> Iterator[Task]:
        """`size` questions that were not drawn before."""
        counts, found = self.report.of(split if split in tables.SPLITS else "demonstrations"), 0
        number = int.from_bytes(hashlib.sha256(f"{self.options.seed} {split}".encode()).digest()[:4])
        dataset = create(self.options, size=10 * size + 100, seed=number)
        for index in range(10 * size + 100):
            try:
                entry = dataset[index]
            except Exception as error:
                raise DomainError(f"{self.options.generator}: question {index} can't be made: {error!r}") from error
            counts.read += 1
            if entry["question"] in seen:
                counts.duplicates += 1
                continue
            seen.add(entry["question"])
            key = f"{split}-{index}"
            self._entries[key] = entry
            found += 1
            yield Task(key, {"question": entry["question"]}, {"answer": _text(entry["answer"])})
            if found == size:
                counts.kept = found
                return
        if split in tables.SPLITS:
            raise DomainError(
                f"domain.options.{split} = {size}: {self.options.generator} gave {found} questions not drawn before in "
                f"{counts.read}; ask for fewer, or widen domain.options.config"
            )

    async def _score(self, task: Task, answer: str) -> float | str:
        """The score, or why there is none, which is the answer's doing."""
        entry = base64.b64encode(pickle.dumps(self._entries[task.key])).decode()
        for _ in range(TRIES):
            async with self._worker() as worker:
                end = await worker.run_episode({"entry": entry, "answer": answer}, _no_chat, _no_tool, tools=[])
            if end.kind == "answer":
                return float(end.answer)
            if end.kind != "died":
                last = end.detail.strip().rpartition("\n")[2][:200]
                return f"the answer can't be scored: {end.kind}: {last}"
        return f"the answer can't be scored: it ended {TRIES} workers: {end.detail[:200]}"

    @contextlib.asynccontextmanager
    async def _worker(self) -> AsyncIterator[SealedWorker]:
        """A worker to oneself. One that is lost is replaced the next time."""
        if self._free is None:
            self._free = asyncio.LifoQueue()
            for _ in range(WORKERS):
                self._free.put_nowait(None)
        free = self._free
        worker = await free.get()
        try:
            if worker is None or not worker.alive:
                worker = await self._start()
            yield worker
        finally:
            free.put_nowait(worker if worker is not None and worker.alive else None)

    async def _start(self) -> SealedWorker:
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="whale-scorer-")
            given = f"NAME, CONFIG = {self.options.generator!r}, {self.options.config!r}\n"
            scorer = Path(__file__).with_name("scorer.py").read_text(encoding="utf-8")
            for name, text in (("scorer", scorer), ("scored", given)):
                (Path(self._folder.name) / f"whale_tui_{name}.py").write_text(text, encoding="utf-8")
        limits = Limits(
            memory_mb=self.options.score_memory_mb, episode_seconds=self.options.score_seconds, load_seconds=120.0
        )
        path = [self._folder.name, *(each for each in sys.path if each)]
        return await SealedWorker.start(SCORE, limits, modules=("whale_tui_scorer",), path=path)


def build(options: Options) -> ReasoningGym:
    return ReasoningGym(options)


def create(options: Options, *, size: int, seed: int) -> Any:
    """The generator as reasoning-gym makes it. DomainError names what is missing or wrong, and the mend."""
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise DomainError(f"the package reasoning-gym is not installed; install it: {PIP}") from error
    if options.generator not in DATASETS:
        raise DomainError(
            f"domain.options.generator: no generator {options.generator!r}{_near(options.generator, DATASETS)}"
        )
    known = [field.name for field in dataclasses.fields(DATASETS[options.generator][1])]
    for key in options.config:
        if key in ("size", "seed"):
            raise DomainError(
                f"domain.options.config.{key}: sizes and seed are options of the domain, not of its config"
            )
        if key not in known:
            raise DomainError(f"domain.options.config.{key}: {options.generator} has no such key{_near(key, known)}")
    try:
        return reasoning_gym.create_dataset(options.generator, size=size, seed=seed, **options.config)
    except Exception as error:  # a config is checked with asserts, and by use
        raise DomainError(f"domain.options.config of {options.generator}: {type(error).__name__}: {error}") from error


def _near(word: str, known: Collection[str]) -> str:
    close = difflib.get_close_matches(word, known, n=3, cutoff=0.4)
    return f"; did you mean {' or '.join(close)}?" if close else f"; there are {', '.join(sorted(known))}"


def _text(answer: Any) -> str:
    return "" if answer is None else str(answer)


async def _no_chat(*_: Any) -> Any:
    raise AssertionError("a scorer does not ask a policy")


async def _no_tool(*_: Any) -> Any:
    raise AssertionError("a scorer has no tools")
