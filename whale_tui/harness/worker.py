"""Sealed workers from the engine's side: start one, run episodes in it, believe nothing that it says.

A worker serves the episodes of one harness. Whatever comes out of it is bounded in size, decoded into one of a few
shapes, and has to fit the state of an open episode; anything else is a violation, which ends the worker and every episode
in it as `flood`: the program behind the seal never sends such a line, so the harness's code did.

**Who is to blame for a hang.** An episode's clock runs while the harness computes, not while it waits for the engine. Python
threads share one lock, so one looping episode holds up the others. When a clock runs out the kernel is asked which
threads burn processor time: episodes that are late and burn are cut as `timeout`. A late one that burns nothing while
another burns is a victim and gets one more limit's time. Cutting costs the worker; its other episodes end as `died`, to
be run again (HarnessRunner does).

**Who is to blame for a death** (a crash, a kill): only an episode that was computing can be, so those are `suspect` and run
again each in a worker of its own. One that ends its worker alone has ended it itself, and is an `error`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Literal, cast

import msgspec
from msgspec import Raw, Struct

from whale_tui.harness import contract, seal
from whale_tui.harness.contract import BudgetExceeded, Reply, ToolError

INSIDE = Path(__file__).with_name("inside.py")
MB = 1 << 20

OnChat = Callable[[list[dict[str, str]], int | None, list[str], bool | None], Awaitable[Reply]]
"""(messages, max_tokens, stop, thinking) -> Reply. BudgetExceeded ends the episode as `budget`; any other exception is
the machinery's and comes out of `run_episode`."""
OnTool = Callable[[str, list[Any], dict[str, Any]], Awaitable[Any]]
"""(name, args, kwargs) -> JSON value. ToolError is raised inside the harness; any other exception comes out."""


class Limits(Struct, frozen=True):
    """What a worker and each of its episodes may use."""

    memory_mb: int = 1024
    """Address space of a worker, half a megabyte of thread stack for each open episode included."""
    cpu_seconds: int = 36_000
    """Processor time of a worker over its whole life; a backstop should the engine be gone."""
    load_seconds: float = 10.0
    """From start to loaded, the module body included."""
    episode_seconds: float = 120.0
    """Wall time that a harness may compute in one episode; waiting for the policy or a tool is free."""
    messages_per_episode: int = 1_000
    message_bytes: int = 1_000_000
    answer_chars: int = 100_000
    log_bytes: int = 200_000
    stack_kb: int = 512


class EpisodeEnd(Struct):
    """How an episode ended. `died` is no fault of its own known so far; everything else is the harness's doing."""

    kind: Literal["answer", "error", "timeout", "budget", "flood", "died"]
    answer: str = ""
    detail: str = ""
    """The traceback of the harness's own frames, or the reason in words."""
    seconds: float = 0.0
    """Wall time in the harness itself."""
    messages: int = 0
    suspect: bool = False
    """Of a `died`: it was computing at that moment, so it may be the cause."""


class Stats(Struct):
    episodes: int = 0
    messages: int = 0
    seconds: float = 0.0


class HarnessLoadError(Exception):
    """The harness can't be loaded: the text is its traceback, or says what is missing."""


class SealUnavailable(Exception):
    """No seal on this machine, and running without was not asked for. The text says why and what to do."""


class WorkerFailure(Exception):
    """A worker could not be started: a failure of the machinery, not of the harness."""


# ----------------------------------------------------------------------------------------------- what a worker may say


class _Message(Struct, tag_field="type", forbid_unknown_fields=True):
    pass


class _Sealed(_Message, tag="sealed"):
    pass


class _Loaded(_Message, tag="loaded"):
    pass


class _Unloadable(_Message, tag="unloadable"):
    detail: str


class _Begin(_Message, tag="begin"):
    ep: int
    thread: int


class _Refuse(_Message, tag="refuse"):
    ep: int
    detail: str


class _Chat(_Message, tag="chat"):
    ep: int
    messages: Raw
    max_tokens: Raw
    stop: Raw
    thinking: Raw


