"""Edits on harnesses that keep to the documented constants and functions, source to source (libcst).

A harness that lacks a name only loses the edits that need it. Nothing here runs a harness.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import libcst as cst
from msgspec import Struct, field

from whale_tui.harness.contract import MODULES
from whale_tui.records import ArchivedEpisode, Brief, Demonstration

KINDS: dict[str, frozenset[str]] = {
    "format": frozenset({"TURN", "parse"}),
    "examples": frozenset({"EXAMPLES"}),
    "system": frozenset({"SYSTEM", "messages"}),
    "search": frozenset(
        {"SEARCH_K", "PASSAGE_CHARS", "PASSAGE", "SENTENCES", "shorten", "ask", "LISTED", "MOVE", "listed", "turn"}
    ),
    "query": frozenset({"query"}),
    "length": frozenset({"MAX_TOKENS", "STOP"}),
    "turns": frozenset({"TURNS", "OUTPUT"}),
    "retry": frozenset({"RETRIES", "RETRY", "attempt"}),
    "vote": frozenset({"VOTES", "choose", "run"}),
}
"""What a change to each documented name is a change of: how the search tells which kinds of edit pay."""

WAYS = ("another", "a third")


class Source:
    """A harness as a syntax tree. Changes return a new Source; names not touched keep their text and comments."""

    def __init__(self, text: str) -> None:
        """Raises ValueError where the text is no Python."""
        try:
            self._module = cst.parse_module(text)
        except (cst.ParserSyntaxError, RecursionError) as error:
            raise ValueError(f"not Python: {error}") from error

    @property
    def text(self) -> str:
        return self._module.code

    def constants(self) -> dict[str, Any]:
        """The UPPER_CASE names that the module gives a literal value."""
        found = {}
        for statement in self._module.body:
            name, value = _assigned(statement)
            if name and name.isupper() and value is not None:
                try:
                    found[name] = ast.literal_eval(_code(value))
                except (ValueError, SyntaxError):
                    continue
        return found

    def functions(self) -> dict[str, str]:
        """Each top-level function, written in one way whatever its formatting and comments."""
        return {
            statement.name.value: _plain(_code(statement))
            for statement in self._module.body
            if isinstance(statement, cst.FunctionDef)
        }

    def with_constants(self, **values: Any) -> Source:
        """These constants set: where they stand; new ones below the last constant that stands above any function."""
        body = list(self._module.body)
        for name, value in values.items():
            line = cst.parse_statement(f"{name} = {_literal(value)}")
            places = [place for place, statement in enumerate(body) if _assigned(statement)[0] == name]
            if places and isinstance(line, cst.SimpleStatementLine):
                old = body[places[-1]]
                assert isinstance(old, cst.SimpleStatementLine)
                body[places[-1]] = line.with_changes(leading_lines=old.leading_lines)
            else:
                body.insert(_below_constants(body), line)
        return self._with(body)

    def with_function(self, code: str) -> Source:
        """A top-level function replaced, or put before `run` where there is none of its name; with the imports that it
        needs, since a harness written by hand may lack them.
        """
        new = cst.parse_statement(code)
        assert isinstance(new, cst.FunctionDef)
        body = list(self._module.body)
        names = [s.name.value if isinstance(s, cst.FunctionDef) else "" for s in body]
        if new.name.value in names:
            place = names.index(new.name.value)
            body[place] = new.with_changes(leading_lines=body[place].leading_lines)
        else:
            place = names.index("run") if "run" in names else len(body)
            body.insert(place, new.with_changes(leading_lines=[cst.EmptyLine(indent=False)] * 2))
        return self._with(_imported(body, code))

    def _with(self, body: Sequence[Any]) -> Source:
        changed = Source.__new__(Source)
        changed._module = self._module.with_changes(body=body)
        return changed


class Format(Struct, frozen=True):
    """How the policy is asked and answers: the user turn, the answer as an example shows it, and the parser for it."""

    words: str
    turns: tuple[str, ...]
    """Wordings of TURN; the first is taken when the format is switched to."""
    shown: str
    """The assistant turn of an example, e.g. "<answer>{answer}</answer>"."""
    parse: str
    """`def parse(text, tools)`, and where it may raise ToolError, `raises`."""
    raises: bool = False
    stop: tuple[str, ...] = ()
    tool: str = ""
    """The tool that its parser uses, if any."""


class Edit(Struct, frozen=True):
    """One change. `cures` names the share of episodes (Evidence, or a Sign of the domain) that it is to lower."""

    kind: str
    words: str
    change: Callable[[Source, Kit], Source | None]
    """None where the source lacks what it needs or already has it."""
    cures: str = "wrong"
    weight: float = 1.0
    tool: str = ""
    """The tool that it brings into use, if any."""


def _default_fields(shown: Demonstration, constants: Mapping[str, Any]) -> dict[str, str]:
    return {**{key: str(value) for key, value in shown.task.items()}, "answer": shown.answer}


class Sign(Struct, frozen=True):
    """Something of the domain's own that an episode may show and an edit may mend (Edit.cures names it)."""

    words: str
    """Completes "40% of h0003's episodes ...", e.g. "read a passage that was cut"."""
    shows: Callable[[ArchivedEpisode, Mapping[str, Any]], bool]
    """Whether an episode shows it, from its record and the harness's constants."""


