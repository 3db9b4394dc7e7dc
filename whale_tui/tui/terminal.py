"""The terminal as a remote thing: stray output kept off it, signals and hang-ups survived, copies sent to it."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import select
import signal
import sys
import termios
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

LEAVE_SECONDS = 2.0
"""Time for an orderly end after a hang-up or a signal, before the process ends regardless."""

OSC52_MOST = 74_000
"""Bytes of base64 that common terminals take in one OSC 52; larger copies go to the file alone."""

_OFF = "".join(f"\x1b[?{mode}l" for mode in (1000, 1003, 1015, 1006, 2004, 2048, 1004))
RESTORE = f"{_OFF}\x1b[<u\x1b[?7h\x1b[?1049l\x1b[?25h\x1b[0m"
"""Mouse, paste, resize and focus reports off, keyboard as it was, line wrap on, main screen, cursor."""


@contextlib.contextmanager
def errors_to(log: Path) -> Iterator[None]:
    """Send descriptor 2 to a log while the app draws, so that no library prints over the screen.

    The app itself draws on `sys.__stderr__`, which gets a descriptor of its own.
    """
    if sys.__stderr__ is None:
        yield
        return
    log.parent.mkdir(parents=True, exist_ok=True)
    sys.__stderr__.flush()
    before, screen = sys.__stderr__, os.dup(2)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    drawn = open(screen, "w", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    os.dup2(file, 2)
    sys.__stderr__ = drawn  # type: ignore[misc]
    try:
        yield
    finally:
        with contextlib.suppress(OSError, ValueError):
            drawn.flush()
        os.dup2(screen, 2)
        sys.__stderr__ = before  # type: ignore[misc]
        os.close(file)
        os.close(screen)


class Guard:
    """Leaves on SIGHUP, SIGTERM and end of input: orderly where that still works, and in any case within seconds."""

    def __init__(self) -> None:
        self.attributes: Any = None
        self.leaving = False
        self.status = 0
        with contextlib.suppress(termios.error, ValueError, OSError):
            self.attributes = termios.tcgetattr(0)

    def watch(self, leave: Callable[[str], None]) -> None:
        """Call from inside the running loop. `leave` gets why."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGHUP, signal.SIGTERM):
            with contextlib.suppress(RuntimeError, ValueError):  # not the main thread: a test
                loop.add_signal_handler(number, self._leave, leave, number.name)
        if sys.__stdin__ is not None and os.isatty(0):
            thread = threading.Thread(target=self._wait_for_hangup, args=(loop, leave), name="hang-up", daemon=True)
            thread.start()

    def _wait_for_hangup(self, loop: asyncio.AbstractEventLoop, leave: Callable[[str], None]) -> None:
        """Asks the kernel for nothing but a hang-up of standard input: costs nothing until there is one."""
        poll = select.poll()
        poll.register(0, 0)
        if poll.poll():
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._leave, leave, "end of input")
            self._end_soon()

    def _leave(self, leave: Callable[[str], None], why: str) -> None:
        if self.leaving:
            return
        self.leaving = True
        self.status = {"SIGHUP": 129, "SIGTERM": 143}.get(why, 0)
        self._end_soon()
        leave(why)

    def _end_soon(self) -> None:
        timer = threading.Timer(LEAVE_SECONDS, self._end)
        timer.daemon = True
        timer.start()

    def _end(self) -> None:
        """The orderly way is stuck, most likely on writing to a terminal that is gone."""
        with contextlib.suppress(OSError):
            os.set_blocking(1, False)
            os.write(1, RESTORE.encode())
        if self.attributes is not None:
            with contextlib.suppress(termios.error, OSError):
                termios.tcsetattr(0, termios.TCSANOW, self.attributes)
        os._exit(self.status)


def osc52(text: str, environment: Mapping[str, str]) -> str:
    """The sequence that puts a text on the clipboard of the terminal in front; empty when it is too long for that."""
    data = base64.b64encode(text.encode("utf-8", "replace")).decode()
    if len(data) > OSC52_MOST:
        return ""
    sequence = f"\x1b]52;c;{data}\x07"
    if environment.get("TMUX"):
        return "\x1bPtmux;" + sequence.replace("\x1b", "\x1b\x1b") + "\x1b\\"
    return sequence
