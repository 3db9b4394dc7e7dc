"""Lineage: harnesses by policy versions, each cell a pair: its success rate on D_harness and n, its test on D_test."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.content import Content

from whale_tui.loop.state import RunState
from whale_tui.rundir import RunDirError
from whale_tui.tui.compare import percent
from whale_tui.tui.dialogs import Ask
from whale_tui.tui.look import Look
from whale_tui.tui.page import Page
from whale_tui.tui.panes import Pane, View
from whale_tui.tui.plain import fit, line

CELL = 22


class Grid(Pane):
    NAME = "lineage"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("left", "column(-1)", show=False),
        Binding("right", "column(1)", show=False),
    ]

    def __init__(self, look: Look, id: str | None = None) -> None:
        super().__init__(look, choosable=True, id=id)
        self.column = 10**6
        self.first = 0
        self.rows: list[str] = []
        self.versions: list[str] = []

    def snapshot(self, view: View) -> Any:
        return grid_of(view.state)

    def draw(self, snap: Any, width: int, height: int) -> tuple[Sequence[Content], Sequence[Content]]:
        versions, rows, current, pinned, best = snap
        kept = self.harness
        self.versions, self.rows = [name for name, _ in versions], [row[0] for row in rows]
        wanted = kept if kept in self.rows else current
        if wanted in self.rows:
            self.set_reactive(Grid.cursor, self.rows.index(wanted))
        look, g = self.look, self.look.glyphs
        if not versions:
            return [line(("nothing has been measured yet", look("muted")))], ()
        self.column = min(max(0, self.column), len(versions) - 1)
        fitting = max(1, (width - 10) // CELL)
        if self.column < self.first:
            self.first = self.column
        self.first = max(self.first, self.column - fitting + 1, 0)
        self.first = min(self.first, max(0, len(versions) - fitting))
        seen = range(self.first, min(len(versions), self.first + fitting))
        told = f"success rate on D_harness, n episodes; {g.test} mean on D_test; {g.star} best measured"
        head: list[str | tuple[str, str]] = [" " * 10]
        for n in seen:
            name, is_current = versions[n]
            style = look("title") if is_current else look("muted")
            head.append((fit(name + (f" {g.on}" if is_current else ""), CELL), style))
        more = f" {len(versions)} versions" + (f", {self.first} before" if self.first else "")
        self.name_it(f"lineage {g.dot} {len(rows)} harnesses {g.dot}{more}")
        out = []
        for row, (name, cells, tests) in enumerate(rows):
            mark = g.pin if name == pinned else g.accepted if name == current else " "
            parts: list[str | tuple[str, str]] = [
                (f"{mark} ", look("pinned" if name == pinned else "accepted")),
                (fit(name, 7), "bold" if name == current else ""),
            ]
            for n in seen:
                cell, is_best = cells[n], (name, n) == best
                mark = g.star if is_best else " "
                style = look("best") if is_best else "" if cell else look("faint")
                pieces = [
                    (fit(percent(cell[0]) + mark if cell else g.dot, 7), style),
                    (fit(f"n {cell[1]}" if cell else "", 6), look("faint")),
                    (fit(self._test(tests.get(n)), CELL - 15), look("test" if n in tests else "faint")),
                ]
                chosen = row == self.cursor and n == self.column
                if chosen:
                    pieces = [("".join(text for text, _ in pieces), "reverse")]
                parts += [(g.cursor if chosen else " ", look("key")), *pieces, " "]
            out.append(line(*parts))
        self.note(self._explained(snap))
        return out, [line((told, look("faint"))), line(*head)]

    def _test(self, test: float | str | None) -> str:
        """A mean on D_test, or that it is to come."""
        return "" if test is None else f"{self.look.glyphs.test}{test if isinstance(test, str) else percent(test)}"

    def _explained(self, snap: Any) -> str:
        """The cell under the cursor in words."""
        versions, rows, _, _, best = snap
        if self.cursor >= len(rows):
            return ""
        name, cells, tests = rows[self.cursor]
        cell, policy = cells[self.column], versions[self.column][0]
        test = tests.get(self.column)
        words = f"{policy} {self.look.glyphs.times} {name}"
        words += f": {percent(cell[0])} of {cell[1]} episodes" if cell else ": not measured"
        words += f", test {test if isinstance(test, str) else percent(test)}" if test is not None else ""
        return words + (", best measured" if (name, self.column) == best else "")

    @property
    def harness(self) -> str:
        return self.rows[self.cursor] if self.cursor < len(self.rows) else ""

    @property
    def policy(self) -> str:
        return self.versions[self.column] if self.column < len(self.versions) else ""

    def watch_cursor(self, old: int, new: int) -> None:
        super().watch_cursor(old, new)
        self.redraw()

    def action_column(self, by: int) -> None:
        self.column = min(max(0, self.column + by), max(0, len(self.versions) - 1))
        self.redraw()


def grid_of(state: RunState) -> tuple[Any, ...]:
    """((version, is current), ...), ((harness, cells, tests by column), ...), current, pinned, best cell.

    Versions: those measured or to be measured, the last of each cycle, the current one. A test is a mean, or "asked".
    """
    names = {v.hash: v.name for v in state.versions.values()}
    measured = {h for c in state.harnesses.values() for h in c.scores} | {t.policy_hash for t in state.tests}
    last = {v.cycle: v.name for v in state.versions.values()}
    measured |= {state.versions[v].hash for v in (*last.values(), *(w.policy for w in state.wanted), state.policy) if v}
    hashes = [h for h in names if h in measured]
    rows, best = [], None
    for c in state.harnesses.values():
        cells = []
        for n, h in enumerate(hashes):
            mean = c.mean(h)
            parts = [s.batch for s in (c.scores.get(h), c.confirms.get(h)) if s is not None]
            cells.append(None if mean is None else (mean, sum(b.episodes - b.invalid for b in parts)))
            if mean is not None and (best is None or mean > best[0]):
                best = (mean, c.id, n)
        tests: dict[int, float | str] = {
            hashes.index(t.policy_hash): t.mean for t in state.tests if t.harness_hash == c.source_hash and t.n
        }
        tests |= {hashes.index(state.versions[w.policy].hash): "asked" for w in state.wanted if w.harness == c.id}
        rows.append((c.id, tuple(cells), tests))
    versions = tuple((names[h], names[h] == state.policy) for h in hashes)
    return versions, tuple(rows), state.harness, state.pinned, best and (best[1], best[2])


class LineagePage(Page):
    NAME: ClassVar[str] = "lineage"

    def body(self) -> ComposeResult:
        yield Grid(self.look, id="grid")

    def on_mount(self) -> None:
        self.query_one(Grid).focus()
        super().on_mount()

    @property
    def candidate(self) -> str:
        return self.query_one(Grid).harness if self.is_mounted else ""

    def pair(self) -> tuple[str, str] | None:
        grid = self.query_one(Grid)
        return (grid.policy, grid.harness) if grid.policy and grid.harness else None

    def do_evaluate(self) -> None:
        if pair := self.pair():
            self.app.send("evaluate", {"policy": pair[0], "harness": pair[1]})

    @work
    async def do_export(self) -> None:
        session, pair = self.app.session, self.pair()
        if session is None or pair is None:
            return
        suggested = Path.cwd() / f"{session.rundir.name}-{pair[0]}-{pair[1]}"
        hint = "Into which folder? It must not exist yet."
        chosen = await self.app.push_screen_wait(
            Ask(f"Export {pair[0]} with {pair[1]}", hint, self.look, str(suggested))
        )
        if chosen is None:
            return
        self.say(True, "export", "at work: it takes a moment")
        try:
            await self.app.services.export(session.rundir, pair, Path(chosen))
        except (RunDirError, OSError) as error:
            self.say(False, "export", str(error))
        else:
            self.say(True, "export", f"{chosen}; its README.md says how to use it")
