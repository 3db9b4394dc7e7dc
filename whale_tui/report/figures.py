"""Figures of runs with matplotlib, each as PNG and SVG. Nothing is shown, so no screen is needed.

Colours are told apart by colour-blind eyes (Okabe and Ito's), and marks differ as well. Names are drawn as they stand:
matplotlib's own markup is off. The same data give the same bytes.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whale_tui.report.conditions import ORDER, Study
from whale_tui.report.series import Course, half_gain

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WEIGHT, HARNESS, TEST, HELD_OUT, INK = "#0072B2", "#D55E00", "#000000", "#009E73", "#444444"
CONDITIONS = ("#0072B2", "#D55E00", "#009E73", "#000000", "#CC79A7", "#56B4E9")
MARKS = "sDvo^P"
GRID_ROWS, GRID_COLUMNS = 30, 16
"""Most harnesses and versions that the grid draws; the table beside it has more."""


class Drawn:
    """Figures of one report, by name, with a line that says what each shows."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.captions: dict[str, str] = {}
        folder.mkdir(parents=True, exist_ok=True)

    @contextmanager
    def figure(self, name: str, caption: str, width: float = 8.0, height: float = 3.6) -> Iterator[Axes]:
        """Axes to draw on; saved when the block is left, twice."""
        with drawing() as plot:
            figure: Figure = plot.Figure(figsize=(width, height), layout="constrained")
            yield figure.subplots()
            figure.savefig(self.folder / f"{name}.png", dpi=130)
            figure.set_layout_engine("none")  # laid out once
            figure.savefig(self.folder / f"{name}.svg", metadata={"Date": None})
        self.captions[name] = caption


@contextmanager
def drawing() -> Iterator[Any]:
    """matplotlib.figure with our settings. Its font cache is its own affair; a missing home folder must not matter."""
    os.environ.setdefault("MPLBACKEND", "Agg")
    import matplotlib
    import matplotlib.figure

    settings: dict[Any, Any] = {
        "svg.hashsalt": "whale-tui", "text.parse_math": False, "axes.spines.top": False, "axes.spines.right": False,
        "axes.edgecolor": INK, "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK, "legend.frameon": False,
        "font.size": 9, "axes.titlesize": 10, "axes.axisbelow": True,
    }  # fmt: skip
    with matplotlib.rc_context(settings):
        yield matplotlib.figure


# ------------------------------------------------------------------------------------------------------------ one run


def of_run(drawn: Drawn, course: Course, prefix: str, *, whole: bool = True) -> list[str]:
    """The figures of a run that its data allow, by name; without `whole` the course alone."""
    made = []
    if any(p.value is not None for p in course.points) or course.tests:
        made.append(f"{prefix}-success")
        with drawn.figure(made[-1], "Success over episodes: training steps, best of the search, D_test") as axes:
            success(axes, course)
    if not whole:
        return made
    if course.phases:
        made.append(f"{prefix}-phases")
        with drawn.figure(made[-1], "Realised phase lengths: epochs (E) and iterations (I)", height=2.6) as axes:
            lengths(axes, course)
    if any(row.gain for row in course.phases):
        made.append(f"{prefix}-gain")
        with drawn.figure(made[-1], "Points gained per 1,000 episodes, with 95% intervals", height=2.8) as axes:
            gains(axes, course)
    if (columns := len(_grid_columns(course))) and len(course.lineage.rows) > 1:
        made.append(f"{prefix}-lineage")
        rows = min(GRID_ROWS, len(course.lineage.rows))
        size = (max(3.5, 1.6 + 0.62 * columns), max(1.8, 0.9 + 0.24 * rows))
        with drawn.figure(made[-1], "Success on D_harness (%) by harness and policy version", *size) as axes:
            grid(axes, course)
    return made


