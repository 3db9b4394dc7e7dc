"""Reports: figures and tables against what journals hold, from whole, killed, empty, one-phase and damaged runs, and
with hostile text; intervals against an exact enumeration."""

from __future__ import annotations

import itertools
import re
import shutil
import sqlite3
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from tests.scripted import Script, write_run
from whale_tui import records as r
from whale_tui.cli import _guarded
from whale_tui.journal import Journal
from whale_tui.loop.evaluation import RESAMPLES, bootstrap, difference
from whale_tui.report import figures, page
from whale_tui.report.conditions import rewards_of, spread, study, two_level
from whale_tui.report.series import cost, course, half_gain
from whale_tui.rundir import RunDir

# ------------------------------------------------------------------------------------------------------- intervals


def exact(means: list[float]) -> tuple[np.ndarray, np.ndarray]:
    """Every value that a resampled mean can take, and how likely at most it is."""
    values = np.sort(np.asarray(means))
    return values, np.arange(1, len(values) + 1) / len(values)


def holds(found: float, means: list[float], share: float, slack: float = 0.012) -> bool:
    """Whether `found` is the share-quantile of the exact distribution, up to the noise of a finite draw."""
    values, _ = exact(means)
    below, at_most = np.mean(values < found - 1e-12), np.mean(values <= found + 1e-12)
    return bool(below - slack <= share <= at_most + slack)


@pytest.mark.parametrize("values", [[0.0, 0.25, 0.5, 1.0, 1.0], [0.0, 0.0, 0.0, 1.0, 0.5, 0.125]])
def test_a_bootstrap_interval_has_the_quantiles_of_every_possible_resample(values: list[float]) -> None:
    means = [sum(drawn) / len(drawn) for drawn in itertools.product(values, repeat=len(values))]
    got = bootstrap(values)
    assert holds(got.low, means, 0.025) and holds(got.high, means, 0.975)


def test_an_interval_over_seeds_and_tasks_has_the_quantiles_of_every_possible_resample() -> None:
    table = np.array([[0.0, 1.0, 0.5, 1.0], [0.25, 0.0, 0.5, 0.75], [1.0, 1.0, 0.0, 1.0]])
    means = [
        float(table[np.ix_(rows, columns)].mean())
        for rows in itertools.product(range(3), repeat=3)
        for columns in itertools.product(range(4), repeat=4)
    ]
    got = two_level(table)
    assert got.mean == pytest.approx(table.mean())
    assert holds(got.low, means, 0.025) and holds(got.high, means, 0.975)
    assert two_level(table) == got and RESAMPLES >= 2000


def test_a_spread_is_over_seeds_and_over_the_tasks_that_all_of_them_have() -> None:
    got = spread([{"a": [1.0], "b": [0.0, 1.0], "c": [1.0]}, {"a": [0.0], "b": [0.5]}])
    assert got is not None and got.mean == pytest.approx((0.75 + 0.25) / 2) and got.seeds == 2
    assert got.deviation == pytest.approx(0.5 / 2**0.5)
    one = spread([{"a": [1.0]}])
    assert one is not None and one.deviation is None
    assert spread([]) is None and spread([{"a": [1.0]}, {"b": [1.0]}]) is None


# -------------------------------------------------------------------------------------------------------- what is told


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return write_run(tmp_path_factory.mktemp("whole") / "first-light", until="finished").rundir


