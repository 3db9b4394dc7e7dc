"""The Ledger: what was spent, by phase and purpose, and what each half gained for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from msgspec.structs import astuple
from textual.app import ComposeResult
from textual.content import Content

from whale_tui.loop.limiting import limiting
from whale_tui.loop.state import PhaseRecord, RunState, Spend
from whale_tui.tui import code, compare
from whale_tui.tui.compare import count, duration, percent
from whale_tui.tui.page import Page
from whale_tui.tui.panes import Pane, View
from whale_tui.tui.plain import line

COLUMNS = ("episodes", "calls", "prompt", "sampled", "time", "dollars")


class Spent(Pane):
    NAME = "spent"

    def snapshot(self, view: View) -> Any:
        return tuple((key, astuple(spend)) for key, spend in view.state.ledger.items())

    def draw(self, snap: Any, width: int, height: int) -> tuple[Sequence[Content], Sequence[Content]]:
        look = self.look
        if not snap:
            return [line(("nothing has been spent yet", look("muted")))], ()
        shown = COLUMNS if width >= 78 else ("episodes", "sampled", "time", "dollars")
        header = code.columns(
            [("phase", 8, look("muted"), False), ("purpose", 9, look("muted"), False)]
            + [(name, 10, look("muted"), True) for name in shown]
        )
        rows = [self._row(key, Spend(*values), shown) for key, values in snap]
        total = Spend(*(sum(column) for column in zip(*(values for _, values in snap), strict=True)))
        rule = line((look.glyphs.rule * min(width, 19 + 12 * len(shown)), look("faint")))
        saved = line((f"early rejection saved {count(total.saved)} episodes", look("muted")))
        return [*rows, rule, self._row("all/", total, shown), *([saved] if total.saved else [])], [header]

    def _row(self, key: str, spend: Spend, shown: Sequence[str]) -> Content:
        phase, _, purpose = key.partition("/")
        look = self.look
        style = look.phase(phase) if phase in ("weight", "harness") else look("title")
        values = {
            "episodes": count(spend.episodes), "calls": count(spend.calls), "prompt": count(spend.prompt_tokens),
            "sampled": count(spend.output_tokens), "time": duration(spend.seconds),
            "dollars": f"{spend.dollars:.2f}" if spend.dollars else "",
        }  # fmt: skip
        cells = [(phase, 8, style, False), (purpose, 9, "", False)]
        return code.columns([*cells, *((values[name] if values[name] != "0" else "", 10, "", True) for name in shown)])


class Gains(Pane):
    """Each phase: where its signal began and ended, and how many episodes a point cost."""

    NAME = "cost per point gained"

    def snapshot(self, view: View) -> Any:
        s = view.state
        return tuple(_phase_row(s, phase) for phase in s.phases), limiting(s)

    def draw(self, snap: Any, width: int, height: int) -> tuple[Sequence[Content], Sequence[Content]]:
        look = self.look
        snap, limit = snap
        self.note(limit.told(width, look.glyphs.dot))
        if not snap:
            return [line(("no phase has run yet", look("muted")))], ()
        head = [("phase", 12, False), ("rounds", 6, True), ("began", 7, True), ("ended", 7, True), ("points", 7, True)]
        head += [("episodes", 9, True), ("a point", 9, True)]
        header = code.columns([(text, w, look("muted"), right) for text, w, right in head])
        rows = [self._row(row) for row in snap]
        halves = [self._half(half, [row for row in snap if row[1] == half]) for half in ("weight", "harness")]
        note = line(
            (
                "weight: mean of the first and of the last window of steps; harness: best archive score; "
                "a point: episodes for one percentage point",
                look("muted"),
            )
        )
        told = line((f"{limit.half}: ", look("title")), limit.words).wrap(max(1, width))
        return [
            *rows,
            Content(""),
            *(h for h in halves if h),
            Content(""),
            *told,
            Content(""),
            *note.wrap(max(1, width)),
        ], [header]

    def _row(self, row: tuple[Any, ...]) -> Content:
        cycle, phase, rounds, began, ended, episodes = row
        look = self.look
        gain = None if began is None or ended is None else (ended - began) * 100
        cost = count(episodes / gain) if gain and gain > 0 else ""
        points = "" if gain is None else compare.points(gain / 100, look.glyphs.minus)
        style = look("good" if gain and gain > 0 else "muted")
        return code.columns(
            [
                (f"{phase} {cycle}", 12, look.phase(phase), False), (str(rounds), 6, "", True),
                (percent(began), 7, "", True), (percent(ended), 7, "", True), (points, 7, style, True),
                (count(episodes), 9, "", True), (cost, 9, look("title"), True),
            ]
        )  # fmt: skip

    def _half(self, half: str, rows: list[tuple[Any, ...]]) -> Content | None:
        gains = [(r[4] - r[3]) * 100 for r in rows if r[3] is not None and r[4] is not None]
        episodes = sum(r[5] for r in rows)
        if not gains or not episodes:
            return None
        look = self.look
        rate = sum(gains) / episodes * 1000
        words = f"{compare.points(rate / 100, look.glyphs.minus)} points for 1,000 episodes over {len(rows)} phase"
        return line((f"{half} ", look.phase(half)), (words + ("" if len(rows) == 1 else "s"), ""))


def _phase_row(state: RunState, phase: PhaseRecord) -> tuple[Any, ...]:
    values = [v for v in phase.signal if v is not None]
    window = min(len(values), state.settings.weight_window if state.settings and phase.phase == "weight" else 1)
    began = sum(values[:window]) / window if window else None
    ended = sum(values[-window:]) / window if window else None
    episodes = phase.episodes or state.budget_used - phase.episodes_before
    return (phase.cycle, phase.phase, len(phase.signal), began, ended, episodes)


class LedgerPage(Page):
    NAME: ClassVar[str] = "ledger"

    def body(self) -> ComposeResult:
        yield Spent(self.look, id="spent")
        yield Gains(self.look, id="gains")

    def on_mount(self) -> None:
        self.query_one(Spent).focus()
        super().on_mount()
