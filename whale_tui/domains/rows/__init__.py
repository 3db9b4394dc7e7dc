"""Your own tasks: a table of rows, and a Python file that judges answers. `whale-tui init NAME` writes both.

No code of yours but that file is needed. What a harness may see are the public columns; the private ones, where the
reference answer is, reach the verifier and the tools alone. h0 shows the public columns and returns the reply;
`domain.harness` takes another.
"""

from __future__ import annotations

import json
import string
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from whale_tui.domains import tables
from whale_tui.domains.base import DomainError, Tool, read_h0
from whale_tui.domains.rows.edits import rules_for
from whale_tui.domains.rows.own import OwnCode
from whale_tui.domains.tables import Report, Row, read_rows
from whale_tui.records import Brief, Decision, Demonstration, Episode, Split, Task, Verdict, content_hash

PRIVATE = ("answer", "answers", "golden_answers", "solution", "reference", "target", "label")
"""Columns that are private unless the options say otherwise."""
NUMBERING = ("id", "idx", "index", "key", "split")
"""Columns that are neither: they tell nothing of the task, and may give its split away."""
FILES: dict[Split, str] = {"weight": "train", "harness": "dev", "test": "test"}


class Options(Struct, forbid_unknown_fields=True, frozen=True):
    """[domain.options] of a table of your own. Paths start from the config's folder."""

    verifier: Path
    """Python file with verify(task, answer), and tools where there are any (docs/domains.md)."""
    train: Path
    """Table of D_weight: JSONL, JSON, CSV or Parquet, also .zst. The splits without a file are cut from it."""
    dev: Path | None = None
    """Table of D_harness."""
    test: Path | None = None
    """Table of D_test."""
    dev_size: int | float = 0.2
    """Without `dev`: the tasks that D_harness takes out of `train`, a number of them or a share."""
    test_size: int | float = 0.2
    """Without `test`: the same for D_test."""
    seed: int = 0
    """Another seed is another cut."""
    public: list[str] | None = None
    """Columns that a harness sees. Unset: all but the private ones and those that number rows (id, index, ...)."""
    private: list[str] | None = None
    """Columns for the verifier alone. Unset: those called answer, answers, golden_answers, solution, reference, target
    or label."""
    brief: Path | None = None
    """Text for the proposer: what the task is, when an answer is right."""
    examples: Path | None = None
    """Table of worked examples, with the same columns, that belong to no split: what a harness may show."""
    allow_overlap: bool = False
    """Let D_test hold tasks of the other splits."""


class Columns(Struct, frozen=True):
    """Which columns of a row go where, settled by the first row."""

    public: tuple[str, ...]
    private: tuple[str, ...]
    every: frozenset[str] | None
    """All that a row may have, where `public` was left to the first row."""

    def task(self, row: Row) -> Task:
        """Raises DomainError with the file, the line and the column."""
        for name in (*self.public, *self.private):
            if name not in row.values:
                raise DomainError(f"{row.where}: no column {name!r}; it has {', '.join(row.values) or 'none'}")
        for name in row.values if self.every is not None else ():
            if name not in self.every:  # type: ignore[operator]
                raise DomainError(f"{row.where}: column {name!r} is not in the first row; name the public columns")
        public = {name: row.values[name] for name in self.public}
        return Task(content_hash(public), public, {name: row.values[name] for name in self.private})


