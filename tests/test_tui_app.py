"""The application, driven by keys, over a scripted run whose commands are planned by the real controls."""

from __future__ import annotations

import asyncio
import re
import stat
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot

from tests.scripted import ScriptedClient, write_run
from whale_tui import records as r
from whale_tui.rundir import RunDir, RunDirError
from whale_tui.service.discovery import RunSummary
from whale_tui.service.protocol import Activity
from whale_tui.tui import dialogs, plain
from whale_tui.tui.actions import ACTIONS
from whale_tui.tui.app import WhaleApp
from whale_tui.tui.lines import Lines
from whale_tui.tui.page import Answer, KeyBar
from whale_tui.tui.pages.episodes import Conversation, Rows
from whale_tui.tui.pages.home import Runs
from whale_tui.tui.pages.inbox import Card, Waiting
from whale_tui.tui.pages.lineage import Grid
from whale_tui.tui.pages.run import RunPage
from whale_tui.tui.panes import Candidates, Events, Harness, Pane, Patience, Status, Success
from whale_tui.tui.session import Services, real_export

WIDE, SMALL = (120, 36), (80, 24)


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain, "ascii_only", False)


class Stage:
    """An app on a scripted run, with what a test asks of it."""

    def __init__(self, app: WhaleApp, pilot: Pilot[Any], client: ScriptedClient) -> None:
        self.app, self.pilot, self.client = app, pilot, client
        self.script = client.script

    async def press(self, *keys: str) -> None:
        await self.pilot.press(*keys)
        await self.settle()

    async def settle(self) -> None:
        await self.pilot.pause(0.05)

    async def wait(self, met: Callable[[], Any], what: str = "") -> None:
        for _ in range(100):
            if met():
                return
            await self.pilot.pause(0.03)
        raise AssertionError(f"never came true: {what or met}; on screen:\n{self.text()}")

    async def type(self, text: str) -> None:
        await self.pilot.press(*(("space" if c == " " else c) for c in text))

    async def out_of_grace(self) -> None:
        await self.pilot.pause(dialogs.GRACE + 0.05)

    def said(self) -> str:
        answer = self.page.query_one(Answer).said
        return f"{answer[1]}: {answer[2]} ({answer[3]})" if answer else ""

    @property
    def page(self) -> Any:
        return self.app.page

    def text(self) -> str:
        """Everything on the screen, line by line."""
        return "\n".join(
            "".join(segment.text for segment in strip) for strip in self.app.screen._compositor.render_strips()
        )

    def one(self, kind: type[Any]) -> Any:
        return self.page.query_one(kind)


@pytest.fixture
def stage(tmp_path: Path) -> Callable[..., Any]:
    """`async with stage(until=..., size=...) as s`."""

    @asynccontextmanager
    async def make(
        until: str = "waiting", size: tuple[int, int] = WIDE, home: bool = False, **options: Any
    ) -> AsyncIterator[Stage]:
        script = write_run(tmp_path / "runs" / "first-light", until=until)
        client = ScriptedClient(script)
        runs = [
            RunSummary(name="first-light", path=script.rundir.path, status="running", condition="adaptive", cycle=2,
                       phase="weight", policy="theta-0001", harness="h0000", best_mean=0.4, episodes=9, at=1.0),
            RunSummary(name="lost", path=tmp_path / "lost", status="crashed", condition="whale"),
        ]  # fmt: skip
        sample = tmp_path / "quickstart.toml"
        sample.write_text("# ten minutes on a laptop\n[run]\n")
        started: list[Any] = []

        def launch(config: Path, overrides: list[str]) -> Any:
            started.append(config)
            return script.rundir

        services = Services(lambda rundir: client, lambda: runs, started.append, launch, lambda: [sample])
        app = WhaleApp(
            services, who="you", rundir=None if home else script.rundir, config_folder=tmp_path / "config",
            state_folder=tmp_path / "state", **options,
        )  # fmt: skip
        async with app.run_test(size=size) as pilot:
            s = Stage(app, pilot, client)
            s.started = started  # type: ignore[attr-defined]
            await s.wait(lambda: s.page is not None and s.page.is_mounted)
            await s.settle()
            yield s

    return make


