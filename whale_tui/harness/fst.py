"""The prompt-only rule of the `fst` condition: outside its prompt constants a candidate is h0, to the syntax tree.

A prompt constant is a module-level assignment of an UPPER_CASE name, made once, to text: a string, or lists, tuples
and dicts of text (literals joined with + count too; an f-string is code). Its text may change and its lists may grow or
shrink; its kind and the keys of its dicts stay. A name that h0 uses to parse or to act instead of to say (a regular
expression, a stop string, an argument of a tool or of a parsing method, a comparison) is no prompt, whatever it holds.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator

PARSERS = frozenset(
    """split rsplit partition rpartition find rfind index rindex count startswith endswith removeprefix removesuffix
    strip lstrip rstrip replace fullmatch match search sub subn finditer findall compile""".split()  # noqa: SIM905
)


def prompts(tree: ast.Module) -> dict[str, ast.expr]:
    """The prompt constants of a harness: name -> value."""
    used = set(_used_as_code(tree))
    constants = list(_constants(tree))
    times = Counter(name for names, _ in constants for name in names)
    return {
        name: value
        for names, value in constants
        for name in names
        if not used & set(names) and all(times[each] == 1 for each in names) and _is_text(value)
    }


def violation(base: str, candidate: str) -> str | None:
    """Why a candidate breaks the rule against h0 (`base`), naming its line; None where it keeps it.

    Both must parse: SyntaxError otherwise."""
    old, new = without_docstrings(ast.parse(base)), without_docstrings(ast.parse(candidate))
    allowed = prompts(old)
    texts = dict(_constants(new))
    for names, value in list(_constants(old)):
        other = texts.get(names)
        if names[0] not in allowed or other is None:
            continue
        if not _same_kind(value, other):
            return (
                f"line {other.lineno}: {names[0]} must stay {_kind(value)} with nothing but text in it: "
                "fst changes the text of prompts and nothing else"
            )
        for tree in (old, new):
            _blank(tree, names)
    where = _first_difference(old, new)
    if where is None:
        return None
    may = ", ".join(sorted(allowed)) or "h0 has none"
    return f"line {where}: fst changes the text of prompt constants and nothing else ({may}); this differs from h0"


def _constants(tree: ast.Module) -> Iterator[tuple[tuple[str, ...], ast.expr]]:
    """Module-level assignments to UPPER_CASE names alone, each with its value."""
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            names = _names(node)
            if names and all(re.fullmatch(r"_?[A-Z][A-Z0-9_]*", name) for name in names):
                yield names, node.value


def _names(node: ast.Assign | ast.AnnAssign) -> tuple[str, ...]:
    """The names that an assignment gives a value; none where it assigns to anything else too."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return tuple(target.id if isinstance(target, ast.Name) else "" for target in targets)


def _used_as_code(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        parts: list[ast.expr] = []
        if isinstance(node, ast.Compare):
            parts = [node.left, *node.comparators]
        elif isinstance(node, ast.Call):
            parts = [keyword.value for keyword in node.keywords if keyword.arg == "stop"]
            if isinstance(node.func, ast.Attribute):
                owner = node.func.value
                if node.func.attr in PARSERS or (isinstance(owner, ast.Name) and owner.id in ("re", "tools")):
                    parts += node.args + [keyword.value for keyword in node.keywords]
        for part in parts:
            yield from (name.id for name in ast.walk(part) if isinstance(name, ast.Name))


def _is_text(value: ast.expr) -> bool:
    match value:
        case ast.Constant():
            return isinstance(value.value, str)
        case ast.List() | ast.Tuple():
            return all(map(_is_text, value.elts))
        case ast.Dict():
            return all(isinstance(k, ast.Constant) and isinstance(k.value, str) for k in value.keys) and all(
                map(_is_text, value.values)
            )
        case ast.BinOp(op=ast.Add()):
            return (
                _kind(value.left) == _kind(value.right) == "a string" and _is_text(value.left) and _is_text(value.right)
            )
    return False


def _kind(value: ast.expr) -> str:
    match value:
        case ast.List():
            return "a list"
        case ast.Tuple():
            return "a tuple"
        case ast.Dict():
            return "a dict"
        case ast.BinOp():
            return _kind(value.left)
        case ast.Constant() if isinstance(value.value, str):
            return "a string"
    return "as it is"


def _same_kind(old: ast.expr, new: ast.expr) -> bool:
    if not _is_text(new) or _kind(old) != _kind(new):
        return False
    match old, new:
        case (ast.List() | ast.Tuple(), ast.List() | ast.Tuple()):
            return not old.elts or all(any(_same_kind(a, b) for a in old.elts) for b in new.elts)
        case (ast.Dict(), ast.Dict()):
            keys = [ast.unparse(key) for key in old.keys if key], [ast.unparse(key) for key in new.keys if key]
            return keys[0] == keys[1] and all(map(_same_kind, old.values, new.values))
    return True


def _blank(tree: ast.Module, names: tuple[str, ...]) -> None:
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and _names(node) == names:
            node.value = ast.copy_location(ast.Constant(""), node)


def without_docstrings(tree: ast.Module) -> ast.Module:
    """The tree without docstrings: they say nothing to the policy."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and (
            node.body
            and isinstance(node.body[0], ast.Expr)
            and isinstance(node.body[0].value, ast.Constant)
            and isinstance(node.body[0].value.value, str)
        ):
            node.body = node.body[1:] or ([] if isinstance(node, ast.Module) else [ast.Pass()])
    return tree


def _first_difference(old: ast.AST, new: ast.AST, line: int = 1) -> int | None:
    """The line of `new` where the two trees first differ."""
    line = getattr(new, "lineno", line)
    if type(old) is not type(new):
        return line
    for name in old._fields:
        a, b = getattr(old, name, None), getattr(new, name, None)
        if isinstance(a, list) and isinstance(b, list):
            for x, y in zip(a, b, strict=False):
                found = _first_difference(x, y, line) if isinstance(x, ast.AST) and isinstance(y, ast.AST) else None
                if found is not None or (not isinstance(x, ast.AST) and x != y):
                    return found or line
            if len(a) != len(b):
                return (
                    getattr(b[len(a)], "lineno", line) if len(b) > len(a) else getattr(new, "end_lineno", None) or line
                )
        elif isinstance(a, ast.AST) and isinstance(b, ast.AST):
            found = _first_difference(a, b, line)
            if found is not None:
                return found
        elif type(a) is not type(b) or a != b:
            return line
    return None
