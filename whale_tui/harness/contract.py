"""The contract of a harness, as data and as text: what its file defines, what it is given, what it may import."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from msgspec import Struct

ENTRY = "run"
PARAMETERS = ("task", "model", "tools")
SOURCE_BYTES = 64_000
"""The largest harness. The proposer reads a whole archive of them."""

MODULES = frozenset(
    """__future__ abc array ast base64 binascii bisect calendar cmath collections collections.abc colorsys
    contextlib copy csv dataclasses datetime decimal difflib enum fractions functools graphlib hashlib heapq
    hmac html html.entities html.parser io itertools json keyword math numbers operator pprint random re reprlib
    shlex statistics string struct textwrap traceback types typing unicodedata urllib.parse
    xml.etree.ElementTree zlib""".split()  # noqa: SIM905
)
"""Modules that a harness may import: pure computation, nothing that waits, watches a clock or reaches outside."""

LAZY = {
    "ast": ("inspect",),
    "collections": ("heapq", "copy"),
    "datetime": ("_strptime",),
    "functools": ("typing", "types", "weakref"),
    "re": ("warnings", "unicodedata"),
    "statistics": ("random",),
    "traceback": ("ast", "unicodedata"),
    "xml.etree.ElementTree": ("xml.parsers.expat", "pyexpat"),
}
"""What the standard library imports inside functions of an allowed module: nothing can be imported after the seal."""


class Reply(Struct):
    """What `model.chat` returns. The last two are the episode's own budget after this call; None is no limit."""

    text: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    remaining_calls: int | None = None
    remaining_tokens: int | None = None


class BudgetExceeded(Exception):
    """Raised by the engine's side of a call when the episode has no calls or tokens left; the text says which."""


class ToolError(Exception):
    """A tool refused. Raised in the harness under the same name, with the same text."""


def use_tool(tools: Mapping[str, Callable[..., Any]], name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Call one tool of an episode. An unknown name, arguments that don't fit, and ValueError become ToolError; any
    other exception is a failure of the machinery and passes through."""
    if name not in tools:
        raise ToolError(f"there is no tool {name!r}; there are: {', '.join(sorted(tools)) or 'none'}")
    try:
        inspect.signature(tools[name]).bind(*args, **kwargs)
    except TypeError as misfit:
        raise ToolError(f"{name}: {misfit}") from misfit
    try:
        return tools[name](*args, **kwargs)
    except ValueError as refusal:
        raise ToolError(str(refusal)) from refusal


def imports(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Every module that an `import` in the tree names, with its line. `from a import b` names `a`, and `a.b` where
    only that is a module of the contract."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            for alias in node.names:
                full = f"{base}.{alias.name}"
                yield (full if base not in MODULES and full in MODULES else base, node.lineno)


def preload(source: str) -> tuple[list[str], list[str]]:
    """What a worker imports before the seal: the allowed modules that a harness names, and what these import later."""
    try:
        named = {name for name, _ in imports(ast.parse(source))} & MODULES
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return [], []  # the worker meets the same error and reports it
    return sorted(named), sorted({later for name in named for later in LAZY.get(name, ())} - named)


CONTRACT = f"""\
A harness is one Python file, at most {SOURCE_BYTES:,} bytes, that defines

    def run(task, model, tools) -> str:
        \"\"\"Drive the model on one task; return the final answer as a string.\"\"\"

task    The task's public fields, read-only: task["question"] or task.question. Lists come as tuples.
model   model.chat(messages, *, max_tokens=None, stop=None, thinking=None) -> reply
            messages    list of {{"role": "system" | "user" | "assistant" | "tool", "content": str}}
            max_tokens  at most this many sampled tokens; never more than the run allows
            stop        a string or list of strings that end the reply
            thinking    True or False for models with a thinking mode; None leaves the model's own default
        reply.text, reply.finish_reason ("stop" or "length"), reply.prompt_tokens, reply.completion_tokens
        model.remaining.calls, model.remaining.tokens: what this episode may still use (None: no limit)
        Temperature and top-k belong to the run.
tools   tools.<name>(...): the domain's tools. They take and return JSON values. A refused call raises ToolError, a
        name that needs no import.

Plain synchronous code. No files, network, processes, clocks or threads: none of them exist where a harness runs.
It may import: {", ".join(sorted(MODULES - {"__future__"}))}.
No other import, no __import__, no importlib.
The module body runs anew for every episode: keep it to constants and definitions. Nothing is shared by episodes.
For a choice that repeats from run to run use random.Random(<a constant>) and sort sets before iterating over them.
An exception, a missing or non-string answer, an over-long answer, a hang, and running over the call or token budget
end the episode as `reject`; the traceback is kept. print() goes to a bounded log.
The verdict comes from the returned answer and the state of the environment. Nothing else that a harness says counts.
"""
