"""What a session leaves behind while it runs, so that one whose engine was killed is ended and counted all the same.

In proposer/it-0012/: prompt.md, transcript.jsonl, candidates/; while it runs also session.json, scratch/, home/.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from pathlib import Path

import msgspec
from msgspec import Struct

from whale_tui.proposers.base import Spending

MARK = "WHALE_SESSION"
"""Variable in the environment of a session's processes: it finds those that left their process group."""
SCRATCH, HOME = "scratch", "home"
PROMPT, TRANSCRIPT, STATE = "prompt.md", "transcript.jsonl", "session.json"


class Left(Struct):
    """session.json: the mark of the session's processes, and what it has spent so far."""

    mark: str
    usage: Spending
    started_at: float


def write(folder: Path, left: Left) -> None:
    """Replace session.json. A reader sees the old one or the new one."""
    beside = folder / f".{STATE}"
    beside.write_bytes(msgspec.json.encode(left))
    beside.replace(folder / STATE)


def read(folder: Path) -> Left | None:
    """None where a session never began here."""
    try:
        return msgspec.json.decode((folder / STATE).read_bytes(), type=Left)
    except (OSError, msgspec.DecodeError):
        return None


def close(folder: Path) -> None:
    """The session is in the journal."""
    (folder / STATE).unlink(missing_ok=True)


def end_all(sessions: Path) -> None:
    """End whatever sessions of an earlier engine left running, and clear away what only they needed."""
    for state in sessions.glob(f"*/{STATE}"):
        if (left := read(state.parent)) is not None:
            end(left.mark)
        clear(state.parent)


def clear(folder: Path) -> None:
    """Remove the copy of the archive, and the private home with the agent's litter and logins."""
    for name in (SCRATCH, HOME):
        shutil.rmtree(folder / name, ignore_errors=True)


def end(mark: str) -> int:
    """Kill every process of a session, wherever it went. Returns how many there were. Linux only: needs /proc."""
    found = 0
    for _ in range(20):  # one that forks while it is looked for is met the next time
        marked = _marked(f"{MARK}={mark}".encode())
        if not marked:
            break
        found += len(marked)
        for pid in marked:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    return found


def _marked(words: bytes) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if words in (entry / "environ").read_bytes().split(b"\0") and int(entry.name) != os.getpid():
                found.append(int(entry.name))
        except OSError:  # gone, or another user's
            continue
    return found
