"""What every page has: status lines on top, answer line and key bar at the bottom, and the keys of its actions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from textual.app import ComposeResult
from textual.binding import Binding
from textual.content import Content
from textual.events import Resize
from textual.screen import Screen
from textual.widget import Widget

from whale_tui.tui.actions import Action, Context, available, show_key
from whale_tui.tui.lines import Lines
from whale_tui.tui.look import Look
from whale_tui.tui.panes import Pane, Status, View
from whale_tui.tui.plain import line, plain, sides

if TYPE_CHECKING:
    from whale_tui.tui.app import WhaleApp


NARROW = (100, 28)
"""Under this many columns or rows panes become tabs, or stand above each other."""

ALWAYS = ("help", "palette", "quit")
"""Words of the key bar that stay in sight however narrow it is."""


class Answer(Widget):
    """The last answer to a control: what it did, or will do and when, and who asked."""

    def __init__(self, look: Look) -> None:
        super().__init__(id="answer")
        self.look = look
        self.said: tuple[bool, str, str, str] | None = None

    def say(self, ok: bool, what: str, text: str, who: str = "") -> None:
        self.said = (ok, what, text, who)
        self.refresh()

    def restyle(self, look: Look) -> None:
        self.look = look
        self.refresh()

    def render(self) -> Content:
        look = self.look
        if self.said is None:
            return Content("")
        ok, what, text, who = self.said
        mark = (f"{look.glyphs.yes if ok else look.glyphs.no} ", look("good" if ok else "bad"))
        left = line(mark, (f"{plain(what, 60)}: " if what else "", look("title")), (plain(text, 500), ""))
        return sides(left, line((plain(who, 60), look("muted"))), self.size.width)


class KeyBar(Widget):
    """The page's main keys, from the registry."""

    def __init__(self, look: Look, page: str) -> None:
        super().__init__(id="keys")
        self.look, self.page = look, page
        self.snap: tuple[tuple[str, str], ...] = ()

    def offer(self, keys: tuple[tuple[str, str], ...]) -> None:
        if keys != self.snap:
            self.snap = keys
            self.refresh()

    def restyle(self, look: Look) -> None:
        self.look = look
        self.refresh()

    def render(self) -> Content:
        always = [pair for pair in self.snap if pair[1] in ALWAYS]
        right = self._keys(always, self.size.width)
        left = self._keys([p for p in self.snap if p not in always], self.size.width - right.cell_length - 2)
        return sides(left, right, self.size.width)

    def _keys(self, pairs: Sequence[tuple[str, str]], width: int) -> Content:
        """As many as fit."""
        parts: list[str | tuple[str, str]] = []
        length = 0
        for key, word in pairs:
            length += len(key) + len(word) + 3
            if length - 2 > width:
                break
            parts += ["  " if parts else "", (key, self.look("key")), (f" {word}", self.look("muted"))]
        return line(*parts)


class Page(Screen[None]):
    """One full screen. `NAME` is its name in the registry."""

    NAME: ClassVar[str] = ""
    app: WhaleApp

    def __init__(self, look: Look) -> None:
        super().__init__()
        self.look = look

    def body(self) -> ComposeResult:
        raise NotImplementedError

    def compose(self) -> ComposeResult:
        yield Status(self.look, id="status")
        yield from self.body()
        yield Answer(self.look)
        yield KeyBar(self.look, self.NAME)

    def on_mount(self) -> None:
        for action in available(self.NAME):
            binding = Binding(action.key, f"app.do('{action.id}')", action.name, id=action.id, show=False)
            for made in binding.make_bindings([binding]):
                self._bindings.key_to_bindings[made.key] = [made]  # in place of the framework's own, where it has one
        self.refresh_bindings()
        self.app.paint()

    def context(self) -> Context:
        session = self.app.session
        if session is None:
            return Context(self.NAME)
        return Context(self.NAME, session.state, session.client.live, self.candidate, self.has_servers)

    @property
    def has_servers(self) -> bool:
        """Whether this page has a pane of servers now."""
        return False

    @property
    def candidate(self) -> str:
        """The candidate under the cursor, where the page has one."""
        return ""

    def offer(self, view: View | None) -> None:
        """Show the newest state. Called at most four times a second, and after what the person does."""
        if not self.is_mounted:
            return
        if view is not None:
            self.query_one(Status).offer(view)
            self.show(view)
        context = self.context()
        keys = tuple(
            (show_key(self.app.keys.get(a.id, a.key)).split()[0], _word(a.short, a.id, context))
            for a in self._main_keys()
            if a.short and a.does != f"go_{self.NAME}" and not a.when(context)
        )
        self.query_one(KeyBar).offer(keys)

    def _main_keys(self) -> list[Action]:
        """In the registry's order; elsewhere than on the Run page its own ones first, since a small bar shows few."""
        actions = available(self.NAME)
        return actions if self.NAME == "run" else sorted(actions, key=lambda a: len(a.pages))

    def show(self, view: View) -> None:
        for pane in self.query(Pane):
            if pane.display:
                pane.offer(view)

    @property
    def narrow(self) -> bool:
        return self.app.size.width < NARROW[0] or self.app.size.height < NARROW[1]

    def on_resize(self, event: Resize) -> None:
        self.set_class(self.narrow, "-narrow")
        self.app.paint()

    def restyle(self, look: Look) -> None:
        self.look = look
        for widget in self.query(Widget):
            if isinstance(widget, Status | Answer | KeyBar | Pane):
                widget.restyle(look)
        for lines in self.query(Lines):
            lines.cursor_style = look("cursor")

    def say(self, ok: bool, what: str, text: str, who: str = "") -> None:
        stamp = time.strftime("%H:%M:%S")
        self.query_one(Answer).say(ok, what, text, f"{who} {stamp}".strip())

    def text_to_copy(self) -> str:
        """What the pane in focus shows, as text."""
        focused = self.focused
        if isinstance(focused, Lines):
            return "\n".join(content.plain.rstrip() for content in [*focused.header, *focused.lines])
        return ""

    def focusable_panes(self) -> list[Lines]:
        return [lines for lines in self.query(Lines) if lines.display and lines.can_focus and lines.size.height]

    def on_lines_moved(self, event: Lines.Moved) -> None:
        self.app.paint()


def _word(short: str, action: str, context: Context) -> str:
    """`pause` is `resume` while the run is paused."""
    if action == "run.pause" and context.state is not None and context.state.status == "paused":
        return "resume"
    return short
