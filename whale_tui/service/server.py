"""The engine's socket: events and activity out, commands in. Private to the user: folder 0700, socket 0600."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from whale_tui import __version__
from whale_tui import records as r
from whale_tui.journal import Journal, JournalError
from whale_tui.loop.control import Refused
from whale_tui.rundir import RunDir, RunDirError
from whale_tui.service import protocol as p

if TYPE_CHECKING:
    from whale_tui.loop.run import Run

BACKLOG = 4 * 1024 * 1024
"""Bytes that a slow reader may fall behind. It is then dropped: it attaches again and reads the journal."""
ACTIVITY_SECONDS = 0.25
LONGEST_FOLDER = 75
"""Bytes of a folder in which a socket of ours fits: its path may have 107."""
LINE_EVENTS = 500
"""Most events of one line to a client that has to catch up."""


def socket_path(rundir: RunDir) -> Path:
    """Where the engine of a run listens: beside the user's other sockets, or in /tmp where that is too deep
    for a socket. Private to the user."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    fits = 0 < len(os.fsencode(runtime)) <= LONGEST_FOLDER
    base = Path(runtime) / "whale-tui" if fits else Path(tempfile.gettempdir()) / f"whale-tui-{os.getuid()}"
    base.mkdir(parents=True, exist_ok=True, mode=0o700)
    if base.stat().st_uid != os.getuid():
        raise RunDirError(f"{base} belongs to another user; set XDG_RUNTIME_DIR to a folder of yours")
    base.chmod(0o700)
    return base / f"{hashlib.sha256(str(rundir.path).encode()).hexdigest()[:16]}.sock"


class Server:
    """Answers from the moment the engine lives, also before there is a run."""

    def __init__(self, name: str, path: Path) -> None:
        self.name, self.path = name, path
        self._run: Run | None = None
        self._journal: Journal | None = None
        self._server: asyncio.Server | None = None
        self._followers: set[asyncio.StreamWriter] = set()
        self._connections: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self._activity = p.Activity(doing="starting")
        self._sent_activity = 0.0
        self._pending: asyncio.TimerHandle | None = None

    async def start(self) -> None:
        self.path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._serve, self.path, limit=p.MAX_LINE)
        self.path.chmod(0o600)

    def attach(self, run: Run, journal: Journal) -> None:
        """The run is there: followers that came early get its events."""
        self._run, self._journal = run, journal

    async def close(self) -> None:
        if self._pending is not None:
            self._pending.cancel()
        if self._server is not None:
            self._server.close()
            self.path.unlink(missing_ok=True)
            for writer in list(self._connections.values()):
                with contextlib.suppress(OSError, asyncio.TimeoutError):
                    async with asyncio.timeout(1):
                        await writer.drain()
                writer.close()
            if self._connections:
                await asyncio.wait(self._connections, timeout=1)

    def publish(self, what: list[r.AnyEvent] | p.Activity) -> None:
        """Events go out at once, activity a few times a second."""
        if isinstance(what, list):
            if self._run is not None:
                first = self._run.state.seq - len(what) + 1
                raw = [msgspec.Raw(r.encode_event(event)) for event in what]
                self._send(p.line(p.Events(first=first, events=raw)))
            return
        self._activity = what
        if self._pending is None:
            loop = asyncio.get_running_loop()
            wait = max(0.0, self._sent_activity + ACTIVITY_SECONDS - loop.time())
            self._pending = loop.call_later(wait, self._send_activity)

    def _send_activity(self) -> None:
        self._pending = None
        self._sent_activity = asyncio.get_running_loop().time()
        self._send(p.line(self._activity))

    def _send(self, line: bytes) -> None:
        for writer in list(self._followers):
            if writer.transport.get_write_buffer_size() > BACKLOG:
                self._followers.discard(writer)
                writer.transport.abort()
            else:
                writer.write(line)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections[task] = writer
        try:
            while line := await reader.readline():
                match p.client_decoder.decode(line):
                    case p.Hello() as hello:
                        self._welcome(hello, writer)
                    case p.CommandRequest() as request:
                        writer.write(p.line(self._command(request)))
                await writer.drain()
        except (msgspec.DecodeError, ValueError, RecursionError, OSError, JournalError):
            pass  # not one of ours, or gone: this connection ends, nothing else
        finally:
            self._followers.discard(writer)
            del self._connections[task]
            writer.close()

    def _welcome(self, hello: p.Hello, writer: asyncio.StreamWriter) -> None:
        seq = self._run.state.seq if self._run is not None else 0
        writer.write(p.line(p.Welcome(run=self.name, pid=os.getpid(), version=__version__, seq=seq)))
        if not hello.follow:
            return
        if self._journal is not None and hello.after < seq:
            first, missed = hello.after + 1, self._journal.events(hello.after)
            while raw := [msgspec.Raw(r.encode_event(event)) for event in itertools.islice(missed, LINE_EVENTS)]:
                writer.write(p.line(p.Events(first=first, events=raw)))
                first += len(raw)
        writer.write(p.line(self._activity))
        self._followers.add(writer)

    def _command(self, request: p.CommandRequest) -> p.CommandReply:
        if request.what == "status":
            doing = msgspec.to_builtins(self._activity)
            return p.CommandReply(id=request.id, ok=True, effect=self._activity.doing, data=doing)
        if self._run is None:
            return p.CommandReply(id=request.id, ok=False, effect=f"the run is not up yet: {self._activity.doing}")
        try:
            effect, repeated = self._run.command(
                request.id, request.who, request.what, dict(request.args), dry_run=request.dry_run
            )
        except (Refused, JournalError) as refusal:
            return p.CommandReply(id=request.id, ok=False, effect=str(refusal))
        return p.CommandReply(id=request.id, ok=True, effect=effect, repeated=repeated)