class _Tool(_Message, tag="tool"):
    ep: int
    name: str
    args: list[Any]
    kwargs: dict[str, Any]


class _Done(_Message, tag="done"):
    ep: int
    answer: str


class _Fail(_Message, tag="fail"):
    ep: int
    detail: str


class _Turn(Struct, forbid_unknown_fields=True):
    role: Literal["system", "user", "assistant", "tool"]
    content: str


_decode = msgspec.json.Decoder(
    _Sealed | _Loaded | _Unloadable | _Begin | _Refuse | _Chat | _Tool | _Done | _Fail
).decode
_encode = msgspec.json.Encoder().encode


def _chat_fields(call: _Chat) -> tuple[list[dict[str, str]], int | None, list[str], bool | None]:
    """The arguments of one `model.chat`, checked. Raises TypeError in words for the harness."""

    def read(name: str, raw: Raw, shape: Any) -> Any:
        try:
            return msgspec.json.decode(raw, type=shape)
        except (msgspec.MsgspecError, RecursionError) as wrong:
            raise TypeError(f"model.chat: {name}: {wrong}") from None

    turns = read("messages", call.messages, list[_Turn])
    if not turns:
        raise TypeError("model.chat: messages: the list is empty")
    max_tokens = read("max_tokens", call.max_tokens, int | None)
    if max_tokens is not None and max_tokens < 1:
        raise TypeError(f"model.chat: max_tokens: {max_tokens} is less than 1")
    stop = read("stop", call.stop, str | list[str] | None)
    stops = [stop] if isinstance(stop, str) else stop or []
    if "" in stops or len(stops) > 16:
        raise TypeError("model.chat: stop: at most 16 strings, none of them empty")
    return (
        [{"role": turn.role, "content": turn.content} for turn in turns],
        max_tokens,
        stops,
        read("thinking", call.thinking, bool | None),
    )


# ----------------------------------------------------------------------------------------------------- sealing at all


@functools.cache
def _program() -> str:
    return seal.filter_program().hex()


@functools.cache
def can_seal() -> tuple[bool, str]:
    """Whether this machine can seal a worker, tried for real once; where it can't, why and what to do."""
    if sys.platform != "linux":
        return False, f"sealing needs Linux seccomp; this is {sys.platform}"
    try:
        line = _encode(_setup("def run(task, model, tools): return ''", Limits(), _program())) + b"\n"
    except (ImportError, RuntimeError, OSError) as missing:
        return False, f"libseccomp can't be used ({missing}); install the system's libseccomp2 package"
    probe = subprocess.run(_command(), input=line, env={}, capture_output=True, timeout=60, start_new_session=True)
    if b'"loaded"' in probe.stdout:
        return True, "sealed with seccomp"
    last = probe.stderr.decode(errors="replace").strip().rpartition("\n")[2] or f"status {probe.returncode}"
    return False, f"a worker could not seal itself: {last}"


def _command() -> list[str]:
    return [sys.executable, "-I", "-S", str(INSIDE)]


def _setup(
    source: str, limits: Limits, program: str | None, also: Sequence[str] = (), path: Sequence[str] = ()
) -> dict:
    named, lazy = contract.preload(source)
    return {
        "source": source,
        "modules": [*named, *also],
        "lazy": lazy,
        "path": list(path),
        "program": program,
        "parent": os.getpid(),
        "limits": {"AS": limits.memory_mb * MB, "CPU": limits.cpu_seconds},
        "stack_bytes": limits.stack_kb << 10,
        "message_bytes": limits.message_bytes,
        "answer_chars": limits.answer_chars,
        "log_bytes": limits.log_bytes,
    }


# ---------------------------------------------------------------------------------------------------------- the worker


