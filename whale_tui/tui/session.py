"""What the terminal needs of the rest, as protocols, and the one run that it watches.

The real ones are in `whale_tui.service`; a script can stand in for them.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from whale_tui.journal import Journal, JournalError
from whale_tui.loop.state import RunState
from whale_tui.records import AnyEvent
from whale_tui.rundir import RunDir, RunDirError
from whale_tui.service.discovery import RunSummary
from whale_tui.service.player import Ask, Ready
from whale_tui.service.protocol import Activity, CommandReply

EVENTS_KEPT = 500
"""Events that the events pane can scroll back to; the journal has them all."""


class Client(Protocol):
    state: RunState
    activity: Activity | None
    live: bool

    def follow(self) -> AsyncIterator[Any]: ...

    async def command(
        self, what: str, args: dict[str, Any] | None = None, *, dry_run: bool = False
    ) -> CommandReply: ...


class Player(Protocol):
    """A pair in a process of its own (service/player.py)."""

    ready: Ready | None

    def start(self) -> AsyncIterator[Any]: ...

    def play(self, ask: Ask) -> AsyncIterator[Any]: ...

    async def close(self) -> None: ...


def real_player(rundir: RunDir, policy: str, harness: str) -> Player:
    from whale_tui.service import player

    return player.Player(rundir, policy, harness)


async def real_export(rundir: RunDir, pair: tuple[str, str], out: Path) -> None:
    """`whale-tui export` as a process of its own. Raises RunDirError with what it said."""
    words = [sys.executable, "-m", "whale_tui", "export", str(rundir.path), str(out), "--pair", ",".join(pair)]
    pipe, none = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(*words, stdin=none, stdout=none, stderr=pipe)
    _, said = await process.communicate()
    if process.returncode:
        lines = said.decode(errors="replace").strip().splitlines()
        raise RunDirError(lines[-1].removeprefix("whale-tui: ") if lines else f"status {process.returncode}")


@dataclass
class Services:
    """The doors to engines and runs."""

    connect: Callable[[RunDir], Client]
    list_runs: Callable[[], Sequence[RunSummary]]
    start_engine: Callable[[RunDir], None]
    launch: Callable[[Path, list[str]], RunDir]
    samples: Callable[[], list[Path]]
    play: Callable[[RunDir, str, str], Player] = real_player
    export: Callable[[RunDir, tuple[str, str], Path], Awaitable[None]] = real_export


def real_services(who: str) -> Services:
    """Imported on use, so that a screen is up before sockets and configs are looked at."""

    def connect(rundir: RunDir) -> Client:
        from whale_tui.service.client import RunClient

        return RunClient(rundir, who)

    def list_runs() -> Sequence[RunSummary]:
        from whale_tui.service import discovery

        return discovery.list_runs()

    def start_engine(rundir: RunDir) -> None:
        from whale_tui.service import launch

        launch.start_engine(rundir)

    def start(config: Path, overrides: list[str]) -> RunDir:
        from whale_tui.service import launch

        return launch.launch(config, overrides)

    return Services(connect, list_runs, start_engine, start, sample_configs)


def sample_configs() -> list[Path]:
    """sample_configs/ of the wheel, or of the checkout."""
    package = Path(__file__).parent.parent
    folder = package / "sample_configs"
    return sorted((folder if folder.is_dir() else package.parent / "sample_configs").glob("*.toml"))


class Session:
    """The run in view: its client, a reader of its journal, and the tail of its events."""

    def __init__(self, rundir: RunDir, client: Client) -> None:
        self.rundir, self.client = rundir, client
        self.events: list[tuple[int, AnyEvent]] = []
        self.trouble = ""
        """Why the journal can't be read, once that is so."""
        self._journal: Journal | None = None
        self._seen = 0
        self._sources: dict[str, str] = {}

    @property
    def state(self) -> RunState:
        return self.client.state

    @property
    def journal(self) -> Journal | None:
        """A read-only journal, as soon as there is one."""
        if self._journal is None and self.rundir.journal.exists():
            try:
                self._journal = Journal(self.rundir.journal, read_only=True)
            except JournalError as error:
                self.trouble = str(error)
        return self._journal

    def read_events(self) -> None:
        """Take in the events since the last time; of a long journal only the tail."""
        last = self.state.seq
        if last <= self._seen or self.journal is None:
            return
        start = max(self._seen, last - EVENTS_KEPT)
        try:
            for seq, event in enumerate(self.journal.events(after=start), start + 1):
                if seq > last:
                    break  # the screen shows one state: what the client has not reduced yet comes next time
                self.events.append((seq, event))
                self._seen = seq
        except JournalError as error:
            self.trouble = str(error)
        del self.events[:-EVENTS_KEPT]

    def source(self, harness: str) -> str:
        """A harness's text. Sources never change once proposed, so each is read once."""
        if harness not in self._sources:
            try:
                self._sources[harness] = self.rundir.harness_source(harness)
            except (OSError, UnicodeDecodeError) as error:
                return f"# {harness} can't be read: {error}"
        return self._sources[harness]

    def close(self) -> None:
        if self._journal is not None:
            self._journal.close()
            self._journal = None