class Rows:
    """Implements domains.base.Domain."""

    name = "rows"

    def __init__(self, options: Options) -> None:
        self.report = Report()
        self._own = OwnCode(options.verifier)
        files = {split: getattr(options, name) for split, name in FILES.items()}
        self._columns = _columns(options)
        self._tasks = tables.assemble(self._splits(options, files), self.report, allow_overlap=options.allow_overlap)
        self._demonstrations = self._shown(options.examples)
        turn = "\n".join(_line(name, self._columns.public) for name in self._columns.public)
        self.edits = rules_for(turn)
        self.h0 = _base_harness(turn)
        text = _read(options.brief) if options.brief else _brief(self._columns)
        self.brief = Brief(text, self._own.describe_tools(self._example()), self._demonstrations)

    def tasks(self, split: Split) -> Sequence[Task]:
        return self._tasks[split]

    def tools(self, task: Task) -> Mapping[str, Tool]:
        return self._own.tools(_row(task))

    def verify(self, task: Task, answer: str, episode: Episode) -> Verdict | Awaitable[Verdict]:
        return self._own.verify(_row(task), answer, episode)

    def known_answers(self) -> list[tuple[Task, str, Decision]]:
        """What the file's own `known_answers` gives; else the reference of the first tasks, and no answer at all."""
        given = self._own.known_answers()
        if given is not None:
            return [(self._columns.task(Row(self._own.file, 1, row)), answer, right) for row, answer, right in given]
        found: list[tuple[Task, str, Decision]] = []
        for task in self._tasks["weight"][:10]:
            for name in self._columns.private:
                value = task.private[name]
                first = value[0] if isinstance(value, list) and value else value
                if name in PRIVATE and isinstance(first, str | int | float):
                    found.append((task, str(first), "accept"))
                    break
            found.append((task, "", "reject"))
        return found

    def _splits(self, options: Options, files: Mapping[Split, Path | None]) -> dict[Split, Iterable[Task]]:
        def read(file: Path, name: str) -> list[Task]:
            return list(tables.convert(read_rows(file), self._columns.task, self.report.of(name)))

        own: dict[Split, Iterable[Task]] = {s: read(f, s) for s, f in files.items() if f is not None and s != "weight"}
        if len(own) == 2:
            return {"weight": read(options.train, "weight"), **own}
        every = tables.distinct(read(options.train, options.train.name), self.report.of(options.train.name))
        sizes: dict[Split, int | float] = {"harness": options.dev_size, "test": options.test_size}
        wanted: dict[Split, int | float | None] = {s: size for s, size in sizes.items() if s not in own}
        return {**tables.cut(every, {**wanted, "weight": None}, options.seed), **own}

    def _shown(self, file: Path | None) -> list[Demonstration]:
        """The worked examples. Raises DomainError for one that is a task of a split."""
        held = {content_hash(task.public): split for split, tasks in self._tasks.items() for task in tasks}
        shown = []
        for row in read_rows(file) if file is not None else ():
            task = self._columns.task(row)
            if (split := held.get(content_hash(task.public))) is not None:
                raise DomainError(f"{row.where}: this example is a task of D_{split}; examples belong to no split")
            shown.append(Demonstration(task.public, [], _first_answer(task)))
        return shown

    def _example(self) -> dict[str, Any]:
        return _row(self._tasks["weight"][0])


def build(options: Options) -> Rows:
    return Rows(options)


def _columns(options: Options) -> Columns:
    """Settled by the first row of `train` and the options. Raises DomainError."""
    first = next(read_rows(options.train), None)
    if first is None:
        raise DomainError(f"{options.train}: no rows")
    names = list(first.values)
    if options.private is None and not set(names) & set(PRIVATE):
        raise DomainError(
            f"{first.where}: none of the columns {', '.join(names)} is known to be the reference answer; name it in "
            "domain.options.private ([] where the verifier needs none)"
        )
    private = options.private if options.private is not None else [name for name in names if name in PRIVATE]
    public = options.public
    if public is None:
        public = [name for name in names if name not in private and name not in NUMBERING]
    if both := set(public) & set(private):
        raise DomainError(f"domain.options: {sorted(both)[0]!r} is both public and private; a harness may not see it")
    if not public:
        raise DomainError(f"{first.where}: no public column is left for a harness to see; it has {', '.join(names)}")
    every = frozenset(names) | set(private) if options.public is None else None
    return Columns(tuple(public), tuple(private), every)


def _row(task: Task) -> dict[str, Any]:
    """A task as the user's code sees it: one dict of its own with every column."""
    copy: dict[str, Any] = json.loads(json.dumps({**task.public, **task.private}, default=str))
    return copy


def _first_answer(task: Task) -> str:
    """The reference as an example shows it: the first text or number of the private columns."""
    for value in task.private.values():
        first = value[0] if isinstance(value, list) and value else value
        if isinstance(first, str | int | float):
            return str(first)
    return ""


def _line(name: str, public: Sequence[str]) -> str:
    if any(sign in name for sign in "{}[].:!") or next(iter(string.Formatter().parse(f"{{{name}}}")))[1] != name:
        raise DomainError(f"column {name!r}: a name with one of {{}}[].:! can't stand in a prompt; rename it")
    return f"{{{name}}}" if len(public) == 1 else f"{name}: {{{name}}}"


def _base_harness(turn: str) -> str:
    return read_h0(__file__).replace('TURN = "{question}"', f"TURN = {json.dumps(turn, ensure_ascii=False)}")


def _brief(columns: Columns) -> str:
    fields = ", ".join(f'task["{name}"]' for name in columns.public)
    return _read(Path(__file__).with_name("brief.md")).replace("FIELDS", fields)


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DomainError(f"{file} can't be read: {getattr(error, 'strerror', None) or error}") from error
