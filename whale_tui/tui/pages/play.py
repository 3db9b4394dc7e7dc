"""Play: the pair solves a task of yours, or one of D_test, as you watch. Nothing of it is recorded or a score."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, ClassVar

from textual import work
from textual.app import ComposeResult
from textual.content import Content

from whale_tui.rundir import RunDirError
from whale_tui.service.player import Ask as AskPair
from whale_tui.service.player import Ended, Prompted, Said, Used, task_of
from whale_tui.tui.compare import duration
from whale_tui.tui.dialogs import Ask, Pick
from whale_tui.tui.look import Look
from whale_tui.tui.page import Page
from whale_tui.tui.panes import Pane, View
from whale_tui.tui.plain import line, plain, plain_lines
from whale_tui.tui.session import Player
from whale_tui.tui.transcript import sampled_lines, tool_lines

Happened = Prompted | Said | Used | Ended


class Played(Pane):
    """One episode, as far as it has come."""

    NAME = "play"

    def __init__(self, look: Look, id: str | None = None) -> None:
        super().__init__(look, id=id)
        self.pair = ""
        self.doing = ""
        self.given = ""
        self.greedy = False
        self.happened: list[Happened] = []
        self.snap = 0

    def snapshot(self, view: View) -> Any:
        return self.snap

    def tell(self, doing: str = "") -> None:
        """Something is new."""
        self.doing = doing
        self.snap += 1
        self.redraw()
        self.scroll_to(y=len(self.lines), animate=False, immediate=True, force=True)

    def draw(self, snap: Any, width: int, height: int) -> tuple[Sequence[Content], Sequence[Content]]:
        look, dot = self.look, self.look.glyphs.dot
        self.name_it(f"play {dot} {self.pair}" + (f" {dot} greedy" if self.greedy else ""))
        self.note(self.doing or "not judged, not recorded")
        out: list[Content] = []
        if self.given:
            for text in plain_lines(self.given):
                out += line(("task  ", look("muted")), (text, look("title"))).wrap(width)
            out.append(Content(""))
        elif not self.doing:
            out += line(("t: a task of yours   x: one of D_test", look("muted"))).wrap(width)
        for message in self.happened:
            out += self._lines(message, width)
        return out, ()

    def _lines(self, message: Happened, width: int) -> list[Content]:
        look = self.look
        match message:
            case Prompted():
                head = (f"call {message.call}", look("title")), (f"  {message.tokens} prompt tokens", look("muted"))
                again = f", {message.shared} as in the call before" if message.shared else ""
                out = line(*head, (again, look("faint"))).wrap(width)
                for text in plain_lines(message.text):
                    out += line("  ", (text, look("muted"))).wrap(width) if text else [Content("")]
                return out
            case Said():
                end = "stopped by itself" if message.finish_reason == "stop" else "cut off by the length limit"
                role = "muted" if message.finish_reason == "stop" else "warning"
                told = line((f"  {message.tokens} sampled tokens, {end}", look(role)))
                return [*sampled_lines([(message.text, 1.0)], width, look), told, Content("")]
            case Used():
                return tool_lines(message.name, message.args, message.result, message.seconds, width, look)
        if message.problem:
            told = line(("no answer  ", look("bad")), (plain(message.problem, 2000), ""))
        else:
            told = line(("answer  ", look("muted")), (plain(message.answer, 2000) or "(empty)", look("title")))
        return [*told.wrap(width), line((duration(message.seconds), look("muted")))]


class PlayPage(Page):
    NAME: ClassVar[str] = "play"

    def __init__(self, look: Look) -> None:
        super().__init__(look)
        self.player: Player | None = None
        self.pair_played: tuple[str, str] | None = None
        self.greedy = False
        self.busy = False

    def body(self) -> ComposeResult:
        yield Played(self.look, id="played")

    @property
    def played(self) -> Played:
        return self.query_one(Played)

    def on_mount(self) -> None:
        self.played.focus()
        super().on_mount()

    def on_screen_resume(self) -> None:
        """Load the pair that is asked for, where another one is loaded or none."""
        session = self.app.session
        if session is None:
            return
        best = session.state.best
        pair = self.app.play or (best and (best.policy, best.harness)) or (session.state.policy, session.state.harness)
        if pair[0] and pair != self.pair_played:
            self.load(pair)

    @work(exclusive=True, group="play")
    async def load(self, pair: tuple[str, str]) -> None:
        session, played = self.app.session, self.played
        if session is None:
            return
        await self._close()
        self.pair_played, self.busy = pair, True
        played.pair, played.given, played.happened = f"{pair[0]} {self.look.glyphs.times} {pair[1]}", "", []
        played.tell("loading the pair")
        self.player = player = self.app.services.play(session.rundir, *pair)
        try:
            async for note in player.start():
                played.tell(plain(note.text, 100))
        except (RunDirError, OSError) as error:
            self._broken(str(error))
        else:
            self.busy = False
            played.tell()

    def _broken(self, text: str) -> None:
        self.player, self.pair_played, self.busy = None, None, False
        self.played.tell("nothing is loaded")
        self.say(False, "play", text)

    def _idle(self) -> bool:
        if self.player is None or self.player.ready is None or self.busy:
            self.say(False, "play", "not now: it is at work" if self.busy else "not now: no pair is loaded")
            return False
        return True

    @work
    async def do_task(self) -> None:
        player = self.player
        if not self._idle() or player is None or player.ready is None:
            return
        ready = player.ready
        hint = f"Its {ready.field}." if ready.field else f"A JSON object with {', '.join(ready.fields)}."
        text = await self.app.push_screen_wait(Ask("A task for the pair", hint, self.look))
        if text is None:
            return
        try:
            task = task_of(text, ready)
        except ValueError as error:
            self.say(False, "play", str(error))
            return
        self.solve(text, AskPair(task=task, greedy=self.greedy))

    @work
    async def do_example(self) -> None:
        player = self.player
        if not self._idle() or player is None or player.ready is None:
            return
        examples = player.ready.examples
        items = [(plain(_words(public), 70), "", "") for _, public in examples]
        chosen = await self.app.push_screen_wait(
            Pick("A task of D_test, by what the pair sees of it", items, self.look)
        )
        if chosen is not None:
            key, public = examples[chosen]
            self.solve(_words(public), AskPair(key=key, greedy=self.greedy))

    def do_greedy(self) -> None:
        self.greedy = self.played.greedy = not self.greedy
        self.played.redraw()
        self.say(True, "play", "the likeliest token is taken" if self.greedy else "it samples as the run does")

    @work(exclusive=True, group="solve")
    async def solve(self, text: str, ask: AskPair) -> None:
        player, played = self.player, self.played
        if not self._idle() or player is None:
            return
        self.busy = True
        played.given, played.happened = text, []
        played.tell("at work")
        try:
            async for message in player.play(ask):
                played.happened.append(message)
                played.tell("" if isinstance(message, Ended) else "at work")
        except (RunDirError, OSError) as error:
            self._broken(str(error))
        else:
            self.busy = False

    # ------------------------------------------------------------------------------------------------------- the end

    async def _close(self) -> None:
        player, self.player = self.player, None
        if player is not None:
            await player.close()

    @work(group="end")
    async def end(self) -> None:
        """Another run comes into view: this one's pair is let go."""
        await self._close()

    async def on_unmount(self) -> None:
        await self._close()


def _words(public: dict[str, Any]) -> str:
    """A task as one line."""
    values = list(public.values())
    return values[0] if len(values) == 1 and isinstance(values[0], str) else json.dumps(public, ensure_ascii=False)
