"""Playing a pair: a process of its own, nothing of it in the run; and the page that shows it."""

from __future__ import annotations

import asyncio
import io
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.engines import environment
from tests.pairs import trained_run
from tests.scripted import ScriptedClient, write_run
from whale_tui.cli import _guarded
from whale_tui.play import shown, told
from whale_tui.rundir import RunDir, RunDirError
from whale_tui.service.player import Ask, Ended, Note, Player, Prompted, Ready, Said, Used, task_of
from whale_tui.tui import dialogs
from whale_tui.tui.app import WhaleApp
from whale_tui.tui.pages.play import Played, PlayPage
from whale_tui.tui.session import Services


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for key, value in environment(tmp_path).items():
        monkeypatch.setenv(key, value)
    return tmp_path


def contents(run: RunDir) -> dict[str, bytes]:
    """Of every file but the lock, and what SQLite keeps beside a journal that is read."""
    files = [p for p in sorted(run.path.rglob("*")) if p.is_file() and not re.search(r"-shm$|-wal$|/lock$", str(p))]
    return {str(p.relative_to(run.path)): p.read_bytes() for p in files}


def test_a_pair_plays_beside_a_run_and_leaves_no_trace_in_it(folder: Path) -> None:
    run = trained_run(folder)
    before = contents(run)
    with run.lock():  # as an engine holds it
        first, again, missing = asyncio.run(_session(run))
    assert contents(run) == before
    kinds = [type(m) for m in first]
    assert kinds == [Prompted, Said] * 3 + [Used, Used, Ended]
    assert "Say more." in first[0].text and first[2].shared > 0 and "go on" in first[2].text
    assert first[-1].answer.count("|") >= 4 and not first[-1].problem
    assert first[6].result.startswith("ToolError: clean: too many") and first[7].result == first[-1].answer
    assert again[-1].answer == first[-1].answer, "greedy is the same twice, and the same for a task of D_test"
    assert missing[-1].problem.startswith("error: ") and "ask" in missing[-1].problem
    lines = [told(message) for message in first]
    assert lines[4].startswith("call 3: ") and lines[6].startswith("clean(1, 2)\n  = ToolError: ")
    assert lines[-1] == f"answer: {shown(first[-1].answer)}  ({first[-1].seconds:.1f} s; not judged, not recorded)"


async def _session(run: RunDir) -> tuple[list[Any], ...]:
    player = Player(run, "theta-0001", "h0001")
    notes = [note async for note in player.start()]
    assert any("loading" in n.text for n in notes)
    assert player.ready is not None and player.ready.field == "ask" and len(player.ready.examples) == 6
    key, public = player.ready.examples[1]
    asks = (Ask(task=public, greedy=True), Ask(key=key, greedy=True), Ask(task={"other": "x"}))
    try:
        return tuple([[m async for m in player.play(ask)] for ask in asks])
    finally:
        await player.close()
        assert player._process is None