def success(axes: Axes, course: Course) -> None:
    """Both phases over budgeted episodes, with what was accepted, held out and tested."""
    _bands(axes, course)
    steps = [p for p in course.points if p.kind == "step" and p.value is not None]
    axes.plot([p.x for p in steps], [100 * (p.value or 0) for p in steps], ".", color=WEIGHT, alpha=0.45)
    for number, run in enumerate(_runs(course, "step")):
        window = [(p.x, 100 * p.window) for p in run if p.window is not None]
        axes.plot(*_columns(window), "-", color=WEIGHT, label="" if number else "training steps (line: window)")
    for number, run in enumerate(_runs(course, "iteration")):
        best = [(p.x, 100 * p.value) for p in run if p.value is not None]
        axes.plot(*_columns(best), "s-", ms=4, color=HARNESS, label="" if number else "best of the search, D_harness")
    axes.plot(
        *_columns([(h.x, 100 * h.mean) for h in course.held_out]), "x", color=HELD_OUT,
        label="held-out slice" if course.held_out else "",
    )  # fmt: skip
    accepted = [p for p in course.points if p.kind == "accept" and p.value is not None]
    axes.plot(
        *_columns([(p.x, 100 * (p.value or 0)) for p in accepted]), "*", ms=11, color=HARNESS, mec="white",
        label="harness accepted" if accepted else "",
    )  # fmt: skip
    for p in accepted:
        axes.annotate(p.label, (p.x, 100 * (p.value or 0)), (0, 7), textcoords="offset points", ha="center", size=7)
    tests = [t for t in course.tests if t.on_course]
    _bars(
        axes,
        [(t.x, 100 * t.score.mean, 100 * t.score.low, 100 * t.score.high) for t in tests],
        "D_test, 95% interval" if tests else "",
        color=TEST,
    )
    _frame(axes, "budgeted episodes", "success (%)")
    axes.set_ylim(bottom=0)
    _legend(axes)


def _bands(axes: Axes, course: Course) -> None:
    """Which phase ran where."""
    for number, phase in enumerate(course.state.phases):
        after = course.state.phases[number + 1 :]
        end = after[0].episodes_before if after else course.state.budget_used
        color = WEIGHT if phase.phase == "weight" else HARNESS
        axes.axvspan(phase.episodes_before, max(end, phase.episodes_before), color=color, alpha=0.07, lw=0)


def _runs(course: Course, kind: str) -> list[list[Any]]:
    """Points of a kind, phase by phase, so that no line joins two phases."""
    out: list[list[Any]] = [[]]
    for p in course.points:
        if p.kind == "switch":
            out.append([])
        elif p.kind == kind:
            out[-1].append(p)
    return [run for run in out if run]


def lengths(axes: Axes, course: Course) -> None:
    places = range(len(course.phases))
    for at, row in zip(places, course.phases, strict=True):
        value = row.rounds if row.epochs is None else row.epochs
        shown = f"I {row.rounds}" if row.epochs is None else f"E {row.epochs:.3g} ({row.rounds} steps)"
        scale = max((_length(r) for r in course.phases if r.phase == row.phase), default=1) or 1
        axes.barh(at, value / scale, color=HARNESS if row.epochs is None else WEIGHT, height=0.7)
        axes.text(value / scale + 0.02, at, f"{shown}, {row.episodes:,} episodes", va="center", size=8)
    axes.set_yticks(list(places), [f"{row.phase} {row.cycle}" for row in course.phases])
    axes.set_xlim(0, 1.6)
    axes.set_xticks([])
    axes.invert_yaxis()


def _length(row: Any) -> float:
    return float(row.rounds if row.epochs is None else row.epochs)


def gains(axes: Axes, course: Course) -> None:
    rows = [row for row in course.phases if row.gain is not None]
    labels = [f"{row.phase} {row.cycle}" for row in rows]
    values = [row.gain for row in rows]
    colors = [WEIGHT if row.phase == "weight" else HARNESS for row in rows]
    for half in ("weight", "harness"):
        total = half_gain(course.phases, half)
        if total is not None and sum(row.phase == half for row in rows) > 1:
            labels, values = [*labels, f"all {half}"], [*values, total]
            colors.append(WEIGHT if half == "weight" else HARNESS)
    for at, (gain, color) in enumerate(zip(values, colors, strict=True)):
        assert gain is not None
        axes.bar(at, gain.mean, color=color, width=0.6, alpha=1.0 if at < len(rows) else 0.6)
        axes.plot([at, at], [gain.low, gain.high], color=INK, lw=1.2)
    axes.axhline(0, color=INK, lw=0.8)
    axes.set_xticks(range(len(labels)), labels, rotation=30 if len(labels) > 6 else 0)
    axes.set_ylabel("points / 1,000 episodes")


def grid(axes: Axes, course: Course) -> None:
    """The best harnesses and the newest versions, where not all fit."""
    lineage = course.lineage
    columns = _grid_columns(course)
    versions = [lineage.versions[n] for n in columns]
    order = sorted(lineage.rows, key=lambda row: (row.id not in course.state.accepted, -_best(row)))[:GRID_ROWS]
    rows = sorted(order, key=lambda row: row.id)
    table = [[100 * cell[0] if (cell := row.cells[n]) else math.nan for n in columns] for row in rows]
    axes.imshow(table, cmap="viridis", aspect="auto", vmin=0, vmax=100)
    for y, line in enumerate(table):
        for x, value in enumerate(line):
            if not math.isnan(value):
                axes.text(x, y, f"{value:.0f}", ha="center", va="center", size=7, color="black" if value > 55 else "w")
    axes.set_xticks(range(len(versions)), versions, rotation=45, ha="right")
    marked = [f"{row.id} *" if row.id in course.state.accepted else row.id for row in rows]
    axes.set_yticks(range(len(rows)), marked)
    axes.spines[:].set_visible(False)
    axes.set_xlabel("* accepted")


