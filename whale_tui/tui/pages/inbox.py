"""The Inbox: candidates that wait for a person, each with all that a decision needs; decided ones below them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, ClassVar

from textual.app import ComposeResult
from textual.containers import Container
from textual.content import Content

from whale_tui.loop.state import Candidate, RunState
from whale_tui.tui import code, compare
from whale_tui.tui.look import Look
from whale_tui.tui.page import Page
from whale_tui.tui.panes import Candidates, Harness, View, card_of, waiting_for
from whale_tui.tui.plain import line, plain
from whale_tui.tui.session import Session

FAILED = ("vetoed", "invalid", "crash", "timeout")


class Waiting(Candidates):
    """Waiting first, then the rest, newest first."""

    NAME = "inbox"

    def snapshot(self, view: View) -> Any:
        s = view.state
        waiting = {c.id for c in waiting_for(s)}
        made = [self._row(s, c, c.id in waiting) for c in s.harnesses.values() if c.proposer]
        rows = tuple(sorted(made, key=lambda row: row[2] == "waiting"))
        self.order(rows, False)
        return rows

    def draw(self, snap: Any, width: int, height: int) -> tuple[Sequence[Content], Sequence[Content]]:
        rows = self.ordered
        waiting = sum(row[2] == "waiting" for row in rows)
        dot = self.look.glyphs.dot
        self.name_it(f"inbox {dot} {waiting} waiting" if waiting else f"inbox {dot} nothing waits")
        if not rows:
            return [line(("no candidate has been proposed yet", self.look("muted")))], ()
        return [self._short(row, width) for row in rows], ()

    def _short(self, row: tuple[Any, ...], width: int) -> Content:
        name, status, hypothesis = row[0], row[2], row[8]
        role = {"waiting": "warning", "accepted": "accepted", "scored": "muted", "approved": "good"}.get(status, "bad")
        g = self.look.glyphs
        mark = {"waiting": "?", "accepted": g.accepted, "approved": g.yes}.get(status, " ")
        style = "bold" if status == "waiting" else self.look("muted")
        return code.columns(
            [
                (name, 5, style, False),
                (f"{mark} {status}", 10, self.look(role), False),
                (hypothesis, max(1, width - 19), style if status != "waiting" else "", False),
            ]
        )


class Card(Harness):
    """One candidate: hypothesis, checks, what its proposer was told and read, cost so far, diff, result."""

    NAME = "candidate"

    def snapshot(self, view: View) -> Any:
        s, c = view.state, view.state.harnesses.get(view.candidate)
        self.session = view.session
        if c is None or not c.proposer:
            return ("none", "", "", False, ())
        extra = (told(s, c), read_by_proposer(view.session, s, c), spent(s), s.settings.approval if s.settings else "")
        return (
            "diff",
            c.id,
            c.parent or "h0000",
            view.beside,
            card_of(s, c),
            extra,
            c in waiting_for(s),
            code.is_warm(),
        )

    def draw(self, snap: Any, width: int, height: int) -> tuple[Sequence[Content], Sequence[Content]]:
        if snap[0] == "none":
            self.name_it("candidate")
            self.note("")
            return [line(("no candidate to show", self.look("muted")))], ()
        return super().draw(snap, width, height)

    def head(self, snap: Any, width: int) -> list[Content]:
        look = self.look
        notes, files, cost, approval = snap[5]
        out: list[Content] = []
        if snap[6]:
            question = "may it be accepted?" if approval == "before-accept" else "may it cost episodes?"
            out.append(
                line(
                    (f"{question}  ", look("warning")), ("a", look("key")), " approve   ", ("x", look("key")),
                    " veto   ", ("E", look("key")), " edit   ", ("u", look("key")), " parent",
                )
            )  # fmt: skip
            out.append(Content(""))
        out += super().head(snap, width)
        if approval == "auto":
            out.append(line(("approval is auto: candidates go on without a person", look("muted"))))
        out += line((f"cost so far: {cost}", look("muted"))).wrap(max(1, width))
        for title, lines in (("its proposer was told", notes), ("its proposer's files", files)):
            if lines:
                out.append(line((f"{title}:", look("muted"))))
                out += [row for text in lines for row in line(("  ", ""), plain(text, 300)).wrap(max(1, width))]
        return out


def told(state: RunState, candidate: Candidate) -> tuple[str, ...]:
    """The vetoes, failures and warnings that were known when this one was written. Newest last of each."""
    before = (candidate.cycle, candidate.iteration)
    known = [c for c in state.harnesses.values() if (c.cycle, c.iteration) < before]
    failed = [f"{c.id} {c.outcome}: {c.reason}" for c in known if c.outcome in FAILED]
    return tuple(failed[-6:] + [f"{c.id} warning: {text}" for c in known for text in c.warnings][-3:])


def read_by_proposer(session: Session, state: RunState, candidate: Candidate) -> tuple[str, ...]:
    """The files of the proposer's session that wrote this candidate."""
    earlier = sum(len(p.signal) for p in state.phases if p.phase == "harness" and p.cycle < candidate.cycle)
    folder = session.rundir.proposer / f"it-{earlier + candidate.iteration:04d}"
    try:
        return tuple(f"{folder.name}/{path.name}" for path in sorted(folder.iterdir()))[:12]
    except OSError:
        return ()


