"""Harness sources and their diffs as contents: Pygments for the colours, `+` and `-` always there."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from textual.content import Content, Span

from whale_tui.harness import diffs
from whale_tui.tui.look import Look
from whale_tui.tui.plain import cut, fit, line, plain_lines

if TYPE_CHECKING:
    from pygments.lexer import Lexer

_ROLES = {
    "Comment": "code-comment",
    "Literal.String": "code-string",
    "Literal.Number": "code-number",
    "Keyword": "code-keyword",
    "Operator.Word": "code-keyword",
    "Name.Builtin": "code-builtin",
    "Name.Function": "code-function",
    "Name.Class": "code-function",
    "Name.Decorator": "code-builtin",
}
"""Pygments token -> role, for it and all below it."""
_MOST_HIGHLIGHTED = 200_000
"""Characters above which a source is shown without colours: nothing that long was written to be read."""


_lexer: list[Lexer] = []


def warm() -> None:
    """Load the lexer and its tables. Until then sources have no colours, so that the first screen is quick."""
    from pygments.lexers.python import PythonLexer

    lexer = PythonLexer(stripnl=False, ensurenl=False)
    list(lexer.get_tokens("def run(task): return 'x'\n"))
    _lexer.append(lexer)


def is_warm() -> bool:
    return bool(_lexer)


@lru_cache(maxsize=512)
def _role(kind: tuple[str, ...]) -> str:
    return next((_ROLES[name] for n in range(len(kind), 0, -1) if (name := ".".join(kind[:n])) in _ROLES), "")


@lru_cache(maxsize=64)
def _tokens(source: str) -> tuple[tuple[tuple[int, int, str], ...], ...]:
    """By line: (start, end, role) of what is highlighted."""
    lines: list[list[tuple[int, int, str]]] = [[]]
    column = 0
    for kind, text in _lexer[0].get_tokens(source) if len(source) <= _MOST_HIGHLIGHTED else ():
        role = _role(tuple(kind))
        for number, piece in enumerate(text.split("\n")):
            if number:
                lines.append([])
                column = 0
            if role and piece:
                lines[-1].append((column, column + len(piece), role))
            column += len(piece)
    return tuple(tuple(spans) for spans in lines)


def highlighted(source: str, look: Look) -> list[Content]:
    """The lines of a source, each a content of its own."""
    shown = plain_lines(source)
    if not _lexer or any(
        shown_line != source_line for shown_line, source_line in zip(shown, source.split("\n"), strict=False)
    ):
        return [line(text) for text in shown]  # made visible or cut: offsets of the tokens no longer hold
    tokens = _tokens(source)
    return [
        Content(text, [Span(a, b, look(role)) for a, b, role in tokens[n]] if n < len(tokens) else [])
        for n, text in enumerate(shown)
    ]


def source_lines(source: str, changed: set[int], look: Look) -> list[Content]:
    """A numbered listing; `changed` lines are marked in the gutter and by a `+`."""
    out = []
    for number, content in enumerate(highlighted(source, look), 1):
        mark = (f"{look.glyphs.gutter}+ ", look("changed")) if number in changed else ("   ", "")
        out.append(Content("").join([line((f"{number:>4} ", look("faint")), mark), content]))
    return out


def diff_lines(old: str, new: str, look: Look) -> tuple[list[Content], list[int]]:
    """A unified diff, and the line at which each hunk begins."""
    before, after = highlighted(old, look), highlighted(new, look)
    out: list[Content] = []
    starts: list[int] = []
    for hunk in diffs.unified(old, new):
        starts.append(len(out))
        out.append(line((hunk.header, look("diff-hunk"))))
        for part in hunk.lines:
            sign = {"same": " ", "added": "+", "removed": "-"}[part.kind]
            numbers = f"{part.old or '':>4} {part.new or '':>4} "
            style = {"added": look("diff-added"), "removed": look("diff-removed")}.get(part.kind, "")
            content = _side(after, part.new) if part.new else _side(before, part.old)
            out.append(
                Content("").join(
                    [line((numbers, look("faint")), (f"{sign} ", style)), _changed(content, style, part.spans)]
                )
            )
    return out or [line(("no difference", look("muted")))], starts


def side_by_side_lines(old: str, new: str, width: int, look: Look) -> tuple[list[Content], list[int]]:
    """Both sources beside each other in `width` cells, and the line at which each run of changes begins."""
    before, after = highlighted(old, look), highlighted(new, look)
    half = max(16, (width - 3) // 2)
    out: list[Content] = []
    starts: list[int] = []
    changing = False
    for row in diffs.side_by_side(old, new):
        if row.kind != "same" and not changing:
            starts.append(len(out))
        changing = row.kind != "same"
        left = _half(before, row.old, "-" if changing else " ", look("diff-removed"), row.old_spans, half, look)
        right = _half(after, row.new, "+" if changing else " ", look("diff-added"), row.new_spans, half, look)
        out.append(Content("").join([left, line((f" {look.glyphs.bar} ", look("faint"))), right]))
    return out, starts


def _half(
    side: list[Content], number: int | None, sign: str, style: str, spans: list[diffs.Span], width: int, look: Look
) -> Content:
    if number is None:
        return Content(" " * width)
    style = style if sign != " " else ""
    content = _changed(_side(side, number), style, spans)
    head = line((f"{number:>4} ", look("faint")), (f"{sign} ", style))
    return cut(Content("").join([head, content]), width).truncate(width, pad=True)


def _side(side: list[Content], number: int | None) -> Content:
    return side[number - 1] if number and number <= len(side) else Content("")


def _changed(content: Content, style: str, spans: list[diffs.Span]) -> Content:
    """A changed line on its role's ground, with the words that differ underlined."""
    if not style:
        return content
    ground = content.stylize_before(style)
    for start, end in spans:
        if end <= len(content.plain):
            ground = ground.stylize("bold underline", start, end)
    return ground


def columns(cells: list[tuple[str, int, str, bool]]) -> Content:
    """A row of a table: (text, width, style, right-aligned), two spaces between columns."""
    parts: list[str | tuple[str, str]] = []
    for text, width, style, right in cells:
        parts += [(fit(text, width, right), style), "  "]
    return line(*parts[:-1])