def _grid_columns(course: Course) -> list[int]:
    """The newest versions under which anything was measured on D_harness."""
    cells = [row.cells for row in course.lineage.rows]
    known = [n for n in range(len(course.lineage.versions)) if any((c := row[n]) and c[1] for row in cells)]
    return known[-GRID_COLUMNS:]


def _best(row: Any) -> float:
    return max((cell[0] for cell in row.cells if cell and not math.isnan(cell[0])), default=-1.0)


# ------------------------------------------------------------------------------------------------------- several runs


def of_study(drawn: Drawn, courses: Sequence[Course], study: Study) -> list[str]:
    made = []
    if any(t.on_course for course in courses for t in course.tests):
        made.append("study-tests")
        with drawn.figure(
            made[-1],
            "D_test over budgeted episodes (marks), and each run's own training and search scores (lines)",
            height=4.2,
        ) as axes:
            overlay(axes, courses)
    if any(row.last for row in study.rows):
        made.append("study-last")
        with drawn.figure(made[-1], "Last pair on D_test: mean over seeds, 95% interval, seeds as dots") as axes:
            ends(axes, courses, study)
    return made


def overlay(axes: Axes, courses: Sequence[Course]) -> None:
    """Tests as marks; behind them, thin, what each run saw of itself: its steps' window, the best of its search."""
    seen = set()
    for course in sorted(courses, key=lambda c: _place(c.state.condition)):
        tests = [t for t in course.tests if t.on_course]
        if not tests:
            continue
        condition = course.state.condition
        color, mark = style(condition)
        axes.plot(
            [t.x for t in tests], [100 * t.score.mean for t in tests], marker=mark, ms=6, lw=0.9, ls=":", color=color,
            alpha=0.9, label="" if condition in seen else condition,
        )  # fmt: skip
        seen.add(condition)
        for kind in ("step", "iteration"):
            for run in _runs(course, kind):
                own = [(p.x, 100 * v) for p in run if (v := p.window if kind == "step" else p.value) is not None]
                axes.plot(*_columns(own), "-", lw=0.9, color=color, alpha=0.4)
    _frame(axes, "budgeted episodes", "mean@k on D_test (%)")
    axes.set_ylim(bottom=0)
    _legend(axes)


def ends(axes: Axes, courses: Sequence[Course], study: Study) -> None:
    rows = [row for row in study.rows if row.last is not None]
    for at, row in enumerate(rows):
        assert row.last is not None
        color, mark = style(row.condition)
        axes.bar(at, 100 * row.last.mean, color=color, width=0.6, alpha=0.75)
        interval = [100 * row.last.low, 100 * row.last.high]
        axes.plot([at, at], interval, color="white", lw=4)  # seen on a dark bar too
        axes.plot([at, at], interval, color=INK, lw=1.5)
        ends = [c.last.score.mean for c in courses if c.state.condition == row.condition and c.last is not None]
        axes.plot([at + 0.17] * len(ends), [100 * mean for mean in ends], mark, ms=4, color="white", mec=INK)
    axes.set_xticks(range(len(rows)), [row.condition for row in rows])
    axes.set_ylabel("mean@k on D_test (%)")
    axes.set_ylim(bottom=0)


def style(condition: str) -> tuple[str, str]:
    place = _place(condition) % len(CONDITIONS)
    return CONDITIONS[place], MARKS[place]


def _place(condition: str) -> int:
    return ORDER.index(condition) if condition in ORDER else len(ORDER) - 1


# ------------------------------------------------------------------------------------------------------------ helpers


def _columns(pairs: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in pairs], [y for _, y in pairs]


def _bars(axes: Axes, points: Sequence[tuple[float, float, float, float]], label: str, color: str) -> None:
    """Points (x, y, low, high) with their intervals."""
    for x, _, low, high in points:
        axes.plot([x, x], [low, high], color=color, lw=1.2)
    axes.plot([p[0] for p in points], [p[1] for p in points], "o", ms=5, color=color, label=label)


def _frame(axes: Axes, x: str, y: str) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(axis="y", color="#dddddd", lw=0.6)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")


def _legend(axes: Axes) -> None:
    if axes.get_legend_handles_labels()[1]:
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8)