def test_a_course_is_what_the_journal_says(whole: RunDir) -> None:
    told = course(whole)
    state = told.state
    assert [t.score.label for t in told.tests] == ["start", "cycle 1", "end"]
    assert told.start is told.tests[0] and told.last is told.tests[2] and told.best is not None
    assert told.best.score.mean == max(t.score.mean for t in told.tests)
    assert [t.x for t in told.tests] == [0, *(p.x for p in state.points if p.kind == "test" and p.x)]
    assert [(p.phase, p.rounds, p.epochs) for p in told.phases] == [
        ("weight", 10, 1.0), ("harness", 4, None), ("weight", 8, 0.8), ("harness", 2, None)
    ]  # fmt: skip
    assert [p.episodes for p in told.phases] == [p.episodes for p in state.phases]
    assert [a.harness for a in told.accepted] == state.accepted[1:] and all(a.hunks for a in told.accepted)
    assert {row.id for row in told.lineage.rows} == set(state.harnesses)
    spent = cost(told)
    assert spent.episodes == state.budget_used and spent.test_episodes == state.ledger["-/test"].episodes
    assert spent.points == pytest.approx(100 * (told.tests[2].score.mean - told.tests[0].score.mean))
    assert spent.a_point(spent.episodes) == pytest.approx(spent.episodes / (spent.points or 1))
    total = half_gain(told.phases, "harness")
    gains = [p.gain for p in told.phases if p.phase == "harness"]
    assert total and gains[0] and gains[1]
    assert min(g.mean for g in gains if g) <= total.mean <= max(g.mean for g in gains if g)
    assert total.low < total.mean < total.high


def test_a_report_has_every_figure_twice_and_opens_from_one_file(whole: RunDir, tmp_path: Path) -> None:
    made = page.write([whole], tmp_path)
    names = {f.stem for f in (tmp_path / "figures").iterdir()}
    assert names == {"run-1-success", "run-1-phases", "run-1-gain", "run-1-lineage"}
    for name in names:
        assert (tmp_path / "figures" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert b"</svg>" in (tmp_path / "figures" / f"{name}.svg").read_bytes()
    html, markdown = made.html.read_text(), made.markdown.read_text()
    tags = Tags.of(html)
    assert [src for tag, src in tags.sources if not src.startswith("data:image/svg+xml;base64,")] == []
    assert len(tags.sources) == len(names) and tags.open == []
    for text in (html, markdown):
        assert "h0009 in place of h0002" in text and "best seen" in text and "undecided" in text
        assert "E 0.8 (8 steps)" in text and "83.0%" in text
    assert "+    return &#34; &#34;.join(words[-2:])" in html and '+    return " ".join(words[-2:])' in markdown
    assert "mean@2 83.0%" in made.text
    again = figures.Drawn(tmp_path / "again")
    for name in figures.of_run(again, course(whole), "run-1", whole=False):
        for kind in ("png", "svg"):
            drawn = [(tmp_path / folder / f"{name}.{kind}").read_bytes() for folder in ("figures", "again")]
            assert drawn[0] == drawn[1], "the same data, the same bytes"


class Tags(HTMLParser):
    """Every tag, its attributes, and what is still open at the end."""

    VOID = ("meta", "img", "link")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()
        self.sources: list[tuple[str, str]] = []
        self.attributes: set[str] = set()

    @classmethod
    def of(cls, text: str) -> Tags:
        made = cls()
        made.feed(text)
        made.close()
        return made

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        self.attributes |= {name for name, _ in attrs}
        self.sources += [(tag, value or "") for name, value in attrs if name in ("src", "href")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-1:]}"
        self.open.pop()


# ------------------------------------------------------------------------------------------------ runs as they come


def killed(path: Path) -> RunDir:
    return write_run(path, until="training").rundir


def empty(path: Path) -> RunDir:
    run = RunDir(path)
    run.create()
    return run


def tables_only(path: Path) -> RunDir:
    run = empty(path)
    Journal(run.journal).close()
    return run


def one_phase(path: Path) -> RunDir:
    script = Script(path)
    script.start()
    script.weight_phase(3)
    return script.rundir


