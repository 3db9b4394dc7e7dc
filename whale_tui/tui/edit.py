"""A text in the person's own editor."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

from textual.app import App, SuspendNotSupported


class NoEditor(Exception):
    """The text says what to set."""


def command() -> list[str]:
    """$VISUAL or $EDITOR, with its arguments; vi where neither is set."""
    return shlex.split(os.environ.get("VISUAL") or os.environ.get("EDITOR") or "vi")


async def edited(app: App[Any], text: str, name: str) -> str:
    """Give the terminal to the editor until it closes, and return what it left. Raises NoEditor."""
    with tempfile.TemporaryDirectory(prefix="whale-") as folder:
        path = Path(folder) / name
        path.write_text(text, encoding="utf-8")
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(SuspendNotSupported):
                stack.enter_context(app.suspend())
            try:
                screen = sys.__stderr__.fileno() if sys.__stderr__ is not None else None
                process = await asyncio.create_subprocess_exec(*command(), str(path), stderr=screen)
                status = await process.wait()
            except OSError as error:
                raise NoEditor(f"{command()[0]} can't be started ({error.strerror}): set $EDITOR") from None
        if status:
            raise NoEditor(f"{command()[0]} ended with status {status}: nothing is proposed")
        return path.read_text(encoding="utf-8", errors="replace")
