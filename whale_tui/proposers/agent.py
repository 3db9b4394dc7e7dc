"""The `agent` proposer: any headless coding agent, run as a command on a scratch folder, in a jail where there is one.

A session ends when the agent does, or is ended: past the wall limit, silent for too long, past a cap on spending, or
still hanging after it said that it had finished. Whole candidates that were written by then are kept; what it spent is
counted as it streams. Nothing that it started outlives it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shlex
import shutil
import signal
import tempfile
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

import msgspec

from whale_tui.config import ProposerConfig
from whale_tui.harness import leaks
from whale_tui.proposers import jail, sessions
from whale_tui.proposers.base import ProposerFailure, Request
from whale_tui.proposers.presets import COMMON, PRESETS, Preset, Prices
from whale_tui.proposers.scratch import Scratch
from whale_tui.proposers.stream import Stream
from whale_tui.records import Proposal

TRANSCRIPT_BYTES = 32 * 1024 * 1024
"""Most of a transcript that is kept. The session goes on past it; a line says where it was cut."""
LINE_BYTES = 4 * 1024 * 1024
"""Longest line that is read as a whole; the rest of a longer one is passed over."""
AFTER_RESULT = 15.0
"""Seconds that an agent may take to exit once it has said that it is done."""
TICK = 0.25
INTERPRETERS = re.compile(r"python[\d.]*|node|bun|deno|sh|bash|env|npx|uvx?|run|nice|timeout|\d+")
PERMANENT = re.compile(
    r"(?i)invalid.{0,20}api.?key|authenticat|unauthori[sz]ed|not logged in|please (run )?/?login|credit balance|billing"
    r"|unknown (option|argument|flag)|unexpected argument|unrecognized|command not found|no such file|max_budget"
    r"|model.{0,40}not found"
)
"""What an agent says when trying again won't help."""


class Agent:
    """Implements proposers.base.Proposer by sessions of a coding agent."""

    def __init__(
        self,
        options: ProposerConfig,
        preset: str = "",
        *,
        hidden: Sequence[Path] = (),
        use_jail: bool = True,
        after_result: float = AFTER_RESULT,
    ) -> None:
        """`preset` names one of PRESETS; empty: `options.command` alone. `hidden`: what the jail must not show.

        Raises ValueError where the options name no command.
        """
        self.options, self.hidden, self.after_result = options, list(hidden), after_result
        self.preset = PRESETS.get(preset, Preset(command=(), model=()))
        words = tuple(shlex.split(options.command)) or self.preset.command
        if not words:
            raise ValueError("proposer.command: name the agent's command, or take a preset as proposer.kind")
        self._command = words if options.command else (*words, *self._model())
        self.name = preset or _name(words)
        self._bwrap, why = jail.available() if use_jail else ("", "it was not asked for")
        self.notice = "" if self._bwrap else f"{self.name} runs without a jail: {why}. It can read what you can read"

    def preflight(self) -> list[str]:
        """What keeps it from working now."""
        if shutil.which(self._command[0]) is None:
            return [f"{self._command[0]} is not on the PATH; install it, or give its path as proposer.command"]
        return []

    def _model(self) -> tuple[str, ...]:
        return self.preset.model if self.options.model else ()

    async def propose(self, request: Request) -> Sequence[Proposal]:
        with contextlib.ExitStack() as stack:
            folder = request.folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="whale-")))
            try:
                if folder.exists():  # of an engine that was killed before it could begin
                    shutil.rmtree(folder)
                session = await asyncio.to_thread(_Session, self, request, folder)  # it writes a whole archive
                try:
                    return self._taken(session, await session.run())
                finally:
                    await asyncio.to_thread(session.tidy)
            except OSError as error:
                raise ProposerFailure(f"{self.name}: {error}", transient=False) from error

    def _taken(self, session: _Session, cut: str) -> list[Proposal]:
        """The candidates of a session that is over, or the failure that it was."""
        stream = session.stream
        found = session.scratch.read_candidates(whole_only=bool(cut))
        for refused in session.scratch.refused:
            session.request.report(refused)
        if found or not (cut or stream.error or session.status):
            strange = [f"its session named {text}" for text in session.reads_outside()]
            return [msgspec.structs.replace(proposal, warnings=strange) for proposal in found]
        said = cut or stream.error or f"it ended with status {session.status}: {session.complaint or stream.last}"
        permanent = session.over_budget or PERMANENT.search(f"{stream.error} {session.complaint} {stream.last}")
        raise ProposerFailure(f"{self.name} wrote no candidate: {said}", transient=not permanent)


