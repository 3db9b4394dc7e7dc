"""The terminal application: a client of an engine that goes on without it."""

from __future__ import annotations

import asyncio
import gc
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, ClassVar

from textual import work
from textual.app import App
from textual.binding import Binding
from textual.driver import Driver
from textual.filter import Monochrome, NoColor
from textual.screen import Screen
from textual.scrollbar import ScrollBar, ScrollBarRender

from whale_tui import records as r
from whale_tui.journal import JournalError
from whale_tui.records import Settings
from whale_tui.rundir import RunDir, RunDirError
from whale_tui.tui import code, edit, keep, plain, themes
from whale_tui.tui.actions import BY_ID, Action, available, show_key
from whale_tui.tui.dialogs import GRACE, Ask, Confirm, Jump, Pick
from whale_tui.tui.look import ASCII, ROLES, UNICODE, Look
from whale_tui.tui.page import Page
from whale_tui.tui.panes import View
from whale_tui.tui.session import Services, Session, real_services
from whale_tui.tui.terminal import Guard, errors_to, osc52

REDRAW_SECONDS = 0.25


class WholeCells(ScrollBarRender):
    """A scrollbar without the block characters that end it between two cells."""

    VERTICAL_BARS: ClassVar[list[str]] = [" "] * 8
    HORIZONTAL_BARS: ClassVar[list[str]] = [" "] * 8


