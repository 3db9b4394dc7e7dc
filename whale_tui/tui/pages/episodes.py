"""Episodes: the index page by page from SQLite, filtered; one episode as a conversation; one task under two pairs."""

from __future__ import annotations

import asyncio
import heapq
import shlex
from collections.abc import Sequence
from typing import Any, ClassVar

from textual import work
from textual.app import ComposeResult
from textual.containers import Container
from textual.content import Content

from whale_tui.journal import Journal, JournalError, Row
from whale_tui.loop.state import RunState
from whale_tui.records import Episode
from whale_tui.tui import code
from whale_tui.tui.dialogs import Ask, Pick
from whale_tui.tui.look import Look
from whale_tui.tui.page import Page
from whale_tui.tui.panes import Pane, View
from whale_tui.tui.plain import cut, line, plain
from whale_tui.tui.session import Session
from whale_tui.tui.transcript import Turns, read_turns, transcript

PAGE = 200
MOST_ROWS = 10_000
"""Rows that the list grows to; a filter finds what lies beyond."""
KEYS = ("verdict", "task", "policy", "harness", "purpose", "phase", "truncated", "cycle", "step", "iteration")
ALIASES = {"theta": "policy", "h": "harness"}


class BadFilter(ValueError):
    """The text says which word, and what there is."""


def parse_filter(text: str) -> tuple[dict[str, Any], str, str]:
    """`verdict=reject h:h0003 slate` -> (index filters, outcome, text). Raises BadFilter.

    A colon is an equals sign behind a known key; elsewhere it is text.
    """
    filters: dict[str, Any] = {}
    outcome, rest = "", []
    try:
        words = shlex.split(text)
    except ValueError:
        words = text.split()
    for word in words:
        key, equals, value = word.partition("=")
        if not equals and word.partition(":")[0] in (*KEYS, *ALIASES, "outcome"):
            key, equals, value = word.partition(":")
        key = ALIASES.get(key, key)
        if not equals:
            rest.append(word)
        elif key == "outcome":
            outcome = value
        elif key not in KEYS:
            raise BadFilter(f"no filter {key!r}; there are {', '.join((*KEYS, 'outcome'))}")
        elif key in ("cycle", "step", "iteration", "truncated"):
            if not value.isdigit():
                raise BadFilter(f"{key} takes a number, not {value!r}")
            filters[key] = int(value)
        else:
            filters[key] = value
    return filters, outcome, " ".join(rest)


def find(journal: Journal, state: RunState, wanted: str, before: int | None, limit: int = PAGE) -> list[Row]:
    """Rows of the index that a filter lets through, newest first. Raises BadFilter."""
    filters, outcome, text = parse_filter(wanted)
    if not outcome:
        return journal.page(before=before, limit=limit, text=text, **filters)
    harnesses = [c.id for c in state.harnesses.values() if c.outcome == outcome]
    if "harness" in filters:
        harnesses = [h for h in harnesses if h == filters["harness"]]
    pages = [journal.page(before=before, limit=limit, text=text, **(filters | {"harness": h})) for h in harnesses]
    return heapq.nsmallest(limit, (row for page in pages for row in page), key=lambda row: -row.n)


