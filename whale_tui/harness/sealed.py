"""A sealed worker from the engine's side: start it, run episodes in it, believe nothing that it says.

It serves the episodes of one harness. Whatever comes out of it is bounded in size, decoded into one of a few shapes,
and has to fit the state of an open episode; anything else is a violation, which ends the worker and every episode in
it as `flood`: the program behind the seal never sends such a line, so the harness's code did.

**Who is to blame for a hang.** An episode's clock runs while the harness computes, not while it waits for the engine.
Python threads share one lock, so a looping episode holds up the others. When a clock runs out the kernel is asked
which threads burn processor time: episodes that are late and burn end as `timeout`. A late one that burns nothing
while another burns is a victim and gets one more limit's time. The cut costs the worker; its other episodes end as
`died`.

**Who is to blame for a death** (a crash, a kill): only an episode that was computing can be; of the episodes that end
as `died`, those are `suspect`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, cast

import msgspec
from msgspec import Struct

from whale_tui.harness import contract, seal, wire
from whale_tui.harness.contract import BudgetExceeded, ToolError
from whale_tui.harness.wire import EpisodeEnd, Limits, OnChat, OnTool

INSIDE = Path(__file__).with_name("inside.py")
MB = 1 << 20


class Stats(Struct):
    """What a worker did so far; `seconds` is wall time in the harness, summed over episodes."""

    episodes: int = 0
    messages: int = 0
    seconds: float = 0.0

    def add(self, more: Stats) -> None:
        self.episodes += more.episodes
        self.messages += more.messages
        self.seconds += more.seconds


class HarnessLoadError(Exception):
    """The harness can't be loaded: the text is its traceback, or says what is missing."""


class SealUnavailable(Exception):
    """No seal on this machine, and running without was not asked for. The text says why and what to do."""


