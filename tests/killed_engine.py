"""An engine that is killed at a commit: `python -m tests.killed_engine RUNDIR N before|after`.

SIGKILL to itself right before or right after the N-th commit to the journal of this process.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from whale_tui.journal import Journal
from whale_tui.service import engine

_, folder, last, when = sys.argv
sys.argv = [sys.argv[0], folder]
_count = 0
_commit = Journal.commit


def commit(self: Journal, *args: Any, **more: Any) -> None:
    global _count
    _count += 1
    if _count == int(last) and when == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    _commit(self, *args, **more)
    if _count == int(last):
        os.kill(os.getpid(), signal.SIGKILL)


Journal.commit = commit  # type: ignore[method-assign]
if __name__ == "__main__":
    raise SystemExit(engine.main())
