"""The checks that a candidate passes before it costs an episode. Each reason is in words and names the line."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Sequence

from msgspec import Struct, field

from whale_tui.harness import contract, fst, leaks
from whale_tui.records import content_hash


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
    texts: Sequence[str] = (),
    fst_base: str | None = None,
    given: str = "",
) -> Checked:
    """Check a candidate. `archive_hashes` are the `source_hash` of every archived harness, `answers` the reference
    answers and `texts` the texts of D_harness tasks, `fst_base` is h0's source where only prompts may change, and
    `given` is text that the proposer was handed (brief, demonstrations, h0): what it holds is not held against it."""
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
    warnings = leaks.in_source(tree, answers, texts, given) if problem is None else []
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
