"""What a model may do in a scratch folder: read, search, write a candidate, check. Nothing outside it, over no link.

Each tool answers in text, also where it refuses: the model reads the reason and goes on.
"""

from __future__ import annotations

import asyncio
import os
import re
import stat
from collections.abc import Callable
from pathlib import PurePosixPath
from typing import Any

from whale_tui.harness import contract
from whale_tui.proposers.scratch import Scratch

SHOWN_CHARS = 30_000
"""Most of a file, or of a search, that one call shows."""
SEARCH_SECONDS = 10.0


class Refused(Exception):
    """The text says what may be done instead."""


class Tools:
    def __init__(self, scratch: Scratch) -> None:
        self.scratch = scratch

    def all(self) -> list[Callable[..., Any]]:
        """The tools, as an agent library takes them: names, parameters and descriptions are the functions' own."""
        return [self.read, self.grep, self.write, self.check]

    async def read(self, path: str, first_line: int = 1, lines: int = 400) -> str:
        """Read a file, or list a folder.

        Args:
            path: relative to the folder, e.g. "archive/index.md"; "." lists the folder itself.
            first_line: where to begin.
            lines: how many lines at most.
        """
        try:
            fd = self._open(path)
        except Refused as refused:
            return f"refused: {refused}"
        try:
            if stat.S_ISDIR(os.fstat(fd).st_mode):
                with os.scandir(fd) as entries:
                    names = sorted(e.name + ("/" if e.is_dir(follow_symlinks=False) else "") for e in entries)
                return _cut("\n".join(name for name in names if not name.startswith(".")))
            with os.fdopen(os.dup(fd), "rb") as file:
                text = file.read(4 << 20).decode("utf-8", "replace")
        finally:
            os.close(fd)
        every = text.splitlines()
        start = max(1, first_line)
        shown = every[start - 1 : start - 1 + max(1, lines)]
        more = len(every) - (start - 1 + len(shown))
        return _cut("\n".join(shown)) + (f"\n({more} more lines)" if more > 0 else "")

    async def grep(self, pattern: str, path: str = ".") -> str:
        """Search files for lines that match an extended regular expression, with file and line number.

        Args:
            pattern: as of `grep -E`.
            path: a file, or a folder that is searched at any depth.
        """
        try:
            os.close(self._open(path))
        except Refused as refused:
            return f"refused: {refused}"
        process = await asyncio.create_subprocess_exec(
            "grep", "-rnIE", "-m", "50", "-e", pattern, "--", str(PurePosixPath(path)), cwd=self.scratch.folder,
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
            env={"PATH": os.environ.get("PATH", ""), "LC_ALL": "C.UTF-8"},
        )  # fmt: skip
        assert process.stdout is not None
        try:
            async with asyncio.timeout(SEARCH_SECONDS):
                found = await process.stdout.read(SHOWN_CHARS)
                while len(found) < SHOWN_CHARS and (more := await process.stdout.read(SHOWN_CHARS)):
                    found += more
        except TimeoutError:
            return f"refused: the search took longer than {SEARCH_SECONDS:g} s"
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()
        return _cut(found.decode("utf-8", "replace")) or "nothing matches"

    async def write(self, path: str, text: str) -> str:
        """Write a whole file into candidates/, in place of one of that name.

        Args:
            path: candidates/<name>.py
            text: the whole file.
        """
        if not re.fullmatch(r"(\./)?candidates/[A-Za-z0-9][A-Za-z0-9_-]{0,60}\.(py|md)", path):
            return "refused: only candidates/<name>.py can be written; a name has letters, digits, - and _"
        data = text.encode("utf-8", "replace")
        if len(data) > contract.SOURCE_BYTES:
            return f"refused: {len(data):,} bytes; a harness has at most {contract.SOURCE_BYTES:,}"
        try:
            folder = self._open("candidates")
        except Refused as refused:
            return f"refused: {refused}"
        try:
            name = PurePosixPath(path).name
            fd = os.open(
                name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder
            )
            with os.fdopen(fd, "wb") as file:
                file.write(data)
        except OSError as error:
            return f"refused: {error.strerror}"
        finally:
            os.close(folder)
        return f"written: {len(data):,} bytes"

    async def check(self, path: str = "") -> str:
        """Run the checks that the run does: on one candidate, or on all of candidates/.

        Args:
            path: candidates/<name>.py; empty: all.
        """
        names = [path] if path else [f"candidates/{name}" for name in await self._candidates()]
        out = []
        for name in names:
            source = await self._source(name)
            if source.startswith("refused: "):
                out.append(f"{name}: {source}")
                continue
            checked = await asyncio.to_thread(self.scratch.check, source)
            out.append(f"{name}: {'passes' if checked.ok else f'fails: {checked.reason}'}")
            out += [f"  warning: {text}" for text in checked.warnings]
        return "\n".join(out) or "no candidate is written yet"

    async def _candidates(self) -> list[str]:
        return [name for name in (await self.read("candidates")).splitlines() if name.endswith(".py")]

    async def _source(self, path: str) -> str:
        try:
            fd = self._open(path)
        except Refused as refused:
            return f"refused: {refused}"
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                return "refused: it is a folder"
            with os.fdopen(os.dup(fd), "rb") as file:
                return file.read(contract.SOURCE_BYTES + 1).decode("utf-8", "replace")
        finally:
            os.close(fd)

    def _open(self, path: str) -> int:
        """A descriptor of a plain file or folder inside, reached step by step without following a link."""
        parts = [part for part in PurePosixPath(path).parts if part != "."]
        if PurePosixPath(path).is_absolute() or ".." in parts or "\0" in path:
            raise Refused(f"{path} is outside the folder; paths are relative to it")
        fd = os.open(self.scratch.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for part in parts:
                inner = os.open(part, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=fd)
                os.close(fd)
                fd = inner
            mode = os.fstat(fd).st_mode
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                raise Refused(f"{path} is no plain file")
            return fd
        except OSError as error:
            os.close(fd)
            raise Refused(f"{path}: {error.strerror}") from None
        except Refused:
            os.close(fd)
            raise


def _cut(text: str) -> str:
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}\n(cut at {SHOWN_CHARS:,} characters)"