# ------------------------------------------------------------------------------------------------------ the Run page


async def test_the_run_page_shows_where_the_run_is(stage: Any) -> None:
    async with stage() as s:
        assert isinstance(s.page, RunPage)
        text = s.text()
        for words in ("first-light", "harness phase", "theta-0018", "h0002", "2 waiting", "12%", "since best", "0 / 2"):
            assert words in text, words
        assert "not before 4 iterations (3 to go)" in s.one(Patience).as_text()
        assert "h0010" in text and "waiting" in text


async def test_every_pane_is_in_sight_when_wide_and_in_a_tab_when_small(stage: Any) -> None:
    async with stage(size=(160, 45)) as s:
        assert all(pane.display and pane.size.height >= 3 for pane in s.page.query(Pane))
    async with stage(size=SMALL) as s:
        assert {pane.id for pane in s.page.query(Pane) if pane.display} == {"success", "patience"}
        for key, pane in (("3", "harness"), ("4", "candidates"), ("5", "events"), ("1", "success")):
            await s.press(key)
            assert s.page.pane == pane
            assert s.page.query_one(f"#{pane}").display
            assert s.page.query_one(f"#{pane}").size.height >= (5 if pane == "success" else 15), (
                "alone, it has all the room"
            )
            assert s.page.query_one(f"#{pane}").has_focus


@pytest.mark.parametrize("size", [(20, 6), (45, 20), (60, 15), (250, 80)])
async def test_any_size_is_survived(stage: Any, size: tuple[int, int]) -> None:
    async with stage(size=size) as s:
        for key in ("3", "d", "v", "i", "e", "l", "dollar_sign", "question_mark", "escape", "R"):
            await s.press(key)
        assert s.app.is_running


async def test_growing_and_shrinking_rearranges(stage: Any) -> None:
    async with stage(size=SMALL) as s:
        await s.press("5")
        await s.pilot.resize_terminal(140, 40)
        await s.wait(lambda: all(pane.display for pane in s.page.query(Pane)))
        await s.pilot.resize_terminal(80, 24)
        await s.wait(lambda: {p.id for p in s.page.query(Pane) if p.display} == {"events"})


async def test_maximise_jump_and_tab_move_between_panes(stage: Any, tmp_path: Path) -> None:
    async with stage() as s:
        await s.press("tab")
        assert s.page.query_one(Patience).has_focus
        await s.press("m")
        assert [pane.id for pane in s.page.query(Pane) if pane.display] == ["patience"]
        await s.press("tab")
        assert [pane.id for pane in s.page.query(Pane) if pane.display] == ["harness"]
        await s.press("escape")
        assert all(pane.display for pane in s.page.query(Pane))
        await s.press("f")
        assert isinstance(s.app.screen, dialogs.Jump)
        await s.press("d")
        await s.wait(lambda: s.page.query_one(Events).has_focus)
        assert s.app.layout.pane == "events"


async def test_the_harness_pane_marks_the_last_change_and_turns_into_a_diff(stage: Any) -> None:
    async with stage() as s:
        harness = s.one(Harness)
        assert "h0002" in harness.border_title
        changed = [row.plain for row in harness.lines if "+" in row.plain[:9]]
        assert len(changed) == 1 and "PASSAGE_CHARS = 400" in changed[0]
        await s.press("4", "d")
        assert "diff" in harness.border_title and "h0010" in harness.border_title
        rows = [row.plain for row in harness.lines]
        assert any("- SEARCH_K = 1" in row for row in rows) and any("+ SEARCH_K = 2" in row for row in rows)
        assert rows[0] == "read two passages"
        await s.press("down")
        assert "h0009" in harness.border_title, "the diff follows the cursor"
        await s.press("escape")
        assert "diff" not in harness.border_title


