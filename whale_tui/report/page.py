"""The page: HTML that opens offline, in one file, and the same in Markdown.

Names, hypotheses, reasons and sources come from models and are hostile: in HTML the template engine escapes every value
and a policy forbids scripts and requests; in Markdown every value is escaped by `finalize`, and sources stand in fences
longer than any that they hold. Control characters are shown, never sent.
"""

from __future__ import annotations

import base64
import re
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
from msgspec import Struct

from whale_tui import __version__
from whale_tui.report import figures
from whale_tui.report.conditions import Spread, Study, study
from whale_tui.report.series import Accepted, Cost, Course, cost, course, half_gain
from whale_tui.rundir import RunDir, write_atomic

MOST_CHARACTERS = 2_000
"""Of one shown line."""


class Made(Struct):
    """Where the report is, and its table as text."""

    html: Path
    markdown: Path
    text: str


def write(rundirs: Sequence[RunDir], out: Path) -> Made:
    """index.html, report.md and figures/ in `out`. One run is told in full; several are also compared."""
    courses = [course(rundir) for rundir in rundirs]
    several = len(courses) > 1
    drawn = figures.Drawn(out / "figures")
    compared = study(courses) if several else None
    told = {"study": figures.of_study(drawn, courses, compared) if compared else []}
    runs = [
        (each, cost(each), figures.of_run(drawn, each, f"run-{number}", whole=not several))
        for number, each in enumerate(courses, 1)
    ]
    context = {
        "title": "Several runs" if several else courses[0].name, "study": compared, "study_figures": told["study"],
        "runs": runs, "captions": drawn.captions, "version": __version__, "half_gain": half_gain,
    }  # fmt: skip
    html, markdown = out / "index.html", out / "report.md"
    write_atomic(html, _html(out / "figures").get_template("page.html.j2").render(context).encode())
    write_atomic(markdown, _markdown().get_template("page.md.j2").render(context).encode())
    return Made(html, markdown, text(courses, compared))


# --------------------------------------------------------------------------------------------------------- both kinds


def shown(value: object, limit: int = MOST_CHARACTERS) -> str:
    """One line of text: control, format and lone surrogate characters as escapes, cut where it is too long."""
    line = str(value)
    if len(line) > limit:
        line = f"{line[:limit]}… ({len(line):,} characters)"
    return "".join(c if _harmless(c) else c.encode("unicode_escape").decode() for c in line)


def _harmless(character: str) -> bool:
    return character.isprintable() or unicodedata.category(character) == "Zs"


def percent(value: float | None, digits: int = 1) -> str:
    return "–" if value is None else f"{100 * value:.{digits}f}%"


def interval(low: float, high: float) -> str:
    return f"[{100 * low:.1f}, {100 * high:.1f}]"


def points(value: float | None) -> str:
    return "–" if value is None else f"{value:+.1f}"


def count(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}"


def duration(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}" if minutes >= 60 else f"{minutes}:{rest:02d}"


def seeds_of(deviation: float | None) -> str:
    return "" if deviation is None else f" ± {100 * deviation:.1f}"


def diff_lines(accepted: Accepted) -> list[tuple[str, str]]:
    """(kind, line) of a diff; kind is "head", "same", "added" or "removed"."""
    marks = {"same": " ", "added": "+", "removed": "-"}
    lines: list[tuple[str, str]] = []
    for hunk in accepted.hunks:
        lines.append(("head", hunk.header))
        lines += [(line.kind, shown(marks[line.kind] + line.text.expandtabs(4))) for line in hunk.lines]
    return lines


_FILTERS: dict[str, Any] = {
    "shown": shown, "percent": percent, "interval": interval, "points": points, "count": count, "duration": duration,
    "deviation": seeds_of, "diff_lines": diff_lines,
}  # fmt: skip


def _loader() -> jinja2.BaseLoader:
    return jinja2.FileSystemLoader(Path(__file__).parent)


# --------------------------------------------------------------------------------------------------------------- HTML


