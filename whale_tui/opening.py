"""Opening the terminal application, and what every command needs: finding a run, who is asking, failures in one line.

It loads no command-line parser, which takes as long as the first screen: `whale-tui` and `whale-tui attach RUN` come
here straight away.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from whale_tui.rundir import RunDir

FAILED, WRONG, REFUSED, NO_ENGINE, INTERRUPTED = 1, 2, 3, 4, 130


def straight(words: Sequence[str]) -> Callable[[], int] | None:
    """What the words ask for where they need no parser: nothing, or `attach [RUN]` without options."""
    if any(word.startswith("-") for word in words) or not is_terminal():
        return None
    if not words:
        return lambda: open_screen(None)
    if words[0] == "attach" and len(words) <= 2:
        return lambda: attach(*words[1:])
    return None


def attach(run: str = "", *, headless: bool = False, **options: Any) -> int:
    """Watch a run: on the screen, or as lines where there is none. Without RUN: the one that runs, or the newest."""
    if not run:
        from whale_tui.service import discovery

        runs = discovery.list_runs()
        if not runs:
            return fail("no run on this machine yet; start one with: whale-tui run CONFIG")
        run = str(next((r.path for r in runs if r.status in ("running", "paused")), runs[0].path))
    rundir = find(run)
    if is_terminal() and not headless:
        return open_screen(rundir.path, **options)
    return follow(rundir, stop_on_interrupt=False)


def open_screen(
    path: Path | None, *, ascii: bool = False, mouse: bool = True, theme: str | None = None,
    play: tuple[str, str] | None = None,
) -> int:  # fmt: skip
    """The application on a run, or on Home, until the person leaves. play: a pair to begin with on the Play page."""
    from whale_tui.tui.app import run_app

    return run_app(path, who=who(), ascii=ascii, mouse=mouse, theme=theme, play=play)


def follow(rundir: RunDir, *, stop_on_interrupt: bool) -> int:
    """Print what happens until the run ends."""
    import asyncio

    from whale_tui.service import lines

    return asyncio.run(lines.follow(rundir, who(), stop_on_interrupt=stop_on_interrupt))


def find(run: str) -> RunDir:
    """A run by name or path. Raises RunDirError, with the nearest name."""
    from whale_tui.rundir import RunDirError
    from whale_tui.service import discovery

    found = discovery.find(run)
    if found is None:
        import difflib

        names = [r.name for r in discovery.list_runs()]
        near = difflib.get_close_matches(run, names, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(names) or 'none yet'}"
        raise RunDirError(f"no run {run!r}; {hint}")
    found.check_format()
    return found


def who() -> str:
    """The person at this terminal, as the journal names them."""
    import getpass

    tty = os.ttyname(0).removeprefix("/dev/") if sys.stdin is not None and sys.stdin.isatty() else "no tty"
    try:
        user = getpass.getuser()
    except (OSError, KeyError):
        user = str(os.getuid())
    return f"{user}@{os.uname().nodename} ({tty})"


def is_terminal() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def fail(text: str) -> int:
    print(f"whale-tui: {text}", file=sys.stderr)
    return FAILED


def guarded(act: Callable[[], int]) -> int:
    """The exit status of a command; what a person can mend becomes one line on stderr."""
    try:
        return act()
    except KeyboardInterrupt:
        return INTERRUPTED
    except ConnectionError as error:
        if isinstance(error, BrokenPipeError):  # whoever read our output has gone
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        fail(str(error))
        return NO_ENGINE
    except OSError as error:
        return fail(str(error))
    except Exception as error:
        from whale_tui.config import ConfigError
        from whale_tui.journal import JournalError
        from whale_tui.rundir import RunDirError

        if isinstance(error, ConfigError | JournalError | RunDirError):
            return fail(str(error))
        raise
