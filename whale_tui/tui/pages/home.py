"""Home: the runs on this machine, and how to begin one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from textual import work
from textual.app import ComposeResult
from textual.content import Content

from whale_tui.config import ConfigError
from whale_tui.rundir import RunDir, RunDirError
from whale_tui.service.discovery import RunSummary
from whale_tui.tui import code, compare
from whale_tui.tui.dialogs import Pick
from whale_tui.tui.page import Page
from whale_tui.tui.panes import Pane, Status, View
from whale_tui.tui.plain import line, plain

ROLES = {"running": "good", "paused": "warning", "crashed": "failure", "unreadable": "failure", "stopped": "warning"}


class Runs(Pane):
    NAME = "runs on this machine"

    def offer_runs(self, runs: Sequence[RunSummary] | None) -> None:
        self.snap = runs if runs is None else tuple(runs)
        if runs is None:
            self.snap = ()
        self.redraw()

    def snapshot(self, view: View) -> Any:
        return self.snap

    def draw(self, snap: Any, width: int, height: int) -> tuple[Sequence[Content], Sequence[Content]]:
        look = self.look
        if not snap:
            after = (" starts one from a sample", look("muted"))
            hint = line(("no runs yet: ", look("muted")), ("n", look("key")), after)
            return [Content(""), hint], ()
        wide = width >= 92
        names = max(10, min(28, max(len(run.name) for run in snap)))
        head = [("name", names), ("", 10), ("condition", 12), ("where", 17)]
        head += [("pair", 19), ("best test", 9), ("episodes", 9)] if wide else []
        header = code.columns([(text, w, look("muted"), text in ("best test", "episodes")) for text, w in head])
        return [self._run(run, names, wide, width) for run in snap], [header]

    def _run(self, run: RunSummary, names: int, wide: bool, width: int) -> Content:
        look = self.look
        where = f"cycle {run.cycle} {run.phase or ''}".strip() if run.cycle or run.phase else ""
        cells = [
            (plain(run.name, 60), names, look("title"), False),
            (run.status, 10, look(ROLES.get(run.status, "muted")), False),
            (plain(run.condition, 20), 12, "", False),
            (where, 17, look.phase(run.phase) if run.phase else look("muted"), False),
        ]
        if wide:
            cells.append((f"{run.policy} {look.glyphs.times} {run.harness}" if run.policy else "", 19, "", False))
            cells.append((compare.percent(run.best_mean), 9, look("best"), True))
            cells.append((compare.count(run.episodes) if run.episodes else "", 9, look("muted"), True))
        used = sum(w + 2 for _, w, _, _ in cells)
        note = plain(run.problem, 200) or (ago(time.time() - run.at) if run.at else "")
        if width - used > 4:
            cells.append((note, width - used, look("muted"), False))
        return code.columns(cells)


def ago(seconds: float) -> str:
    """A coarse age: it need not tick."""
    for size, unit in ((86400 * 2, 86400), (3600 * 2, 3600), (120, 60)):
        if seconds >= size:
            return f"{int(seconds // unit)} {({86400: 'days', 3600: 'hours', 60: 'minutes'})[unit]} ago"
    return "just now"


class Welcome(Pane):
    NAME = "whale-tui"

    def on_mount(self) -> None:
        self.snap = ()
        self.can_focus = False

    def snapshot(self, view: View) -> Any:
        return ()

    def draw(self, snap: Any, width: int, height: int) -> tuple[Sequence[Content], Sequence[Content]]:
        look = self.look
        text = line(
            "Weights and harness take turns: ",
            ("the weight phase", look.phase("weight")),
            " fine-tunes a small language model on what it got right, ",
            ("the harness phase", look.phase("harness")),
            " searches the code around it. Each run has an engine of its own, which goes on when you leave.",
        )
        keys = line(
            ("enter", look("key")), (" open a run   ", look("muted")), ("n", look("key")),
            (" start one from a sample config   ", look("muted")), ("?", look("key")), (" help", look("muted")),
        )  # fmt: skip
        return [*text.wrap(max(1, width)), Content(""), keys], ()


class HomePage(Page):
    NAME: ClassVar[str] = "home"

    def body(self) -> ComposeResult:
        yield Welcome(self.look, id="welcome")
        yield Runs(self.look, choosable=True, id="runs")

    def on_mount(self) -> None:
        self.query_one(Status).display = False
        self.query_one(Runs).focus()
        super().on_mount()

    def on_screen_resume(self) -> None:
        self.do_refresh()

    def show(self, view: View) -> None:
        """Home shows runs, not the one in view."""

    @work(exclusive=True, group="runs")
    async def do_refresh(self) -> None:
        runs = await asyncio.to_thread(self.app.services.list_runs)
        self.query_one(Runs).offer_runs(runs)

    def on_lines_chosen(self, event: Runs.Chosen) -> None:
        runs: Sequence[RunSummary] = self.query_one(Runs).snap or ()
        if event.row < len(runs):
            self.app.open_run(RunDir(runs[event.row].path))

    @work
    async def do_start_sample(self) -> None:
        samples = self.app.services.samples()
        if not samples:
            self.say(False, "start", "no sample configs are installed")
            return
        items = [(path.stem, "", first_comment(path)) for path in samples]
        chosen = await self.app.push_screen_wait(Pick("Start a run from a sample config", items, self.look))
        if chosen is None:
            return
        self.say(True, "start", f"{samples[chosen].stem}: the engine is starting")
        try:
            rundir = await asyncio.to_thread(self.app.services.launch, samples[chosen], [])
        except (ConfigError, RunDirError, OSError) as error:
            self.say(False, "start", str(error))
        else:
            self.app.open_run(rundir)


def first_comment(path: Path) -> str:
    """What a config says of itself."""
    try:
        with path.open(encoding="utf-8") as file:
            return plain(next((row[1:].strip() for row in file if row.startswith("#")), ""), 120)
    except (OSError, UnicodeDecodeError):
        return ""
