"""Leak checks: what a candidate may know of the tasks only by having seen them. Warnings in words, each with its line.

Four looks, each a function: reference answers in the source, text of tasks in the source, reads outside the folder a
proposer was given, and answers that do not stem from what the policy said. `harness.strict_leaks` makes a warning of
the first two, and `harness.answer_from_samples = "strict"` the last, the end of a candidate.
"""

from __future__ import annotations

import ast
import itertools
import json
import os.path
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

SHORTEST_ANSWER = 4
"""Reference answers with fewer characters are in every program by chance, so they are not looked for."""
COMMON = frozenset(
    """true false none null yes no unknown answer question north south east west left right first second third zero one
    two three four five six seven eight nine ten hundred thousand monday tuesday wednesday thursday friday saturday
    sunday january february march april june july august september october november december""".split()  # noqa: SIM905
)
"""Nor are these words, which a prompt may well use."""
RUN = 8
"""Words in a row that make a quotation. A shorter text of a task counts as a whole,"""
SHORTEST_TEXT = 4
"""from this many words on."""
MOST_WARNINGS = 10
LONGEST_LINE = 1 << 20
"""Bytes of a transcript's line past which it is a file's content, not a call."""
UNSAID = 0.1
"""Share of answers that may differ from all that the policy said before a candidate is warned of."""
SYSTEM = ("/bin", "/dev", "/etc/alternatives", "/lib", "/lib64", "/nix", "/opt", "/sbin", "/usr")
"""Where programs and their libraries lie: reading there tells nothing of the run."""


def in_source(tree: ast.Module, answers: Iterable[str], texts: Iterable[str], given: str) -> list[str]:
    """Answers and task texts in a candidate's source, at most MOST_WARNINGS of each and a count of the rest.

    `answers` and `texts` are those of D_harness tasks; what stands in `given` (brief, demonstrations, h0) is known
    anyway and is not held against a candidate."""
    literals = list(_literals(tree))
    return [
        *_few(answers_in(literals, answers, given), "reference answers"),
        *_few(texts_in(literals, texts, given), "texts of tasks"),
    ]


def answers_in(literals: Sequence[tuple[int, str]], answers: Iterable[str], given: str) -> Iterator[str]:
    """Reference answers that stand in a string as whole words, in any case, or as a number of a table."""
    everything, known = "\n".join(text for _, text in literals), given.casefold()
    for answer in sorted({answer.strip().casefold() for answer in answers}):
        if len(answer) < SHORTEST_ANSWER or answer in COMMON or answer not in everything:
            continue
        whole = re.compile(rf"(?<!\w){re.escape(answer)}(?!\w)")
        lines = sorted({line for line, text in literals if whole.search(text)})
        if lines and not whole.search(known):
            yield f"line {lines[0]}: it holds {answer!r}, the reference answer of a D_harness task"


def texts_in(literals: Sequence[tuple[int, str]], texts: Iterable[str], given: str) -> Iterator[str]:
    """Quotations of a task: RUN words in a row (a shorter text as a whole) that only one task has."""
    tasks = [(text, set(_runs(_words(text)))) for text in dict.fromkeys(texts)]
    having = Counter(run for _, runs in tasks for run in runs)
    known, here = " ".join(_words(given)), [(line, f" {' '.join(_words(text))} ") for line, text in literals]
    everything = "".join(text for _, text in here)
    for text, runs in tasks:
        for run in sorted(runs):
            quoted = f" {run} "
            if having[run] == 1 and quoted in everything and quoted not in f" {known} ":
                line = next(line for line, literal in here if quoted in literal)
                yield f"line {line}: it quotes a D_harness task: {_cut(text)!r}"
                break


def reads_outside(uses: Iterable[tuple[str, Any]], folder: Path, allowed: Sequence[Path] = ()) -> list[str]:
    """Tool calls of a proposer's session, each (tool, arguments), that name a path outside its folder.

    Arguments are searched at any depth: a value whose key speaks of a path is one, and so is each word of a command
    that begins with / or ~ or climbs with `..`. It reads what was asked, not what happened: a session that
    hides what it opens is held by the sandbox, not by this."""
    inside = [folder, *allowed, *map(Path, SYSTEM)]
    found = [
        f"{tool} {path}, outside its folder"
        for tool, arguments in uses
        for path in _paths(arguments)
        if not any(_is_in(path, folder, place) for place in inside)
    ]
    return _few(dict.fromkeys(found), "reads outside its folder")


