"""The Run page: everything about a run at a glance, or pane by pane where the terminal is small."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.containers import Container, Vertical
from textual.content import Content
from textual.events import Click, DescendantFocus, Resize
from textual.widget import Widget

from whale_tui.tui.lines import Lines
from whale_tui.tui.look import Look
from whale_tui.tui.page import Page
from whale_tui.tui.panes import Candidates, Events, Harness, Pane, Patience, Success, View
from whale_tui.tui.plain import line
from whale_tui.tui.servers import Servers

PANES = ("success", "patience", "harness", "candidates", "events", "servers")
TABS = {
    "overview": ("success", "patience"),
    "harness": ("harness",),
    "candidates": ("candidates",),
    "events": ("events",),
    "servers": ("servers",),
}


class Tabs(Widget):
    """The tabs of a small terminal: 1 overview, 3 harness, ..."""

    def __init__(self, look: Look) -> None:
        super().__init__(id="tabs")
        self.look, self.current, self.servers = look, "overview", False

    def restyle(self, look: Look) -> None:
        self.look = look
        self.refresh()

    def choose(self, tab: str) -> None:
        if tab != self.current:
            self.current = tab
            self.refresh()

    def _labels(self) -> list[tuple[str, str]]:
        shown = [(tab, panes) for tab, panes in TABS.items() if tab != "servers" or self.servers]
        return [(tab, f" {PANES.index(panes[0]) + 1} {tab} ") for tab, panes in shown]

    def render(self) -> Content:
        look = self.look
        parts: list[str | tuple[str, str]] = []
        for tab, label in self._labels():
            parts += [(label, look("title") + " reverse" if tab == self.current else look("muted")), " "]
        return line(*parts)

    def on_click(self, event: Click) -> None:
        at = 0
        for tab, label in self._labels():
            at += len(label) + 1
            if event.x < at:
                self.screen.query_one(f"#{TABS[tab][0]}").focus()
                return


class RunPage(Page):
    NAME: ClassVar[str] = "run"

    def __init__(self, look: Look) -> None:
        super().__init__(look)
        self.pane, self.maximised, self.diff, self.beside = "success", False, False, False
        self.served = False

    @property
    def has_servers(self) -> bool:
        return self.served

    @property
    def panes(self) -> tuple[str, ...]:
        """The panes of this run: servers where it has any."""
        return PANES if self.served else PANES[:-1]

    def body(self) -> ComposeResult:
        yield Tabs(self.look)
        with Container(id="panes"):
            with Vertical(id="left"):
                yield Success(self.look, id="success")
                yield Candidates(self.look, id="candidates")
                yield Events(self.look, id="events")
            with Vertical(id="right"):
                yield Patience(self.look, id="patience")
                yield Harness(self.look, id="harness")

    def on_mount(self) -> None:
        layout = self.app.layout
        self.pane = layout.pane if layout.pane in self.panes else "success"
        self.maximised, self.beside = layout.maximised, layout.beside
        self.query_one(Candidates).best_first = layout.best_first
        self._arrange()
        self.query_one(f"#{self.pane}").focus()
        super().on_mount()

    # -------------------------------------------------------------------------------------------------- layout

    def _arrange(self) -> None:
        """Which panes are in sight: all, those of a tab, or the maximised one."""
        tab = next(tab for tab, panes in TABS.items() if self.pane in panes)
        shown = (self.pane,) if self.maximised else TABS[tab] if self.narrow else self.panes
        self.set_class(self.narrow, "-narrow")
        self.set_class(self.maximised, "-maximised")
        self.set_class(len(shown) == 1, "-solo")
        tabs = self.query_one(Tabs)
        if tabs.servers != self.served:
            tabs.servers = self.served
            tabs.refresh()
        tabs.display = self.narrow and not self.maximised
        tabs.choose(tab)
        for pane in self.query(Pane):
            pane.display = pane.id in shown
        for side in ("left", "right"):
            box = self.query_one(f"#{side}")
            box.display = any(child.id in shown for child in box.children)

    def on_resize(self, event: Resize) -> None:
        self._arrange()
        self.app.paint()

    def on_descendant_focus(self, event: DescendantFocus) -> None:
        if event.widget.id in PANES and event.widget.id != self.pane:
            self.pane = str(event.widget.id)
            self._arrange()
            self._keep()
            self.app.paint()

    def _keep(self) -> None:
        layout = self.app.layout
        layout.pane, layout.maximised, layout.beside = self.pane, self.maximised, self.beside
        layout.best_first = self.query_one(Candidates).best_first

    def _go(self, pane: str) -> None:
        self.pane = pane
        self._arrange()
        self.query_one(f"#{pane}").focus()
        self._keep()
        self.app.paint()

    def focusable_panes(self) -> list[Lines]:
        """Every pane in reading order: in tabs, the hidden ones too."""
        return [self.query_one(f"#{pane}", Lines) for pane in self.panes]

    # -------------------------------------------------------------------------------------------------- showing

    @property
    def candidate(self) -> str:
        """Only one that is in sight, in the list or as a diff: nothing is decided on what a person can't see."""
        if not self.is_mounted:
            return ""
        candidates = self.query_one(Candidates)
        seen = candidates.display or (self.diff and self.query_one(Harness).display)
        return candidates.under_cursor if seen else ""

    def show(self, view: View) -> None:
        activity = view.session.client.activity
        if activity is not None and activity.servers and not self.served:
            self.served = True
            self.query_one("#right").mount(Servers(self.look, id="servers"))
            self._arrange()
        candidates = self.query_one(Candidates)
        candidates.offer(view)
        super().show(
            View(view.session, candidates.under_cursor or view.state.harness, self.diff, self.beside, view.trouble)
        )

    def restyle(self, look: Look) -> None:
        super().restyle(look)
        self.query_one(Tabs).restyle(look)

    # -------------------------------------------------------------------------------------------------- actions

    def do_pane_success(self) -> None:
        self._go("success")

    def do_pane_patience(self) -> None:
        self._go("patience")

    def do_pane_harness(self) -> None:
        self._go("harness")

    def do_pane_candidates(self) -> None:
        self._go("candidates")

    def do_pane_events(self) -> None:
        self._go("events")

    def do_pane_servers(self) -> None:
        self._go("servers")

    def do_maximise(self) -> None:
        self.maximised = not self.maximised
        self._go(self.pane)

    def do_diff(self) -> None:
        self.diff = not self.diff
        if self.diff and (self.narrow or self.pane not in ("harness", "candidates")):
            self._go("harness")
        self.app.paint()

    def do_beside(self) -> None:
        self.beside = not self.beside
        self.diff = True
        self._go("harness" if self.narrow else self.pane)

    def do_next_hunk(self) -> None:
        self.query_one(Harness).to_hunk(1)

    def do_previous_hunk(self) -> None:
        self.query_one(Harness).to_hunk(-1)

    def do_parent(self) -> None:
        candidates, session = self.query_one(Candidates), self.app.session
        if session is None:
            return
        parent = session.state.harnesses[candidates.under_cursor].parent
        if parent in candidates.ids:
            candidates.cursor = candidates.ids.index(parent)
        else:
            self.say(False, "", f"{candidates.under_cursor} has no parent")

    def do_sort(self) -> None:
        candidates = self.query_one(Candidates)
        candidates.best_first = not candidates.best_first
        self._keep()
        self.app.paint()

    def on_lines_chosen(self, event: Candidates.Chosen) -> None:
        """Enter on a candidate opens its diff; it decides nothing."""
        if event.lines.id == "candidates":
            self.diff = True
            self._go("harness")

    def do_back(self) -> None:
        if self.maximised:
            self.do_maximise()
        elif self.diff:
            self.diff = False
            self.app.paint()
