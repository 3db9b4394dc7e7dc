"""The success chart as text: raw and windowed rates over budgeted episodes, phases, switches, acceptances, tests.

Phases are told apart by colour, by the band under the chart and by their marks; switches by a vertical line.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from textual.content import Content

from whale_tui.loop.state import Point
from whale_tui.tui.look import Look
from whale_tui.tui.plain import cut, fit, line

MARGIN = 6
Place = Callable[..., int]
"""A value and an optional scale -> a column or row."""
_BITS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Braille dot bits by row and column of a 2 x 4 cell."""


class Canvas:
    """A grid of cells; each has a glyph with a style, or braille dots. Later and higher ranks win a cell."""

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self.cells: dict[tuple[int, int], tuple[str, str]] = {}
        self.dots: dict[tuple[int, int], int] = {}
        self.dot_style: dict[tuple[int, int], str] = {}

    def put(self, column: int, row: int, glyph: str, style: str) -> None:
        if 0 <= column < self.width and 0 <= row < self.height:
            self.cells[column, row] = (glyph, style)

    def dot(self, x: int, y: int, style: str) -> None:
        """A braille dot; x counts half cells, y quarter rows from the top."""
        cell = (x // 2, y // 4)
        if 0 <= cell[0] < self.width and 0 <= cell[1] < self.height:
            self.dots[cell] = self.dots.get(cell, 0) | _BITS[y % 4][x % 2]
            self.dot_style[cell] = style

    def rows(self) -> list[list[tuple[str, str]]]:
        out = []
        for row in range(self.height):
            cells = []
            for column in range(self.width):
                at = (column, row)
                if at in self.cells:
                    cells.append(self.cells[at])
                elif at in self.dots:
                    cells.append((chr(0x2800 + self.dots[at]), self.dot_style[at]))
                else:
                    cells.append((" ", ""))
            out.append(cells)
        return out


def draw(points: Sequence[Point], window: int, width: int, height: int, look: Look) -> list[Content]:
    """The chart in exactly `height` lines of at most `width` cells: plot, phase band, x axis, legend."""
    if width < 24 or height < 5:
        return [line(("too small for the chart", look("muted")))]
    if not points:
        return [Content("")] * (height // 2) + [line(("  no step has finished yet", look("muted")))]
    legend = height >= 8
    plot_height, plot_width = height - (3 if legend else 2), width - MARGIN
    values = [v for p in points for v in (p.value, p.window) if v is not None]
    top = _nice(max(values, default=0.1))
    last = max(1, max(p.x for p in points))
    canvas = Canvas(plot_width, plot_height)

    def x_of(x: int, scale: int = 1) -> int:
        return round(x / last * (plot_width * scale - 1))

    def y_of(value: float, scale: int = 1) -> int:
        return (plot_height * scale - 1) - round(min(value / top, 1.0) * (plot_height * scale - 1))

    for p in points:
        if p.kind == "switch":
            for row in range(plot_height):
                canvas.put(x_of(p.x), row, look.glyphs.switch, look("switch"))
    _lines(canvas, points, x_of, y_of, look)
    _marks(canvas, points, x_of, y_of, look)

    out = []
    for row, cells in enumerate(canvas.rows()):
        out.append(
            line((_tick(row, plot_height, top), look("muted")), (look.glyphs.tick, look("faint")), *_merge(cells))
        )
    out.append(_band(points, last, plot_width, look))
    out.append(_axis(last, plot_width, look))
    if legend:
        out.append(cut(_legend(points, window, look), width))
    return out


def _lines(canvas: Canvas, points: Sequence[Point], x_of: Place, y_of: Place, look: Look) -> None:
    """The windowed mean of each weight phase, and the best archive score of each harness phase, as lines."""
    before: Point | None = None
    for p in points:
        value = p.window if p.kind == "step" else p.value
        if p.kind == "switch":
            before = None
        if p.kind not in ("step", "iteration") or value is None:
            continue
        style = look.phase(p.phase)
        if look.glyphs.braille:
            x, y = x_of(p.x, 2), y_of(value, 4)
            if before is not None:
                old = before.window if before.kind == "step" else before.value
                assert old is not None
                _segment(canvas, (x_of(before.x, 2), y_of(old, 4)), (x, y), style)
            canvas.dot(x, y, style)
        else:
            canvas.put(x_of(p.x), y_of(value), "*", style)
        before = p


def _segment(canvas: Canvas, a: tuple[int, int], b: tuple[int, int], style: str) -> None:
    steps = max(abs(b[0] - a[0]), abs(b[1] - a[1]), 1)
    for i in range(steps + 1):
        canvas.dot(round(a[0] + (b[0] - a[0]) * i / steps), round(a[1] + (b[1] - a[1]) * i / steps), style)


def _marks(canvas: Canvas, points: Sequence[Point], x_of: Place, y_of: Place, look: Look) -> None:
    glyphs = look.glyphs
    for kind, glyph, role in (
        ("step", glyphs.raw, ""),
        ("iteration", glyphs.iteration, ""),
        ("test", glyphs.test, "test"),
    ):
        for p in points:
            if p.kind == kind and p.value is not None:
                style = look(role) if role else look.phase(p.phase)
                canvas.put(x_of(p.x), y_of(p.value), glyph, style)
    for p in points:
        if p.kind == "accept":
            row = y_of(p.value) if p.value is not None else 0
            canvas.put(x_of(p.x), row, glyphs.accepted, look("accepted"))
            label = f" {p.label}"
            column = x_of(p.x)
            start = column + 1 if column + len(label) < canvas.width else column - len(label)
            label_row = row - 1 if row else row + 1
            for offset, character in enumerate(label.strip()):
                canvas.put(start + offset, label_row, character, look("accepted"))


def _band(points: Sequence[Point], last: int, width: int, look: Look) -> Content:
    """Which phase ran where: a rule in the phase's colour and glyph, with its name where there is room."""
    cells: list[tuple[str, str]] = [(look.glyphs.rule, look("faint"))] * width
    switches = [p for p in points if p.kind == "switch"]
    cycle_of = _cycles(points)
    for number, p in enumerate(switches):
        start = round(p.x / last * (width - 1))
        end = round(switches[number + 1].x / last * (width - 1)) if number + 1 < len(switches) else width
        glyph = look.glyphs.weight_band if p.phase == "weight" else look.glyphs.harness_band
        style = look.phase(p.phase)
        for column in range(start, min(end, width)):
            cells[column] = (glyph, style)
        for name in (f" {p.phase} {cycle_of[number]} ", f" {(p.phase or '?')[0]}{cycle_of[number]} "):
            room = end - start
            if room >= len(name) + 2:
                first = start + (room - len(name)) // 2
                for offset, character in enumerate(name):
                    cells[first + offset] = (character, style)
                break
    return line((" " * MARGIN, ""), *_merge(cells))


def _cycles(points: Sequence[Point]) -> list[int]:
    """The cycle of each switch: a cycle begins with its weight phase."""
    out: list[int] = []
    cycle = 0
    for p in points:
        if p.kind == "switch":
            cycle += p.phase == "weight"
            out.append(cycle)
    return out


def _axis(last: int, width: int, look: Look) -> Content:
    end = f"{last:,} episodes"
    middle = f"{last // 2:,}"
    text = fit("0", max(1, width // 2 - len(middle) // 2)) + middle
    return line((" " * MARGIN + fit(text, max(0, width - len(end))) + end, look("muted")))


def _legend(points: Sequence[Point], window: int, look: Look) -> Content:
    g = look.glyphs
    kinds = {p.kind for p in points}
    phases = {p.phase for p in points if p.kind in ("step", "iteration")}
    parts: list[str | tuple[str, str]] = [" " * MARGIN]
    mean = "⠒" if g.braille else "*"
    if "weight" in phases:
        parts += [(g.raw, look.phase("weight")), (" step  ", look("muted"))]
        parts += [(mean, look.phase("weight")), (f" mean of {window}  ", look("muted"))]
    if "harness" in phases:
        parts += [(g.iteration, look.phase("harness")), (" best of archive  ", look("muted"))]
    if "accept" in kinds:
        parts += [(g.accepted, look("accepted")), (" accepted  ", look("muted"))]
    if "test" in kinds:
        parts += [(g.test, look("test")), (" test", look("muted"))]
    return line(*parts)


def _tick(row: int, height: int, top: float) -> str:
    """The label at the top, the bottom and, with room, the middle row."""
    share = (height - 1 - row) / max(1, height - 1)
    middle = (height - 1) // 2
    if row in (0, height - 1) or (height >= 7 and row == middle):
        return f"{share * top:4.0%} "
    return " " * (MARGIN - 1)


def _nice(value: float) -> float:
    """The least of 5%, 10%, 20%, 30%, ... 100% that holds the value with a little air."""
    return next((t for t in (0.05, *(i / 10 for i in range(1, 10))) if value <= t * 0.95), 1.0)


def _merge(cells: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Neighbouring cells of one style as one piece."""
    out: list[tuple[str, str]] = []
    for glyph, style in cells:
        if out and out[-1][1] == style:
            out[-1] = (out[-1][0] + glyph, style)
        else:
            out.append((glyph, style))
    return out