def damaged(path: Path) -> RunDir:
    run = write_run(path, until="waiting").rundir
    db = sqlite3.connect(run.journal)
    db.execute("UPDATE events SET body = ? WHERE seq = 60", (b"{}",))
    db.commit()
    db.close()
    return run


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (killed, "crashed"), (empty, "Nothing of this run has happened yet"), (tables_only, "Nothing of this run"),
        (one_phase, "no search has been measured yet"), (damaged, "damaged after event 59"),
    ],
)  # fmt: skip
def test_a_report_goes_as_far_as_its_run(make: object, says: str, tmp_path: Path) -> None:
    made = page.write([make(tmp_path / "run")], tmp_path / "out")  # type: ignore[operator]
    html, markdown = made.html.read_text(), made.markdown.read_text()
    assert says in html and says in markdown and Tags.of(html).open == []
    assert ("D_test" in made.text or "cost" in made.text) and "nan" not in markdown


def test_the_first_pair_is_the_last_only_of_a_run_that_ended_with_it(tmp_path: Path) -> None:
    script = Script(tmp_path / "run")
    script.start()
    begun = course(script.rundir)
    assert begun.start is not None and begun.last is None and cost(begun).points is None
    script.tell(r.RunFinished(status="finished", reason="nothing was accepted"))
    ended = course(script.rundir)
    assert ended.last == ended.start and cost(ended).points == 0.0


def test_a_study_of_such_runs_is_told_too(tmp_path: Path) -> None:
    made = page.write([empty(tmp_path / "a"), killed(tmp_path / "b"), one_phase(tmp_path / "c")], tmp_path / "out")
    assert "0 of 2" in made.markdown.read_text() and (tmp_path / "out" / "figures" / "study-last.svg").exists()
    assert Tags.of(made.html.read_text()).open == []


def test_a_long_run_is_read_by_its_events_alone(whole: RunDir, tmp_path: Path) -> None:
    shutil.copytree(whole.path, tmp_path / "run", ignore=shutil.ignore_patterns("episodes"))
    run = RunDir(tmp_path / "run")
    db = sqlite3.connect(run.journal)
    db.executescript("DROP TABLE episodes;")
    db.close()
    told = course(run)
    assert told.problem == "" and [t.score.mean for t in told.tests] == [t.score.mean for t in course(whole).tests]
    assert page.text([told], None) == page.text([course(whole)], None)


# ------------------------------------------------------------------------------------------------------ hostile text

HOSTILE = (
    "<script>alert(1)</script> </pre><img src=x onerror=alert(2)> | $x_1$ ``` \x1b[31m \u202e "
    "[go](javascript:alert(3)) https://example.org \n# not a heading\n\n![p](http://example.org/p.png) \ud800"
)


def hostile(path: Path) -> RunDir:
    script = Script(path)
    script.start("<b>run</b>$")
    script.begin_search()
    source = script.rundir.harness_source("h0000") + f'\nEXTRA = r"""```\n{HOSTILE[:-1]}\n````\n"""\n'
    script.rundir.write_harness("h0001", source, {"parent": "h0000"})
    script.tell(
        r.CandidateProposed(
            harness="h0001", iteration=2, parent="h0000", hypothesis=HOSTILE[:-1], proposer="<i>x</i>",
            source_hash="s1",
        ),
        r.Warned(text=HOSTILE[:-1]),
    )  # fmt: skip
    script.bonus["h0001"] = 0.5
    script.score("h0001")
    script.accept(HOSTILE[:-1])
    return script.rundir


def outside_fences(markdown: str) -> Iterator[str]:
    """Lines that Markdown reads as such."""
    fence = ""
    for line in markdown.split("\n"):
        mark = re.match(r"(`{3,})", line)
        if mark and not fence:
            fence = mark[1]
        elif mark and line.strip() == fence:
            fence = ""
        elif not fence:
            yield line
    assert not fence, "a fence is left open"


