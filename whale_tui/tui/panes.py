"""The panes of the Run screen. Each takes a snapshot of what it shows, and draws only when that has changed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from msgspec.structs import astuple
from textual.content import Content
from textual.events import Resize
from textual.geometry import Region
from textual.widget import Widget

from whale_tui import records as r
from whale_tui.harness.diffs import changed_lines
from whale_tui.loop import switching
from whale_tui.loop.limiting import limiting
from whale_tui.loop.state import Candidate, RunState
from whale_tui.loop.words import words
from whale_tui.service.protocol import Activity
from whale_tui.tui import chart, code, compare
from whale_tui.tui.compare import percent, points
from whale_tui.tui.lines import Lines
from whale_tui.tui.look import Glyphs, Look
from whale_tui.tui.plain import cut, fit, line, plain, sides
from whale_tui.tui.session import Session


@dataclass(frozen=True)
class View:
    """What panes draw from: the session, and where the person is in it."""

    session: Session
    candidate: str = ""
    """The candidate under the cursor."""
    diff: bool = False
    beside: bool = False
    trouble: str = ""

    @property
    def state(self) -> RunState:
        return self.session.state


class Pane(Lines):
    """A titled box. `snapshot` says what is shown as a comparable value; `draw` turns it into lines."""

    NAME = ""

    def __init__(self, look: Look, *, choosable: bool = False, id: str | None = None) -> None:
        super().__init__(choosable=choosable, cursor_style=look("cursor"), id=id)
        self.look = look
        self.snap: Any = None
        self.border_title = self.NAME
        self.draws = 0
        """How often it has drawn: tests hold that nothing new draws nothing."""

    def offer(self, view: View) -> None:
        """Draw, if what this pane shows is not what it showed."""
        snap = self.snapshot(view)
        if snap != self.snap:
            self.snap = snap
            self.redraw()

    def redraw(self) -> None:
        room = self.room
        if self.snap is not None and room.width > 0 and room.height > 0:
            self.draws += 1
            self.show(*self.draw(self.snap, room.width, room.height))

    def name_it(self, title: str) -> None:
        """The title in the upper border; never parsed, never wider than it."""
        self.border_title = self._in_border(title)

    def note(self, text: str) -> None:
        """The note in the lower border."""
        self.border_subtitle = self._in_border(text)

    def _in_border(self, text: str) -> Content:
        return cut(Content(text), max(1, self.outer_size.width - 6))

    def restyle(self, look: Look) -> None:
        self.look, self.cursor_style = look, look("cursor")
        self.redraw()
        self.refresh()

    def on_resize(self, event: Resize) -> None:
        super().on_resize(event)
        self.redraw()

    def snapshot(self, view: View) -> Any:
        raise NotImplementedError

    def draw(self, snap: Any, width: int, height: int) -> tuple[Sequence[Content], Sequence[Content]]:
        """Lines, and header lines."""
        raise NotImplementedError

    def wrapped(self, content: Content, width: int) -> list[Content]:
        return content.wrap(max(1, width))


class Status(Widget):
    """The two lines on top: where the run is, and what the engine does now."""

    def __init__(self, look: Look, id: str | None = None) -> None:
        super().__init__(id=id)
        self.look = look
        self.snap: Any = None
        self.draws = 0

    def offer(self, view: View) -> None:
        s, session = view.state, view.session
        activity = session.client.activity
        waiting = [c.id for c in waiting_for(s)]
        snap = (
            session.rundir.name, s.condition if s.run else "", s.cycle, s.phase, s.step, s.iteration, s.policy,
            s.harness, s.status, s.reason, s.pinned, s.budget_used, s.settings.budget_episodes if s.settings else 0,
            compare.eta(s), session.client.live, None if activity is None else astuple(activity), waiting,
            s.switch, s.switch_by, view.trouble, _limit_of(s),
        )  # fmt: skip
        if snap != self.snap:
            before, self.snap = self._lines(), snap
            self.draws += 1
            for row, (old, new) in enumerate(zip(before, self._lines(), strict=True)):
                if not old.is_same(new):
                    self.refresh(Region(0, row, self.size.width, 1))

    def restyle(self, look: Look) -> None:
        self.look = look
        self.refresh()

    def _lines(self) -> tuple[Content, Content]:
        width = self.size.width
        return (Content(""), Content("")) if self.snap is None else (self._where(width), self._now(width))

    def render(self) -> Content:
        return Content("\n").join(self._lines())

    def _where(self, width: int) -> Content:
        (name, condition, cycle, phase, step, iteration, policy, harness, status, _, pinned, *_rest) = self.snap
        live, waiting, limit = self.snap[14], self.snap[16], self.snap[20]
        look, g = self.look, self.look.glyphs
        left: list[str | tuple[str, str]] = [(plain(name, 40), look("title"))]
        if condition and width >= 96:
            left.append((f"  {condition}", look("muted")))
        if cycle or phase:
            left.append((f"  cycle {cycle}", look("muted")))
            number = step + 1 if phase == "weight" else iteration + 1
            unit = "step" if phase == "weight" else "iteration"
            if status in ("finished", "stopped"):
                pass
            elif phase:
                of = f" of {limit}" if limit and number <= limit else ""
                left.append((f"  {g.on} {phase} phase", "bold " + look.phase(phase).replace("bold ", "")))
                left.append((f" {unit} {number}{of}", look.phase(phase)))
            else:
                left.append((f"  {g.off} between phases", look("muted")))
        if policy:
            left += [
                "  ",
                (policy, look("phase-weight")),
                (f" {g.times} ", look("muted")),
                (harness, look("phase-harness")),
            ]
        right: list[str | tuple[str, str]] = []
        if waiting:
            right.append((f" {len(waiting)} waiting: i ", look("warning") + " reverse"))
        if pinned:
            right.append((f"  {g.pin} pinned {pinned}", look("pinned")))
        if status == "paused":
            right.append(("  paused", look("warning")))
        elif status in ("finished", "stopped"):
            right.append((f"  {status}", look("good") if status == "finished" else look("warning")))
        elif not live and condition:
            right.append(("  no engine", look("warning")))
        badges = line(*right)
        return sides(cut(line(*left), width - badges.cell_length - 1), badges, width)

    def _now(self, width: int) -> Content:
        status, reason, used, budget, eta, live, packed = (self.snap[i] for i in (8, 9, 11, 12, 13, 14, 15))
        switch, switch_by, trouble = self.snap[17], self.snap[18], self.snap[19]
        look, g = self.look, self.look.glyphs
        right: list[str | tuple[str, str]] = []
        if budget:
            right.append((f"  {compare.count(used)} of {compare.count(budget)} episodes", look("muted")))
            right.append((f"  {used / budget:.0%}", look("title")))
        left: list[str | tuple[str, str]] = []
        if trouble:
            left.append((plain(trouble, 300), look("failure")))
        elif status in ("finished", "stopped"):
            left.append((f"{status}: {plain(reason, 200)}", look("muted")))
            if status == "stopped":
                left += [("; ", look("muted")), ("A", look("key")), (" goes on with it", look("muted"))]
        elif packed is not None and live:
            left += self._activity(Activity(*packed), width, width - line(*right).cell_length - 1)
        elif not live:
            left.append(("nothing is running; ", look("muted")))
            left.append(("A", look("key")))
            left.append((" starts the engine again", look("muted")))
        elif status == "paused":
            left.append((f"paused {plain(reason, 80)}", look("warning")))
        else:
            left.append(("waiting for word from the engine", look("muted")))
        if switch:
            when = "now" if switch == "now" else "at the next safe point"
            left.append((f"  {g.arrow} switch {when} (by {plain(switch_by, 20)})", look("warning")))
        told, spent = line(*left), line(*right)
        if eta and width >= 96 and told.cell_length + spent.cell_length + len(eta) + 8 <= width:
            spent = line(*right, (f"  {eta} to go", look("muted")))
        return sides(cut(told, width - spent.cell_length - 1), spent, width)

    def _activity(self, a: Activity, width: int, room: int) -> list[str | tuple[str, str]]:
        """What the run does now. A figure that has no place within `room` cells is left out."""
        look, g = self.look, self.look.glyphs
        parts: list[str | tuple[str, str]] = [(plain(a.doing, 60), "")]
        if a.total > 0:
            bar = 10 if width < 110 else 20
            full = round(min(a.done, a.total) / a.total * bar)
            parts += ["  ", (g.full * full, look("good")), (g.empty * (bar - full), look("faint"))]
            parts.append((f" {_amount(a.done, a.total, a.unit)}", look("muted")))
        elif a.done:
            parts.append((f"  {a.done:,} {plain(a.unit, 20)}", look("muted")))
        clock = time.strftime("%H:%M:%S", time.localtime(a.since))  # a duration would have to tick
        for there, text, role, least in (
            (a.accepted, f"{a.accepted} accepted", "good", room),
            (a.tokens_per_second, f"{a.tokens_per_second:,.0f} tokens/s", "muted", room),
            (a.detail, plain(a.detail, 120), "muted", 21),  # words may be cut
            (a.since, f"since {clock}", "muted", room),
        ):
            if there and min(len(text) + 3, least) <= room - line(*parts).cell_length:
                parts.append((f" {g.dot} {text}", look(role)))
        return parts


def _amount(done: int, total: int, unit: str) -> str:
    if unit == "bytes":
        return f"{done / 1e6:,.0f} of {total / 1e6:,.0f} MB"
    return f"{done:,} of {total:,} {plain(unit, 20)}"


def _limit_of(state: RunState) -> int | None:
    """The round at which a fixed phase ends; a patience phase has no such number."""
    if state.current_phase is None or state.settings is None or state.settings.rule != "fixed":
        return None
    return switching.decide(state).most


def waiting_for(state: RunState) -> list[Candidate]:
    """Candidates that wait for a person."""
    if state.settings is None or state.phase != "harness" or state.status in ("finished", "stopped"):
        return []
    if state.settings.approval == "before-eval":
        return [c for c in state.undecided() if c.checked and not c.decided and c.proposer != "person"]
    if state.settings.approval == "before-accept":
        leader = next(iter(state.ranking()), None)
        undecided = leader and not leader.confirmed and leader.outcome != "accepted" and leader.proposer != "person"
        if leader is not None and undecided and leader.id != state.harness:
            return [leader]
    return []


class Success(Pane):
    NAME = "success rate"

    def snapshot(self, view: View) -> Any:
        s = view.state
        points = tuple((p.x, p.kind, p.phase, p.value, p.window, p.label) for p in s.points)
        window = s.settings.weight_window if s.settings else 1
        batches = [p.batch for p in s.points if p.batch is not None]
        episodes = sum(b.episodes for b in batches)
        shares = (sum(b.truncated for b in batches), sum(b.invalid for b in batches), episodes)
        newest = next((p for p in reversed(s.points) if p.kind == "step"), None)
        solved = (newest.batch.solved, newest.batch.tasks) if newest and newest.batch else (0, 0)
        return (points, window, max(0, len(s.accepted) - 1), shares, solved, _best_words(s))

    def draw(self, snap: Any, width: int, height: int) -> tuple[Sequence[Content], Sequence[Content]]:
        from whale_tui.loop.state import Point

        points, window, accepted, (truncated, invalid, episodes), (solved, tasks), best = snap
        dot = f" {self.look.glyphs.dot} "
        facts = [f"{accepted} accepted"] if accepted else []
        if tasks:
            facts.append(f"step solved {solved} of {tasks}")
        if episodes:
            facts += [f"{truncated / episodes:.0%} truncated", f"{invalid / episodes:.1%} invalid"]
        self.note(dot.join(facts))
        self.name_it(f"success rate{dot}{best}" if best and width > 60 else "success rate")
        made = [Point(x=x, kind=k, phase=p, value=v, window=w, label=label) for x, k, p, v, w, label in points]
        return chart.draw(made, window, width, height, self.look), ()


def _best_words(state: RunState) -> str:
    best = state.best
    return f"best test {best.mean:.1%} [{best.low:.0%}, {best.high:.0%}] {best.policy} {best.harness}" if best else ""


class Patience(Pane):
    NAME = "patience"

    def snapshot(self, view: View) -> Any:
        s = view.state
        decision = switching.decide(s) if s.current_phase is not None and s.settings is not None else None
        last = s.phases[-1] if s.phases else None
        settings = astuple(s.settings) if s.settings else ()
        return (
            decision,
            s.phase,
            last and (last.phase, last.ended),
            settings,
            s.switch,
            s.switch_by,
            s.pinned,
            limiting(s) if s.phases else None,
        )

    def draw(self, snap: Any, width: int, height: int) -> tuple[Sequence[Content], Sequence[Content]]:
        decision, phase, last, packed, switch, switch_by, pinned, limit = snap
        look, out = self.look, []
        if decision is None:
            self.name_it("patience")
            if last:
                out += self.wrapped(line((f"the {last[0]} phase ended: ", look("muted")), plain(last[1], 400)), width)
                if limit is not None:
                    out += [Content(""), *self.wrapped(line((f"{limit.half}: ", look("title")), limit.words), width)]
            else:
                out.append(line(("no phase is running yet", look("muted"))))
        else:
            self.name_it(f"patience {look.glyphs.dot} {phase} phase")
            out += self._counters(decision, phase, width)
            words = self.wrapped(line((plain(decision.words, 400), "")), width)
            out += ([Content("")] if height >= len(out) + len(words) + 2 else []) + words
        if switch:
            when = "now" if switch == "now" else "at the next safe point"
            out.append(line((f"{plain(switch_by, 20)} asked to switch {when}", look("warning"))))
        if pinned:
            out.append(line((f"{look.glyphs.pin} {pinned} is pinned: nothing else is accepted", look("pinned"))))
        if limit is not None:
            self.note(limit.told(width, look.glyphs.dot))
        if packed and height > len(out):
            s = r.Settings(*packed)
            rule = f"E {s.epochs:g}, I {s.iterations}" if s.rule == "fixed" else s.rule
            foot = cut(line((f"rule {rule}   M {s.candidates}   approval {s.approval}", look("muted"))), width)
            out += [Content("")] * max(0, height - len(out) - 1) + [foot]
        return out, ()

    def _counters(self, d: switching.Decision, phase: str, width: int) -> list[Content]:
        look, unit = self.look, "step" if phase == "weight" else "iteration"
        out = []
        if d.since_best is not None and d.patience:
            low = d.done >= d.minimum and d.patience - d.since_best <= 1
            role = "patience-low" if low else "patience-ok"
            out.append(self._counter("since best", d.since_best, d.patience, role, width))
            out.append(self._counter("minimum", min(d.done, d.minimum), d.minimum, "patience-ok", width))
        else:
            out.append(self._counter(f"{unit}s", d.done, d.minimum, "patience-ok", width))
        if d.most is not None and d.most != d.minimum:
            out.append(self._counter("cap", d.done, d.most, "muted", width))
        if d.best is not None:
            where = (f" at {unit} {d.best_at}", look("muted"))
            out.append(line((fit("best", 12), look("muted")), (percent(d.best), look("best")), where))
        return out

    def _counter(self, name: str, done: int, of: int, role: str, width: int) -> Content:
        g, look = self.look.glyphs, self.look
        room = min(of, max(0, width - 24), 24)
        full = round(min(done, of) / of * room) if of else 0
        note = "  !" if role == "patience-low" else ""
        return line(
            (fit(name, 12), look("muted")), (fit(f"{done} / {of}", 9), look(role)),
            (g.full * full, look(role)), (g.empty * (room - full), look("faint")), (note, look(role)),
        )  # fmt: skip


BESIDE_WIDTH = 64
"""Columns under which a side-by-side diff is shown unified: a column of code would be too narrow to read."""


class Harness(Pane):
    """The current source with the last accepted change marked, or the diff of the candidate under the cursor."""

    NAME = "harness"

    def __init__(self, look: Look, id: str | None = None) -> None:
        super().__init__(look, id=id)
        self.hunks: list[int] = []
        self.session: Session | None = None

    def snapshot(self, view: View) -> Any:
        s = view.state
        self.session, coloured = view.session, code.is_warm()
        if view.diff and view.candidate in s.harnesses:
            c = s.harnesses[view.candidate]
            return ("diff", c.id, c.parent or "h0000", view.beside, card_of(s, c), coloured)
        previous = s.accepted[-2] if len(s.accepted) > 1 and s.accepted[-1] == s.harness else ""
        parent = previous or (s.harnesses[s.harness].parent if s.harness in s.harnesses else "")
        return ("source", s.harness, parent, False, (), coloured)

    def draw(self, snap: Any, width: int, height: int) -> tuple[Sequence[Content], Sequence[Content]]:
        mode, name, parent, beside, card = snap[:5]
        beside = beside and width >= BESIDE_WIDTH
        dot, session = self.look.glyphs.dot, self.session
        self.note("")
        if not name or session is None:
            return [line(("no harness yet", self.look("muted")))], ()
        source = session.source(name)
        if mode == "source":
            changed = changed_lines(session.source(parent), source) if parent else set()
            self.name_it(f"harness {dot} {name}")
            if changed:
                self.note(f"{self.look.glyphs.gutter}+ changed from {parent}")
            return code.source_lines(source, changed, self.look), ()
        how = "side by side" if beside else "unified"
        self.name_it(f"diff {dot} {name} against {parent} {dot} {how}")
        head = self.head(snap, width)
        body, starts = (
            code.side_by_side_lines(session.source(parent), source, width, self.look) if beside
            else code.diff_lines(session.source(parent), source, self.look)
        )  # fmt: skip
        self.hunks = [len(head) + 1 + n for n in starts]
        self.note(f"{len(starts)} hunk{'' if len(starts) == 1 else 's'} {dot} ] next  [ previous")
        result = result_lines(card, width, self.look)
        return [*head, Content(""), *body, *([Content(""), *result] if result else [])], ()

    def head(self, snap: Any, width: int) -> list[Content]:
        """What stands above a diff."""
        return card_lines(snap[4], width, self.look, result=False)

    def offer(self, view: View) -> None:
        before = self.snap
        super().offer(view)
        if before is not None and before[:2] != self.snap[:2]:
            self.scroll_to(y=0, animate=False, immediate=True, force=True)

    def to_hunk(self, direction: int) -> None:
        """Put the next hunk's first line on top; the last stays where there is no further one."""
        here = self.scroll_offset.y
        ahead = [n for n in self.hunks if n > here] if direction > 0 else [n for n in reversed(self.hunks) if n < here]
        if ahead:
            self.scroll_to(y=ahead[0], animate=False, immediate=True, force=True)