class WorkerFailure(Exception):
    """A worker could not be started: a failure of the machinery, not of the harness."""


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
        line = wire.encode(_setup("def run(task, model, tools): return ''", Limits(), _program())) + b"\n"
    except (ImportError, RuntimeError, OSError) as missing:
        return False, f"libseccomp can't be used ({missing}); install the system's libseccomp2 package"
    try:
        probe = subprocess.run(_command(), input=line, env={}, capture_output=True, timeout=60, start_new_session=True)
    except (OSError, subprocess.SubprocessError) as error:
        return False, f"a worker could not be started: {error}"
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
        "limits": {"AS": limits.memory_mb * MB, "CPU": limits.cpu_seconds},  # AS: see _make_room
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
        self.inbox: asyncio.Future[wire.Chat | wire.Tool | EpisodeEnd] | None = None
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
        self._episodes: dict[int, _Episode] = {}
        self._numbers = 0
        self._room = 0
        """Open episodes whose thread stacks the memory limit allows for."""
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
        """Start a worker and load a harness in it. `modules` (found on `path`) are imported before the seal and
        allowed besides the contract's. Raises HarnessLoadError, SealUnavailable or WorkerFailure."""
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

    @property
    def log(self) -> str:
        """What the harness printed, up to `log_bytes`, and what Python said of a crash."""
        return self._stderr.decode(errors="replace")

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
        tools: Sequence[str] | None = None,
        remaining_calls: int | None = None,
        remaining_tokens: int | None = None,
    ) -> EpisodeEnd:
        """Run the harness on one task's public fields. `tools` are the names it may use; None leaves that to `on_tool`.
        Cancelling drops the episode, inside the worker too."""
        if not self.alive:
            return EpisodeEnd("died", detail="the worker was gone before the episode started")
        self._numbers += 1
        episode = self._episodes[self._numbers] = _Episode(self._numbers)
        self._make_room()
        start = {
            "task": task,
            "tools": None if tools is None else list(tools),
            "remaining_calls": remaining_calls,
            "remaining_tokens": remaining_tokens,
        }
        answer: dict[str, Any] = {"start": start}
        try:
            while True:
                said = await self._hand_over(episode, answer)
                match said:
                    case EpisodeEnd():
                        return said
                    case wire.Chat():
                        try:
                            call = wire.chat_fields(said)
                        except TypeError as wrong:
                            answer = {"error": "TypeError", "text": str(wrong)}
                            continue
                        try:
                            answer = {"value": msgspec.to_builtins(await on_chat(*call))}
                        except BudgetExceeded as spent:
                            return self._ended(episode, "budget", str(spent))
                    case wire.Tool():
                        try:
                            answer = {"value": await on_tool(said.name, said.args, said.kwargs)}
                        except ToolError as refusal:
                            answer = {"error": "ToolError", "text": str(refusal)}
        finally:
            self._abandon(episode)
            self.stats.episodes += 1
            self.stats.seconds += episode.seconds()

    # ------------------------------------------------------------------------------------------ one episode's exchange

    def _make_room(self) -> None:
        """Allow for the stacks of more open episodes than ever. The worker itself can't: its seal refuses."""
        if len(self._episodes) > self._room and sys.platform == "linux":
            self._room = 2 * len(self._episodes)
            stacks = self._room * (self.limits.stack_kb + 64) << 10
            with contextlib.suppress(OSError, ValueError):  # gone, or the engine's own limit: it does without
                hard = resource.prlimit(self.pid, resource.RLIMIT_AS)[1]
                resource.prlimit(self.pid, resource.RLIMIT_AS, (self.limits.memory_mb * MB + stacks, hard))

    async def _hand_over(self, episode: _Episode, answer: dict[str, Any]) -> wire.Chat | wire.Tool | EpisodeEnd:
        """Give control to the harness and wait for what it says next."""
        if not self.alive:
            return self._casualty(episode)
        episode.inbox = asyncio.get_running_loop().create_future()
        episode.since = time.monotonic()
        self._write({"ep": episode.number, **answer})
        return await episode.inbox

    def _tell(self, episode: _Episode, said: wire.Chat | wire.Tool | EpisodeEnd) -> None:
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
        """Stop an episode that the engine is done with but the harness is not. It stays under watch until it ends."""
        if self.alive and episode.number in self._episodes:
            episode.abandoned = True
            episode.since = episode.since or time.monotonic()
            self._write({"ep": episode.number, "stop": True})
        else:
            self._episodes.pop(episode.number, None)

    # ------------------------------------------------------------------------------------------- the pipes, all hostile

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        if fd == 2:
            self._stderr += data[: max(0, 2 * self.limits.log_bytes - len(self._stderr))]
            if len(self._stderr) == 2 * self.limits.log_bytes:  # print() stops at half of that
                self._end("flood", "the harness wrote to the log past its limit, around print()")
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
            message = wire.decode(line)
            if isinstance(message, wire.Sealed | wire.Loaded | wire.Unloadable):
                self._receive_at_start(message)
            else:
                self._receive_in_episode(message)
        except (ValueError, RecursionError, OverflowError) as violation:  # msgspec's errors are ValueErrors
            self._end("flood", f"the harness forged or flooded the worker's messages: {violation}")

    def _receive_at_start(self, message: wire.Sealed | wire.Loaded | wire.Unloadable) -> None:
        if self._loaded.done():
            raise ValueError("a second load")
        if isinstance(message, wire.Sealed):
            self._sealed = True
        else:
            self._loaded.set_result(message.detail[:4_000] if isinstance(message, wire.Unloadable) else None)

    def _receive_in_episode(
        self, message: wire.Begin | wire.Refuse | wire.Chat | wire.Tool | wire.Done | wire.Fail
    ) -> None:
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
            if isinstance(message, wire.Refuse | wire.Done | wire.Fail):
                del self._episodes[message.ep]
            return
        if isinstance(message, wire.Begin | wire.Refuse) and episode.messages > 1:
            raise ValueError("it began twice")
        if over:
            self._tell(episode, self._ended(episode, "flood", f"more than {self.limits.messages_per_episode} calls"))
        elif isinstance(message, wire.Begin):
            episode.thread = message.thread
        elif isinstance(message, wire.Chat | wire.Tool):
            self._tell(episode, message)
        else:
            del self._episodes[message.ep]
            self._tell(episode, self._last(episode, message))

    def _last(self, episode: _Episode, message: wire.Refuse | wire.Done | wire.Fail) -> EpisodeEnd:
        if isinstance(message, wire.Refuse):
            end = self._ended(episode, "died", message.detail[:4_000])
            end.suspect = True
            return end
        if isinstance(message, wire.Fail):
            return self._ended(episode, "error", message.detail[:4_000])
        if len(message.answer) > self.limits.answer_chars:
            return self._ended(episode, "flood", f"an answer of more than {self.limits.answer_chars:,} characters")
        return self._ended(episode, "answer", answer=message.answer)

    def _write(self, message: dict[str, Any]) -> None:
        pipe = self._transport.get_pipe_transport(0) if self._transport is not None else None
        if pipe is not None and not pipe.is_closing():
            cast(asyncio.WriteTransport, pipe).write(wire.encode(message) + b"\n")

    # --------------------------------------------------------------------------------------------- hangs, and the end

    async def _keep_watch(self) -> None:
        """Cut the worker when an episode hangs (see the module's text)."""
        limit = self.limits.episode_seconds
        while self.alive:
            await asyncio.sleep(min(0.5, limit / 4))
            if not self._late(1.0):
                continue
            before = {e.number: (e.since, _cpu_seconds(self.pid, e.thread)) for e in self._computing()}
            await asyncio.sleep(min(0.25, limit / 4))  # also lets lines already in the pipe be read
            burnt = {
                e.number: _cpu_seconds(self.pid, e.thread) - before[e.number][1]
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
    def pid(self) -> int:
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