class DomainRules(Struct, frozen=True):
    """What a domain adds: its formats, its own edits and signs, wordings for SYSTEM, and the fields of an example.

    `fields` gives the values for TURN and for a format's `shown` from a demonstration and the harness's constants.
    """

    formats: tuple[Format, ...] = ()
    systems: tuple[str, ...] = ()
    edits: tuple[Edit, ...] = ()
    signs: Mapping[str, Sign] = field(default_factory=dict)
    fields: Callable[[Demonstration, Mapping[str, Any]], dict[str, str]] = _default_fields


class Kit(Struct, frozen=True):
    """What edits work with: the domain's rules, and the brief whose demonstrations are the only tasks ever shown."""

    rules: DomainRules
    brief: Brief

    def format_of(self, source: Source) -> Format | None:
        """The known format whose parser the harness has."""
        parse = source.functions().get("parse")
        return next((f for f in self.rules.formats if _plain(f.parse) == parse), None)

    def examples(self, source: Source, shown: Sequence[Demonstration]) -> list[tuple[str, str]] | None:
        """Demonstrations as chat turns in the harness's own wording and format; None where these are not known."""
        constants = source.constants()
        turn, written = constants.get("TURN"), self._shown(source)
        if not isinstance(turn, str) or written is None:
            return None
        try:
            fields = [self.rules.fields(demonstration, constants) for demonstration in shown]
            return [(turn.format(**each), written.format(**each)) for each in fields]
        except (KeyError, IndexError, ValueError, TypeError, AttributeError):
            return None

    def shown(self, source: Source) -> list[Demonstration]:
        """The demonstrations among the harness's examples, in their order."""
        return [d for pair in _pairs(source) if (d := self._demonstration(pair)) is not None]

    def refreshed(self, source: Source) -> Source:
        """The examples written anew after the wording, the format or the passages changed."""
        shown = self.shown(source)
        if not shown or len(shown) != len(_pairs(source)):
            return source
        examples = self.examples(source, shown)
        return source if examples is None else source.with_constants(EXAMPLES=examples)

    def _demonstration(self, pair: tuple[str, str]) -> Demonstration | None:
        return next((d for d in self.brief.demonstrations if any(str(v) in pair[0] for v in d.task.values())), None)

    def _shown(self, source: Source) -> str | None:
        """How an example shows its answer: the known format's way, or the way of the examples already there."""
        known = self.format_of(source)
        if known is not None:
            return known.shown
        for pair in _pairs(source):
            shown = self._demonstration(pair)
            if shown is not None and shown.answer and pair[1].count(shown.answer) == 1:
                escaped = pair[1].replace("{", "{{").replace("}", "}}")
                return escaped.replace(shown.answer, "{answer}")
        return None


def generic(kit: Kit) -> list[Edit]:
    """The edits that every domain has, then the domain's own."""
    return [
        *(Edit("format", f.words, _to_format(f), "none", 2.0 if f.tool else 1.0, f.tool) for f in kit.rules.formats),
        *(Edit("format", f"the question put in {way} way", _to_wording(n), "wrong", 0.5) for n, way in enumerate(WAYS)),
        *_example_edits(kit),
        *(Edit("system", _system_words(text), _to_constants(SYSTEM=text), "wrong", 1.0) for text in kit.rules.systems),
        Edit("length", "a stop at the end of the line", _to_constants(STOP=["\n"]), "truncated", 0.4),
        Edit("length", "at most 64 new tokens", _to_constants(MAX_TOKENS=64), "truncated", 0.2),
        Edit("length", "at most 16 new tokens", _to_constants(MAX_TOKENS=16), "cost", 0.2),
        *(
            Edit("retry", f"{n} more {'try' if n == 1 else 'tries'} with the error shown", _to_retry(n), "none")
            for n in (1, 2)
        ),
        *(Edit("vote", f"a vote over {n} answers", _to_vote(n), "wrong", 1.0) for n in (3, 4)),
        *kit.rules.edits,
    ]


