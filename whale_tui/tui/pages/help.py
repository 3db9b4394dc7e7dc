"""Help, from the action registry: what can be done, on which page, by which key, and what it sends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from textual.app import ComposeResult
from textual.content import Content

from whale_tui.tui.actions import ACTIONS, PAGES, show_key
from whale_tui.tui.page import Page
from whale_tui.tui.panes import Pane, View
from whale_tui.tui.plain import fit, line

TITLES = {
    "run": "the run", "candidate": "candidates", "harness": "the harness", "pair": "pairs", "episodes": "episodes",
    "home": "Home", "play": "play", "view": "what is in view", "go": "pages",
}  # fmt: skip

CLOSING = (
    "Leaving with q never stops a run: its engine goes on, and `whale-tui attach RUN` comes back to it.",
    "Every control is also a command: `whale-tui ctl RUN pause`, `... veto h0003 'reads the clock'`, and so on.",
    'Keys can be changed in config.toml of the config folder, e.g. [keys] "run: pause" = "f5".',
    "With --ascii, --no-mouse or NO_COLOR the same things are said without those means.",
)


class Text(Pane):
    NAME = "help"

    def __init__(self, look: Any, keys: dict[str, str], id: str | None = None) -> None:
        super().__init__(look, id=id)
        self.keys, self.snap = keys, ()

    def snapshot(self, view: View) -> Any:
        return ()

    def draw(self, snap: Any, width: int, height: int) -> tuple[Sequence[Content], Sequence[Content]]:
        look = self.look
        out: list[Content] = []
        for group in dict.fromkeys(action.group for action in ACTIONS):
            out += (
                [Content(""), line((TITLES.get(group, group), look("title")))]
                if out
                else [line((TITLES.get(group, group), look("title")))]
            )
            for action in (a for a in ACTIONS if a.group == group):
                key = show_key(self.keys.get(action.id, action.key))
                where = "" if action.pages == PAGES or len(action.pages) > 4 else f"  ({', '.join(action.pages)})"
                sends = f"  ctl {action.command}" if action.command else ""
                names = 36 if width >= 72 else 0
                head = line(("  ", ""), (fit(key, 8), look("key")), (fit(action.name, 26), ""))
                told = line((action.help, look("muted")), (where, look("faint")), (sends, look("faint")))
                rows = told.wrap(max(1, width - (names or 10)))
                if not names:
                    out.append(head)
                    head = Content("")
                indent = Content(" " * (names or 10))
                for n, row in enumerate(rows):
                    out.append(Content("").join([head if n == 0 and names else indent, row]))
        out.append(Content(""))
        for text in CLOSING:
            out += line((text, look("muted"))).wrap(max(1, width))
        out += [Content(""), *self._marks(width)]
        return out, ()

    def _marks(self, width: int) -> list[Content]:
        g, look = self.look.glyphs, self.look
        marks = (
            (g.raw, look.phase("weight"), "a step's success rate"),
            (g.iteration, look.phase("harness"), "an iteration's best"),
            (g.accepted, look("accepted"), "an accepted harness"), (g.test, look("test"), "a test"),
            (g.switch, look("switch"), "a switch of phase"), (g.pin, look("pinned"), "pinned"),
        )  # fmt: skip
        parts = [piece for mark, style, text in marks for piece in ((mark, style), (f" {text}   ", look("muted")))]
        return [line(("marks", look("title"))), *line(*parts).wrap(max(1, width))]


class HelpPage(Page):
    NAME: ClassVar[str] = "help"

    def body(self) -> ComposeResult:
        yield Text(self.look, self.app.keys, id="text")

    def on_mount(self) -> None:
        self.query_one(Text).focus()
        super().on_mount()