def card_of(state: RunState, c: Candidate) -> tuple[Any, ...]:
    """A candidate's facts as a comparable value, in the order that `card_lines` reads them."""
    mean, under = compare.newest_mean(state, c)
    parent = state.harnesses.get(c.parent)
    parent_mean = compare.newest_mean(state, parent)[0] if parent else None
    return (
        c.id, c.parent, c.hypothesis, c.proposer, c.cycle, c.iteration, c.checked, tuple(c.warnings), c.outcome,
        c.reason, c.decided, c.decided_by, mean, under, parent_mean, compare.against_parent(state, c),
        tuple(c.also_from), c.held_out(state.policy_hash) if state.policy else None,
    )  # fmt: skip


def card_lines(card: tuple[Any, ...], width: int, look: Look, result: bool = True) -> list[Content]:
    """Hypothesis, author, checks, decision, and (with `result`) the score against the parent."""
    (_, parent, hypothesis, proposer, cycle, iteration, checked, warnings, outcome, reason, decided, by, *_rest) = card
    out = line((plain(hypothesis, 400) or "no hypothesis", look("title"))).wrap(max(1, width))
    also = f" and {', '.join(card[16])}" if card[16] else ""
    where = (
        f"by {plain(proposer, 40)} from {parent}{also}, cycle {cycle}, iteration {iteration}"
        if proposer
        else "the base"
    )
    out.append(line((where, look("muted"))))
    if outcome == "invalid":
        text = line((f"{look.glyphs.no} fails the checks: ", look("bad")), (plain(reason, 400), ""))
    elif checked:
        text = line((f"{look.glyphs.yes} passes the checks", look("good")))
    else:
        text = line((f"{look.glyphs.off} not checked yet", look("muted")))
    out += text.wrap(max(1, width))
    for warning in warnings:
        out += line(("! ", look("warning")), (plain(warning, 300), look("warning"))).wrap(max(1, width))
    if outcome == "vetoed":
        out += line((f"{look.glyphs.no} vetoed by {plain(by, 40)}: ", look("bad")), plain(reason, 600)).wrap(
            max(1, width)
        )
        out.append(line(("  the reason goes to the next proposal", look("muted"))))
    elif decided == "approved":
        out.append(line((f"{look.glyphs.yes} approved by {plain(by, 40)}", look("good"))))
    if outcome == "rejected":
        out += line((f"{look.glyphs.no} ", look("muted")), plain(reason, 600)).wrap(max(1, width))
    if outcome in ("crash", "timeout", "infra"):
        out += line((f"{look.glyphs.no} {outcome}: ", look("bad")), plain(reason, 600)).wrap(max(1, width))
    return out + (result_lines(card, width, look) if result else [])