class WhaleApp(App[str]):
    """Pages over one session. Its result is what to tell the person after it has closed."""

    CSS_PATH = "whale.tcss"
    ENABLE_COMMAND_PALETTE = False
    TITLE = "whale-tui"
    BINDINGS: ClassVar = [Binding("ctrl+q", "do('go.quit')", show=False)]
    """ctrl+q is Textual's own binding to quit; here it leaves like any other, and no binding needs it."""

    def __init__(
        self, services: Services, *, who: str, rundir: RunDir | None = None, ascii: bool = False,
        theme: str | None = None, play: tuple[str, str] | None = None,
        config_folder: Path | None = None, state_folder: Path | None = None,
        guard: Guard | None = None, driver_class: type[Driver] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(driver_class=driver_class)
        if self.no_color:  # no colour at all, not shades of grey: those would be of somebody else's terminal
            self._filters[:] = [NoColor() if isinstance(f, Monochrome) else f for f in self._filters]
        self.services, self.who, self.guard = services, who, guard
        self.config_folder = config_folder or keep.config_folder()
        self.state_folder = state_folder or keep.state_folder()
        self.animation_level = "none"
        plain.ascii_only = ascii
        self.glyphs = ASCII if ascii else UNICODE
        ScrollBar.renderer = WholeCells if ascii else ScrollBarRender
        self.preferences = keep.read_preferences(self.config_folder)
        self.keys = self.preferences.keys
        self.layout = keep.read_layout(self.state_folder)
        self.themes = themes.load(themes.shipped_folder(), self.config_folder / "themes")
        self.notices = [*self.preferences.notices, *self.themes.notices]
        for loaded in self.themes.found.values():
            self.register_theme(loaded.theme)
        self._choose_first_theme(theme)
        self.session: Session | None = None
        self.trouble = ""
        self.first = rundir
        self.play = play
        """The pair that the Play page is for; None: the best seen."""
        self.painted = 0
        self._next_paint = 0.0
        self._waiting = False
        self._told = 0
        """Sequence number up to which commands of others have been shown."""
        self._mine: set[str] = set()

    def _choose_first_theme(self, asked: str | None) -> None:
        wanted = (asked, self.preferences.theme, self.layout.theme, themes.DEFAULT)
        for name in wanted:
            if name and name in self.themes.found:
                self.theme = name
                break
            if name and name == asked:
                self.notices.append(f"no theme {name!r}; there are {', '.join(self.themes.found)}")
        loaded = self.themes.found.get(self.theme)
        self.look = self._look_of(loaded)

    def _look_of(self, loaded: themes.Loaded | None) -> Look:
        roles = loaded.roles if loaded else ROLES
        return Look(roles | {"cursor": "reverse"} if self.no_color else roles, self.glyphs)

    # --------------------------------------------------------------------------------------------------- start

    def on_mount(self) -> None:
        self.set_class(not self.glyphs.braille, "-ascii")
        if self.guard is not None:
            self.guard.watch(lambda why: self.exit(self.goodbye()))
        self.set_keymap(self.keys)
        if self.first is not None:
            self.open_run(self.first)
            if self.play is not None:
                self.go("play")
        else:
            self.go("home")
        if self.notices:
            self.say(False, "settings", "; ".join(self.notices))

    def open_run(self, rundir: RunDir) -> None:
        """Watch a run, in place of the one before."""
        self.close_run()
        self.session = Session(rundir, self.services.connect(rundir))
        self._told = 0
        self.follow(self.session)
        self.go("run")

    def close_run(self) -> None:
        self.workers.cancel_group(self, "follow")
        if self.session is not None:
            self.session.close()
        self.session, self.trouble = None, ""
        if (play := self._pages.get("play")) is not None:
            play.end()  # type: ignore[attr-defined]
        for name in list(self._pages):
            if name != "home":
                del self._pages[name]

    @work(group="follow", exclusive=True)
    async def follow(self, session: Session) -> None:
        try:
            async for _ in session.client.follow():
                if session is not self.session:
                    return
                self.paint_soon()
        except JournalError as error:
            self.trouble = str(error)
            self.paint()

    # ------------------------------------------------------------------------------------------------- drawing

    def paint_soon(self) -> None:
        """At most four times a second, however fast events come."""
        if self._waiting:
            return
        wait = self._next_paint - time.monotonic()
        if wait <= 0:
            self.paint()
        else:
            self._waiting = True
            self.set_timer(wait, self._paint_due)

    def _paint_due(self) -> None:
        self._waiting = False
        self.paint()

    def paint(self) -> None:
        """Hand the page the newest state; its panes draw what has changed."""
        page = self.page
        if page is None:
            return
        self._next_paint = time.monotonic() + REDRAW_SECONDS
        session = self.session
        view = None
        if session is not None:
            session.read_events()
            self._tell_of_others(session)
            view = View(session, page.candidate, trouble=self.trouble or session.trouble)
        page.offer(view)
        if session is not None and session.state.seq:
            self.painted += 1
            if self.painted == 1:
                self.call_after_refresh(self._settle)

    @work
    async def _settle(self) -> None:
        """What the first screen could do without."""
        gc.enable()
        gc.freeze()  # what has been loaded stays: no collection needs to look at it again
        if not code.is_warm():
            await asyncio.to_thread(code.warm)
            self.paint()

    def _tell_of_others(self, session: Session) -> None:
        """A command that another terminal sent shows here too, with who sent it."""
        new = [(seq, e) for seq, e in session.events if seq > self._told]
        first = self._told == 0
        if session.events:
            self._told = session.events[-1][0]
        for _, event in new if not first else ():
            if isinstance(event, r.CommandTaken) and event.effect not in self._mine:
                self.say(True, event.what, event.effect, event.who)

    @property
    def page(self) -> Page | None:
        """The page in sight, beneath any dialog."""
        return (
            next((s for s in reversed(self.screen_stack) if isinstance(s, Page)), None) if self._screen_stacks else None
        )

    @property
    def _pages(self) -> dict[str, Page]:
        return self.__dict__.setdefault("pages", {})

    def go(self, name: str) -> None:
        if self.page is not None and name == self.page.NAME:
            return
        if name not in self._pages:
            self._pages[name] = self._make_page(name)
        before = self.page.NAME if self.page is not None else ""
        page = self._pages[name]
        if before and before != "help":
            self._back = before
        if isinstance(self.screen, Page):
            self.switch_screen(page)
        else:
            self.push_screen(page)
        self.call_later(self.paint)

    _back = "run"

    def _make_page(self, name: str) -> Page:
        from whale_tui.tui import pages

        page: Page = pages.page(name)(self.look)
        self.install_screen(page, f"{name}-{time.monotonic_ns()}")
        return page

    def say(self, ok: bool, what: str, text: str, who: str = "") -> None:
        page = self.page
        if page is None:
            return
        if page.is_mounted:
            page.say(ok, what, text, who)
        else:
            self.call_later(self.say, ok, what, text, who)

    # ------------------------------------------------------------------------------------------------- actions

    def action_do(self, action_id: str) -> None:
        """Every key and every palette entry comes here."""
        self.do(BY_ID[action_id])

    def do(self, action: Action) -> None:
        page = self.page
        if page is None or isinstance(self.screen, Confirm | Ask | Pick | Jump):
            return
        reason = action.when(page.context())
        if reason:
            self.say(False, action.name, f"not now: {reason}")
            return
        name = f"do_{action.does}"
        handler: Callable[[], Any] = getattr(page, name, None) or getattr(self, name)
        handler()

    @work
    async def send(self, what: str, args: dict[str, Any] | None = None) -> None:
        """One control, and its answer on the answer line."""
        session = self.session
        if session is None:
            return
        try:
            reply = await session.client.command(what, args)
        except ConnectionError as error:
            self.say(False, what, str(error))
            return
        self._mine.add(reply.effect)
        again = " (already done)" if reply.repeated else ""
        self.say(reply.ok, what, reply.effect + again, self.who)
        self.paint()

    def do_pause(self) -> None:
        paused = self.session is not None and self.session.state.status == "paused"
        self.send("resume" if paused else "pause")

    def do_switch(self) -> None:
        self.send("switch", {"now": False})

    @work
    async def do_switch_now(self) -> None:
        text = "Episodes in flight are dropped and not counted."
        if await self.push_screen_wait(Confirm("End the phase at once?", text, "y", "end it now", self.look)):
            self.send("switch", {"now": True})

    def do_pin(self) -> None:
        candidate = self.page.candidate if self.page else ""
        self.send("pin", {"harness": candidate} if candidate else {})

    def do_unpin(self) -> None:
        self.send("unpin")

    def _just_appeared(self) -> bool:
        """A card that came up by itself takes no key for a moment: it was not what the person meant."""
        appeared = getattr(self.page, "appeared", 0.0)
        if time.monotonic() - appeared < GRACE:
            self.say(False, "", "this card has just appeared: look, then press again")
            return True
        return False

    def do_approve(self) -> None:
        if self.page is not None and not self._just_appeared():
            self.send("approve", {"harness": self.page.candidate})

    @work
    async def do_veto(self) -> None:
        if self._just_appeared():
            return
        candidate = self.page.candidate if self.page else ""
        reason = await self.push_screen_wait(
            Ask(f"Veto {candidate}", "Why? The proposer reads this before it writes the next one.", self.look)
        )
        if reason:
            self.send("veto", {"harness": candidate, "reason": reason})

    @work
    async def do_edit(self) -> None:
        """The candidate's source in $EDITOR; what comes back is submitted as the person's own."""
        session, parent = self.session, self.page.candidate if self.page else ""
        if session is None:
            return
        source = session.source(parent)
        try:
            edited = await edit.edited(self, source, f"{parent}.py")
        except edit.NoEditor as error:
            self.say(False, "edit", str(error))
            return
        if edited == source:
            self.say(True, "edit", f"{parent} was not changed: nothing is proposed")
            return
        hypothesis = await self.push_screen_wait(
            Ask("Propose your edit", f"What does it try, in one line? It starts from {parent}.", self.look)
        )
        if hypothesis:
            self.send("propose", {"source": edited, "parent": parent, "hypothesis": hypothesis})
        else:
            path = keep.put(self.state_folder, f"{parent}-edited.py", edited)
            self.say(False, "edit", f"not proposed; your text is in {path}")

    @work
    async def do_set(self) -> None:
        session = self.session
        if session is None or session.state.settings is None:
            return
        values = session.state.settings
        items = [(name, str(getattr(values, name)), SETTINGS_HELP[name]) for name in Settings.__struct_fields__]
        chosen = await self.push_screen_wait(Pick("Change a setting for the phases to come", items, self.look))
        if chosen is None:
            return
        name = items[chosen][0]
        value = await self.push_screen_wait(Ask(f"{name}", f"{items[chosen][2]}. Now {items[chosen][1]}.", self.look))
        if value:
            self.send("set", {name: _number(value)})

    @work
    async def do_stop(self) -> None:
        first = Confirm(
            "Stop the run?", "It can be resumed. Leaving without stopping is q.", "y", "go on to the second question",
            self.look,
        )  # fmt: skip
        if not await self.push_screen_wait(first):
            return
        text = "Episodes in flight are dropped and not counted, and the engine ends."
        if await self.push_screen_wait(Confirm("Stop the run: are you sure?", text, "s", "stop it", self.look)):
            self.send("stop")

    @work
    async def do_roll_back(self) -> None:
        session = self.session
        if session is None:
            return
        pair = self.page.pair() if self.page is not None and hasattr(self.page, "pair") else None
        if pair is None:
            s = session.state
            tested = {t.policy: t for t in s.tests}
            versions = list(reversed(s.versions.values()))
            items = [
                (v.name, f"{tested[v.name].mean:.1%}" if v.name in tested else "", f"cycle {v.cycle}") for v in versions
            ]
            chosen = await self.push_screen_wait(Pick("Roll back: to which policy version?", items, self.look))
            if chosen is None:
                return
            pair = (versions[chosen].name, s.harness)
        text = f"The run goes on from {pair[0]} with {pair[1]}. Nothing is deleted."
        if await self.push_screen_wait(Confirm("Roll back?", text, "y", "roll back", self.look)):
            self.send("rollback", {"policy": pair[0], "harness": pair[1]})

    @work
    async def do_start_engine(self) -> None:
        session = self.session
        if session is None:
            return
        self.say(True, "engine", "starting")
        try:
            await asyncio.to_thread(self.services.start_engine, session.rundir)
        except (RunDirError, OSError) as error:
            self.say(False, "engine", str(error))
        else:
            self.say(True, "engine", "started; it goes on where the run left off")

    # ------------------------------------------------------------------------------------------------- the view

    def do_next_pane(self) -> None:
        self._step_focus(1)

    def do_previous_pane(self) -> None:
        self._step_focus(-1)

    def _step_focus(self, by: int) -> None:
        page = self.page
        panes = page.focusable_panes() if page else []
        if page is None or not panes:
            return
        at = next((n for n, pane in enumerate(panes) if pane.has_focus), -1)
        target = panes[(at + by) % len(panes)]
        go = getattr(page, "_go", None)
        if go is not None and target.id:
            go(target.id)
        else:
            target.focus()

    @work
    async def do_jump(self) -> None:
        page = self.page
        panes = [pane for pane in page.query("Lines") if pane.display and pane.region.height] if page else []
        if not panes:
            return
        places = [(pane.region.x + 2, pane.region.y) for pane in panes]
        chosen = await self.push_screen_wait(Jump(places, self.look))
        if chosen is not None:
            panes[chosen].focus()

    def do_copy(self) -> None:
        text = self.page.text_to_copy() if self.page else ""
        if not text:
            self.say(False, "copy", "nothing here to copy")
            return
        try:
            path = keep.put(self.state_folder, "copied.txt", text)
        except OSError as error:
            self.say(False, "copy", f"can't write the file: {error}")
            return
        sequence = osc52(text, os.environ)
        if sequence and self._driver is not None:
            self._driver.write(sequence)
        where = "to the clipboard and to" if sequence else "(too long for the clipboard) to"
        self.say(True, "copy", f"{len(text):,} characters {where} {path}")

    def do_screenshot(self) -> None:
        name = f"whale-{time.strftime('%Y%m%d-%H%M%S')}.svg"
        try:
            path = keep.put(self.state_folder, name, self.export_screenshot(title="whale-tui"))
        except OSError as error:
            self.say(False, "screenshot", str(error))
        else:
            self.say(True, "screenshot", str(path))

    @work
    async def do_choose_theme(self) -> None:
        names = list(self.themes.found)
        items = [(name, "dark" if self.themes.found[name].theme.dark else "light", "") for name in names]
        before = self.theme
        chosen = await self.push_screen_wait(
            Pick(
                "Theme", items, self.look, names.index(before) if before in names else 0,
                preview=lambda n: self.use_theme(names[n] if n is not None else before),
            )
        )  # fmt: skip
        self.use_theme(before if chosen is None else names[chosen])
        if chosen is not None:
            self.layout.theme = names[chosen]
            self.say(True, "theme", names[chosen])

    def use_theme(self, name: str) -> None:
        if name == self.theme:
            return
        self.theme = name
        self.look = self._look_of(self.themes.found[name])
        for page in self._pages.values():
            if page.is_mounted:
                page.restyle(self.look)
            else:
                page.look = self.look

    @work
    async def do_palette(self) -> None:
        page = self.page
        if page is None:
            return
        actions = [action for action in available(page.NAME) if action.id not in ("go.palette", "go.back")]
        context = page.context()
        items = [
            (
                a.name,
                show_key(self.keys.get(a.id, a.key)),
                a.help if not a.when(context) else f"not now: {a.when(context)}",
            )
            for a in actions
        ]
        chosen = await self.push_screen_wait(Pick("Every action", items, self.look))
        if chosen is not None:
            self.do(actions[chosen])

    # ------------------------------------------------------------------------------------------------ the pages

    def do_go_run(self) -> None:
        self.go("run")

    def do_go_inbox(self) -> None:
        self.go("inbox")

    def do_go_episodes(self) -> None:
        self.go("episodes")

    def do_go_lineage(self) -> None:
        self.go("lineage")

    def do_go_ledger(self) -> None:
        self.go("ledger")

    def do_go_play(self) -> None:
        self.play = self.page.pair() if self.page is not None and hasattr(self.page, "pair") else None
        self.go("play")

    def do_go_help(self) -> None:
        self.go("help")

    def do_go_home(self) -> None:
        self.go("home")

    def do_back(self) -> None:
        if self.page is not None and self.page.NAME == "help":
            self.go(self._back)
        elif self.session is not None:
            self.go("run")

    def do_leave(self) -> None:
        self.exit(self.goodbye())

    def goodbye(self) -> str:
        """How to come back."""
        if self.session is None:
            return ""
        name = self.session.rundir.name
        status = self.session.state.status
        if status in ("finished", "stopped"):
            return f"{name} is {status}. To look at it again: whale-tui attach {name}"
        if self.session.client.live:
            return f"{name} goes on. To come back: whale-tui attach {name}"
        return f"{name} has no engine running. To go on: whale-tui run {self.session.rundir.path}"

    def get_theme_variable_defaults(self) -> dict[str, str]:
        """So that a theme that leaves one out is still whole."""
        return {"ansi-background": "ansi_default", "ansi-foreground": "ansi_default"}

    def get_system_commands(self, screen: Screen[Any]) -> Iterable[Any]:
        return ()


SETTINGS_HELP = {
    "rule": "fixed or patience",
    "epochs": "E: epochs of a weight phase (fixed)",
    "iterations": "I: iterations of a harness phase (fixed)",
    "weight_min": "patience: least steps of a weight phase",
    "weight_window": "patience: steps whose mean is watched",
    "weight_patience": "patience: steps without a new best that end the phase",
    "harness_min": "patience: least iterations of a harness phase",
    "harness_patience": "patience: iterations without a better score that end the phase",
    "harness_cap": "patience: most iterations of a harness phase",
    "candidates": "M: candidates of an iteration",
    "budget_episodes": "episodes of the whole run",
    "approval": "auto, before-eval or before-accept",
    "approval_timeout": "seconds after which a waiting candidate goes on; 0 waits for ever",
    "max_dollars": "dollars that proposers may spend over the run",
    "max_tokens": "tokens that proposers may spend over the run",
}


def _number(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text.replace(",", ""))
        except ValueError:
            continue
    return text


def run_app(
    rundir: Path | None, *, ascii: bool, mouse: bool, theme: str | None, who: str, play: tuple[str, str] | None = None
) -> int:
    """Open the application on a run, or on Home, until the person leaves. Returns the exit status.

    play: the pair to begin with on the Play page."""
    gc.disable()  # until the first screen is there
    guard = Guard()
    app = WhaleApp(
        real_services(who), who=who, rundir=RunDir(rundir) if rundir is not None else None, ascii=ascii, theme=theme,
        play=play, guard=guard,
    )  # fmt: skip
    with errors_to(keep.state_folder() / "terminal.log"):
        goodbye = app.run(mouse=mouse)
    keep.write_layout(app.state_folder, app.layout)
    if not guard.leaving and goodbye:
        print(goodbye)
    return guard.status or app.return_code or 0
