"""Text from models, tasks, files and tools as plain content: nothing in it is markup, nothing in it moves the cursor.

Every such text passes here before it is drawn. Control characters become visible, lengths are bounded, and in ASCII
mode anything else is written as an escape.
"""

from __future__ import annotations

import unicodedata

from rich.cells import cell_len, set_cell_size
from textual.content import Content, Span

MAX_LINE = 2_000
"""Characters of one shown line."""
MAX_LINES = 4_000
"""Lines of one shown text."""

ascii_only = False
"""Set once at the start, by `--ascii`."""

_NEAREST = str.maketrans({"─": "-", "·": "-", "—": "-", "–": "-", "−": "-", "×": "x", "→": "->", "…": "...", "’": "'"})
"""Punctuation that has a near relative in ASCII; everything else is written as an escape there."""

_PICTURES = {code: chr(0x2400 + code) for code in range(32)} | {127: "\u2421"}


def plain(text: str, limit: int = MAX_LINE) -> str:
    """One line: controls made visible (line breaks too), cut to `limit` characters with a word on what is missing."""
    if len(text) > limit:
        text = f"{text[:limit]}{'...' if ascii_only else '…'} ({len(text):,} characters)"
    if ascii_only:
        text = text.translate(_NEAREST)
    if text.isascii() and text.isprintable():
        return text
    return "".join(_visible(text))


def plain_lines(text: str, limit: int = MAX_LINE, most: int = MAX_LINES) -> list[str]:
    """Lines of a longer text, tabs as spaces, each one plain."""
    head = text[: limit * most]
    lines = head.replace("\r\n", "\n").expandtabs(4).split("\n")
    shown = [plain(line, limit) for line in lines[:most]]
    if len(lines) > most or len(head) < len(text):
        shown.append(f"({len(text):,} characters in all; the rest is not shown)")
    return shown


def _visible(text: str) -> list[str]:
    out: list[str] = []
    marks = 0
    for character in text:
        code = ord(character)
        if code < 127 and code >= 32:
            out.append(character)
            marks = 0
            continue
        if ascii_only:
            out.append(character.encode("ascii", "backslashreplace").decode() if code > 127 else repr(character)[1:-1])
            continue
        if code in _PICTURES:
            out.append(_PICTURES[code])
            marks = 0
            continue
        category = unicodedata.category(character)
        if category in ("Mn", "Me"):  # combining: two on one letter are language, more are a stain on the lines around
            marks += 1
            if marks <= 2 and out and not 0xFE00 <= code <= 0xFE0F:
                out.append(character)
            continue
        marks = 0
        if category[0] == "C" or category in ("Zl", "Zp"):
            out.append(f"\\u{code:04x}")
        else:
            out.append(character)
    return out


def fit(text: str, width: int, right: bool = False) -> str:
    """Exactly `width` cells: padded, or cut with an ellipsis."""
    if width <= 0:
        return ""
    length = cell_len(text)
    if length > width:
        mark = "~" if ascii_only else "…"
        return set_cell_size(text, width - 1) + mark
    space = " " * (width - length)
    return space + text if right else text + space


def line(*parts: str | tuple[str, str]) -> Content:
    """A content of pieces: text, or (text, style). Never parsed."""
    text: list[str] = []
    spans: list[Span] = []
    at = 0
    for part in parts:
        piece, style = part if isinstance(part, tuple) else (part, "")
        if not piece:
            continue
        text.append(piece)
        if style:
            spans.append(Span(at, at + len(piece), style))
        at += len(piece)
    return Content("".join(text), spans, strip_control_codes=False)


def sides(left: Content, right: Content, width: int) -> Content:
    """`left` and `right` at the two ends of a line; the right gives way where both don't fit."""
    room = width - left.cell_length - right.cell_length
    if room >= 1:
        return Content("").join([left, Content(" " * room), right])
    if left.cell_length >= width:
        return cut(left, width)
    space = width - left.cell_length - 1
    return Content("").join([left, Content(" "), cut(right, space)]) if space > 3 else left


def cut(content: Content, width: int) -> Content:
    """At most `width` cells."""
    if width <= 0:
        return Content("")
    if content.cell_length <= width:
        return content
    mark = "~" if ascii_only else "…"
    return Content("").join([content.truncate(width - 1), Content(mark)])