class Rows(Pane):
    NAME = "episodes"

    def __init__(self, look: Look, id: str | None = None) -> None:
        super().__init__(look, choosable=True, id=id)
        self.rows: list[Row] = []
        self.filter = ""
        self.complete = False
        self.searching = False
        self.snap = 0
        self.task_width = 12

    def snapshot(self, view: View) -> Any:
        return view.state.episodes

    def take(self, rows: list[Row], complete: bool) -> None:
        self.rows, self.complete = rows, complete
        self.redraw()

    def draw(self, snap: Any, width: int, height: int) -> tuple[Sequence[Content], Sequence[Content]]:
        look, dot = self.look, self.look.glyphs.dot
        self.name_it(f"episodes {dot} {snap:,}" + (f" {dot} {plain(self.filter, 60)}" if self.filter else ""))
        newer = snap - self.rows[0].n if self.rows and not self.filter else 0
        state = "searching" if self.searching else f"{newer:,} newer: home" if newer > 0 else ""
        self.note(state)
        wide = width >= 76
        self.task_width = max(12, min(24, width - (64 if wide else 46)))
        head = [("", 1), ("task", self.task_width), ("pair", 16), ("purpose", 7)] + (
            [("where", 8), ("tokens", 6)] if wide else []
        )
        header = code.columns(
            [(t, w, look("muted"), t == "tokens") for t, w in head] + [("answer", 20, look("muted"), False)]
        )
        if not self.rows:
            words = "searching" if self.searching else "no episode matches" if self.filter else "no episode yet"
            return [line((words, look("muted")))], [header]
        return [self._row(row, wide, width) for row in self.rows], [header]

    def _row(self, row: Row, wide: bool, width: int) -> Content:
        look, g = self.look, self.look.glyphs
        mark, role = {"accept": (g.yes, "good"), "reject": (g.no, "bad")}.get(row.verdict, ("!", "invalid"))
        pair = f"{row.policy.removeprefix('theta-')} {g.times} {row.harness}"
        cells = [
            (mark, 1, look(role), False), (plain(row.task, 30), self.task_width, "", False),
            (pair, 16, look("muted"), False),
            (row.purpose, 7, look("muted"), False),
        ]  # fmt: skip
        if wide:
            where = f"{row.cycle}.{row.step or row.iteration}" if row.phase else ""
            cells += [(f"{(row.phase or '')[:1]}{where}", 8, look.phase(row.phase), False)]
            cells.append((str(row.output_tokens), 6, look("muted"), True))
        used = sum(w + 2 for _, w, _, _ in cells)
        told = plain(row.answer or row.reason, 200) + (" (cut off)" if row.truncated else "")
        return code.columns([*cells, (told, max(1, width - used), "" if row.answer else look("muted"), False)])