def result_lines(card: tuple[Any, ...], width: int, look: Look) -> list[Content]:
    """Score beside the parent's: tasks won and lost, difference with its interval."""
    parent, mean, under, parent_mean, c = card[1], card[12], card[13], card[14], card[15]
    if mean is None:
        return []
    out = [line(("result  ", look("muted")), (percent(mean), look("title")), (f" under {under}", look("muted")))]
    if card[17] is not None:
        out.append(line(("held out ", look("muted")), (percent(card[17]), ""), ("  decides nothing", look("muted"))))
    if c is not None:
        role = "good" if c.low > 0 else "bad" if c.high < 0 else "muted"
        minus = look.glyphs.minus
        out.append(
            line(
                ("parent  ", look("muted")), (percent(parent_mean), ""), (f" {parent}", look("muted")),
                (f"   {points(c.difference, minus)} points", look(role)),
                (f" [{points(c.low, minus)}, {points(c.high, minus)}]", look("muted")),
            )
        )  # fmt: skip
        out.append(
            line(
                ("tasks   ", look("muted")), (f"{c.won} won  ", look("good")), (f"{c.lost} lost", look("bad")),
                (f"  {c.tied} the same", look("muted")),
            )
        )  # fmt: skip
    return [row for content in out for row in content.wrap(max(1, width))]