def kinds_between(old: Source, new: Source) -> frozenset[str]:
    """The kinds of edit that lead from one source to the other. Examples rewritten for a format are no edit of them."""
    changed = _changed(old.constants(), new.constants()) | _changed(old.functions(), new.functions())
    kinds = {kind for kind, names in KINDS.items() if names & changed}
    if {"format", "search"} & kinds and len(_pairs(old)) == len(_pairs(new)):
        kinds.discard("examples")
    return frozenset(kinds)


def cross(kit: Kit, old: Source, other: Source, kind: str) -> Source | None:
    """`old` with everything of one kind taken from `other`; None where that changes nothing or does not fit."""
    names = KINDS[kind] | (KINDS["length"] | KINDS["examples"] if kind == "format" else frozenset())
    mine, theirs = {**old.constants(), **old.functions()}, {**other.constants(), **other.functions()}
    moved = {name: theirs[name] for name in sorted(names) if name in theirs and mine.get(name) != theirs[name]}
    if not moved or any(name in mine and name not in theirs for name in names):
        return None
    new = old.with_constants(**{name: value for name, value in moved.items() if name.isupper()})
    for name, value in moved.items():
        if not name.isupper():
            new = new.with_function(value)
    return kit.refreshed(new)


# ------------------------------------------------------------------------------------------------------ the changes

GUARDED = """
def attempt(chat, model, tools):
    reply = model.chat(chat, max_tokens=MAX_TOKENS, stop=STOP)
    try:
        return parse(reply.text, tools)
    except ToolError:
        return ""
"""
RETRYING = """
def attempt(chat, model, tools):
    answer = ""
    for _ in range(RETRIES + 1):
        reply = model.chat(chat, max_tokens=MAX_TOKENS, stop=STOP)
        try:
            answer, problem = parse(reply.text, tools), RETRY
        except ToolError as error:
            problem = str(error)
        if answer or model.remaining.calls == 0:
            break
        chat = [*chat, {"role": "assistant", "content": reply.text}, {"role": "user", "content": problem}]
    return answer
"""
VOTING = """
def run(task, model, tools):
    chat = messages(ask(task, tools))
    answers = []
    while len(answers) < VOTES and (not answers or model.remaining.calls != 0):
        answers.append(attempt(chat, model, tools))
    found = [answer for answer in answers if answer]
    return max(found, key=found.count) if found else ""
"""


def _to_format(wanted: Format) -> Callable[[Source, Kit], Source | None]:
    def change(source: Source, kit: Kit) -> Source | None:
        functions = source.functions()
        if not {"parse", "attempt"} <= functions.keys() or kit.format_of(source) == wanted:
            return None
        shown = kit.shown(source)
        if len(shown) != len(_pairs(source)):
            return None
        new = source.with_constants(TURN=wanted.turns[0], STOP=list(wanted.stop)).with_function(wanted.parse)
        if wanted.raises and functions["attempt"] != _plain(RETRYING):
            new = new.with_function(GUARDED)
        return kit.refreshed(new)

    return change


def _to_wording(number: int) -> Callable[[Source, Kit], Source | None]:
    def change(source: Source, kit: Kit) -> Source | None:
        known, turn = kit.format_of(source), source.constants().get("TURN")
        others = [t for t in known.turns if t != turn] if known is not None and turn is not None else []
        return kit.refreshed(source.with_constants(TURN=others[number])) if number < len(others) else None

    return change


def _example_edits(kit: Kit) -> list[Edit]:
    """One to four demonstrations, each number from up to three places of the brief; and none at all."""
    usual = {1: 0.5, 2: 2.0, 3: 3.0, 4: 2.0}
    count = len(kit.brief.demonstrations)
    edits = [Edit("examples", "no examples", _to_constants(EXAMPLES=[]), "cost", 0.3)]
    for n, weight in usual.items():
        for place, start in enumerate(start for start in (0, n, 2 * n) if start + n <= count):
            words = f"{n} worked example{'s' if n > 1 else ''}" + (f" from number {start + 1} on" if start else "")
            edits.append(Edit("examples", words, _to_examples(start, n), "unshown", weight / (1 + place)))
    return edits


def _to_examples(start: int, count: int) -> Callable[[Source, Kit], Source | None]:
    def change(source: Source, kit: Kit) -> Source | None:
        examples = kit.examples(source, kit.brief.demonstrations[start : start + count])
        if examples is None or "EXAMPLES" not in source.constants():
            return None
        return source.with_constants(EXAMPLES=examples)

    return change


def _to_constants(**values: Any) -> Callable[[Source, Kit], Source | None]:
    def change(source: Source, kit: Kit) -> Source | None:
        constants = source.constants()
        if not values.keys() <= constants.keys() or all(constants[name] == value for name, value in values.items()):
            return None
        return kit.refreshed(source.with_constants(**values))

    return change


