"""The `python` tool: code in, what it printed out. In sealed forks on this machine, or in a SandboxFusion server.

Each call starts from an empty namespace and the same random state; nothing is left of the call before.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec
from msgspec import Struct

from whale_tui.domains import http
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


class _Ran(Struct):
    status: str = ""
    stdout: str | None = None
    stderr: str | None = None
    return_code: int | None = None


class _Answer(Struct):
    """POST /run_code {code, language, run_timeout, memory_limit_MB, stdin, files, fetch_files} of SandboxFusion."""

    status: Literal["Success", "Failed"]
    run_result: _Ran


class SandboxPython:
    """Code in SandboxFusion servers. One that is down, or says `SandboxError`, is no answer: Unavailable."""

    AT_ONCE = 64
    TRIES = 3
    PATIENCE = 30.0
    """Seconds beyond the program's own for which one request is waited for."""

    def __init__(self, urls: Sequence[str], seconds: int, memory_mb: int, output_chars: int) -> None:
        addresses = [f"{url}/run_code" for url in http.checked("domain.options.sandbox", urls)]
        self._service = http.Service(addresses, seconds=seconds + self.PATIENCE, tries=self.TRIES, at_once=self.AT_ONCE)
        self._seconds, self._memory_mb, self._output_chars = seconds, memory_mb, output_chars

    async def python(self, code: str) -> str:
        """As SealedPython's. Raises http.Unavailable where no server answers: the episode is `invalid`."""
        ran = await self._service.post(self._wanted(checked(code)), _result)
        output = (ran.stdout or "") + ((ran.stderr or "") if ran.return_code else "")
        if len(output) > self._output_chars:
            return marked(output[: self._output_chars], f"cut: more than {self._output_chars:,} characters")
        if ran.status == "TimeLimitExceeded":
            return marked(output, f"cut: still running after {self._seconds} s")
        return output

    def _wanted(self, code: str) -> dict[str, Any]:
        return {
            "code": code, "language": "python", "run_timeout": self._seconds, "memory_limit_MB": self._memory_mb,
            "stdin": "", "files": {}, "fetch_files": [],
        }  # fmt: skip

    async def preflight(self) -> list[str]:
        def read(value: Any) -> None:
            if (_result(value).stdout or "").strip() != "2":
                raise ValueError(f"it works out 1 + 1 as {value!r:.200}")

        found = await self._service.problems(self._wanted("print(1 + 1)"), read)
        return [f"sandbox server {problem}; start it, or leave domain.options.sandbox out" for problem in found]

    async def close(self) -> None:
        await self._service.close()


def _result(value: Any) -> _Ran:
    """What came of the program. ValueError where the server itself was at fault."""
    return msgspec.convert(value, _Answer).run_result


def checked(code: str) -> str:
    if not isinstance(code, str) or not code.strip():
        raise ValueError("python(code): code must be text, and not empty")
    if len(code) > CODE_CHARS:
        raise ValueError(f"python(code): {len(code):,} characters, at most {CODE_CHARS:,} are allowed")
    return code


def marked(output: str, mark: str) -> str:
    return f"{output}{'' if not output or output.endswith(chr(10)) else chr(10)}[{mark}]\n"