async def test_side_by_side_and_from_hunk_to_hunk(stage: Any) -> None:
    async with stage(size=(160, 45), until="finished") as s:
        await s.press("4", "d", "m", "3", "v")
        harness = s.one(Harness)
        assert "side by side" in harness.border_title
        assert harness.hunks
        await s.press("right_square_bracket")
        assert harness.scroll_offset.y == min(harness.hunks[0], harness.max_scroll_y)
        await s.press("v")
        assert "unified" in harness.border_title
        assert any("won" in row.plain for row in harness.lines)


async def test_the_candidates_keep_the_cursor_on_theirs_when_others_arrive(stage: Any) -> None:
    async with stage() as s:
        candidates = s.one(Candidates)
        await s.press("4", "down", "down")
        chosen = candidates.under_cursor
        s.script.propose("allow longer answers")
        s.client.changed()
        await s.wait(lambda: "h0011" in candidates.ids)
        assert candidates.under_cursor == chosen
        assert s.page.query_one(Candidates).has_focus, "nothing steals the focus"
        await s.press("o")
        assert "best first" in candidates.border_title
        assert candidates.under_cursor == chosen


async def test_enter_opens_a_diff_and_decides_nothing(stage: Any) -> None:
    async with stage() as s:
        await s.press("4", "enter")
        assert s.page.diff
        assert s.client.sent == []


# ------------------------------------------------------------------------------------------------------ redraw


async def test_nothing_new_draws_nothing(stage: Any) -> None:
    async with stage() as s:
        drawn = [widget.draws for widget in (*s.page.query(Pane), s.one(Status))]
        for _ in range(5):
            s.client.changed()
            await s.pilot.pause(0.06)
        assert [widget.draws for widget in (*s.page.query(Pane), s.one(Status))] == drawn


async def test_a_change_of_activity_draws_the_status_alone(stage: Any) -> None:
    async with stage(until="training") as s:
        panes = {pane.id: pane.draws for pane in s.page.query(Pane)}
        status = s.one(Status).draws
        s.client.changed(Activity(doing="training step 6", done=3, total=9))
        await s.wait(lambda: s.one(Status).draws > status)
        assert {pane.id: pane.draws for pane in s.page.query(Pane)} == panes
        assert "3 of 9 episodes" in s.text()


async def test_many_events_a_second_are_painted_at_most_four_times(stage: Any) -> None:
    async with stage(until="training") as s:
        before = s.app.painted
        start = asyncio.get_running_loop().time()
        for n in range(60):
            s.client.changed(Activity(doing="training step 6", done=n, total=60))
            await asyncio.sleep(0.01)
        spent = asyncio.get_running_loop().time() - start
        assert s.app.painted - before <= spent * 4 + 2


async def test_before_the_first_event_there_is_something_to_see(stage: Any) -> None:
    async with stage(until="training") as s:
        s.client.state.__init__()  # as at the very start: connected, and nothing in the journal yet
        s.client.changed(Activity(doing="loading the model", done=40_000_000, total=160_000_000, unit="bytes"))
        await s.wait(lambda: "loading the model" in s.text())
        assert "40 of 160 MB" in s.text()


# ------------------------------------------------------------------------------------------------------ controls


async def test_pause_and_resume_answer_with_what_and_who(stage: Any) -> None:
    async with stage(until="training") as s:
        await s.press("p")
        await s.wait(lambda: "pauses at the next safe point" in s.said())
        assert "you" in s.said()
        assert s.client.sent == [("pause", {})]
        await s.wait(lambda: "paused" in s.text().splitlines()[0])
        await s.press("p")
        await s.wait(lambda: "goes on now" in s.said())


async def test_switch_at_the_safe_point_and_at_once_say_which(stage: Any) -> None:
    async with stage(until="training") as s:
        s.script.train(6)
        await s.press("s")
        await s.wait(lambda: "ends after step 7" in s.said())
        await s.wait(lambda: "switch at the next safe point (by you)" in s.text())
        await s.press("S")
        assert isinstance(s.app.screen, dialogs.Confirm)
        await s.out_of_grace()
        await s.press("y")
        await s.wait(lambda: "ends now; episodes in flight are dropped" in s.said())
        assert s.client.sent == [("switch", {"now": False}), ("switch", {"now": True})]