class _Episode:
    """One open episode as the engine sees it."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.inbox: asyncio.Future[_Chat | _Tool | EpisodeEnd] | None = None
        self.thread = 0
        self.messages = 0
        self.spent = 0.0
        self.since: float | None = None
        """When the harness was last handed control; None while it waits for the engine."""
        self.abandoned = False

    def seconds(self) -> float:
        return self.spent + (time.monotonic() - self.since if self.since is not None else 0.0)


class SealedWorker(asyncio.SubprocessProtocol):
    """One process behind the seal, serving the episodes of one harness. Make it with `start`, end it with `close`."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.stats = Stats()
        self.log = ""
        """What the harness printed, up to `log_bytes`."""
        self._episodes: dict[int, _Episode] = {}
        self._numbers = 0
        self._buffer = bytearray()
        self._stderr = bytearray()
        self._transport: asyncio.SubprocessTransport | None = None
        loop = asyncio.get_running_loop()
        self._loaded: asyncio.Future[str | None] = loop.create_future()
        self._gone: asyncio.Future[None] = loop.create_future()
        self._sealed = False
        self._verdict: tuple[Literal["flood", "died"], str] | None = None
        """Why the worker is being ended, once something decided so."""
        self._watch: asyncio.Task[None] | None = None

    @classmethod
    async def start(
        cls,
        source: str,
        limits: Limits = Limits(),  # noqa: B008
        *,
        allow_unsealed: bool = False,
        modules: Sequence[str] = (),
        path: Sequence[str] = (),
    ) -> SealedWorker:
        """Start a worker and load a harness in it. `modules` (found on `path`) are imported before the seal, and allowed,
        besides the contract's. Raises HarnessLoadError, SealUnavailable or WorkerFailure."""
        sealable, why = can_seal()
        if not sealable and not allow_unsealed:
            raise SealUnavailable(f"{why}; to run LLM-written code without a seal set allow_unsealed = true")
        setup = _setup(source, limits, _program() if sealable else None, modules, path)
        loop = asyncio.get_running_loop()
        try:
            transport, worker = await loop.subprocess_exec(
                lambda: cls(limits), *_command(), env={}, start_new_session=True, close_fds=True
            )
        except OSError as error:
            raise WorkerFailure(f"a sealed worker could not be started: {error}") from error
        worker._transport = transport
        worker._write(setup)
        try:
            async with asyncio.timeout(limits.load_seconds):
                problem = await asyncio.shield(worker._loaded)
        except TimeoutError:
            problem = f"the module body was still running after {limits.load_seconds:g} s"
        except BaseException:
            await worker.close()
            raise
        if problem is not None:
            sealed = worker._sealed
            await worker.close()
            raise HarnessLoadError(problem) if sealed else WorkerFailure(f"a worker did not start: {problem}")
        worker._watch = asyncio.create_task(worker._keep_watch())
        return worker

    @property
    def alive(self) -> bool:
        return self._verdict is None and not self._gone.done()

    async def close(self) -> None:
        """End the process, however it is, and wait until it is gone. Open episodes end as `died`."""
        self._end("died", "the worker was closed")
        await asyncio.shield(self._gone)
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)

    async def run_episode(
        self,
        task: dict[str, Any],
        on_chat: OnChat,
        on_tool: OnTool,
        *,
        tools: Sequence[str] = (),
        calls_left: int | None = None,
        tokens_left: int | None = None,
    ) -> EpisodeEnd:
        """Run the harness on one task's public fields. Cancelling drops the episode, inside the worker too."""
        if not self.alive:
            return EpisodeEnd("died", detail="the worker was gone before the episode started")
        self._numbers += 1
        episode = self._episodes[self._numbers] = _Episode(self._numbers)
        start = {"task": task, "tools": list(tools), "calls_left": calls_left, "tokens_left": tokens_left}
        answer: dict[str, Any] = {"start": start}
        try:
            while True:
                said = await self._hand_over(episode, answer)
                match said:
                    case EpisodeEnd():
                        return said
                    case _Chat():
                        try:
                            answer = {"value": msgspec.to_builtins(await on_chat(*_chat_fields(said)))}
                        except TypeError as wrong:
                            if not str(wrong).startswith("model.chat: "):
                                raise
                            answer = {"error": "TypeError", "text": str(wrong)}
                        except BudgetExceeded as spent:
                            return self._ended(episode, "budget", str(spent))
                    case _Tool():
                        try:
                            answer = {"value": await on_tool(said.name, said.args, said.kwargs)}
                        except ToolError as refusal:
                            answer = {"error": "ToolError", "text": str(refusal)}
        finally:
            self._abandon(episode)
            self.stats.episodes += 1
            self.stats.seconds += episode.seconds()

    # ------------------------------------------------------------------------------------------ one episode's exchange

    async def _hand_over(self, episode: _Episode, answer: dict[str, Any]) -> _Chat | _Tool | EpisodeEnd:
        """Give control to the harness and wait for what it says next."""
        if not self.alive:
            return self._casualty(episode)
        episode.inbox = asyncio.get_running_loop().create_future()
        episode.since = time.monotonic()
        self._write({"ep": episode.number, **answer})
        return await episode.inbox

    def _tell(self, episode: _Episode, said: _Chat | _Tool | EpisodeEnd) -> None:
        """The harness gave control back."""
        episode.spent = episode.seconds()
        episode.since = None
        if episode.inbox is not None and not episode.inbox.done():
            episode.inbox.set_result(said)

    def _ended(self, episode: _Episode, kind: Any, detail: str = "", answer: str = "") -> EpisodeEnd:
        return EpisodeEnd(kind, answer, detail, episode.seconds(), episode.messages)

    def _casualty(self, episode: _Episode) -> EpisodeEnd:
        kind, why = self._verdict or ("died", "the worker ended")
        end = self._ended(episode, kind, why)
        end.suspect = kind == "died" and episode.since is not None
        return end

    def _abandon(self, episode: _Episode) -> None:
        """Stop an episode that the engine is done with but the harness is not. It stays under watch until it says so."""
        if self.alive and episode.number in self._episodes:
            episode.abandoned = True
            episode.since = episode.since or time.monotonic()
            self._write({"ep": episode.number, "stop": True})
        else:
            self._episodes.pop(episode.number, None)

    # ------------------------------------------------------------------------------------------- the pipes, all hostile

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        if fd == 2:
            self._stderr += data[: max(0, self.limits.log_bytes + 100 - len(self._stderr))]
            self.log = self._stderr.decode(errors="replace")
            return
        self._buffer += data
        *lines, rest = self._buffer.split(b"\n")
        self._buffer = rest
        for line in lines:
            if self._verdict is None and not self._gone.done():
                self._receive(line)
        if len(rest) > self.limits.message_bytes:
            self._end("flood", f"a message of more than {self.limits.message_bytes:,} bytes")

    def _receive(self, line: bytearray) -> None:
        try:
            if len(line) > self.limits.message_bytes:
                raise ValueError(f"a message of {len(line):,} bytes, at most {self.limits.message_bytes:,}")
            message = _decode(line)
            if isinstance(message, _Sealed | _Loaded | _Unloadable):
                self._receive_at_start(message)
            else:
                self._receive_in_episode(message)
        except (ValueError, RecursionError, OverflowError) as violation:  # msgspec's errors are ValueErrors
            self._end("flood", f"the harness forged or flooded the worker's messages: {violation}")

    def _receive_at_start(self, message: _Sealed | _Loaded | _Unloadable) -> None:
        if self._loaded.done():
            raise ValueError("a second load")
        if isinstance(message, _Sealed):
            self._sealed = True
        else:
            self._loaded.set_result(message.detail[:4_000] if isinstance(message, _Unloadable) else None)

    def _receive_in_episode(self, message: _Begin | _Refuse | _Chat | _Tool | _Done | _Fail) -> None:
        episode = self._episodes.get(message.ep)
        if episode is None:
            raise ValueError("no such episode is open")
        if episode.since is None:
            raise ValueError("it spoke while the engine was answering it")
        self.stats.messages += 1
        episode.messages += 1
        over = episode.messages > self.limits.messages_per_episode
        if episode.abandoned:
            if over:
                raise ValueError("an episode that was stopped went on speaking")
            if isinstance(message, _Refuse | _Done | _Fail):
                del self._episodes[message.ep]
            return
        if isinstance(message, _Begin | _Refuse) and episode.messages > 1:
            raise ValueError("it began twice")
        if over:
            self._tell(episode, self._ended(episode, "flood", f"more than {self.limits.messages_per_episode} calls"))
        elif isinstance(message, _Begin):
            episode.thread = message.thread
        elif isinstance(message, _Chat | _Tool):
            self._tell(episode, message)
        else:
            del self._episodes[message.ep]
            self._tell(episode, self._last(episode, message))

    def _last(self, episode: _Episode, message: _Refuse | _Done | _Fail) -> EpisodeEnd:
        if isinstance(message, _Refuse):
            return self._ended(episode, "died", message.detail[:4_000])
        if isinstance(message, _Fail):
            return self._ended(episode, "error", message.detail[:4_000])
        if len(message.answer) > self.limits.answer_chars:
            return self._ended(episode, "flood", f"an answer of more than {self.limits.answer_chars:,} characters")
        return self._ended(episode, "answer", answer=message.answer)

    def _write(self, message: dict[str, Any]) -> None:
        pipe = self._transport.get_pipe_transport(0) if self._transport is not None else None
        if pipe is not None and not pipe.is_closing():
            cast(asyncio.WriteTransport, pipe).write(_encode(message) + b"\n")

    # --------------------------------------------------------------------------------------------- hangs, and the end

    async def _keep_watch(self) -> None:
        """Cut the worker when an episode hangs (see the module's text)."""
        limit = self.limits.episode_seconds
        while self.alive:
            await asyncio.sleep(min(0.5, limit / 4))
            if not self._late(1.0):
                continue
            before = {e.number: (e.since, _cpu_seconds(self._pid, e.thread)) for e in self._computing()}
            await asyncio.sleep(min(0.25, limit / 4))  # also lets lines already in the pipe be read
            burnt = {
                e.number: _cpu_seconds(self._pid, e.thread) - before[e.number][1]
                for e in self._computing()
                if before.get(e.number, (None,))[0] == e.since
            }
            most = max(burnt.values(), default=0.0)
            culprits = [
                e
                for e in self._late(1.0)
                if e.number in burnt and (burnt[e.number] >= most / 2 or most < 0.02 or e.seconds() > 2 * limit)
            ]
            if culprits:
                for episode in culprits:
                    self._tell(episode, self._ended(episode, "timeout", f"the harness computed for over {limit:g} s"))
                self._end("died", "another episode hung the worker", suspects=False)

    @property
    def _pid(self) -> int:
        return self._transport.get_pid() if self._transport is not None else 0

    def _computing(self) -> list[_Episode]:
        return [episode for episode in self._episodes.values() if episode.since is not None]

    def _late(self, share: float) -> list[_Episode]:
        return [e for e in self._computing() if e.seconds() > share * self.limits.episode_seconds]

    def _end(self, kind: Literal["flood", "died"], why: str, *, suspects: bool = True) -> None:
        """Kill the process and end every open episode, once."""
        if self._verdict is not None:
            return
        self._verdict = (kind, why)
        if self._transport is not None:
            with contextlib.suppress(ProcessLookupError):
                self._transport.kill()
        if not self._loaded.done():
            self._loaded.set_result(why)
        for episode in self._episodes.values():
            end = self._casualty(episode)
            end.suspect = end.suspect and suspects
            self._tell(episode, end)
        self._episodes.clear()

    def connection_lost(self, exc: Exception | None) -> None:
        status = self._transport.get_returncode() if self._transport is not None else None
        said = self.log.strip().rpartition("\n")[2][:300]
        self._end("died", f"the worker ended with {_status(status)}" + (f": {said}" if said else ""))
        if not self._gone.done():
            self._gone.set_result(None)


def _status(status: int | None) -> str:
    if status is not None and status < 0:
        with contextlib.suppress(ValueError):
            return f"signal {signal.Signals(-status).name}"
    return f"status {status}"


def _cpu_seconds(pid: int, thread: int) -> float:
    """Processor time of one thread, by the kernel's account. 0.0 where it can't be told."""
    try:
        fields = Path(f"/proc/{pid}/task/{thread}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
