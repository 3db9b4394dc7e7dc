"""The process that plays a pair: `python -m whale_tui.service.play RUNDIR POLICY HARNESS`.

Episodes run exactly as the engine runs them (loop/rollouts.py: policy worker, sealed worker, the domain's tools), but
are neither judged nor recorded. Asks come as JSON lines on stdin, what happens goes out as JSON lines on stdout. It
ends when stdin does.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import random
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import platformdirs

from whale_tui.config import Config, ConfigError, load
from whale_tui.domains import base as domains
from whale_tui.domains.base import Domain, DomainError, Tool
from whale_tui.harness.contract import use_tool
from whale_tui.harness.worker import SealUnavailable
from whale_tui.journal import JournalError
from whale_tui.loop.rollouts import Job, Rollouts, Subject, Where
from whale_tui.policy import engines, source
from whale_tui.policy.chat import ChatTokenizer
from whale_tui.policy.client import TransformersEngine
from whale_tui.policy.protocol import PolicyEngine, PolicyFailure, Sampled, SampleRequest
from whale_tui.records import Episode, Task, Verdict
from whale_tui.rundir import RunDir, RunDirError
from whale_tui.service import discovery
from whale_tui.service.player import (
    LINE_BYTES,
    AnyMessage,
    Ask,
    Ended,
    Failed,
    Note,
    Prompted,
    Ready,
    Said,
    Used,
    decode_ask,
    encode,
)  # fmt: skip

EXAMPLES = 200
RESULT_CHARS = 4000
EXPECTED = (ConfigError, DomainError, RunDirError, JournalError, PolicyFailure, SealUnavailable, OSError)

Tell = Callable[[AnyMessage], None]


class Watched:
    """The policy, with what it is asked and what it samples told as it happens."""

    def __init__(self, policy: PolicyEngine, chat: ChatTokenizer, tell: Tell) -> None:
        self._policy, self._chat, self._tell = policy, chat, tell
        self.begin()

    def begin(self) -> None:
        self._calls, self._seen = 0, list[int]()

    def submit(self, request: SampleRequest) -> asyncio.Future[Sampled]:
        self._calls += 1
        call, ids = self._calls, request.prompt_ids
        pairs = zip(self._seen, ids, strict=False)
        shared = next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(self._seen), len(ids)))
        text = "".join(self._chat.decode_each(ids[shared:]))
        self._tell(Prompted(call=call, text=text, tokens=len(ids), shared=shared))
        future = self._policy.submit(request)

        def told(done: asyncio.Future[Sampled]) -> None:
            if not done.cancelled() and done.exception() is None:
                sampled = done.result()
                self._seen = [*ids, *sampled.output_ids]
                said = self._chat.decode(sampled.output_ids)
                count = len(sampled.output_ids)
                self._tell(Said(call=call, text=said, tokens=count, finish_reason=sampled.finish_reason))

        future.add_done_callback(told)
        return future

    def flush(self) -> None:
        self._policy.flush()

    async def drop(self) -> None:
        await self._policy.drop()


class Played:
    """The domain, with its tools told as they are used. It judges nothing."""

    def __init__(self, domain: Domain, tell: Tell) -> None:
        self.domain, self._tell = domain, tell
        self.name, self.h0, self.brief, self.edits = domain.name, domain.h0, domain.brief, domain.edits
        self.tasks = domain.tasks

    def tools(self, task: Task) -> Mapping[str, Tool]:
        return {name: self._watched(name, tool) for name, tool in self.domain.tools(task).items()}

    def verify(self, task: Task, answer: str, episode: Episode) -> Verdict:
        return Verdict("accept", "")

    def _watched(self, name: str, tool: Tool) -> Tool:
        def used(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            shown = ", ".join([*map(repr, args), *(f"{k}={v!r}" for k, v in kwargs.items())])[:RESULT_CHARS]

            def told(result: str) -> None:
                seconds = time.perf_counter() - start
                self._tell(Used(name=name, args=shown, result=result[:RESULT_CHARS], seconds=seconds))

            async def later(waiting: Any) -> Any:
                try:
                    result = await waiting
                except Exception as error:
                    told(f"{type(error).__name__}: {error}")
                    raise
                told(_text(result))
                return result

            try:
                result = use_tool({name: tool}, name, list(args), kwargs)
            except Exception as error:
                told(f"{type(error).__name__}: {error}")
                raise
            if inspect.isawaitable(result):
                return later(result)
            told(_text(result))
            return result

        return used


def _text(result: Any) -> str:
    return result if isinstance(result, str) else msgspec.json.encode(result).decode()


class Session:
    """A pair, loaded and ready to play."""

    def __init__(
        self, config: Config, domain: Domain, policy: PolicyEngine, chat: ChatTokenizer, subject: Subject,
        where: Where, tell: Tell,
    ) -> None:  # fmt: skip
        self._config, self._subject, self._where, self._tell = config, subject, where, tell
        self._tasks = {task.key: task for task in domain.tasks("test")}
        self._watched = Watched(policy, chat, tell)
        played = Played(domain, tell)
        self._rollouts = Rollouts(self._watched, chat, played, config.rollout, config.sampling())  # type: ignore[arg-type]

    def ready(self) -> Ready:
        examples = [(key, task.public) for key, task in list(self._tasks.items())[:EXAMPLES]]
        public = examples[0][1] if examples else {}
        texts = [key for key, value in public.items() if isinstance(value, str)]
        field = "question" if "question" in texts else texts[0] if len(texts) == len(public) == 1 else ""
        where = self._where
        return Ready(policy=where.policy, harness=self._subject.id, field=field, fields=list(public), examples=examples)

    async def play(self, ask: Ask) -> None:
        """One episode, told as it happens."""
        start = time.perf_counter()
        try:
            task = self._tasks[ask.key] if ask.key else Task(key="typed", public=ask.task, private={})
            sampling = self._config.sampling()
            if ask.greedy:
                sampling = msgspec.structs.replace(sampling, temperature=0.0)
            self._rollouts.sampling = sampling
            self._watched.begin()
            where = msgspec.structs.replace(self._where, seed=random.getrandbits(48))
            [episode] = await self._rollouts.run([Job(task=task, subject=self._subject, sample=0)], where)
            problem = "" if episode.verdict == "accept" else episode.reason
            answer = episode.answer
        except PolicyFailure:
            raise
        except Exception as error:  # of a domain's tools, which may need what only a task of its own has
            answer, problem = "", f"{type(error).__name__}: {error}"
        self._tell(Ended(answer=answer, problem=problem, seconds=time.perf_counter() - start))


async def serve(rundir: RunDir, policy: str, harness: str, asks: asyncio.StreamReader, tell: Tell) -> None:
    """Load the pair and play what is asked until there is nothing more. Raises one of EXPECTED."""
    state = discovery.read_state(rundir)
    weights = discovery.weights_of(rundir, state, policy, harness)
    resolved = load(rundir.config)
    config = resolved.config
    tell(Note("reading the domain"))
    domain = await asyncio.to_thread(domains.load_from, resolved.folder, config.domain.name, config.domain.options)
    engine: TransformersEngine | None = None
    try:
        note: Callable[[str], None] = lambda text: tell(Note(text))  # noqa: E731
        path = await asyncio.to_thread(source.resolve, config.model.name, note)
        tell(Note(f"loading {config.model.name}"))
        log = Path(platformdirs.user_state_dir("whale-tui")) / "play-worker.log"
        engine = engines.worker_of(config, path, log, max_rows=1, on_note=note)
        info = await engine.start()
        hash = info.base_hash
        if weights is not None:
            hash = await engine.restore(policy, str(weights), with_optimizer=False)
        if hash != state.versions[policy].hash:
            raise RunDirError(f"{policy} has hash {hash} here and {state.versions[policy].hash} in the journal")
        candidate = state.harnesses[harness]
        subject = Subject(id=harness, hash=candidate.source_hash, source=rundir.harness_source(harness))
        where = Where(
            cycle=0, phase=None, step=0, iteration=0, purpose="look", policy=policy, policy_hash=hash, seed=0
        )  # fmt: skip
        session = Session(config, domain, engine, ChatTokenizer(path), subject, where, tell)
        tell(session.ready())
        while line := await asks.readline():
            await session.play(decode_ask(line))
    finally:
        if engine is not None:
            await engine.close()
        await domains.close(domain)


class Asks(asyncio.StreamReaderProtocol):
    """stdin, and the moment at which nobody is there any more."""

    def __init__(self, reader: asyncio.StreamReader, closed: asyncio.Event) -> None:
        super().__init__(reader)
        self._gone = closed

    def eof_received(self) -> bool | None:
        self._gone.set()
        return super().eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._gone.set()
        super().connection_lost(exc)


async def _run(rundir: RunDir, policy: str, harness: str, out: int) -> int:
    def tell(message: AnyMessage) -> None:
        data = memoryview(encode(message) + b"\n")
        while data:
            data = data[os.write(out, data) :]

    asks, closed = asyncio.StreamReader(limit=LINE_BYTES), asyncio.Event()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: Asks(asks, closed), sys.stdin)
    serving = asyncio.ensure_future(serve(rundir, policy, harness, asks, tell))
    gone = asyncio.ensure_future(closed.wait())
    try:
        await asyncio.wait({serving, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not serving.done():  # nobody listens any more, whatever is being sampled
            serving.cancel()
        await serving
    except asyncio.CancelledError:
        return 0
    except BrokenPipeError:
        return 0
    except EXPECTED as error:
        with contextlib.suppress(BrokenPipeError):
            tell(Failed(str(error)))
        return 1
    finally:
        gone.cancel()
    return 0


def main() -> int:
    os.nice(5)  # an engine that runs comes first
    out = os.dup(1)
    os.dup2(2, 1)  # what libraries print is no message
    return asyncio.run(_run(RunDir(Path(sys.argv[1])), sys.argv[2], sys.argv[3], out))


if __name__ == "__main__":
    raise SystemExit(main())