class _Session:
    """One run of the agent: its folder, its process, its output."""

    def __init__(self, agent: Agent, request: Request, folder: Path) -> None:
        self.agent, self.request, self.folder = agent, request, folder.resolve()
        self.scratch = Scratch(self.folder / sessions.SCRATCH, request)
        self.home = self.folder / sessions.HOME
        self.home.mkdir()
        for folder in (self.folder, self.scratch.folder):
            (folder / sessions.PROMPT).write_text(self.scratch.instructions, encoding="utf-8")
        options = agent.options
        prices = Prices(options.price_prompt, options.price_cached, options.price_prompt, options.price_output)
        self.stream = Stream(request.usage, prices)
        self.left = sessions.Left(mark=uuid.uuid4().hex, usage=request.usage, started_at=time.time())
        self.status = 0
        self.complaint = ""
        """The last line of its standard error."""
        self.over_budget = False
        self._capped = asyncio.Event()
        self._heard = time.monotonic()
        self._finished_at = 0.0
        self._written = 0
        self._said: deque[str] = deque(maxlen=40)
        self._read_logs: dict[Path, int] = {}

    async def run(self) -> str:
        """Until the agent's end. Returns why it was cut short; empty where it was not. OSError, ProposerFailure."""
        command, environment = self._command(), self._environment()
        sessions.write(self.folder, self.left)
        with (self.folder / sessions.TRANSCRIPT).open("wb") as transcript:
            process = await asyncio.create_subprocess_exec(
                *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE, start_new_session=True, env=environment, cwd=self.scratch.folder,
            )  # fmt: skip
            assert process.stdout is not None and process.stderr is not None
            readers = [
                asyncio.ensure_future(self._read(process.stdout, transcript, self._output)),
                asyncio.ensure_future(self._read(process.stderr, transcript, self._error)),
            ]
            try:
                cut = await self._watch(process)
                self._end(process)  # first: one that is over its cap must not go on while its pipes are emptied
                await asyncio.wait(readers, timeout=1.0)
                return cut
            finally:
                self._end(process)
                for reader in readers:
                    reader.cancel()
                await asyncio.gather(*readers, return_exceptions=True)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(5):
                        await process.wait()
                self._follow_logs()
                sessions.write(self.folder, self.left)

    async def _watch(self, process: asyncio.subprocess.Process) -> str:
        """Wait for the end, and bring it about where it is due."""
        start, options, known = time.monotonic(), self.agent.options, b""
        exited = asyncio.ensure_future(process.wait())
        try:
            while True:
                awake = asyncio.ensure_future(self._capped.wait())
                await asyncio.wait([exited, awake], timeout=TICK, return_when=asyncio.FIRST_COMPLETED)
                awake.cancel()
                self._follow_logs()
                while self._said:
                    self.request.report(self._said.popleft())
                if (now := msgspec.json.encode(self.left)) != known:
                    known = now
                    sessions.write(self.folder, self.left)
                if exited.done():
                    self.status = exited.result()
                    return ""
                now_at = time.monotonic()
                if self.stream.finished and self._finished_at == 0.0:
                    self._finished_at = now_at
                if self.stream.finished and now_at - max(self._finished_at, self._heard) > self.agent.after_result:
                    return ""  # it hangs, as agents do: what it said counts
                if not self.stream.finished:
                    self._finished_at = 0.0
                if cap := self.request.allowance.passed(self.request.usage):
                    self.over_budget = True
                    return f"stopped at its cap: {cap}"
                if now_at - start > options.wall_seconds:
                    return f"stopped after {options.wall_seconds:g} s (proposer.wall_seconds)"
                if now_at - self._heard > options.idle_seconds:
                    return f"silent for {options.idle_seconds:g} s (proposer.idle_seconds)"
        finally:
            exited.cancel()

    # ---------------------------------------------------------------------------------------------------- the process

    def _command(self) -> list[str]:
        agent, options, dollars = self.agent, self.agent.options, self.request.allowance.dollars
        words = list(agent._command)
        if not options.command:
            words += agent.preset.budget if dollars < float("inf") else ()
            words += agent.preset.jailed if agent._bwrap else agent.preset.unjailed
        values = {
            "{prompt_file}": str(self.scratch.folder / sessions.PROMPT), "{scratch}": str(self.scratch.folder),
            "{model}": options.model, "{dollars}": f"{max(dollars, 0.01):.2f}",
            "{prompt}": self.scratch.instructions,
        }  # fmt: skip
        for name, value in values.items():  # the prompt comes last: what stands in it is not filled in
            words = [word.replace(name, value) for word in words]
        program = shutil.which(words[0])
        if program is None:
            raise ProposerFailure(self.agent.preflight()[0], transient=False)
        if not agent._bwrap:
            return [program, *words[1:]]
        readable = [Path(path).expanduser() for path in options.readable]
        own = [self.scratch.folder, self.home]
        before = jail.command(agent._bwrap, Path(program), own, agent.hidden, readable, self.scratch.folder)
        return [*before, program, *words[1:]]

    def _environment(self) -> dict[str, str]:
        """What the preset and the config name, a home of its own, and the mark by which its processes are found."""
        preset, options = self.agent.preset, self.agent.options
        passed = {k: v for k in (*COMMON, *preset.env, *options.env) if (v := os.environ.get(k)) is not None}
        if "codex" in self.agent.name and "OPENAI_API_KEY" in passed:
            passed.setdefault("CODEX_API_KEY", passed["OPENAI_API_KEY"])
        temporary = "/tmp" if self.agent._bwrap else str(self.home)
        own = {"HOME": str(self.home), "TMPDIR": temporary, "TERM": "dumb", "NO_COLOR": "1"}
        if self.agent._bwrap:
            own["IS_SANDBOX"] = "1"  # claude refuses to work without prompts for root elsewhere
        for name in options.home_files:
            self._copy_home_file(Path(name))
        return passed | preset.fixed | own | {sessions.MARK: self.left.mark}

    def _copy_home_file(self, name: Path) -> None:
        """A login file of the person's home, by their own wish, into the private one."""
        source, target = Path.home() / name, self.home / name
        if name.is_absolute() or ".." in name.parts or not source.is_file():
            raise ProposerFailure(f"proposer.home_files: {source} is no file of your home folder", transient=False)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, target)

    def _end(self, process: asyncio.subprocess.Process) -> None:
        """Kill the session's processes: the group, and whoever left it."""
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        sessions.end(self.left.mark)

    def reads_outside(self) -> list[str]:
        """Paths outside its folder that stand in its tool calls, whether or not the jail let it have them."""
        places = [self.home, *([Path("/tmp")] if self.agent._bwrap else [])]
        with (self.folder / sessions.TRANSCRIPT).open("rb") as transcript:
            return leaks.reads_outside(leaks.tool_uses(transcript), self.scratch.folder, places)

    def tidy(self) -> None:
        """Keep prompt, transcript and candidates; the rest is a copy of the archive, and the agent's own litter."""
        with contextlib.suppress(OSError):
            if not self.scratch.candidates.is_symlink():
                shutil.copytree(self.scratch.candidates, self.folder / "candidates", ignore=_not_small)
        sessions.clear(self.folder)

    # ----------------------------------------------------------------------------------------------------- its output

    async def _read(self, pipe: asyncio.StreamReader, transcript: IO[bytes], take: Callable[[bytes], bytes]) -> None:
        """Lines of a pipe, of bounded length, into the transcript."""
        line, skipping = bytearray(), False
        while chunk := await pipe.read(1 << 16):
            self._heard = time.monotonic()
            *ends, rest = chunk.split(b"\n")
            for end in ends:
                if not skipping:
                    line += end
                    self._keep(take(bytes(line)), transcript)
                line, skipping = bytearray(), False
            if not skipping:
                line += rest
                if len(line) > LINE_BYTES:
                    self._keep(take(bytes(line)), transcript)
                    line, skipping = bytearray(), True
            transcript.flush()
            await asyncio.sleep(0)
        if line:
            self._keep(take(bytes(line)), transcript)
            transcript.flush()

    def _keep(self, line: bytes, transcript: IO[bytes]) -> None:
        if self._written > TRANSCRIPT_BYTES:
            return
        self._written += len(line) + 1
        if self._written > TRANSCRIPT_BYTES:
            line = msgspec.json.encode({"type": "cut", "text": f"the transcript is cut at {TRANSCRIPT_BYTES:,} bytes"})
        transcript.write(line + b"\n")

    def _output(self, line: bytes) -> bytes:
        if words := self.stream.feed(line):
            self._said.append(words)
        if self.request.allowance.passed(self.request.usage):
            self._capped.set()
        return line

    def _error(self, line: bytes) -> bytes:
        text = line.decode("utf-8", "replace")
        if text.strip():
            self.complaint = " ".join(text.split())[:300]
            self._said.append(self.complaint)
        return msgspec.json.encode({"type": "stderr", "text": text})

    def _follow_logs(self) -> None:
        """New lines of the logs in which an agent counts its tokens before it prints them. None is shown."""
        if not self.agent.preset.logs:
            return
        for path in list(self.home.glob(self.agent.preset.logs))[:20]:
            with contextlib.suppress(OSError):
                if path.is_symlink() or not path.is_file():
                    continue
                with path.open("rb") as file:
                    file.seek(self._read_logs.get(path, 0))
                    fresh = file.read(LINE_BYTES)
                whole = fresh.rfind(b"\n") + 1
                self._read_logs[path] = self._read_logs.get(path, 0) + (whole or len(fresh) // LINE_BYTES * len(fresh))
                for line in fresh[:whole].splitlines():
                    if b"token_count" in line:
                        self.stream.feed(line)


def _name(words: Sequence[str]) -> str:
    """How an agent of one's own is called: its program, or the script that an interpreter runs."""
    plain = (Path(word).name for word in words if not word.startswith("-"))
    return Path(next((name for name in plain if not INTERPRETERS.fullmatch(name)), words[0])).stem


def _not_small(folder: str, names: list[str]) -> set[str]:
    """Names of candidates/ that are not worth keeping: anything but small plain files."""
    paths = ((name, Path(folder) / name) for name in names)
    return {name for name, path in paths if path.is_symlink() or not path.is_file() or path.stat().st_size > 100_000}
