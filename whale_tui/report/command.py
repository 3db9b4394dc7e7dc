"""`whale-tui report`: the page of one run or several."""

from __future__ import annotations

from pathlib import Path

from whale_tui import opening
from whale_tui.cli import RunName
from whale_tui.report import page


def report(run: RunName, *more: RunName, out: Path | None = None) -> int:
    """Write a page (HTML in one file, and Markdown) with figures (PNG and SVG) of RUN, or of several as a study.

    It needs no engine, and takes a run in whatever state it is. out: the folder; by default `report` in the run's own
    folder, or in the current one for several runs.
    """
    rundirs = [opening.find(name) for name in dict.fromkeys([run, *more])]
    made = page.write(rundirs, out or (rundirs[0].path / "report" if len(rundirs) == 1 else Path("report")))
    print(f"{made.text}\nwrote {made.html} and {made.markdown}")
    return 0
