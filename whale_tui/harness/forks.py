"""Sealed processes by the thousand: a server that has imported what takes long forks one for each job.

The same seal as a harness's worker (seal.py). A worker serves many episodes and keeps what they leave; here every job
starts afresh from the same state, at the price of a fork: the rule for code that a policy wrote, and for comparisons
that it might make explode.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import site
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct

from whale_tui.harness import sealed

INSIDE = Path(__file__).with_name("forks_inside.py")
PATIENCE = 30.0
"""Seconds beyond a job's wall time after which a silent server is taken for dead."""
START_SECONDS = 60.0


class ForkFailure(Exception):
    """The server could not be started, or died twice over one job: a failure of the machinery."""


class Ended(Struct, frozen=True):
    """How a job ended. `done`: by itself; `cpu`, `wall`, `output`: cut at that limit; `died`: by a crash."""

    kind: Literal["done", "cpu", "wall", "output", "died"]
    output: str
    """What it wrote, up to the limit."""
    code: int = 0
    """Exit status, negative for a signal."""
    seconds: float = 0.0
    """Processor time."""


class Forks:
    """Jobs of one program file, which defines `warm()` and `run(payload)`: what `run` writes to fd 1 is the result.

    modules: imported before the first fork, `name.*` with all below it but what holds one of `skip`. cpu_seconds,
    wall_seconds, memory_mb, output_bytes: limits of one job. at_once: children that run at a time. The server starts
    when first needed, and again where it died. `close` it in the end.
    """

    def __init__(
        self,
        program: Path,
        *,
        modules: Sequence[str] = (),
        skip: Sequence[str] = (),
        cpu_seconds: int = 10,
        wall_seconds: float = 30.0,
        memory_mb: int = 512,
        output_bytes: int = 20_000,
        at_once: int = 0,
        allow_unsealed: bool = False,
    ) -> None:
        self._setup: dict[str, Any] = {
            "program": str(program), "modules": list(modules), "skip": list(skip), "wall_seconds": wall_seconds,
            "output_bytes": output_bytes, "path": _paths(),
            "seal": {"limits": {"CPU": cpu_seconds, "AS": memory_mb << 20}, "program": None},
        }  # fmt: skip
        self._allow_unsealed = allow_unsealed
        self._at_once = at_once or os.cpu_count() or 1
        self._loop: asyncio.AbstractEventLoop | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._jobs: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._numbers = 0

    async def run(self, payload: Any) -> Ended:
        """Run one job (JSON values). Raises ForkFailure or SealUnavailable. Cancelling ends its process."""
        await self._at_home()
        async with self._room:
            for attempt in (1, 2):
                try:
                    answer = await self._ask(payload)
                    break
                except ForkFailure:
                    if attempt == 2:
                        raise
        if answer["kind"] == "unsealed":
            raise ForkFailure(answer["output"])
        return Ended(answer["kind"], answer["output"], answer["code"], answer["seconds"])

    async def start(self) -> None:
        """Start the server now, so that the first job need not wait. Raises ForkFailure or SealUnavailable."""
        await self._at_home()
        await self._started()

    async def close(self) -> None:
        """End the server and every job."""
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            if self._loop is asyncio.get_running_loop():
                await process.wait()
        if self._reader is not None and self._loop is asyncio.get_running_loop():
            await asyncio.gather(self._reader, return_exceptions=True)
        self._reader = None

    # --------------------------------------------------------------------------------------------------- the server

    async def _at_home(self) -> None:
        """What belongs to an event loop is made anew in another one."""
        if self._loop is not asyncio.get_running_loop():
            await self.close()
            self._loop, self._jobs = asyncio.get_running_loop(), {}
            self._room, self._starting = asyncio.Semaphore(self._at_once), asyncio.Lock()

    async def _started(self) -> asyncio.subprocess.Process:
        async with self._starting:
            if self._process is not None and self._process.returncode is None and not self._reader_done():
                return self._process
            await self.close()
            sealable, why = await asyncio.to_thread(sealed.can_seal)
            if not sealable and not self._allow_unsealed:
                raise sealed.SealUnavailable(f"{why}; code that a policy wrote runs behind a seal only")
            self._setup["seal"]["program"] = sealed._program() if sealable else None
            try:
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-s", "-S", "-P", str(INSIDE)),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    env={"PYTHONHASHSEED": "0", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
                    start_new_session=True,
                    limit=8 << 20,
                )
            except OSError as error:
                raise ForkFailure(f"the fork server could not be started: {error}") from error
            self._process = process
            ready = self._jobs[0] = asyncio.get_running_loop().create_future()
            self._reader = asyncio.create_task(self._read(process))
            self._write(process, self._setup)
            try:
                async with asyncio.timeout(START_SECONDS):
                    said = await ready
            except TimeoutError:
                said = {"kind": "failed", "output": f"not ready after {START_SECONDS:g} s"}
            if said["kind"] != "ready":
                await self.close()
                raise ForkFailure(f"the fork server did not start: {said['output']}")
            return process

    def _reader_done(self) -> bool:
        return self._reader is None or self._reader.done()

    async def _ask(self, payload: Any) -> dict[str, Any]:
        process = await self._started()
        self._numbers += 1
        number = self._numbers
        answer = self._jobs[number] = asyncio.get_running_loop().create_future()
        try:
            self._write(process, {"n": number, "payload": payload})
            async with asyncio.timeout(self._setup["wall_seconds"] + PATIENCE):
                return await answer
        except TimeoutError as silent:
            await self.close()
            raise ForkFailure("the fork server fell silent") from silent
        except asyncio.CancelledError:
            self._write(process, {"stop": number})
            raise
        finally:
            self._jobs.pop(number, None)

    def _write(self, process: asyncio.subprocess.Process, message: dict[str, Any]) -> None:
        if process.stdin is not None and not process.stdin.is_closing():
            process.stdin.write(json.dumps(message).encode() + b"\n")

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        """Hand answers to whoever waits for them, until the server is gone."""
        assert process.stdout is not None
        try:
            async for line in process.stdout:
                answer = json.loads(line)
                waiting = self._jobs.get(answer["n"])
                if waiting is not None and not waiting.done():
                    waiting.set_result(answer)
        finally:
            for waiting in list(self._jobs.values()):
                if not waiting.done():
                    waiting.set_exception(ForkFailure("the fork server died"))


def _paths() -> list[str]:
    """Where the server finds modules: this environment's, without the current folder."""
    named = sysconfig.get_paths()
    return [*dict.fromkeys([*sys.path[1:], named["stdlib"], named["platstdlib"], named["purelib"], *_site()])]


def _site() -> list[str]:
    return [path for path in site.getsitepackages() if Path(path).is_dir()]