class Conversation(Pane):
    """One episode, or one task under two pairs beside each other."""

    NAME = "conversation"

    def on_mount(self) -> None:
        self.snap = ()

    def snapshot(self, view: View) -> Any:
        return self.snap

    def open(self, *episodes: tuple[Episode, Turns]) -> None:
        self.snap = episodes
        self.sideways = 0
        self.redraw()
        self.scroll_to(y=0, animate=False, immediate=True, force=True)

    def draw(self, snap: Any, width: int, height: int) -> tuple[Sequence[Content], Sequence[Content]]:
        look, dot = self.look, self.look.glyphs.dot
        self.note("")
        if not snap:
            self.name_it("conversation")
            return [line(("enter opens an episode", look("muted")))], ()
        if len(snap) == 1:
            episode, turns = snap[0]
            self.name_it(f"{plain(episode.task, 40)} {dot} {episode.policy} {dot} {episode.harness}")
            self.note("c: under another pair")
            return transcript(episode, turns, width, look), ()
        self.name_it(f"{plain(snap[0][0].task, 40)} {dot} under two pairs")
        half = max(12, (width - 3) // 2)
        sides = [transcript(episode, turns, half, look) for episode, turns in snap]
        rows = []
        bar = line((f" {look.glyphs.bar} ", look("faint")))
        for n in range(max(map(len, sides))):
            left, right = (side[n] if n < len(side) else Content("") for side in sides)
            rows.append(Content("").join([cut(left, half).truncate(half, pad=True), bar, cut(right, half)]))
        return rows, ()


class EpisodesPage(Page):
    NAME: ClassVar[str] = "episodes"

    def __init__(self, look: Look) -> None:
        super().__init__(look)
        self.reader: Journal | None = None

    def body(self) -> ComposeResult:
        with Container(id="split"):
            yield Rows(self.look, id="rows")
            yield Conversation(self.look, id="conversation")

    def on_mount(self) -> None:
        self.query_one(Rows).focus()
        super().on_mount()

    def on_screen_resume(self) -> None:
        self.load()

    def on_unmount(self) -> None:
        if self.reader is not None:
            self.reader.close()

    @property
    def candidate(self) -> str:
        row = self._row()
        return row.harness if row else ""

    def _row(self) -> Row | None:
        if not self.is_mounted:
            return None
        rows = self.query_one(Rows)
        return rows.rows[rows.cursor] if rows.cursor < len(rows.rows) else None

    def _reader(self, session: Session) -> Journal:
        """A connection of this page's own: its queries run beside the screen."""
        if self.reader is None:
            self.reader = Journal(session.rundir.journal, read_only=True)
        return self.reader

    # -------------------------------------------------------------------------------------------------- the list

    @work(exclusive=True, group="page")
    async def load(self, more: bool = False) -> None:
        """The first page of the filter, or the one after what is there."""
        session, rows = self.app.session, self.query_one(Rows)
        if session is None or (more and (rows.complete or len(rows.rows) >= MOST_ROWS)):
            return
        before = rows.rows[-1].n if more and rows.rows else None
        rows.searching = not more
        rows.redraw()
        try:
            found = await asyncio.to_thread(find, self._reader(session), session.state, rows.filter, before)
        except (BadFilter, JournalError) as error:
            rows.searching = False
            self.say(False, "filter", str(error))
            rows.take([], True)
            return
        rows.searching = False
        rows.take([*rows.rows, *found] if more else found, len(found) < PAGE)

    @work
    async def do_filter(self) -> None:
        rows = self.query_one(Rows)
        hint = "verdict= task= policy= harness= phase= purpose= cycle= step= outcome= or any text; empty: *"
        wanted = await self.app.push_screen_wait(Ask("Filter episodes", hint, self.look, rows.filter))
        if wanted is None:
            return
        rows.filter = "" if wanted == "*" else wanted
        rows.cursor = 0
        self.load()

    def on_lines_moved(self, event: Rows.Moved) -> None:
        rows = self.query_one(Rows)
        if event.lines is rows:
            if event.row >= len(rows.rows) - 40:
                self.load(more=True)
            elif event.row == 0 and rows.rows and rows.snap > rows.rows[0].n:
                self.load()

    # -------------------------------------------------------------------------------------------------- an episode

    def on_lines_chosen(self, event: Rows.Chosen) -> None:
        if event.lines.id == "rows" and (row := self._row()) is not None:
            self.open(row)

    @work(exclusive=True, group="open")
    async def open(self, *rows: Row) -> None:
        session = self.app.session
        if session is None:
            return
        try:
            opened = [await asyncio.to_thread(self._read, session, row) for row in rows]
        except (JournalError, IndexError, OSError) as error:
            self.say(False, "episode", str(error))
            return
        conversation = self.query_one(Conversation)
        self.set_class(len(opened) == 2, "-two")
        conversation.open(*opened)
        conversation.focus()

    def _read(self, session: Session, row: Row) -> tuple[Episode, Turns]:
        episode = self._reader(session).episode(row)
        return episode, read_turns(episode, session.rundir.path / "tokenizer")

    @work
    async def do_flips(self) -> None:
        """The same task under another pair; pairs with another verdict first."""
        session, row = self.app.session, self._row()
        if session is None or row is None:
            self.say(False, "flips", "no episode under the cursor")
            return
        found = await asyncio.to_thread(self._reader(session).page, limit=500, task=row.task)
        pairs: dict[tuple[str, str], Row] = {}
        for other in found:
            if (other.policy, other.harness) != (row.policy, row.harness):
                pairs.setdefault((other.policy, other.harness), other)
        others = sorted(pairs.values(), key=lambda other: (other.verdict == row.verdict, -other.n))
        if not others:
            self.say(False, "flips", f"{row.task} ran under no other pair")
            return
        g = self.look.glyphs
        items = [
            (f"{o.policy} {g.times} {o.harness}", o.verdict, "flips" if o.verdict != row.verdict else "the same")
            for o in others
        ]
        chosen = await self.app.push_screen_wait(
            Pick(f"{plain(row.task, 40)} under which other pair?", items, self.look)
        )
        if chosen is not None:
            self.open(row, others[chosen])
