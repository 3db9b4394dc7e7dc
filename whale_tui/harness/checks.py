"""The checks that a candidate passes before it costs an episode. Each reason is in words and names the line."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator, Sequence

from msgspec import Struct, field

from whale_tui.harness import contract, fst
from whale_tui.records import content_hash

SHORTEST_ANSWER = 4
"""Reference answers with fewer characters are in every program by chance, so they are not looked for."""
COMMON = frozenset(
    """true false none null yes no unknown answer question north south east west left right first second third zero one
    two three four five six seven eight nine ten hundred thousand monday tuesday wednesday thursday friday saturday
    sunday january february march april june july august september october november december""".split()  # noqa: SIM905
)
"""Nor are these words, which a prompt may well use."""
MOST_WARNINGS = 10


class Checked(Struct):
    """What the checks found. `reason` is empty where `ok`; `source_hash` is empty where the source doesn't parse."""

    ok: bool
    reason: str = ""
    warnings: list[str] = field(default_factory=list)
    source_hash: str = ""


def source_hash(source: str) -> str:
    """A harness's identity: the hash of its code without comments, docstrings and formatting. SyntaxError or ValueError
    where it doesn't parse."""
    try:
        return content_hash(ast.unparse(fst.without_docstrings(ast.parse(source))))
    except (RecursionError, MemoryError) as error:
        raise ValueError(f"nested too deeply ({type(error).__name__})") from error


def check(
    source: str,
    *,
    archive_hashes: Collection[str] = (),
    answers: Sequence[str] = (),
    fst_base: str | None = None,
    given: str = "",
) -> Checked:
    """Check a candidate. `archive_hashes` are the `source_hash` of every archived harness, `answers` the reference
    answers of D_harness, `fst_base` is h0's source where only prompts may change, and `given` is text that the proposer
    was handed (the brief, its demonstrations): an answer that is in there is not held against it."""
    size = len(source.encode("utf-8", "replace"))
    if size > contract.SOURCE_BYTES:
        return Checked(False, f"the file has {size:,} bytes; at most {contract.SOURCE_BYTES:,}")
    try:
        tree = ast.parse(source)
        identity = source_hash(source)
    except SyntaxError as error:
        return Checked(False, f"line {error.lineno}: it doesn't parse: {error.msg}")
    except (ValueError, RecursionError, MemoryError) as error:
        return Checked(False, f"it doesn't parse: {error or type(error).__name__}")
    problem = _entry(tree) or _imports(tree)
    if problem is None and identity in archive_hashes:
        problem = "it is the same code as a harness already in the archive (comments and formatting aside)"
    if problem is None and fst_base is not None:
        problem = fst.violation(fst_base, source)
    warnings = list(_leaks(tree, answers, given)) if problem is None else []
    if len(warnings) > MOST_WARNINGS:
        warnings[MOST_WARNINGS:] = [f"and {len(warnings) - MOST_WARNINGS} more reference answers"]
    return Checked(problem is None, problem or "", warnings, identity)


def _entry(tree: ast.Module) -> str | None:
    """`run` is the last thing of its name at the top level: a plain function of the contract's parameters."""
    wanted = f"def {contract.ENTRY}({', '.join(contract.PARAMETERS)})"
    named = [
        node
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name == contract.ENTRY
    ]
    if not named:
        return f"line 1: no top-level `{wanted}`"
    run = named[-1]
    if not isinstance(run, ast.FunctionDef):
        return f"line {run.lineno}: `{contract.ENTRY}` must be a plain function, `{wanted}`"
    given = run.args
    names = tuple(argument.arg for argument in given.posonlyargs + given.args)
    if names != contract.PARAMETERS or given.vararg or given.kwarg or given.kwonlyargs:
        return f"line {run.lineno}: `{contract.ENTRY}` must take exactly ({', '.join(contract.PARAMETERS)})"
    for node in _own(run):
        if isinstance(node, ast.Yield | ast.YieldFrom):
            return f"line {node.lineno}: `{contract.ENTRY}` must return its answer, not yield"
    return None


def _own(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """The nodes of a function's own body, not those of functions and classes inside it."""
    waiting: list[ast.AST] = list(function.body)
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            waiting.extend(ast.iter_child_nodes(node))


def _imports(tree: ast.Module) -> str | None:
    for name, line in contract.imports(tree):
        if name not in contract.MODULES:
            return f"line {line}: a harness can't import {name!r}; it may import {', '.join(sorted(contract.MODULES))}"
    for node in ast.walk(tree):
        name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
        text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
        if "__import__" in (name, text) or name == "importlib":
            return f"line {node.lineno}: a harness imports with `import` alone"  # type: ignore[attr-defined]
    return None


def _leaks(tree: ast.Module, answers: Sequence[str], given: str) -> Iterator[str]:
    """Reference answers that stand in a string literal, as whole words, in any case."""
    literals = [
        (node.lineno, node.value.casefold())
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    everything, known = "\n".join(text for _, text in literals), given.casefold()
    for answer in sorted({answer.strip().casefold() for answer in answers}):
        if len(answer) < SHORTEST_ANSWER or answer in COMMON or answer not in everything:
            continue
        whole = re.compile(rf"(?<!\w){re.escape(answer)}(?!\w)")
        lines = sorted({line for line, text in literals if whole.search(text)})
        if lines and not whole.search(known):
            yield f"line {lines[0]}: a string holds {answer!r}, the reference answer of a D_harness task"
