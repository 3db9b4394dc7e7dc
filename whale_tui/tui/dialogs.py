"""Small questions over a page: yes or no, a line of text, one of a list. Escape always leaves."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.events import Key
from textual.screen import ModalScreen
from textual.widgets import Input, Static

from whale_tui.tui.lines import Lines
from whale_tui.tui.look import Look
from whale_tui.tui.plain import cut, fit, line

GRACE = 0.5
"""Seconds in which a prompt that has just appeared takes no key."""


class Confirm(ModalScreen[bool]):
    """A question that one named key answers with yes. Enter is not that key."""

    def __init__(self, title: str, text: str, key: str, verb: str, look: Look) -> None:
        super().__init__()
        self.question, self.text, self.key, self.verb, self.look = title, text, key, verb, look
        self.since = time.monotonic()

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog") as box:
            box.border_title = Content(self.question)
            yield Static(line(self.text))
            look = self.look
            yield Static(
                line((self.key, look("key")), f" {self.verb}    ", ("esc", look("key")), " leave it"), classes="keys"
            )

    def on_mount(self) -> None:
        self.since = time.monotonic()

    def on_key(self, event: Key) -> None:
        event.stop()
        if time.monotonic() - self.since < GRACE:
            return
        if event.key == "escape" or event.character == "n":
            self.dismiss(False)
        elif event.character == self.key:
            self.dismiss(True)


class Ask(ModalScreen[str | None]):
    """One line of text. Enter submits it; empty text is no answer."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "dismiss(None)", show=False)]

    def __init__(self, title: str, hint: str, look: Look, value: str = "") -> None:
        super().__init__()
        self.question, self.hint, self.value, self.look = title, hint, value, look

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog") as box:
            box.border_title = Content(self.question)
            yield Static(line((self.hint, self.look("muted"))))
            entry = Input(value=self.value, select_on_focus=False)
            entry.cursor_blink = False
            yield entry
            keys = (("enter", self.look("key")), " submit    ", ("esc", self.look("key")), " leave it")
            yield Static(line(*keys), classes="keys")

    def on_input_submitted(self, event: Input.Submitted) -> None:
        event.stop()
        if event.value.strip():
            self.dismiss(event.value.strip())


class Pick(ModalScreen[int | None]):
    """One of a list, narrowed by typing. `preview` hears of each row that the cursor comes to."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "dismiss(None)", show=False),
        Binding("down", "move(1)", show=False, priority=True),
        Binding("up", "move(-1)", show=False, priority=True),
        Binding("pagedown", "move(10)", show=False, priority=True),
        Binding("pageup", "move(-10)", show=False, priority=True),
        Binding("enter", "take", show=False, priority=True),
    ]

    def __init__(
        self, title: str, items: Sequence[tuple[str, str, str]], look: Look, start: int = 0,
        preview: Callable[[int | None], None] | None = None,
    ) -> None:  # fmt: skip
        """`items`: (name, key or note at the right, help)."""
        super().__init__()
        self.question, self.items, self.look, self.start, self.preview = title, items, look, start, preview
        self.shown: list[int] = list(range(len(items)))

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog pick") as box:
            box.border_title = Content(self.question)
            entry = Input(placeholder="type to narrow")
            entry.cursor_blink = False
            yield entry
            yield Lines(choosable=True, cursor_style=self.look("cursor"))

    def on_mount(self) -> None:
        lines = self.query_one(Lines)
        lines.can_focus = False
        lines.styles.height = max(1, len(self.items))
        self.call_after_refresh(self._first)

    def _first(self) -> None:
        self._fill()
        self.query_one(Lines).cursor = self.start

    def on_resize(self) -> None:
        self.call_after_refresh(self._fill)

    def on_input_changed(self, event: Input.Changed) -> None:
        wanted = event.value.casefold().split()
        self.shown = [
            n for n, item in enumerate(self.items) if all(word in " ".join(item).casefold() for word in wanted)
        ]
        self._fill()
        self.query_one(Lines).cursor = 0
        self._tell()

    def on_lines_moved(self, event: Lines.Moved) -> None:
        self._fill()
        self._tell()

    def on_lines_chosen(self, event: Lines.Chosen) -> None:
        self.action_take()

    def action_move(self, by: int) -> None:
        self.query_one(Lines).action_move(by)

    def action_take(self) -> None:
        row = self.query_one(Lines).cursor
        self.dismiss(self.shown[row] if row < len(self.shown) else None)

    def _tell(self) -> None:
        if self.preview is not None:
            lines = self.query_one(Lines)
            self.preview(self.shown[lines.cursor] if lines.cursor < len(self.shown) else None)
            self.look = getattr(self.app, "look", self.look)  # the preview may have changed it
            lines.cursor_style = self.look("cursor")
            self._fill()

    def _fill(self) -> None:
        lines = self.query_one(Lines)
        width = lines.size.width
        names = min(max((len(name) for name, _, _ in self.items), default=0), max(12, width // 2))
        notes = max((len(note) for _, note, _ in self.items), default=0)
        look = self.look
        rows: list[Content] = []
        for row, n in enumerate(self.shown):
            name, note, text = self.items[n]
            mark = look.glyphs.cursor if row == lines.cursor else " "
            style = look("title") if row == lines.cursor else ""
            content = line(
                (f"{mark} ", look("key")), (fit(name, names), style), "  ", (fit(note, notes), look("key")), "  ",
                (text, look("muted")),
            )  # fmt: skip
            rows.append(cut(content, max(1, width)))
        lines.show(rows)


class Jump(ModalScreen[int | None]):
    """Letters on the panes; one key goes to a pane."""

    LETTERS = "asdfghjkl"

    def __init__(self, places: Sequence[tuple[int, int]], look: Look) -> None:
        super().__init__()
        self.places, self.look = places, look

    def compose(self) -> ComposeResult:
        for letter, (x, y) in zip(self.LETTERS, self.places, strict=False):
            label = Static(line((f" {letter} ", "reverse bold")), classes="jump")
            label.styles.offset = (x, y)
            yield label

    def on_key(self, event: Key) -> None:
        event.stop()
        at = self.LETTERS.find(event.character or " ")
        self.dismiss(at if 0 <= at < len(self.places) else None)
