"""The program as a person has it: in tmux, on a real engine. It switches, vetoes, approves, is cut off, comes back."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines import environment, state_of, wait_for, write_config
from whale_tui.rundir import RunDir

pytestmark = pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")


class Tmux:
    """A tmux server of its own, with a shell in a window of 120x36, as over SSH."""

    def __init__(self, folder: Path) -> None:
        self.socket = str(folder / "tmux")
        self.environment = environment(folder) | {"TERM": "xterm-256color", "LANG": "C.UTF-8"}
        self.open("one", 120, 36)

    def open(self, name: str, width: int, height: int) -> None:
        """A window with a shell, as somebody gets who logs in."""
        self.run("-f", "/dev/null", "new-session", "-d", "-s", name, "-x", str(width), "-y", str(height), "sh")
        time.sleep(0.3)
        self.type("PS1='ready''> '\n")
        self.until("ready>")

    def run(self, *words: str) -> str:
        done = subprocess.run(
            ["tmux", "-S", self.socket, *words], env=self.environment, capture_output=True, text=True, timeout=20
        )
        return done.stdout

    def screen(self) -> str:
        return self.run("capture-pane", "-p")

    def keys(self, *keys: str) -> None:
        self.run("send-keys", *keys)

    def type(self, text: str) -> None:
        self.run("send-keys", "-l", text)

    def until(self, *words: str, seconds: float = 90) -> str:
        end = time.monotonic() + seconds
        while not all(word in (screen := self.screen()) for word in words):
            assert time.monotonic() < end, f"{words} never came:\n{screen}"
            time.sleep(0.1)
        return screen

    def program(self) -> int:
        """The process id of what the shell in the window runs."""
        shell = int(self.run("display-message", "-p", "#{pane_pid}"))
        children = subprocess.run(["ps", "-o", "pid=", "--ppid", str(shell)], capture_output=True, text=True).stdout
        return int(children.split()[0])

    def modes(self) -> str:
        return self.run("display-message", "-p", "#{alternate_on}#{mouse_any_flag}").strip()


@pytest.fixture
def tmux(tmp_path: Path) -> Iterator[Tmux]:
    terminal = Tmux(tmp_path)
    yield terminal
    terminal.run("kill-server")
    for lock in tmp_path.glob("runs/*/lock"):
        info = RunDir(lock.parent).engine_info()
        if info is not None and RunDir(lock.parent).is_locked():
            os.kill(info.pid, signal.SIGKILL)


def test_switch_veto_approve_hang_up_and_come_back(tmux: Tmux, tmp_path: Path) -> None:
    config = write_config(
        tmp_path, harness__approval="before-eval", run__first_phase="weight", run__cycles=30, schedule__epochs=300.0,
        run__budget_episodes=100_000,
    )  # fmt: skip
    program = f"{sys.executable} -m whale_tui"
    tmux.type(f"{program} run {config}\n")
    tmux.until("tiny", "weight phase")
    assert tmux.modes() == "11"
    run = RunDir(tmp_path / "runs" / "tiny")

    wait_for(lambda: state_of(run).step >= 1, what="a step")
    tmux.keys("s")
    tmux.until("switch: the weight phase ends after step")
    tmux.until("harness phase", "waiting: i")

    tmux.keys("i")
    tmux.until("may it cost episodes?")
    time.sleep(0.7)  # a card takes no key in its first half second
    waiting = [c.id for c in state_of(run).undecided()]
    tmux.keys("x")
    tmux.until("Veto")
    tmux.type("reads [/] the clock")
    tmux.keys("Enter")
    tmux.until("is vetoed; its reason goes to the next proposal")
    vetoed = [c for c in state_of(run).harnesses.values() if c.outcome == "vetoed"]
    assert [c.reason for c in vetoed] == ["reads [/] the clock"]
    (left,) = set(waiting) - {vetoed[0].id}
    tmux.keys("Home")
    tmux.until(f"diff · {left}")
    time.sleep(0.7)
    tmux.keys("a")
    tmux.until("will be evaluated")
    wait_for(lambda: state_of(run).harnesses[left].decided == "approved", what="the approval")

    os.kill(tmux.program(), signal.SIGHUP)
    tmux.until("ready>")
    assert tmux.modes() == "00", "main screen and mouse as before"
    assert run.is_locked(), "the engine goes on"

    tmux.type("clear\n")
    tmux.type(f"{program} attach tiny\n")
    tmux.until("success rate")
    tmux.keys("4")
    tmux.until("candidates", vetoed[0].id)
    program_id = tmux.program()
    tmux.run("kill-session", "-t", "one")  # the connection is gone, and the terminal with it
    wait_for(lambda: not Path(f"/proc/{program_id}").exists(), 10, "the end of the program")
    assert run.is_locked(), "the engine goes on"

    tmux.open("two", 80, 24)
    tmux.type(f"{program} attach tiny\n")
    tmux.until("tiny", "1 overview")
    tmux.keys("q")
    tmux.until("tiny goes on. To come back: whale-tui attach tiny")
    assert tmux.modes() == "00"
