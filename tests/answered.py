"""A run in this process without a model: real journal, loop, rollouts and sealed workers; the policy answers by a rule.

A task is a number; its harness shows the policy `LEVEL` and the number, and the policy answers rightly where
`difficulty(number) < LEVEL`. So a harness is exactly as good as its LEVEL says, and a test knows what must come of it.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.simulator import make_config
from tests.tiny import CHATML, _tokenizer
from whale_tui import records as r
from whale_tui.config import Config
from whale_tui.journal import Journal
from whale_tui.loop.run import Run
from whale_tui.policy.chat import ChatTokenizer
from whale_tui.policy.protocol import PolicyFailure, PolicyInfo, Publication, Sampled, SampleRequest, Trained
from whale_tui.proposers.base import Request
from whale_tui.records import Brief, Episode, Proposal, Split, Task, Verdict
from whale_tui.rundir import RunDir

SOURCE = """
LEVEL = {level}


def run(task, model, tools):
    reply = model.chat([{{"role": "user", "content": f"level {{LEVEL}} number {{task['number']}}"}}], max_tokens=24)
    return {answer}
"""


def harness(level: int, answer: str = "reply.text", more: str = "") -> str:
    return SOURCE.format(level=level, answer=answer) + more


def difficulty(number: int) -> int:
    """0 to 99, evenly spread, in no order."""
    return number * 37 % 100


def answer_to(number: int) -> str:
    return f"mineral-{number * 7 + 1000}"


class Answers:
    """A policy engine. `says` may be replaced; `samples` counts calls; a `silent` policy never answers."""

    def __init__(self, chat: ChatTokenizer) -> None:
        self.chat, self.silent, self.samples, self.starts = chat, False, 0, 0
        self.info = PolicyInfo("none", "p0", chat.hash, "cpu", "none", 1, 1, False)
        self.waiting: list[tuple[SampleRequest, asyncio.Future[Sampled]]] = []
        self.after_flush: Callable[[], None] = lambda: None
        self.hangs_on_drop = False

    def says(self, level: int, number: int, seed: int) -> str:
        return answer_to(number) if difficulty(number) < level else "something else"

    async def start(self) -> PolicyInfo:
        self.starts += 1
        self.silent = self.hangs_on_drop = False
        return self.info

    def submit(self, request: SampleRequest) -> asyncio.Future[Sampled]:
        future: asyncio.Future[Sampled] = asyncio.get_running_loop().create_future()
        self.waiting.append((request, future))
        return future

    def flush(self) -> None:
        if self.silent:
            return
        waiting, self.waiting = self.waiting, []
        for request, future in waiting:
            level, number = map(int, re.findall(r"level (\d+) number (\d+)", self.chat.decode(request.prompt_ids))[0])
            ids = self.chat.encode(self.says(level, number, request.seed))[: request.max_tokens]
            self.samples += 1
            if not future.done():
                future.set_result(Sampled(ids, [-0.5] * len(ids), "stop"))
        self.after_flush()

    async def drop(self) -> None:
        self.waiting = []
        if self.hangs_on_drop:
            await asyncio.sleep(3600)

    async def train(self, request: Any) -> Trained:
        raise PolicyFailure("no-training", "this policy only answers")

    async def publish(self, version: str, folder: str) -> Publication:
        raise PolicyFailure("no-training", "this policy only answers")

    async def restore(self, version: str, folder: str | None, *, with_optimizer: bool) -> str:
        return "p0"

    async def close(self) -> None:
        pass


class Numbers:
    """The domain. `broken(task, harness)` says whether the machinery fails in an episode's verdict."""

    name, edits = "numbers", None
    brief = Brief(text="Numbers have answers.", tools={})

    def __init__(self, sizes: dict[Split, int], h0: str) -> None:
        self.sizes, self.h0 = sizes, h0
        self.broken: Callable[[Task, Episode], bool] = lambda task, episode: False

    def tasks(self, split: Split) -> list[Task]:
        start = {"weight": 5000, "harness": 0, "test": 9000}[split]
        return [
            Task(
                key=f"{split}-{n}",
                public={"number": n, "text": f"The number {n} of the {split} tasks wants its own mineral named here"},
                private={"answer": answer_to(n)},
            )
            for n in range(start, start + self.sizes[split])
        ]

    def tools(self, task: Task) -> dict[str, Any]:
        return {}

    def verify(self, task: Task, answer: str, episode: Episode) -> Verdict:
        if self.broken(task, episode):
            raise ConnectionError("the verifier's server is gone")
        right = answer == task.private["answer"]
        return Verdict("accept" if right else "reject", "right" if right else "wrong")


class Writer:
    """A proposer with a list of sources for each iteration; it keeps what it was asked."""

    name = "writer"

    def __init__(self, *rounds: Sequence[str]) -> None:
        self.rounds, self.requests = list(rounds), []

    async def propose(self, request: Request) -> list[Proposal]:
        self.requests.append(request)
        sources = self.rounds[request.iteration - 2] if request.iteration - 2 < len(self.rounds) else []
        return [Proposal(source, request.incumbent, f"idea {n}") for n, source in enumerate(sources)]


class World:
    """One run of these parts in a folder; made again on the same folder, it is the run taken up again."""

    def __init__(self, folder: Path, writer: Any, *, tasks: int = 100, h0: str = "", **changes: Any) -> None:
        values = {
            "run__condition": "harness-only", "run__cycles": 1, "run__budget_episodes": 5000, "schedule__iterations": 2,
            "harness__candidates": 3, "retention__min_free_gb": 0, "domain__name": "numbers",
        }  # fmt: skip
        self.config: Config = make_config(**(values | changes))
        self.rundir = RunDir(folder)
        self.rundir.create()
        self.chat = ChatTokenizer(_model(folder))
        self.journal = Journal(self.rundir.journal)
        self.policy, self.writer = Answers(self.chat), writer
        self.domain = Numbers({"weight": 100, "harness": tasks, "test": 5}, h0 or harness(40))
        self.said: list[r.AnyEvent] = []
        self.run = Run(
            self.rundir, self.config, self.journal, self.domain, self.policy, self.chat, writer,
            lambda what: self.said.extend(what) if isinstance(what, list) else None,
        )  # fmt: skip

    def go(self) -> World:
        """To the end of the run, or to a pause."""
        asyncio.run(self._go())
        self.journal.close()
        return self

    async def _go(self) -> None:
        self.run.begin(1)
        main = asyncio.ensure_future(self.run.run())
        while not main.done() and self.run.state.status != "paused":
            await asyncio.wait([main], timeout=0.02)
        if main.done():
            main.result()
        main.cancel()
        await asyncio.gather(main, return_exceptions=True)

    @property
    def state(self) -> Any:
        return self.run.state

    def events(self, kind: type) -> list[Any]:
        return [event for event in self.said if isinstance(event, kind)]


def _model(folder: Path) -> Path:
    model = folder / "tokenizer"
    if not model.exists():
        model.mkdir()
        _tokenizer().save(str(model / "tokenizer.json"))
        (model / "chat_template.jinja").write_text(CHATML)
        (model / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    return model