async def test_stop_is_asked_twice_and_enter_is_no_yes(stage: Any) -> None:
    async with stage(until="training") as s:
        await s.press("X", "y")
        assert isinstance(s.app.screen, dialogs.Confirm), "no key in the first half second"
        await s.out_of_grace()
        await s.press("enter")
        assert isinstance(s.app.screen, dialogs.Confirm)
        await s.press("y")
        await s.wait(lambda: isinstance(s.app.screen, dialogs.Confirm) and s.app.screen.key == "s")
        await s.out_of_grace()
        await s.press("y", "enter")
        assert s.client.sent == []
        await s.press("s")
        await s.wait(lambda: "stops now, resumable" in s.said())
        assert s.client.sent == [("stop", {})]


async def test_stop_can_be_left_at_either_question(stage: Any) -> None:
    async with stage(until="training") as s:
        for answers in (("escape",), ("y", "escape")):
            await s.press("X")
            for key in answers:
                await s.out_of_grace()
                await s.press(key)
            await s.wait(lambda: isinstance(s.app.screen, RunPage))
        assert s.client.sent == []


async def test_pin_and_unpin(stage: Any) -> None:
    async with stage() as s:
        await s.press("4", "P")
        await s.wait(lambda: "stays until it is unpinned" in s.said())
        assert s.client.sent == [("pin", {"harness": "h0010"})]
        await s.wait(lambda: "pinned h0010" in s.text())
        await s.press("U")
        await s.wait(lambda: "no longer pinned" in s.said())
        await s.press("U")
        assert "nothing is pinned" in s.said()


async def test_a_setting_is_chosen_and_changed(stage: Any) -> None:
    async with stage() as s:
        await s.press("comma")
        assert isinstance(s.app.screen, dialogs.Pick)
        await s.type("harness_patience")
        await s.press("enter")
        await s.wait(lambda: isinstance(s.app.screen, dialogs.Ask))
        await s.type("4")
        await s.press("enter")
        await s.wait(lambda: "harness_patience 2 -> 4" in s.said())
        assert s.client.state.settings.harness_patience == 4
        await s.wait(lambda: "0 / 4" in s.text())


async def test_a_refused_setting_says_why(stage: Any) -> None:
    async with stage() as s:
        await s.press("comma")
        await s.type("approval")
        await s.press("enter")
        await s.wait(lambda: isinstance(s.app.screen, dialogs.Ask))
        await s.type("maybe")
        await s.press("enter")
        await s.wait(lambda: "set:" in s.said() and "maybe" in s.said())
        assert s.client.sent == []


async def test_roll_back_to_a_version(stage: Any) -> None:
    async with stage() as s:
        await s.press("B")
        await s.type("theta-0003")
        await s.press("enter")
        await s.wait(lambda: isinstance(s.app.screen, dialogs.Confirm))
        await s.out_of_grace()
        await s.press("y")
        await s.wait(lambda: "goes on from theta-0003 with h0002" in s.said())
        assert s.client.state.policy == "theta-0003"


async def test_without_an_engine_controls_say_so_and_it_can_be_started(stage: Any) -> None:
    async with stage() as s:
        s.client.live = False
        s.client.changed()
        await s.wait(lambda: "no engine" in s.text())
        await s.press("p")
        assert "A starts it again" in s.said()
        await s.press("A")
        await s.wait(lambda: "started" in s.said())
        assert s.started == [s.script.rundir]


async def test_an_engine_lost_between_key_and_command_is_an_answer(stage: Any) -> None:
    async with stage() as s:

        async def gone(*_: Any, **__: Any) -> None:
            raise ConnectionError("no engine runs first-light")

        s.client.command = gone
        await s.press("p")
        await s.wait(lambda: "no engine runs first-light" in s.said())


async def test_a_command_from_another_terminal_shows_here_with_its_sender(stage: Any) -> None:
    async with stage() as s:
        s.script.command("pin", who="bob@laptop", harness="h0002")
        s.client.changed()
        await s.wait(lambda: "bob@laptop" in s.said())
        assert "h0002 stays until it is unpinned" in s.said()


