"""The `python` tool: code in, what it printed out. In sealed forks on this machine, or in a SandboxFusion server.

Each call starts from an empty namespace and the same random state; nothing is left of the call before.
"""

from __future__ import annotations

import asyncio
import signal
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import msgspec
from msgspec import Struct

from whale_tui.harness.forks import Forks

CODE_CHARS = 20_000

_SYMPY = (
    "core functions solvers ntheory polys series integrals simplify sets logic matrices combinatorics geometry "
    "concrete stats calculus discrete assumptions utilities tensor strategies algebras unify external multipledispatch"
)
_OTHERS = (
    "math cmath fractions decimal itertools functools collections statistics random re string heapq bisect datetime "
    "json operator time copy typing dataclasses numpy numpy.linalg numpy.polynomial numpy.random numpy.fft sympy "
    "mpmath sympy.parsing.sympy_parser sympy.printing"
)
MODULES = (*_OTHERS.split(), *(f"sympy.{package}.*" for package in _SYMPY.split()))
"""Imported before the first fork. sympy imports much of itself inside functions: all of it that computes is named."""
SKIPPED = (".tests", ".benchmarks", ".trace", "_doc", "autowrap", "codegen", "mathml", "runtests", "pytest")


class Python(Protocol):
    """What runs the policy's code."""

    async def python(self, code: str) -> str: ...

    async def preflight(self) -> list[str]: ...

    async def close(self) -> None: ...


class SealedPython:
    """Code in sealed forks (harness/forks.py)."""

    def __init__(self, seconds: int, memory_mb: int, output_chars: int, *, allow_unsealed: bool = False) -> None:
        self._seconds, self._output_chars = seconds, output_chars
        self._forks = Forks(
            Path(__file__).with_name("inside_python.py"),
            modules=MODULES,
            skip=SKIPPED,
            cpu_seconds=seconds,
            wall_seconds=6.0 * seconds,
            memory_mb=memory_mb,
            output_bytes=output_chars,
            allow_unsealed=allow_unsealed,
        )

    async def python(self, code: str) -> str:
        """What the code printed, then the traceback where it raised; cut with a mark at its limits.

        ValueError where `code` is no text or too long. ForkFailure or SealUnavailable is the machinery's.
        """
        ended = await self._forks.run({"code": checked(code)})
        match ended.kind:
            case "cpu" | "wall":
                return marked(ended.output, f"cut: still running after {self._seconds} s")
            case "output":
                return marked(ended.output, f"cut: more than {self._output_chars:,} characters")
            case "died":
                name = signal.Signals(-ended.code).name if ended.code < 0 else f"status {ended.code}"
                return marked(ended.output, f"the process ended with {name}")
        return ended.output

    async def preflight(self) -> list[str]:
        try:
            said = await self.python("import sympy\nprint(sympy.Rational(1, 2) + 1)")
            opened = await self.python("open('/')")
        except Exception as error:
            return [f"the python tool does not start: {error}"]
        found = [] if said == "3/2\n" else [f"the python tool works out 1/2 + 1 as {said!r}"]
        sealed = "PermissionError" in opened
        return found if sealed else [*found, f"the python tool is not sealed: opening a folder said {opened!r}"]

    async def close(self) -> None:
        await self._forks.close()


class SandboxDown(Exception):
    """The sandbox server does not answer, or says that it is at fault itself."""


class _Ran(Struct):
    status: str = ""
    stdout: str | None = None
    stderr: str | None = None
    return_code: int | None = None


class _Answer(Struct):
    status: str
    run_result: _Ran | None = None
    message: str | None = None


class SandboxPython:
    """Code in a SandboxFusion server: POST /run_code. Asked directly, never through a proxy of the environment's."""

    AT_ONCE = 32
    WAITS = (0.5, 2.0)
    """Seconds before each further try where the server does not answer."""

    def __init__(self, url: str, seconds: int, memory_mb: int, output_chars: int) -> None:
        self._url = url.rstrip("/") + "/run_code"
        self._seconds, self._memory_mb, self._output_chars = seconds, memory_mb, output_chars
        self._open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open
        self._threads = ThreadPoolExecutor(self.AT_ONCE, thread_name_prefix="sandbox")

    async def python(self, code: str) -> str:
        """As SealedPython's. SandboxDown where the server can't be had: the episode is `invalid`."""
        checked(code)
        answer = await asyncio.get_running_loop().run_in_executor(self._threads, self._ask, code)
        ran = answer.run_result
        if answer.status == "SandboxError" or ran is None:
            raise SandboxDown(f"{self._url} says {answer.status}: {answer.message or 'no result'}")
        output = (ran.stdout or "") + ((ran.stderr or "") if ran.return_code else "")
        if len(output) > self._output_chars:
            return marked(output[: self._output_chars], f"cut: more than {self._output_chars:,} characters")
        return (
            marked(output, f"cut: still running after {self._seconds} s")
            if ran.status == "TimeLimitExceeded"
            else output
        )

    def _ask(self, code: str) -> _Answer:
        wanted = {
            "code": code, "language": "python", "run_timeout": self._seconds, "memory_limit_MB": self._memory_mb,
            "stdin": "", "files": {}, "fetch_files": [],
        }  # fmt: skip
        request = urllib.request.Request(
            self._url, msgspec.json.encode(wanted), {"Content-Type": "application/json"}, method="POST"
        )
        for wait in (*self.WAITS, None):
            try:
                with self._open(request, timeout=self._seconds + 30) as reply:
                    return msgspec.json.decode(reply.read(), type=_Answer)
            except (OSError, msgspec.MsgspecError) as error:
                final = isinstance(error, urllib.error.HTTPError) and error.code < 500
                if wait is None or final:
                    raise SandboxDown(f"{self._url}: {error}") from error
            time.sleep(wait)
        raise AssertionError("the last try returns or raises")

    async def preflight(self) -> list[str]:
        try:
            said = await self.python("print(1 + 1)")
        except SandboxDown as error:
            return [f"the sandbox server does not answer: {error}; start it, or leave domain.options.sandbox empty"]
        return [] if said.strip() == "2" else [f"the sandbox server works out 1 + 1 as {said!r}"]

    async def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def checked(code: str) -> str:
    if not isinstance(code, str) or not code.strip():
        raise ValueError("python(code): code must be text, and not empty")
    if len(code) > CODE_CHARS:
        raise ValueError(f"python(code): {len(code):,} characters, at most {CODE_CHARS:,} are allowed")
    return code


def marked(output: str, mark: str) -> str:
    return f"{output}{'' if not output or output.endswith(chr(10)) else chr(10)}[{mark}]\n"