class Candidates(Pane):
    """The archive, newest first (or best first)."""

    NAME = "candidates"

    def __init__(self, look: Look, id: str | None = None) -> None:
        super().__init__(look, choosable=True, id=id)
        self.ids: list[str] = []
        self.ordered: list[tuple[Any, ...]] = []
        self.best_first = False
        self._seq = -1
        self._rows: tuple[Any, ...] = ()
        self._compared: compare.Compared = {}

    @property
    def under_cursor(self) -> str:
        return self.ids[self.cursor] if self.cursor < len(self.ids) else ""

    def snapshot(self, view: View) -> Any:
        s = view.state
        if s.seq != self._seq:
            waiting = {c.id for c in waiting_for(s)}
            self._seq, self._rows = s.seq, tuple(self._row(s, c, c.id in waiting) for c in s.harnesses.values())
        self.order(self._rows, self.best_first)
        return (self._rows, s.harness, s.pinned, self.best_first)

    def order(self, rows: Sequence[tuple[Any, ...]], best_first: bool) -> None:
        """Sort, and leave the cursor on the candidate that it was on."""
        kept = self.under_cursor
        ordered = sorted(rows, key=lambda row: row[3] if row[3] is not None else -1.0) if best_first else list(rows)
        self.ordered = ordered[::-1]
        self.ids = [row[0] for row in self.ordered]
        if kept in self.ids:
            self.set_reactive(Candidates.cursor, self.ids.index(kept))

    def _row(self, s: RunState, c: Candidate, waits: bool) -> tuple[Any, ...]:
        mean, under = compare.newest_mean(s, c)
        status = (
            "waiting" if waits else c.outcome or ("approved" if c.decided else "checked" if c.checked else "proposed")
        )
        against = compare.against_parent(s, c, self._compared)
        return (
            c.id,
            c.parent,
            status,
            mean,
            under == s.policy,
            against,
            c.cycle,
            c.iteration,
            plain(c.hypothesis, 200),
            c.held_out(s.policy_hash) if s.policy else None,
        )

    def draw(self, snap: Any, width: int, height: int) -> tuple[Sequence[Content], Sequence[Content]]:
        rows, current, pinned, best_first = snap
        dot = self.look.glyphs.dot
        self.name_it(f"candidates {dot} {len(rows)}" + (f" {dot} best first" if best_first else ""))
        wide = width >= 84
        head = [
            ("  id", 7, "", False),
            ("outcome", 10, "", False),
            ("score", 7, "", True),
            (f"{'points':>6}", 6, "", True),
        ]
        held = any(row[9] is not None for row in rows)
        head[3:3] = [("held", 6, "", True)] if held else []
        head += [("95% interval", 15, "", False), ("from", 5, "", False), ("cycle", 5, "", False)] if wide else []
        head.append(("hypothesis", 40, "", False))
        header = [code.columns([(t, w, self.look("muted"), right) for t, w, _, right in head])]
        best = max((row[3] for row in rows if row[3] is not None and row[4]), default=None)
        return [self._line(row, current, pinned, best, wide, width, held) for row in self.ordered], header

    def _line(
        self, row: tuple[Any, ...], current: str, pinned: str, best: float | None, wide: bool, width: int, held: bool
    ) -> Content:
        name, parent, status, mean, is_now, c, cycle, iteration, hypothesis, held_out = row
        look, g = self.look, self.look.glyphs
        role = {"accepted": "accepted", "scored": "muted", "waiting": "warning"}.get(status, "bad")
        role = "muted" if status in ("approved", "checked", "proposed", "rejected") else role
        mark = g.pin if name == pinned else g.accepted if name == current else " "
        style = look("pinned") if name == pinned else look("accepted")
        score = look("best") if is_now and mean is not None and mean == best else "" if is_now else look("faint")
        gap, interval, gap_role = "", "", "muted"
        if c is not None:
            gap = points(c.difference, g.minus)
            interval = f"[{points(c.low, g.minus)}, {points(c.high, g.minus)}]"
            gap_role = "good" if c.low > 0 else "bad" if c.high < 0 else "muted"
        cells = [
            (name, 5, "bold" if name == current else "", False),
            (f"{_outcome_glyph(status, g)} {status}", 10, look(role), False),
            (percent(mean), 7, score, True), *([(percent(held_out), 6, look("muted"), True)] if held else []),
            (gap, 6, look(gap_role), True),
        ]  # fmt: skip
        if wide:
            cells += [(interval, 15, look("muted"), False), (parent, 5, look("muted"), False)]
            cells.append((f"{cycle}.{iteration}" if parent else "", 5, look("muted"), False))
        used = 2 + sum(w + 2 for _, w, _, _ in cells)
        cells.append((hypothesis, max(1, width - used), "" if status != "vetoed" else look("muted"), False))
        return Content("").join([line((f"{mark} ", style)), code.columns(cells)])