def test_the_command_line_prints_it_and_says_what_can_not_be_played(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained_run(folder)
    played: list[Any] = []

    class Answers(ScriptedPlayer):
        async def play(self, ask: Ask) -> AsyncIterator[Any]:
            played.append((self.pair, ask))
            yield Said(1, "\x1b[2J", 1, "length")
            yield Ended("Corley" if len(played) < 3 else "", "" if len(played) < 3 else "budget: spent", 0.5)

    with monkeypatch.context() as patch:
        patch.setattr("whale_tui.play.Player", Answers)
        assert _guarded(["play", "tiny", "Who?", "--headless", "--greedy"]) == 0
        said = capsys.readouterr()
        assert said.out == (
            "sampled 1 tokens, cut off by the length limit\n  > \\x1b[2J\n"
            "answer: Corley  (0.5 s; not judged, not recorded)\n"
        )
        assert said.err.endswith("loading the model\n")
        patch.setattr("sys.stdin", io.StringIO('one\n\n{"question": "two"}\n'))
        assert _guarded(["play", "tiny", "--headless", "--pair", "start"]) == 1
        assert "no answer: budget: spent" in capsys.readouterr().out
    best, start = ("theta-0001", "h0001"), ("theta-0000", "h0000")
    assert [(pair, ask.task["question"], ask.greedy) for pair, ask in played] == [
        (best, "Who?", True), (start, "one", False), (start, "two", False),
    ]  # fmt: skip

    assert _guarded(["play", "tiny", "x", "--headless", "--pair", "theta-0007,h0001"]) == 1
    assert "has no theta-0007" in capsys.readouterr().err
    run.config.write_text(run.config.read_text().replace(str(folder / "model"), str(folder / "elsewhere")))
    assert _guarded(["play", "tiny", "x", "--headless"]) == 1
    said = capsys.readouterr()
    assert "bad-model" in said.err and "elsewhere" in said.err and "Traceback" not in said.err


def test_the_process_ends_when_nobody_listens(folder: Path) -> None:
    run = trained_run(folder)
    command = [sys.executable, "-m", "whale_tui.service.play", str(run.path), "theta-0001", "h0001"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdin is not None and process.stdout is not None
    process.stdout.readline()
    process.stdin.close()
    assert process.wait(20) == 0
    process.stdout.close()


def test_what_a_person_types_becomes_a_task() -> None:
    one = Ready("p", "h", "question", ["question"], [])
    assert task_of("Who?", one) == {"question": "Who?"}
    assert task_of('{"question": "Who?", "level": 3}', one) == {"question": "Who?", "level": 3}
    with pytest.raises(ValueError, match="no JSON object"):
        task_of("{who", one)
    with pytest.raises(ValueError, match="fen, moves"):
        task_of("Who?", Ready("p", "h", "", ["fen", "moves"], []))
    assert shown("a\x1b[31mb") == "a\\x1b[31mb"


# ---------------------------------------------------------------------------------------------------------- the page


class ScriptedPlayer:
    """Plays as it is told, a step for each `go`."""

    def __init__(self, rundir: RunDir, policy: str, harness: str) -> None:
        self.pair, self.ready, self.asked, self.closed = (policy, harness), None, [], False
        self.go = asyncio.Queue[Any]()

    async def start(self) -> AsyncIterator[Any]:
        yield Note("loading the model")
        self.ready = Ready(*self.pair, "question", ["question"], [("k1", {"question": "Where is Corley?"})])

    async def play(self, ask: Ask) -> AsyncIterator[Any]:
        self.asked.append(ask)
        while not isinstance(message := await self.go.get(), Ended):
            if isinstance(message, Exception):
                raise message
            yield message
        yield message

    async def close(self) -> None:
        self.closed = True


async def test_the_page_shows_an_episode_as_it_happens(tmp_path: Path) -> None:
    script = write_run(tmp_path / "runs" / "first-light", until="waiting")
    players: list[ScriptedPlayer] = []

    def play(*pair: Any) -> ScriptedPlayer:
        players.append(ScriptedPlayer(*pair))
        return players[-1]

    services = Services(
        lambda rundir: ScriptedClient(script),
        lambda: [],
        lambda run: None,
        lambda c, o: script.rundir,
        lambda: [],
        play,
    )
    app = WhaleApp(
        services, who="you", rundir=script.rundir, config_folder=tmp_path / "config", state_folder=tmp_path / "state"
    )
    async with app.run_test(size=(100, 40)) as pilot:

        async def wait(met: Any) -> None:
            for _ in range(100):
                if met():
                    return
                await pilot.pause(0.02)
            raise AssertionError(app.page.query_one(Played).as_text())

        await wait(lambda: app.page is not None and app.session.state.seq)
        await pilot.press("t")
        await wait(lambda: isinstance(app.page, PlayPage) and players and players[0].ready and not app.page.busy)
        best = script.state.best
        assert players[0].pair == (best.policy, best.harness)
        pane = app.page.query_one(Played)
        await pilot.press("t")
        await wait(lambda: isinstance(app.screen, dialogs.Ask))
        await pilot.press(*"Who[red]?", "enter")
        await wait(lambda: players[0].asked)
        assert players[0].asked == [Ask(task={"question": "Who[red]?"})]
        for message in (
            Prompted(1, "<|im_start|>user\nWho[red]?\x1b[2J", 9, 0), Said(1, "Anna [b]Corley[/b]", 5, "stop"),
            Used("search", "'Anna'", "an article", 0.01),
        ):  # fmt: skip
            players[0].go.put_nowait(message)
        await wait(lambda: "an article" in pane.as_text())
        text = pane.as_text()
        assert "Who[red]?" in text and "Anna [b]Corley[/b]" in text and "\x1b" not in text and "answer" not in text
        await pilot.press("t")
        await wait(lambda: "at work" in str(app.page.query_one("#answer").render()))
        players[0].go.put_nowait(Ended("Corley", "", 1.0))
        await wait(lambda: "answer  Corley" in pane.as_text())
        await pilot.press("z", "x")
        await wait(lambda: isinstance(app.screen, dialogs.Pick))
        await pilot.press("enter")
        await wait(lambda: len(players[0].asked) == 2)
        assert players[0].asked[1] == Ask(key="k1", greedy=True)
        players[0].go.put_nowait(RunDirError("the process is gone"))
        await wait(lambda: "the process is gone" in str(app.page.query_one("#answer").render()))
        await pilot.press("escape")
        await wait(lambda: app.page.NAME == "run")
        await pilot.press("t")
        await wait(lambda: len(players) == 2 and players[1].ready)
        await pilot.press("H")
        await wait(lambda: app.page.NAME == "home")
    assert players[1].closed

    app = WhaleApp(
        services, who="you", rundir=script.rundir, play=("theta-0010", "h0002"), config_folder=tmp_path / "config",
        state_folder=tmp_path / "state",
    )  # fmt: skip
    async with app.run_test(size=(80, 24)) as pilot:
        await wait(lambda: len(players) == 3 and players[2].ready)
        assert players[2].pair == ("theta-0010", "h0002") and isinstance(app.page, PlayPage)
        await wait(lambda: "t: a task of yours" in app.page.query_one(Played).as_text())