def tool_uses(transcript: Iterable[bytes]) -> Iterator[tuple[str, Any]]:
    """Tool calls, each (tool, arguments), in the JSON lines of a session's transcript, whichever agent wrote them.

    A call is known by its shape, at any depth: a name beside its arguments, or a command that was executed."""
    for line in transcript:
        if len(line) > LONGEST_LINE or not line.lstrip().startswith(b"{"):
            continue
        try:
            waiting: list[Any] = [json.loads(line)]
        except (ValueError, RecursionError):
            continue
        while waiting:
            value = waiting.pop()
            if isinstance(value, dict):
                yield from _uses(value)
                waiting += value.values()
            elif isinstance(value, list):
                waiting += value


def unsaid(episodes: Iterable[tuple[str, Sequence[str]]]) -> tuple[int, int]:
    """Episodes, each (answer, texts that the policy said): how many gave an answer that occurs in none, of how many
    that gave one. Case, spacing and punctuation aside; 1,000 is 1000."""
    strange = given = 0
    for answer, said in episodes:
        wanted = _plain(answer)
        if wanted:
            given += 1
            strange += not any(wanted in _plain(text) for text in said)
    return strange, given


def unsaid_words(strange: int, given: int) -> str:
    """The warning; empty where few enough answers are strange."""
    if not given or strange / given <= UNSAID:
        return ""
    return f"{strange} of {given} answers do not occur in what the policy said ({strange / given:.0%})"


# ---------------------------------------------------------------------------------------------------------- the parts


def task_texts(public: Mapping[str, Any]) -> Iterator[str]:
    """Every text of a task's public fields, at any depth."""
    waiting: list[Any] = [public]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Mapping):
            waiting += value.values()
        elif isinstance(value, list | tuple):
            waiting += value
        elif isinstance(value, str):
            yield value


def _literals(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, text): strings, and numbers in a list, tuple, set or dict; a number elsewhere is a setting."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value.casefold()
        elif isinstance(node, ast.List | ast.Tuple | ast.Set | ast.Dict):
            for item in ast.iter_child_nodes(node):
                if isinstance(item, ast.Constant) and type(item.value) in (int, float):
                    yield item.lineno, str(item.value)


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.casefold())


def _runs(words: Sequence[str]) -> Iterator[str]:
    if SHORTEST_TEXT <= len(words) < RUN:
        yield " ".join(words)
    for start in range(len(words) - RUN + 1):
        yield " ".join(words[start : start + RUN])


def _uses(value: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    tool = next((value[key] for key in ("tool_name", "name", "tool") if isinstance(value.get(key), str)), "")
    state = value.get("state")
    for arguments in (
        value.get("input"), value.get("parameters"), state.get("input") if isinstance(state, dict) else None
    ):  # fmt: skip
        if tool and isinstance(arguments, dict):
            yield tool, arguments
    if value.get("type") == "command_execution" and isinstance(value.get("command"), str):
        yield "command", {"command": value["command"]}


def _paths(value: Any, key: str = "") -> Iterator[str]:
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _paths(item, str(name).casefold())
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _paths(item, key)
    elif isinstance(value, str) and re.search(r"path|file|dir|folder|cwd", key) and "\n" not in value:
        yield value
    elif isinstance(value, str) and re.search(r"command|cmd|script|args|code", key):
        words = (word for word in _shell_words(value) if re.fullmatch(r"[\w./~@+%-]+", word))
        yield from (word for word in words if re.match(r"/\w|~", word) or ".." in word.split("/"))


def _shell_words(command: str) -> list[str]:
    """The words of a command, those of a command handed to another shell (`bash -lc '...'`) among them."""
    spaced = re.sub(r"[;|&<>()=,]", " ", command)
    try:
        words = shlex.split(spaced)
    except ValueError:  # a quote that is never closed
        return re.sub(r"[\"']", " ", spaced).split()
    inner = [word for flag, word in itertools.pairwise(words) if re.fullmatch(r"-\w*c", flag)]
    return words + [word for text in inner for word in text.split()]


def _is_in(path: str, folder: Path, place: Path) -> bool:
    """By name, links aside: what a path is called tells what was wanted."""
    full = os.path.normpath(os.path.join(folder, os.path.expanduser(path)))  # noqa: PTH111, PTH118
    return full == str(place) or full.startswith(f"{str(place).rstrip('/')}/")


def _plain(text: str) -> str:
    return re.sub(r"[\W_]+", "", text.casefold())


def _cut(text: str, limit: int = 60) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= limit else f"{flat[: limit - 1]}…"


def _few(found: Iterable[str], what: str) -> list[str]:
    every = list(found)
    return every if len(every) <= MOST_WARNINGS else [
        *every[:MOST_WARNINGS], f"and {len(every) - MOST_WARNINGS} more {what}"
    ]  # fmt: skip
