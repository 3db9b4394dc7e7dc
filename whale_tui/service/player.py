"""Playing a pair, as seen from outside: the words that go to its process and come back, and the process as an object.

It is no part of the run: it takes no lock, writes nothing into the run directory, and nothing of it is a score.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import platformdirs
from msgspec import Struct

from whale_tui.rundir import RunDir, RunDirError

LINE_BYTES = 1 << 24
END_SECONDS = 10.0


class Ask(Struct):
    """Solve a task: one of D_test by its key, or one by its public fields."""

    key: str = ""
    task: dict[str, Any] = {}
    greedy: bool = False


class Message(Struct, tag_field="type"):
    pass


class Note(Message, tag="note"):
    """What it does before it is ready."""

    text: str


class Ready(Message, tag="ready"):
    policy: str
    harness: str
    field: str
    """The public field that a task typed as text goes into; empty where a task has several."""
    fields: list[str]
    examples: list[tuple[str, dict[str, Any]]]
    """Key and public fields of some tasks of D_test."""


class Prompted(Message, tag="prompted"):
    """A call: the prompt beyond what the calls before showed, special tokens shown."""

    call: int
    text: str
    tokens: int
    shared: int


class Said(Message, tag="said"):
    """What the policy sampled in that call."""

    call: int
    text: str
    tokens: int
    finish_reason: str


class Used(Message, tag="used"):
    """A tool use."""

    name: str
    args: str
    result: str
    seconds: float


class Ended(Message, tag="ended"):
    """`problem` says why there is no answer, where there is none."""

    answer: str
    problem: str
    seconds: float


class Failed(Message, tag="failed"):
    """The process can't go on."""

    text: str


AnyMessage = Note | Ready | Prompted | Said | Used | Ended | Failed
encode = msgspec.json.encode
decode = msgspec.json.Decoder(AnyMessage).decode
decode_ask = msgspec.json.Decoder(Ask).decode


def task_of(text: str, ready: Ready) -> dict[str, Any]:
    """A task out of what a person typed: a JSON object, or the text of the one field. Raises ValueError in words."""
    if text.lstrip().startswith("{"):
        try:
            return msgspec.json.decode(text, type=dict[str, Any])
        except msgspec.MsgspecError as error:
            raise ValueError(f"this is no JSON object: {error}") from None
    if not ready.field:
        raise ValueError(f"a task here has the fields {', '.join(ready.fields)}: type it as a JSON object")
    return {ready.field: text}


class Player:
    """The process that plays a pair. `start`, then `play` as often as wanted, then `close`."""

    def __init__(self, rundir: RunDir, policy: str, harness: str) -> None:
        self.rundir, self.policy, self.harness = rundir, policy, harness
        self.ready: Ready | None = None
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> AsyncIterator[Note]:
        """Load the pair; what it does meanwhile. Raises RunDirError with what keeps it from it."""
        log = Path(platformdirs.user_state_dir("whale-tui")) / "play.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as file:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "whale_tui.service.play", str(self.rundir.path), self.policy, self.harness),
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=file, limit=LINE_BYTES,
                start_new_session=True,
            )  # fmt: skip
        async for message in self._messages():
            if isinstance(message, Note):
                yield message
            elif isinstance(message, Ready):
                self.ready = message
                return

    async def play(self, ask: Ask) -> AsyncIterator[Prompted | Said | Used | Ended]:
        """One episode as it happens; the last is Ended. Raises RunDirError where the process fails."""
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(encode(ask) + b"\n")
        async for message in self._messages():
            if isinstance(message, Prompted | Said | Used | Ended):
                yield message
                if isinstance(message, Ended):
                    return

    async def close(self) -> None:
        """End the process, whatever it does."""
        process, self._process = self._process, None
        if process is None or process.returncode is not None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            async with asyncio.timeout(END_SECONDS):
                await process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _messages(self) -> AsyncIterator[AnyMessage]:
        assert self._process is not None and self._process.stdout is not None
        while line := await self._process.stdout.readline():
            message = decode(line)
            if isinstance(message, Failed):
                raise RunDirError(message.text)
            yield message
        log = Path(platformdirs.user_state_dir("whale-tui")) / "play.log"
        raise RunDirError(f"the process that plays the pair has ended; see {log}")
