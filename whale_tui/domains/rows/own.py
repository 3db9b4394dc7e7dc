"""The user's Python file: loaded, looked at, and never trusted to return what it should."""

from __future__ import annotations

import importlib.util
import inspect
import sys
import traceback
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

from whale_tui.domains.base import DomainError, Tool
from whale_tui.records import Decision, Episode, Verdict

DECISIONS: tuple[str, ...] = get_args(Decision)


class OwnCode:
    """`verify(task, answer)` or `verify(task, answer, episode)`, `TOOLS` or `tools(task)`, `known_answers()`.

    Raises DomainError where the file can't be loaded or lacks `verify`; what goes wrong later makes an episode
    `invalid`, with the line.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self._module = _load(file)
        self._verify = self._function("verify")
        if self._verify is None:
            raise DomainError(f"{file} does not define verify(task, answer) -> bool | Verdict")
        self._takes_episode = self._fits(self._verify, 3)
        if not self._takes_episode and not self._fits(self._verify, 2):
            raise DomainError(
                f"{file}: verify{inspect.signature(self._verify)} must take (task, answer), or (task, answer, episode)"
            )
        self._make_tools = self._find_tools()

    def verify(self, row: dict[str, Any], answer: str, episode: Episode) -> Verdict | Awaitable[Verdict]:
        """The user's verdict on an answer; `invalid` where it raises or returns something else."""
        assert self._verify is not None
        arguments = (row, answer, episode) if self._takes_episode else (row, answer)
        try:
            said = self._verify(*arguments)
        except Exception as error:
            return self._failed("verify", error)
        return self._later(said) if inspect.isawaitable(said) else self._verdict(said)

    def tools(self, row: dict[str, Any]) -> Mapping[str, Tool]:
        """Fresh tools of one episode. Raises DomainError."""
        try:
            tools = self._make_tools(row)
        except Exception as error:
            raise DomainError(self._failed("tools", error).reason) from error
        wrong = not isinstance(tools, Mapping) or [
            name for name, tool in tools.items() if not (str(name).isidentifier() and callable(tool))
        ]
        if wrong:
            raise DomainError(f"{self.file}: tools must be a dict of names and functions, this is {tools!r:.200}")
        return tools

    def describe_tools(self, row: dict[str, Any]) -> dict[str, str]:
        """Name -> call and what it does, from signature and docstring."""
        return {
            name: f"{name}{_signature(tool)}: {' '.join((inspect.getdoc(tool) or 'no description').split())}"
            for name, tool in self.tools(row).items()
        }

    def known_answers(self) -> list[tuple[dict[str, Any], str, Decision]] | None:
        """(task as a dict of all its columns, answer, what verify has to say); None where the file gives none."""
        function = self._function("known_answers")
        if function is None:
            return None
        try:
            return [(dict(row), str(answer), _decision(right)) for row, answer, right in function()]
        except Exception as error:
            raise DomainError(self._failed("known_answers", error).reason) from error

    async def _later(self, said: Awaitable[Any]) -> Verdict:
        try:
            return self._verdict(await said)
        except Exception as error:
            return self._failed("verify", error)

    def _verdict(self, said: Any) -> Verdict:
        if isinstance(said, bool):
            return Verdict("accept" if said else "reject", f"verify returned {said}")
        if isinstance(said, Verdict) and said.decision in DECISIONS and isinstance(said.reason, str):
            return said
        kind = type(said).__name__
        return Verdict("invalid", f"verify returned {said!r:.100} ({kind}); it must return True, False or a Verdict")

    def _failed(self, name: str, error: Exception) -> Verdict:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == str(self.file)]
        where = f"{self.file.name}:{frames[-1].lineno}" if frames else self.file.name
        return Verdict("invalid", f"{name} failed at {where}: {type(error).__name__}: {error}")

    def _find_tools(self) -> Callable[[dict[str, Any]], Any]:
        fixed, make = getattr(self._module, "TOOLS", None), self._function("tools")
        if fixed is not None and make is not None:
            raise DomainError(f"{self.file}: it has both TOOLS and tools(task); keep one")
        if make is not None and not self._fits(make, 1):
            raise DomainError(f"{self.file}: tools{inspect.signature(make)} must take (task)")
        return make or (lambda row: {} if fixed is None else fixed)

    def _function(self, name: str) -> Callable[..., Any] | None:
        found = getattr(self._module, name, None)
        if found is not None and not callable(found):
            raise DomainError(f"{self.file}: {name} must be a function, this is {found!r:.100}")
        return found

    def _fits(self, function: Callable[..., Any], count: int) -> bool:
        try:
            inspect.signature(function).bind(*range(count))
        except TypeError:
            return False
        return True


def _load(file: Path) -> ModuleType:
    if not file.is_file():
        raise DomainError(
            f"{file}: no such file; domain.options.verifier names a Python file with verify(task, answer)"
        )
    spec = importlib.util.spec_from_file_location(f"whale_tui_rows_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise DomainError(f"{file} can't be read as Python; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and the like look their module up
    sys.path.insert(0, str(file.parent))  # so that it may import what lies beside it
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        raise DomainError(f"{error.filename}:{error.lineno}: it doesn't parse: {error.msg}") from error
    except Exception as error:
        raise DomainError(f"{file} fails to load: {type(error).__name__}: {error}") from error
    finally:
        sys.path.remove(str(file.parent))
    return module


def _decision(right: Any) -> Decision:
    if isinstance(right, bool):
        return "accept" if right else "reject"
    if right in DECISIONS:
        return right
    raise ValueError(f"expected True, False or one of {', '.join(DECISIONS)}, got {right!r}")


def _signature(tool: Tool) -> str:
    try:
        return str(inspect.signature(tool))
    except (TypeError, ValueError):
        return "(...)"
