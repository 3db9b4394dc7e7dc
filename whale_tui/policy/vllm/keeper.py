"""Runs a command for an engine that may be killed: `python -I keeper.py COMMAND..`, a pipe as stdin.

The command gets a session of its own, so that all processes it starts are ended together: when the pipe closes (the
engine closed it, or is gone) they get SIGTERM, and SIGKILL soon after. Otherwise the keeper ends as the command does.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time

GRACE = 10.0
"""Seconds between SIGTERM and SIGKILL."""


def main() -> int:
    child = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, start_new_session=True)

    def watch() -> None:
        while os.read(0, 4096):
            pass
        end(child)

    threading.Thread(target=watch, daemon=True).start()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: threading.Thread(target=end, args=(child,)).start())
    code = child.wait()
    _kill(child.pid, signal.SIGKILL)  # what it left behind
    return code if code >= 0 else 128 - code


def end(child: subprocess.Popen[bytes]) -> None:
    _kill(child.pid, signal.SIGTERM)
    deadline = time.monotonic() + GRACE
    while child.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    _kill(child.pid, signal.SIGKILL)


def _kill(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


if __name__ == "__main__":
    raise SystemExit(main())