def _to_retry(count: int) -> Callable[[Source, Kit], Source | None]:
    def change(source: Source, kit: Kit) -> Source | None:
        if "attempt" not in source.functions() or source.constants().get("RETRIES") == count:
            return None
        retry = "There was no answer in that. Answer again, in the form that was asked for."
        return source.with_constants(RETRIES=count, RETRY=retry).with_function(RETRYING)

    return change


def _to_vote(count: int) -> Callable[[Source, Kit], Source | None]:
    def change(source: Source, kit: Kit) -> Source | None:
        if not {"attempt", "messages", "ask", "run"} <= source.functions().keys():
            return None
        if source.constants().get("VOTES") == count:
            return None
        return source.with_constants(VOTES=count).with_function(VOTING)

    return change


def set_constants(**values: Any) -> Callable[[Source, Kit], Source | None]:
    """A change for a domain's own edits: these constants, which the harness must already have."""
    return _to_constants(**values)


def set_function(code: str) -> Callable[[Source, Kit], Source | None]:
    """A change for a domain's own edits: this function in the place of the one of its name."""

    def change(source: Source, kit: Kit) -> Source | None:
        name = _name_of(code)
        functions = source.functions()
        return source.with_function(code) if name in functions and functions[name] != _plain(code) else None

    return change


# ------------------------------------------------------------------------------------------------------ small helpers


def _pairs(source: Source) -> list[tuple[str, str]]:
    value = source.constants().get("EXAMPLES")
    pairs = [tuple(pair) for pair in value if isinstance(pair, tuple | list)] if isinstance(value, list | tuple) else []
    return [(str(pair[0]), str(pair[1])) for pair in pairs if len(pair) == 2]


def _changed(old: Mapping[str, Any], new: Mapping[str, Any]) -> set[str]:
    return {name for name in old.keys() | new.keys() if old.get(name) != new.get(name)}


def _system_words(text: str) -> str:
    return f"the system prompt {text!r}" if text else "no system prompt of its own"


def _assigned(statement: Any) -> tuple[str, cst.BaseExpression | None]:
    if not isinstance(statement, cst.SimpleStatementLine) or len(statement.body) != 1:
        return "", None
    match statement.body[0]:
        case cst.Assign(targets=[cst.AssignTarget(target=cst.Name(value=name))], value=value):
            return name, value
        case cst.AnnAssign(target=cst.Name(value=name), value=value):
            return name, value
    return "", None


def _below_constants(body: Sequence[Any]) -> int:
    """The place below the last constant that stands above every function; else below docstring and imports."""
    first = next((n for n, s in enumerate(body) if isinstance(s, cst.FunctionDef | cst.ClassDef)), len(body))
    return next((n + 1 for n in range(first - 1, -1, -1) if _assigned(body[n])[0]), first)


def _imported(body: list[Any], code: str) -> list[Any]:
    """The body, importing the allowed modules that `code` names and the body does not bind."""
    needed = _modules_in(code)
    if not needed:
        return body
    module = ast.parse(cst.Module(body).code)
    bound = {alias.asname or alias.name for node in ast.walk(module) for alias in getattr(node, "names", ())
             if isinstance(alias, ast.alias)}  # fmt: skip
    lines = [cst.parse_statement(f"import {name}") for name in sorted(needed - bound)]
    place = int(ast.get_docstring(module) is not None)
    return [*body[:place], *lines, *body[place:]]


@lru_cache(maxsize=4096)
def _modules_in(code: str) -> frozenset[str]:
    """The allowed modules that a function's code names and does not assign itself."""
    names = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name)]
    return frozenset(n.id for n in names) & MODULES - {n.id for n in names if isinstance(n.ctx, ast.Store)}


@lru_cache(maxsize=4096)
def _code(node: cst.CSTNode) -> str:
    """The text of a node. Nodes are never changed in place, and edits share those that they do not touch."""
    return cst.Module([]).code_for_node(node).strip()


@lru_cache(maxsize=4096)
def _plain(code: str) -> str:
    """Code without comments and formatting of its own, so that equal functions are equal text."""
    return ast.unparse(ast.parse(code))


def _name_of(code: str) -> str:
    function = ast.parse(code).body[0]
    assert isinstance(function, ast.FunctionDef)
    return function.name


def _literal(value: Any) -> str:
    """A literal in double quotes; lists of pairs one part a line."""
    match value:
        case str():
            return json.dumps(value, ensure_ascii=False)
        case list() if value and all(isinstance(each, tuple) for each in value):
            rows = ("".join(f"        {_literal(part)},\n" for part in row) for row in value)
            return "[\n" + "".join(f"    (\n{row}    ),\n" for row in rows) + "]"
        case list():
            return f"[{', '.join(map(_literal, value))}]"
        case tuple():
            return f"({', '.join(map(_literal, value))},)"
    return repr(value)