def _html(folder: Path) -> jinja2.Environment:
    made = jinja2.Environment(
        loader=_loader(), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True,
        finalize=lambda value: shown(value) if isinstance(value, str) and not hasattr(value, "__html__") else value,
    )  # fmt: skip
    made.filters |= _FILTERS
    made.globals["picture"] = lambda name: _picture(folder / f"{name}.svg")
    return made


def _picture(path: Path) -> Any:
    """An SVG as an address of its own, so that the page is one file and nothing in it can run."""
    import markupsafe

    return markupsafe.Markup(f"data:image/svg+xml;base64,{base64.b64encode(path.read_bytes()).decode()}")


# ----------------------------------------------------------------------------------------------------------- Markdown


class Verbatim(str):
    """Markdown that we wrote ourselves."""


def escaped(value: object) -> str:
    """Text that Markdown shows as it stands, in a table cell too."""
    if isinstance(value, Verbatim):
        return value
    text = shown(value).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    text = re.sub(r"([\\`*_{}\[\]#|~!$])", r"\\\1", text)
    text = re.sub(r"^(\s*)([-+=]|\d+[.)])", r"\1\\\2", text) if re.match(r"\s*([-+=]+\s|\d+[.)]\s)", text) else text
    return re.sub(r"(?i)\b(https?|ftp|mailto|www)([:.])", r"\1\\\2", text)  # no link of its own accord


def fenced(accepted: Accepted) -> Verbatim:
    """A diff in a fence that nothing in it can close."""
    lines = [line for _, line in diff_lines(accepted)]
    longest = max((len(run) for line in lines for run in re.findall(r"`+", line)), default=0)
    fence = "`" * max(3, longest + 1)
    return Verbatim("\n".join([f"{fence}diff", *lines, fence]))


def _markdown() -> jinja2.Environment:
    made = jinja2.Environment(
        loader=_loader(), autoescape=False, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True,
        finalize=escaped, keep_trailing_newline=True,
    )  # fmt: skip
    made.filters |= _FILTERS | {"fenced": fenced, "verbatim": Verbatim}
    return made


# ---------------------------------------------------------------------------------------------------------- plain text


def text(courses: Sequence[Course], compared: Study | None) -> str:
    """The table for a terminal."""
    if compared is None:
        one, spent = courses[0], cost(courses[0])
        out = [f"{shown(one.name)}: {one.seen}, {one.limit.half}: {one.limit.words}"]
        for label, tested in (("start", one.start), ("last", one.last), ("best seen", one.best)):
            if tested is not None:
                s = tested.score
                pair = f"{s.policy} × {s.harness}"
                out.append(f"{label:10} {pair:22} mean@{s.samples} {percent(s.mean)} {interval(s.low, s.high)}")
        out.append(f"{'cost':10} {_cost_words(spent)}")
        return "\n".join(out)
    head = ("finished", "start", "last pair", "best seen", "episodes", "time")
    out = ["{:13} {:>8} {:>8} {:>27} {:>10} {:>9} {:>8}".format("condition", *head)]
    for row in compared.rows:
        last = _spread(row.last)
        out.append(
            f"{row.condition:13} {f'{row.ended}/{len(row.seeds)}':>8} {_mean(row.start):>8} {last:>27} "
            f"{_mean(row.best):>10} {count(row.cost.episodes):>9} {duration(row.cost.seconds):>8}"
        )
    for a in compared.against:
        gap = f"{points(100 * a.difference.mean)} points {interval(a.difference.low, a.difference.high)}"
        out.append(f"{a.condition} minus {a.other}: {gap} over {a.difference.seeds} seeds, {a.tasks} tasks")
    return "\n".join(out)


def _mean(spread: Spread | None) -> str:
    return percent(spread.mean if spread else None)


def _spread(s: Spread | None) -> str:
    return f"{percent(s.mean)}{seeds_of(s.deviation)} {interval(s.low, s.high)}" if s else "–"


def _cost_words(spent: Cost) -> str:
    point = spent.a_point(spent.episodes)
    more = f", {count(point)} a point" if point else ""
    return f"{spent.episodes:,} episodes{more}, {spent.tokens:,} tokens, {duration(spent.seconds)}"