def test_text_of_models_stays_text(tmp_path: Path) -> None:
    made = page.write([hostile(tmp_path / "run")], tmp_path / "out")
    html, markdown = made.html.read_text(), made.markdown.read_text()
    tags = Tags.of(html)
    assert tags.open == [] and not tags.seen & {"script", "b", "i", "iframe", "a"}
    assert not {name for name in tags.attributes if name.startswith("on")}
    assert all(src.startswith("data:image/svg+xml;base64,") for _, src in tags.sources)
    assert "&lt;script&gt;alert(1)" in html and "Content-Security-Policy" in html
    for text in (html, markdown, made.text):
        assert "\x1b" not in text and "\u202e" not in text and "\ud800" not in text
    told = list(outside_fences(markdown))
    assert not [line for line in told if re.search(r"(?<!\\)<|(?<!\\)\]\((?!figures/)|(?<!\\)`|https?://", line)]
    assert not [line for line in told if line.startswith("# not")]
    assert next(line for line in told if line.startswith("#")) == "# &lt;b&gt;run&lt;/b&gt;\\$"
    rows = [line for line in told if line.startswith("| ")]
    assert rows and any("alert" in row for row in rows)
    widths = {len(re.findall(r"(?<!\\)\|", row)) for row in rows if "h0001" in row and "alert" in row}
    assert widths == {7, 8}, "six columns of the lineage, seven of the phases: no cell of its own making"


@pytest.mark.parametrize("text", ["\ud800", "a\x00b", "\u2028", "\x9b31m", "x" * 5000])
def test_what_is_shown_can_be_written(text: str) -> None:
    line = page.shown(text)
    assert line.encode() and line.isprintable() and len(line) < 2100
    assert page.escaped(text)


@pytest.mark.parametrize("text", ["1. one", "- item", "+ item", "# head", "> quote", "a | b", "<br>", "*b*", "www.a.b"])
def test_markdown_shows_text_as_it_stands(text: str) -> None:
    assert page.escaped(text) != text


# --------------------------------------------------------------------------------------------------------- conditions


def short(path: Path, condition: r.Condition, seed: int, skill: float) -> RunDir:
    script = Script(path, seed=seed)
    script.start(path.name, condition, seed)
    script.weight_phase(2)
    script.skill = skill
    script.test("end")
    script.tell(r.RunFinished(status="finished", reason="budget spent"))
    return script.rundir


def test_conditions_are_compared_by_seed_and_task(tmp_path: Path) -> None:
    runs = [
        short(tmp_path / f"{condition}-{seed}", condition, seed, skill)
        for condition, skill in (("whale", 0.8), ("weight-only", 0.3))
        for seed in (1, 2)
    ]
    courses = [course(run) for run in runs]
    found = study(courses)
    assert [(row.condition, row.seeds, row.ended) for row in found.rows] == [
        ("weight-only", [1, 2], 2), ("whale", [1, 2], 2)
    ]  # fmt: skip
    rewards = [rewards_of(c, c.last) for c in courses if c.last]
    by_hand = [difference(rewards[n], rewards[n + 2]) for n in range(2)]
    (against,) = found.against
    assert (against.condition, against.other, against.tasks) == ("whale", "weight-only", 24)
    assert against.difference.mean == pytest.approx(sum(d.interval.mean for d in by_hand) / 2, abs=0.02)
    assert against.difference.low > 0 and against.won > against.lost
    whale = found.rows[1]
    assert whale.last and whale.last.mean == pytest.approx(sum(c.last.score.mean for c in courses[:2] if c.last) / 2)
    assert whale.last.deviation is not None and whale.cost.points is not None
    made = page.write(runs, tmp_path / "out")
    assert "whale minus weight-only" in made.text and "2/2" in made.text
    assert {"study-tests.png", "study-last.png"} <= {f.name for f in (tmp_path / "out" / "figures").iterdir()}


def test_the_command_writes_into_the_run_and_says_where(
    whole: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    run = empty(tmp_path / "new")
    run.config.write_text("")
    assert _guarded(["report", str(run.path)]) == 0
    assert f"wrote {run.path}/report/index.html" in capsys.readouterr().out
    assert _guarded(["report", str(run.path), str(whole.path), "--out", str(tmp_path / "both")]) == 0
    assert "adaptive" in capsys.readouterr().out and (tmp_path / "both" / "figures" / "study-tests.svg").exists()
    assert _guarded(["report", "nothing"]) == 1