def _outcome_glyph(status: str, g: Glyphs) -> str:
    marks = {"accepted": g.accepted, "scored": g.on, "waiting": "?", "approved": g.yes, "checked": g.off}
    return marks.get(status, g.off if status == "proposed" else g.no)


class Events(Pane):
    NAME = "events"

    def __init__(self, look: Look, id: str | None = None) -> None:
        super().__init__(look, id=id)
        self.follow_end = True

    def snapshot(self, view: View) -> Any:
        events, client = view.session.events, view.session.client
        says = tuple(client.activity.tail) if client.live and client.activity is not None else ()
        return (events[0][0] if events else 0, events[-1][0] if events else 0, view.session, says)

    def draw(self, snap: Any, width: int, height: int) -> tuple[Sequence[Content], Sequence[Content]]:
        session = snap[2]
        self.name_it(f"events {self.look.glyphs.dot} {snap[1]:,}" if snap[1] else "events")
        happened = [self._line(event) for _, event in session.events]
        says = [line(("  ", ""), (plain(text, 300), self.look("muted"))) for text in snap[3]]  # a proposer's session
        return happened + says or [line(("nothing yet", self.look("muted")))], ()

    def _line(self, event: r.AnyEvent) -> Content:
        look = self.look
        role = {
            r.Failure: "failure", r.Warned: "warning", r.HarnessAccepted: "accepted", r.CommandTaken: "key",
            r.TestScored: "test", r.RunFinished: "title", r.Paused: "warning",
        }.get(type(event), "")  # fmt: skip
        style = look(role) if role else ""
        if isinstance(event, r.PhaseStarted):
            style = look.phase(event.phase)
        if isinstance(event, r.CandidateOutcome | r.CandidateChecked) and not getattr(event, "ok", False):
            style = look("bad")
        if isinstance(event, r.VersionPublished | r.StepSampled | r.CandidateProposed | r.ProposalsIn):
            style = look("muted")
        clock = time.strftime("%H:%M:%S", time.localtime(event.at))
        return line((f"{clock} ", look("faint")), (plain(words(event), 500), style))