def spent(state: RunState) -> str:
    """What the search has cost so far."""
    episodes = sum(s.episodes for key, s in state.ledger.items() if key.startswith("harness/"))
    tokens = sum(s.prompt_tokens + s.output_tokens for key, s in state.ledger.items() if key.startswith("harness/"))
    dollars = sum(s.dollars for s in state.ledger.values())
    money = f", {dollars:.2f} dollars" if dollars else ""
    return f"the search has taken {compare.count(episodes)} episodes, {compare.count(tokens)} tokens{money}"


class InboxPage(Page):
    NAME: ClassVar[str] = "inbox"

    def __init__(self, look: Look) -> None:
        super().__init__(look)
        self.beside = False
        self.appeared = time.monotonic()

    def body(self) -> ComposeResult:
        with Container(id="split"):
            yield Waiting(self.look, id="waiting")
            yield Card(self.look, id="card")

    def on_mount(self) -> None:
        self.beside = self.app.layout.beside
        self.query_one(Waiting).focus()
        super().on_mount()

    @property
    def candidate(self) -> str:
        return self.query_one(Waiting).under_cursor if self.is_mounted else ""

    def show(self, view: View) -> None:
        waiting = self.query_one(Waiting)
        before = waiting.under_cursor
        waiting.offer(view)
        if waiting.under_cursor != before:
            self.appeared = time.monotonic()  # another card without the person's doing
        self.query_one(Card).offer(View(view.session, waiting.under_cursor, True, self.beside, view.trouble))

    def do_beside(self) -> None:
        self.beside = not self.beside
        self.app.layout.beside = self.beside
        self.app.paint()

    def do_next_hunk(self) -> None:
        self.query_one(Card).to_hunk(1)

    def do_previous_hunk(self) -> None:
        self.query_one(Card).to_hunk(-1)

    def do_parent(self) -> None:
        waiting, session = self.query_one(Waiting), self.app.session
        parent = session.state.harnesses[waiting.under_cursor].parent if session and waiting.under_cursor else ""
        if parent in waiting.ids:
            waiting.cursor = waiting.ids.index(parent)
        else:
            self.say(True, "", f"{waiting.under_cursor} starts from {parent or 'nothing'}, the domain's own harness")

    def on_lines_chosen(self, event: Waiting.Chosen) -> None:
        """Enter moves to the card. It decides nothing."""
        if event.lines.id == "waiting":
            self.query_one(Card).focus()
