"""The client of a run: its journal from the file, what happens now from the socket. No engine is needed to read."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator
from typing import Any

from msgspec import Struct

from whale_tui import records as r
from whale_tui.journal import Journal
from whale_tui.loop.state import RunState, reduce
from whale_tui.rundir import RunDir
from whale_tui.service import protocol as p

RECONNECT_SECONDS = 1.0


class Update(Struct):
    """What is new. `events` were already folded into the client's state."""

    events: list[r.AnyEvent] = []
    activity: p.Activity | None = None
    live: bool = False


class RunClient:
    """State of one run, kept up to date by `follow`; commands by `command`, on a connection of their own."""

    def __init__(self, rundir: RunDir, who: str) -> None:
        self.rundir, self.who = rundir, who
        self.state = RunState()
        self.activity: p.Activity | None = None
        self.live = False

    def read_journal(self) -> list[r.AnyEvent]:
        """Fold what the journal has beyond the state. Raises JournalError."""
        if not self.rundir.journal.exists():
            return []
        journal = Journal(self.rundir.journal, read_only=True)
        try:
            events = list(journal.events(self.state.seq))
        finally:
            journal.close()
        for event in events:
            reduce(self.state, event)
        return events

    async def follow(self) -> AsyncIterator[Update]:
        """The journal first, then what happens, for ever. Without an engine: an update a second until one is back."""
        yield Update(events=self.read_journal(), live=False)
        while True:
            try:
                async for update in self._follow_engine():
                    yield update
            except (OSError, EOFError, ValueError):
                pass
            self.live, self.activity = False, None
            yield Update(events=self.read_journal(), live=False)
            await asyncio.sleep(RECONNECT_SECONDS)

    async def _follow_engine(self) -> AsyncIterator[Update]:
        reader, writer = await self._connect()
        try:
            writer.write(p.line(p.Hello(who=self.who, after=self.state.seq)))
            while line := await reader.readline():
                match p.engine_decoder.decode(line):
                    case p.Welcome():
                        self.live = True
                        yield Update(live=True)
                    case p.Events() as batch:
                        events = self._fold(batch)
                        if events:
                            yield Update(events=events, activity=self.activity, live=True)
                    case p.Activity() as activity:
                        self.activity = activity
                        yield Update(activity=activity, live=True)
        finally:
            writer.close()

    def _fold(self, batch: p.Events) -> list[r.AnyEvent]:
        if batch.first > self.state.seq + 1:
            raise ValueError("events are missing")  # read them from the journal and connect again
        events = [r.event_decoder.decode(raw) for raw in batch.events[self.state.seq + 1 - batch.first :]]
        for event in events:
            reduce(self.state, event)
        return events

    async def command(
        self, what: str, args: dict[str, Any] | None = None, *, dry_run: bool = False, id: str = ""
    ) -> p.CommandReply:
        """Send one command and wait for its reply. Raises ConnectionError when no engine answers."""
        try:
            reader, writer = await self._connect()
        except OSError as error:
            raise ConnectionError(f"no engine runs {self.rundir.name} ({error.strerror or error})") from None
        try:
            request = p.CommandRequest(
                id=id or uuid.uuid4().hex, who=self.who, what=what, args=args or {}, dry_run=dry_run
            )
            writer.write(p.line(request))
            async with asyncio.timeout(30):
                while line := await reader.readline():
                    reply = p.engine_decoder.decode(line)
                    if isinstance(reply, p.CommandReply) and reply.id == request.id:
                        return reply
        except TimeoutError:
            raise ConnectionError(f"the engine of {self.rundir.name} does not answer") from None
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
        raise ConnectionError(f"the engine of {self.rundir.name} closed the connection")

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        info = self.rundir.engine_info()
        if info is None:
            raise ConnectionRefusedError("it has never been started")
        return await asyncio.open_unix_connection(info.socket, limit=p.MAX_LINE)