async def test_two_terminals_on_one_run_see_the_same(stage: Any, tmp_path: Path) -> None:
    async with stage() as one:
        other = ScriptedClient(one.script, who="bob")
        one.client.who = "ann"
        services = Services(lambda rundir: other, list, lambda r: None, lambda p, o: one.script.rundir, list)
        app = WhaleApp(
            services, who="bob", rundir=one.script.rundir, config_folder=tmp_path, state_folder=tmp_path / "b"
        )
        async with app.run_test(size=WIDE) as pilot:
            two = Stage(app, pilot, other)
            await two.wait(lambda: two.page is not None and two.page.is_mounted)
            await two.settle()
            await two.press("p")
            one.client.changed()
            await two.wait(lambda: "pauses" in two.said())
            await one.wait(lambda: "bob" in one.said())
            assert "paused" in two.text() and "paused" in one.text()


# ------------------------------------------------------------------------------------------------------ Inbox


async def test_the_inbox_holds_all_that_a_decision_needs(stage: Any) -> None:
    async with stage(size=(140, 50)) as s:
        await s.press("i")
        assert "2 waiting" in s.one(Waiting).border_title
        card = "\n".join(row.plain for row in s.one(Card).lines)
        for words in (
            "may it cost episodes?", "read two passages", "passes the checks", "- SEARCH_K = 1", "+ SEARCH_K = 2",
            "h0003 vetoed: the title is the answer", "transcript.jsonl", "the search has taken", "by rules from h0002",
        ):  # fmt: skip
            assert words in card, words
        await s.press("down")
        assert "fewer than three words" in "\n".join(row.plain for row in s.one(Card).lines), "the checks' warning"


async def test_approve_takes_its_own_key_and_never_enter(stage: Any) -> None:
    async with stage() as s:
        await s.press("i", "enter", "enter")
        assert s.client.sent == []
        await s.out_of_grace()
        await s.press("a")
        await s.wait(lambda: s.client.sent == [("approve", {"harness": "h0010"})])
        await s.wait(lambda: "will be evaluated" in s.said())
        await s.wait(lambda: "1 waiting" in s.one(Waiting).border_title)


async def test_a_card_that_has_just_appeared_takes_no_key(stage: Any) -> None:
    async with stage() as s:
        await s.press("i")
        s.page.appeared = dialogs.time.monotonic()
        await s.press("a", "x")
        assert "just appeared" in s.said()
        assert s.client.sent == []
        assert s.app.screen is s.page, "and no question opened"


async def test_a_veto_needs_a_reason_and_shows_on_the_card_and_to_the_next_proposer(stage: Any) -> None:
    async with stage(size=(140, 50)) as s:
        await s.press("i")
        await s.out_of_grace()
        await s.press("x")
        assert isinstance(s.app.screen, dialogs.Ask)
        await s.press("enter")
        assert isinstance(s.app.screen, dialogs.Ask), "no reason, no veto"
        await s.type("reads [/] the clock")
        await s.press("enter")
        await s.wait(lambda: s.client.sent == [("veto", {"harness": "h0010", "reason": "reads [/] the clock"})])
        await s.wait(lambda: "vetoed" in s.said())
        waiting = s.one(Waiting)
        waiting.cursor = waiting.ids.index("h0010")
        await s.settle()
        card = "\n".join(row.plain for row in s.one(Card).lines)
        assert "vetoed by you: reads [/] the clock" in card
        s.script.command("approve", harness="h0009")
        s.script.score("h0009")
        s.script.end_iteration()
        made = s.script.propose("allow longer answers")
        s.client.changed()
        await s.wait(lambda: made[0] in waiting.ids)
        waiting.cursor = waiting.ids.index(made[0])
        await s.settle()
        assert "h0010 vetoed: reads [/] the clock" in "\n".join(row.plain for row in s.one(Card).lines)


async def test_auto_approval_shows_the_card_with_what_was_decided(stage: Any) -> None:
    async with stage(size=(140, 50)) as s:
        s.script.command("set", approval="auto")
        s.client.changed()
        await s.press("i")
        assert "nothing waits" in s.one(Waiting).border_title
        assert "approval is auto" in "\n".join(row.plain for row in s.one(Card).lines)


