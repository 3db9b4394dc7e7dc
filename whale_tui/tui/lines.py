"""The one widget that everything is shown in: lines of content, scrolled, with a cursor where rows can be chosen.

It draws only the lines in sight, and after `show` only those that changed, so its length costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.content import Content
from textual.events import Click, Resize
from textual.geometry import Region, Size
from textual.message import Message
from textual.reactive import reactive
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.style import Style
from textual.visual import Visual

BLANK = Content("")


class Lines(ScrollView, can_focus=True):
    """`header` lines stay in place above the scrolled ones. `choosable`: there is a cursor, Enter chooses."""

    DEFAULT_CSS = """
    Lines { overflow-x: hidden; overflow-y: auto; scrollbar-size-vertical: 1; scrollbar-gutter: stable; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", show=False),
        Binding("down,j", "move(1)", show=False),
        Binding("pageup", "page(-1)", show=False),
        Binding("pagedown,space", "page(1)", show=False),
        Binding("home", "end(-1)", show=False),
        Binding("end", "end(1)", show=False),
        Binding("left", "sideways(-8)", show=False),
        Binding("right", "sideways(8)", show=False),
        Binding("enter", "choose", show=False),
    ]

    cursor: reactive[int] = reactive(0, init=False, repaint=False)

    class Moved(Message):
        """The cursor is on another row."""

        def __init__(self, lines: Lines, row: int) -> None:
            super().__init__()
            self.lines, self.row = lines, row

        @property
        def control(self) -> Lines:
            return self.lines

    class Chosen(Moved):
        """Enter, or a click on the row under the cursor."""

    def __init__(self, *, choosable: bool = False, cursor_style: str = "reverse", id: str | None = None) -> None:
        super().__init__(id=id)
        self.choosable, self.cursor_style = choosable, cursor_style
        self.header: list[Content] = []
        self.lines: list[Content] = []
        self.sideways = 0
        self.follow_end = False
        """Keep the last line in sight while nobody has scrolled away from it."""

    def show(self, lines: Sequence[Content], header: Sequence[Content] = ()) -> None:
        """Replace what is shown; only rows that differ are drawn again."""
        old, old_header = self.lines, self.header
        at_end = self.scroll_offset.y >= self.max_scroll_y - 1
        self.lines, self.header = list(lines), list(header)
        if len(old) != len(self.lines) or len(old_header) != len(self.header):
            self.virtual_size = Size(0, len(self.lines) + len(self.header))
            self.cursor = min(self.cursor, max(0, len(self.lines) - 1))
        top = self.scroll_offset.y
        width, body = self.room.width, max(0, self.size.height - len(self.header))
        if len(old_header) != len(self.header):
            self.refresh()
            return
        for row, (a, b) in enumerate(zip(old_header, self.header, strict=True)):
            if not a.is_same(b):
                self.refresh(Region(0, row, width, 1))
        for row in range(body):
            n = top + row
            a = old[n] if n < len(old) else BLANK
            b = self.lines[n] if n < len(self.lines) else BLANK
            if not a.is_same(b):
                self.refresh(Region(0, row + len(self.header), width, 1))
        if self.follow_end and at_end and self.lines:
            self.scroll_to(y=self.max_scroll_y, animate=False, immediate=True, force=True)

    def render_line(self, y: int) -> Strip:
        width = self.room.width
        style = self.visual_style
        if y < len(self.header):
            return self._strip(self.header[y], width, style)
        n = self.scroll_offset.y + y - len(self.header)
        if n >= len(self.lines):
            return Strip.blank(width, style.rich_style)
        content = self.lines[n]
        if self.sideways:
            content = content[self.sideways :] if len(content.plain) > self.sideways else BLANK
        if self.choosable and n == self.cursor:
            cursor = self._get_style(self.cursor_style)
            padded = content.truncate(width, pad=True) if content.cell_length < width else content
            if not self.has_focus:
                return self._strip(padded.stylize_before("bold"), width, style)
            if cursor.background is not None and cursor.background.a:
                return self._strip(padded, width, style + Style(background=cursor.background, bold=True))
            return self._strip(
                Content(padded.plain).stylize(self.cursor_style), width, style
            )  # colours reversed are blotches
        return self._strip(content, width, style)

    def _strip(self, content: Content, width: int, style: Style) -> Strip:
        strips = Visual.to_strips(self, content.truncate(width), width, 1, style, pad=True, apply_selection=False)
        return strips[0].adjust_cell_length(width, style.rich_style) if strips else Strip.blank(width, style.rich_style)

    def as_text(self) -> str:
        """All of it as running text, wrapped lines joined: for copies of prose, and for tests."""
        return " ".join(content.plain.strip() for content in self.lines)

    @property
    def room(self) -> Size:
        """Cells for content: what the scrollbar leaves."""
        return self.scrollable_content_region.size

    # -------------------------------------------------------------------------------------------------- moving

    @property
    def body_height(self) -> int:
        return max(1, self.size.height - len(self.header))

    def watch_cursor(self, old: int, new: int) -> None:
        if not self.choosable:
            return
        top = self.scroll_offset.y
        if new < top:
            self.scroll_to(y=new, animate=False, immediate=True, force=True)
        elif new >= top + self.body_height:
            self.scroll_to(y=new - self.body_height + 1, animate=False, immediate=True, force=True)
        for n in (old, new):
            self.refresh(Region(0, n - self.scroll_offset.y + len(self.header), self.size.width, 1))
        self.post_message(self.Moved(self, new))

    def action_move(self, by: int) -> None:
        if self.choosable:
            self.cursor = min(max(0, self.cursor + by), max(0, len(self.lines) - 1))
        else:
            self.scroll_relative(y=by, animate=False, immediate=True, force=True)

    def action_page(self, by: int) -> None:
        self.action_move(by * max(1, self.body_height - 1))

    def action_end(self, direction: int) -> None:
        if self.choosable:
            self.cursor = 0 if direction < 0 else max(0, len(self.lines) - 1)
        else:
            self.scroll_to(y=0 if direction < 0 else self.max_scroll_y, animate=False, immediate=True, force=True)

    def action_sideways(self, by: int) -> None:
        longest = max((c.cell_length for c in self.lines), default=0)
        self.sideways = min(max(0, self.sideways + by), max(0, longest - self.room.width + 2))
        self.refresh()

    def action_choose(self) -> None:
        if self.choosable and self.lines:
            self.post_message(self.Chosen(self, self.cursor))

    def on_click(self, event: Click) -> None:
        if not self.choosable:
            return
        content = event.get_content_offset(self)
        if content is None:
            return
        n = self.scroll_offset.y + content.y - len(self.header)
        if 0 <= n < len(self.lines):
            if n == self.cursor and event.chain > 1:
                self.post_message(self.Chosen(self, n))
            self.cursor = n

    def on_focus(self) -> None:
        self.refresh()

    def on_blur(self) -> None:
        self.refresh()

    def on_resize(self, event: Resize) -> None:
        self.virtual_size = Size(0, len(self.lines) + len(self.header))
