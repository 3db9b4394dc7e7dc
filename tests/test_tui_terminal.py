"""The program in a real pseudo-terminal: first screen, signals, end of input, stray output, silence when idle."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.scripted import write_run
from whale_tui import opening

ENTER, LEAVE = b"\x1b[?1049h", b"\x1b[?1049l"
MOUSE_ON, MOUSE_OFF = b"\x1b[?1003h", b"\x1b[?1003l"


class Terminal:
    """A program on a pseudo-terminal of its own, as a shell over SSH would start it."""

    def __init__(self, command: list[str], environment: dict[str, str], size: tuple[int, int] = (120, 36)) -> None:
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", size[1], size[0], 0, 0))
        self.before = termios.tcgetattr(slave)
        self.process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, env=environment, start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )  # fmt: skip
        self.slave = slave
        self.output = b""

    def read(self, seconds: float) -> bytes:
        """What is written within a time."""
        got, end = b"", time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            ready, _, _ = select.select([self.master], [], [], left)
            if ready:
                try:
                    got += os.read(self.master, 65536)
                except OSError:
                    break
        self.output += got
        return got

    def until(self, wanted: bytes, seconds: float = 15.0) -> None:
        end = time.monotonic() + seconds
        while wanted not in self.output:
            assert time.monotonic() < end, f"never wrote {wanted!r}: {self.output[-2000:]!r}"
            self.read(0.05)

    def press(self, keys: bytes) -> None:
        os.write(self.master, keys)

    def wait(self, seconds: float = 8.0) -> int:
        end = time.monotonic() + seconds
        while self.process.poll() is None and time.monotonic() < end:
            self.read(0.05)
        assert self.process.poll() is not None, "still running"
        self.read(0.1)
        return self.process.returncode

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for fd in (self.master, self.slave):
            with contextlib.suppress(OSError):
                os.close(fd)


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    folders = {f"XDG_{name}_HOME": str(tmp_path / name.lower()) for name in ("CONFIG", "STATE", "DATA", "CACHE")}
    return (
        dict(os.environ) | folders | {"WHALE_RUNS": str(tmp_path / "runs"), "TERM": "xterm-256color", "LANG": "C.UTF-8"}
    )


@pytest.fixture
def attach(tmp_path: Path, environment: dict[str, str]) -> Iterator[Any]:
    opened: list[Terminal] = []
    write_run(tmp_path / "runs" / "first-light", until="finished")

    def open_it(*arguments: str, code: str = "") -> Terminal:
        start = code or "import sys; from whale_tui.__main__ import main; main()"
        command = [sys.executable, "-c", start, "attach", "first-light", *arguments]
        terminal = Terminal(command, environment)
        opened.append(terminal)
        return terminal

    yield open_it
    for terminal in opened:
        terminal.close()


def test_the_first_screen_quitting_and_how_to_come_back(attach: Any) -> None:
    t = attach()
    t.until(b"success rate")
    t.until(b"first-light")
    assert ENTER in t.output and MOUSE_ON in t.output
    t.press(b"q")
    assert t.wait() == 0
    after = t.output[t.output.rindex(LEAVE) :]
    assert MOUSE_OFF in t.output
    assert b"first-light is finished. To look at it again: whale-tui attach first-light" in after
    assert termios.tcgetattr(t.slave)[3] == t.before[3], "echo and line mode as before"


@pytest.mark.parametrize(("number", "status"), [(signal.SIGHUP, 129), (signal.SIGTERM, 143)])
def test_a_signal_leaves_the_terminal_clean(attach: Any, number: int, status: int) -> None:
    t = attach()
    t.until(b"success rate")
    t.process.send_signal(number)
    assert t.wait() == status
    for mode in (1000, 1003, 1006, 1004, 1049, 2004):
        assert t.output.rindex(b"\x1b[?%dl" % mode) > t.output.rindex(b"\x1b[?%dh" % mode), mode
    assert t.output.rindex(b"\x1b[?25h") > t.output.rindex(b"\x1b[?25l"), "the cursor is back"
    assert termios.tcgetattr(t.slave)[3] == t.before[3]


def test_a_lost_connection_ends_the_program_without_spinning(attach: Any) -> None:
    t = attach()
    t.until(b"success rate")
    signal_free = t.process
    os.close(t.master)
    os.close(t.slave)
    start = time.monotonic()
    signal_free.wait(timeout=8)
    assert time.monotonic() - start < 6
    t.master = t.slave = os.open(os.devnull, os.O_RDWR)


def test_idle_writes_nothing(attach: Any) -> None:
    t = attach()
    t.until(b"success rate")
    t.read(1.5)
    assert t.read(3.0) == b""


def test_without_mouse_and_in_ascii(attach: Any) -> None:
    t = attach("--no-mouse", "--ascii")
    t.until(b"success rate")
    t.read(0.5)
    assert MOUSE_ON not in t.output
    assert t.output.isascii()
    t.press(b"q")
    assert t.wait() == 0


def test_stray_output_of_libraries_stays_off_the_screen(attach: Any, tmp_path: Path) -> None:
    code = (
        "import os, sys, threading, time\n"
        "def noise():\n"
        "    while sys.__stderr__.fileno() == 2: time.sleep(0.05)\n"
        "    time.sleep(0.5); os.write(2, b'NOISE FROM A LIBRARY')\n"
        "threading.Thread(target=noise, daemon=True).start()\n"
        "from whale_tui.__main__ import main; main()"
    )
    t = attach(code=code)
    t.until(b"success rate")
    log = tmp_path / "state" / "whale-tui" / "terminal.log"
    end = time.monotonic() + 20
    while not (log.exists() and b"NOISE" in log.read_bytes()):
        assert time.monotonic() < end
        t.read(0.1)
    assert b"NOISE" not in t.output
    t.press(b"q")
    assert t.wait() == 0


def test_opening_the_screen_goes_past_the_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "is_terminal", lambda: True)
    opened: list[Any] = []
    monkeypatch.setattr(opening, "open_screen", lambda path: opened.append(path) or 0)
    monkeypatch.setattr(opening, "attach", lambda run="": opened.append(run) or 0)
    for words in ([], ["attach"], ["attach", "mine"]):
        act = opening.straight(words)
        assert act is not None and act() == 0
    assert opened == [None, "", "mine"]
    for words in (["--help"], ["attach", "mine", "--ascii"], ["attach", "a", "b"], ["run", "a.toml"], ["list"]):
        assert opening.straight(words) is None
    monkeypatch.setattr(opening, "is_terminal", lambda: False)
    assert opening.straight(["attach"]) is None


def test_the_terminal_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys; import whale_tui.tui.app, whale_tui.service.client\n"
        "from whale_tui.tui import pages\n"
        "[pages.page(name) for name in ('home', 'run', 'inbox', 'episodes', 'lineage', 'ledger', 'help')]\n"
        "print([m for m in ('torch', 'transformers', 'numpy', 'cyclopts', 'tree_sitter',"
        "  'whale_tui.loop.run', 'whale_tui.loop.rollouts')"
        " if m in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
