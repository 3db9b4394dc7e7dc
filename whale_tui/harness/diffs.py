"""Diffs of harness sources as data: what a screen colours, without the colours. Lines count from 1."""

from __future__ import annotations

import difflib
import re
from typing import Literal

from msgspec import Struct, field

PAIRS_TO_WEIGH = 2_500
"""In a replaced block with more pairs of lines than this, lines are paired in order and not by likeness."""

Kind = Literal["same", "added", "removed", "changed"]
Span = tuple[int, int]
"""Characters [start, end) of a line."""


class Line(Struct):
    """One line of a unified diff. A changed line is a `removed` and an `added` one, with the spans that differ."""

    kind: Literal["same", "added", "removed"]
    text: str
    old: int | None
    new: int | None
    spans: list[Span] = field(default_factory=list)


class Hunk(Struct):
    """Neighbouring changes with their context: lines [old_start, old_start + old_count) of the old side, and so on."""

    old_start: int
    old_count: int
    new_start: int
    new_count: int
    lines: list[Line]

    @property
    def header(self) -> str:
        return f"@@ -{self.old_start},{self.old_count} +{self.new_start},{self.new_count} @@"


class Row(Struct):
    """One row of a side-by-side diff. A side without a line has number None and empty text."""

    kind: Kind
    old: int | None
    old_text: str
    new: int | None
    new_text: str
    old_spans: list[Span] = field(default_factory=list)
    new_spans: list[Span] = field(default_factory=list)


def side_by_side(old: str, new: str) -> list[Row]:
    """All of both sources, row by row: rows with an old number hold the old source's lines in order, likewise new.
    A final newline is no line of its own."""
    a, b = old.removesuffix("\n").split("\n"), new.removesuffix("\n").split("\n")
    rows: list[Row] = []
    for tag, a0, a1, b0, b1 in difflib.SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
        if tag == "equal":
            rows += [Row("same", i + 1, a[i], j + 1, b[j]) for i, j in zip(range(a0, a1), range(b0, b1), strict=True)]
            continue
        for i, j in _pairs(a, b, range(a0, a1), range(b0, b1)):
            if i is None:
                assert j is not None
                rows.append(Row("added", None, "", j + 1, b[j]))
            elif j is None:
                rows.append(Row("removed", i + 1, a[i], None, ""))
            else:
                rows.append(Row("changed", i + 1, a[i], j + 1, b[j], *_spans(a[i], b[j])))
    return rows


def unified(old: str, new: str, context: int = 3) -> list[Hunk]:
    """The changes with `context` same lines around them. Equal sources have no hunk."""
    rows = side_by_side(old, new)
    hunks: list[Hunk] = []
    near = _near_changes(rows, context)
    start = 0
    while start < len(rows):
        if not near[start]:
            start += 1
            continue
        end = start
        while end < len(rows) and near[end]:
            end += 1
        hunks.append(_hunk(rows, start, end))
        start = end
    return hunks


def changed_lines(old: str, new: str) -> set[int]:
    """The lines of `new` that `old` does not have: added or changed."""
    return {row.new for row in side_by_side(old, new) if row.kind != "same" and row.new is not None}


def _near_changes(rows: list[Row], context: int) -> list[bool]:
    near = [False] * len(rows)
    for at, row in enumerate(rows):
        if row.kind != "same":
            low, high = max(0, at - context), min(len(rows), at + context + 1)
            near[low:high] = [True] * (high - low)
    return near


def _hunk(rows: list[Row], start: int, end: int) -> Hunk:
    """Rows [start, end) as a hunk: within each run of changes the removed lines come first."""
    lines: list[Line] = []
    added: list[Line] = []
    for row in rows[start:end]:
        if row.kind == "same":
            lines += [*added, Line("same", row.new_text, row.old, row.new)]
            added = []
            continue
        if row.old is not None:
            lines.append(Line("removed", row.old_text, row.old, None, row.old_spans))
        if row.new is not None:
            added.append(Line("added", row.new_text, None, row.new, row.new_spans))
    lines += added
    olds = [line.old for line in lines if line.old is not None]
    news = [line.new for line in lines if line.new is not None]
    before_old = max((row.old for row in rows[:start] if row.old is not None), default=0)
    before_new = max((row.new for row in rows[:start] if row.new is not None), default=0)
    return Hunk(olds[0] if olds else before_old, len(olds), news[0] if news else before_new, len(news), lines)


def _pairs(a: list[str], b: list[str], olds: range, news: range) -> list[tuple[int | None, int | None]]:
    """Match the lines of a replaced block: like with like, in order; the rest stands alone."""
    if len(olds) * len(news) > PAIRS_TO_WEIGH:
        both = [(i, j) for i, j in zip(olds, news, strict=False) if _likeness(a[i], b[j]) > 0.5]
    else:
        both = _best_pairs(a, b, olds, news)
    pairs: list[tuple[int | None, int | None]] = []
    i, j = olds.start, news.start
    for x, y in [*both, (olds.stop, news.stop)]:
        pairs += [(k, None) for k in range(i, x)]
        pairs += [(None, k) for k in range(j, y)]
        if x < olds.stop and y < news.stop:
            pairs.append((x, y))
        i, j = x + 1, y + 1
    return pairs


def _best_pairs(a: list[str], b: list[str], olds: range, news: range) -> list[tuple[int, int]]:
    """The ordered pairing of greatest total likeness (dynamic programming over both blocks)."""
    best: dict[tuple[int, int], float] = {}
    like = {(i, j): _likeness(a[i], b[j]) for i in olds for j in news}
    for i in reversed(olds):
        for j in reversed(news):
            both = like[i, j] + best.get((i + 1, j + 1), 0.0) if like[i, j] > 0.5 else 0.0
            best[i, j] = max(both, best.get((i + 1, j), 0.0), best.get((i, j + 1), 0.0))
    pairs, i, j = [], olds.start, news.start
    while i < olds.stop and j < news.stop:
        if like[i, j] > 0.5 and best[i, j] == like[i, j] + best.get((i + 1, j + 1), 0.0):
            pairs.append((i, j))
            i, j = i + 1, j + 1
        elif best[i, j] == best.get((i + 1, j), 0.0):
            i += 1
        else:
            j += 1
    return pairs


def _words(text: str) -> list[str]:
    return re.findall(r"\w+|\s+|[^\w\s]", text)


def _likeness(a: str, b: str) -> float:
    if not a.strip() or not b.strip():
        return 0.0
    return difflib.SequenceMatcher(None, _words(a.strip()), _words(b.strip()), autojunk=False).ratio()


def _spans(a: str, b: str) -> tuple[list[Span], list[Span]]:
    """Where two like lines differ, in whole words."""
    x, y = _words(a), _words(b)
    at = [0], [0]
    for side, words in zip(at, (x, y), strict=True):
        for word in words:
            side.append(side[-1] + len(word))
    old: list[Span] = []
    new: list[Span] = []
    for tag, a0, a1, b0, b1 in difflib.SequenceMatcher(None, x, y, autojunk=False).get_opcodes():
        if tag != "equal":
            old += [(at[0][a0], at[0][a1])] if a1 > a0 else []
            new += [(at[1][b0], at[1][b1])] if b1 > b0 else []
    return old, new