async def test_an_edit_is_submitted_as_ones_own(stage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    editor = tmp_path / "editor"
    editor.write_text('#!/bin/sh\necho "# by hand" >> "$1"\n')
    editor.chmod(editor.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("EDITOR", str(editor))
    monkeypatch.delenv("VISUAL", raising=False)
    sent: list[Any] = []
    async with stage() as s:
        command = s.client.command

        async def record(what: str, args: dict[str, Any] | None = None, **more: Any) -> Any:
            sent.append((what, args))
            return await command(what, args, **more)

        s.client.command = record
        await s.press("i", "E")
        await s.wait(lambda: isinstance(s.app.screen, dialogs.Ask))
        await s.type("mine")
        await s.press("enter")
        await s.wait(lambda: sent)
        what, args = sent[0]
        assert what == "propose"
        assert args["parent"] == "h0010" and args["hypothesis"] == "mine"
        assert args["source"] == s.script.rundir.harness_source("h0010") + "# by hand\n"


async def test_an_editor_that_changes_nothing_or_fails_proposes_nothing(
    stage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VISUAL", raising=False)
    async with stage() as s:
        await s.press("i")
        for editor, words in (
            ("true", "was not changed"),
            ("false", "ended with status 1"),
            ("/nope", "can't be started"),
        ):
            monkeypatch.setenv("EDITOR", editor)
            await s.press("E")
            await s.wait(lambda words=words: words in s.said(), words)
        assert s.client.sent == []


# ------------------------------------------------------------------------------------------------------ other pages


async def test_episodes_are_paged_filtered_and_opened(stage: Any) -> None:
    async with stage(until="finished", size=(160, 45)) as s:
        await s.press("e")
        rows = s.one(Rows)
        await s.wait(lambda: len(rows.rows) == 200)
        await s.press("end")
        await s.wait(lambda: len(rows.rows) == 400)
        assert [row.n for row in rows.rows] == sorted((row.n for row in rows.rows), reverse=True)
        await s.press("slash")
        await s.type("verdict=reject purpose=train tin")
        await s.press("enter")
        await s.wait(lambda: rows.rows and all(row.verdict == "reject" and row.purpose == "train" for row in rows.rows))
        await s.press("enter")
        await s.wait(lambda: s.one(Conversation).snap)
        text = "\n".join(row.plain for row in s.one(Conversation).lines)
        assert "<answer>tin</answer>" in text and "reject: it counts as a failure" in text


async def test_a_bad_filter_is_an_answer(stage: Any) -> None:
    async with stage() as s:
        await s.press("e", "slash")
        await s.type("colour=red")
        await s.press("enter")
        await s.wait(lambda: "no filter 'colour'" in s.said())


async def test_the_same_task_under_two_pairs_side_by_side(stage: Any) -> None:
    async with stage(until="finished", size=(160, 45)) as s:
        await s.press("e")
        await s.wait(lambda: s.one(Rows).rows)
        await s.press("c")
        await s.wait(lambda: isinstance(s.app.screen, dialogs.Pick))
        await s.press("enter")
        await s.wait(lambda: len(s.one(Conversation).snap) == 2)
        first, second = (episode for episode, _ in s.one(Conversation).snap)
        assert first.task == second.task
        assert (first.policy, first.harness) != (second.policy, second.harness)
        assert "under two pairs" in s.one(Conversation).border_title


async def test_the_lineage_cell_rolls_back_pins_and_exports(stage: Any, tmp_path: Path) -> None:
    async with stage(size=(140, 40)) as s:
        await s.press("l")
        grid = s.one(Grid)
        assert (grid.policy, grid.harness) == ("theta-0018", "h0002"), "the cursor begins at the current pair"
        await s.press("left", "down", "down")
        assert (grid.policy, grid.harness) == ("theta-0010", "h0004")
        assert "theta-0010" in grid.border_subtitle
        await s.press("up", "up", "B")
        await s.wait(lambda: isinstance(s.app.screen, dialogs.Confirm))
        await s.out_of_grace()
        await s.press("y")
        await s.wait(lambda: s.client.sent == [("rollback", {"policy": "theta-0010", "harness": "h0002"})])
        await s.press("P")
        await s.wait(lambda: s.client.sent[-1] == ("pin", {"harness": "h0002"}))
        await s.press("down", "down", "down", "V")
        await s.wait(lambda: s.client.sent[-1] == ("evaluate", {"policy": "theta-0010", "harness": "h0005"}))
        assert "is measured on D_test at the next safe point; it decides nothing" in s.said()
        assert "asked" in next(row for row in s.text().splitlines() if "h0005" in row)
        assert "test asked" in grid.border_subtitle
        await s.press("up", "up", "up")
        wanted: list[Any] = []

        async def export(rundir: RunDir, pair: tuple[str, str], out: Path) -> None:
            wanted.append((rundir.name, pair, out))
            if len(wanted) == 2:
                raise RunDirError(f"{out} exists already")

        s.app.services.export = export
        for words in ("README.md says how", "exists already"):
            await s.press("O", "ctrl+u")
            await s.type(str(tmp_path / "mine"))
            await s.press("enter")
            await s.wait(lambda words=words: words in s.said(), words)
        assert wanted == [("first-light", ("theta-0010", "h0002"), tmp_path / "mine")] * 2


async def test_a_real_export_says_what_keeps_it(stage: Any, tmp_path: Path) -> None:
    async with stage() as s:
        with pytest.raises(RunDirError, match="theta-0010 is no longer kept"):
            await real_export(s.script.rundir, ("theta-0010", "h0002"), tmp_path / "mine")


async def test_the_half_that_holds_the_system_back_is_said_on_the_run_page_and_in_the_ledger(stage: Any) -> None:
    async with stage(size=SMALL) as s:
        assert str(s.one(Patience).border_subtitle).startswith("harness-limited")
        await s.press("dollar_sign")
        assert "harness-limited · search +" in s.text()
    async with stage(size=(120, 36)) as s:
        await s.press("dollar_sign")
        assert "harness-limited: searching gains more" in s.text()


async def test_the_ledger_adds_up(stage: Any) -> None:
    async with stage(until="finished", size=(140, 40)) as s:
        await s.press("dollar_sign")
        text = s.text()
        assert f"{s.client.state.episodes:,}" in text
        assert "weight 1" in text and "a point" in text and "points for 1,000 episodes" in text


async def test_help_lists_every_action_and_the_palette_runs_them(stage: Any) -> None:
    async with stage(size=(140, 45)) as s:
        await s.press("question_mark")
        shown = "\n".join(row.plain for row in s.page.query_one("#text", Lines).lines)
        for action in ACTIONS:
            assert action.name in shown, action.name
        await s.press("escape")
        await s.wait(lambda: s.page.NAME == "run")
        await s.press("ctrl+p")
        await s.type("go lineage")
        await s.press("enter")
        await s.wait(lambda: s.page.NAME == "lineage")


async def test_home_lists_opens_and_starts_runs(stage: Any) -> None:
    async with stage(home=True) as s:
        await s.wait(lambda: len(s.one(Runs).lines) == 2)
        assert "crashed" in s.text()
        await s.press("n")
        await s.wait(lambda: isinstance(s.app.screen, dialogs.Pick))
        assert "ten minutes on a laptop" in s.text()
        await s.press("enter")
        await s.wait(lambda: s.page.NAME == "run" and s.started)
        await s.press("H")
        await s.wait(lambda: s.page.NAME == "home")
        await s.press("enter")
        await s.wait(lambda: s.page.NAME == "run")


async def test_leaving_says_how_to_come_back_and_stops_nothing(stage: Any) -> None:
    async with stage() as s:
        await s.press("q")
        await s.pilot.pause()
    assert s.app.return_value == "first-light goes on. To come back: whale-tui attach first-light"
    assert s.client.sent == []


# ------------------------------------------------------------------------------------------------------ the view


async def test_copy_goes_to_a_file_whose_path_is_shown(stage: Any, tmp_path: Path) -> None:
    async with stage() as s:
        await s.press("3", "y")
        assert str(tmp_path / "state" / "copied.txt") in s.said()
        assert "PASSAGE_CHARS = 400" in (tmp_path / "state" / "copied.txt").read_text()


async def test_a_screenshot_is_an_svg_file(stage: Any, tmp_path: Path) -> None:
    async with stage() as s:
        await s.press("w")
        (picture,) = (tmp_path / "state").glob("whale-*.svg")
        assert picture.read_text().startswith("<svg")
        assert str(picture) in s.said()


async def test_themes_preview_as_the_cursor_moves_and_escape_goes_back(stage: Any) -> None:
    async with stage() as s:
        await s.press("T", "down")
        assert s.app.theme == "whale-light"
        await s.press("escape")
        await s.wait(lambda: s.app.theme == "whale-dark")
        await s.press("T", "down", "enter")
        await s.wait(lambda: s.app.layout.theme == "whale-light")
        assert s.app.look.roles["phase-weight"] == s.page.look.roles["phase-weight"] == "#00706c"


async def test_user_themes_keys_and_bad_files(stage: Any, tmp_path: Path) -> None:
    (tmp_path / "config" / "themes").mkdir(parents=True)
    (tmp_path / "config" / "themes" / "mine.toml").write_text("primary = '#ff00ff'\nansi = true\n")
    (tmp_path / "config" / "themes" / "broken.toml").write_text("primary = 3")
    (tmp_path / "config" / "config.toml").write_text('theme = "mine"\n[keys]\n"run: pause" = "f5"\n')
    async with stage(until="training") as s:
        assert s.app.theme == "mine"
        assert "broken.toml" in s.said()
        await s.press("p")
        assert s.client.sent == []
        await s.press("f5")
        await s.wait(lambda: s.client.sent == [("pause", {})])
        assert ("f5", "resume") in s.one(KeyBar).snap


async def test_ascii_mode_draws_ascii_alone(stage: Any) -> None:
    async with stage(size=(140, 45), ascii=True) as s:
        for key in ("1", "d", "i", "e", "l", "dollar_sign", "question_mark", "H"):
            await s.press(key)
            odd = {c for c in s.text() if not c.isascii()}
            assert not odd, (key, odd)


async def test_no_color_draws_no_colour(stage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    async with stage() as s:
        await s.press("4")
        fills = set(re.findall(r"-r\d+ \{ fill: #([0-9a-f]{6})", s.app.export_screenshot()))
        assert fills == {"c5c8c6", "292929"}, "the picture's own two, plain and reversed: the screen names none"
        assert "accepted" in s.text() and "waiting" in s.text()


async def test_there_is_no_animation_and_no_blinking(stage: Any) -> None:
    async with stage() as s:
        assert s.app.animation_level == "none"
        await s.press("ctrl+p")
        from textual.widgets import Input

        assert not s.app.screen.query_one(Input).cursor_blink


async def test_a_damaged_journal_is_told_and_not_a_crash(stage: Any) -> None:
    from whale_tui.journal import JournalError

    async with stage() as s:

        async def broken() -> AsyncIterator[None]:
            raise JournalError("journal.sqlite: damaged after event 7")
            yield

        s.client.follow = broken
        s.app.open_run(s.script.rundir)
        await s.wait(lambda: "damaged after event 7" in s.text())
        assert s.app.is_running


async def test_what_is_shown_is_what_the_reducer_says(stage: Any) -> None:
    async with stage(until="training") as s:
        for step in range(6, 9):
            if step > 6:
                s.script.sample(step)
            s.script.train(step)
            s.client.changed()
        s.script.tell(r.PhaseFinished(cycle=2, phase="weight", reason="4 steps without a new best"))
        s.client.changed()
        await s.wait(lambda: "the weight phase ended: 4 steps without a new best" in s.one(Patience).as_text())
        assert s.one(Success).snap[0][-1][1] == "step"
        assert "between phases" in s.text()
