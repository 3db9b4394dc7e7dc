"""Evaluating pairs: after a run, with an engine of its own; in a run that goes on; and what is refused."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines import cli, command, environment, essence, events_of, state_of, wait_for, write_config
from tests.simulator import Simulator, make_config
from tests.test_sinks import written
from whale_tui import evaluate
from whale_tui import records as r
from whale_tui.journal import Journal
from whale_tui.loop import alternation as todo
from whale_tui.loop import control
from whale_tui.loop.evaluation import mean_at_k, parts, subset
from whale_tui.records import Task
from whale_tui.rundir import RunDir

# --------------------------------------------------------------------------------------------------------- in words


def task(key: str, **fields: object) -> Task:
    return Task(key=key, public=fields, private={"type": "geometry"} if key.startswith("g") else {})


def test_parts_of_d_test_are_what_tasks_say_of_themselves() -> None:
    tasks = [
        task("a", level=1),
        task("b", level=1),
        task("c", level=5),
        task("g1"),
        task("d"),
        task("u", level=5),
    ]
    by_task = {"a": [1.0, 0.0], "b": [1.0], "c": [0.0], "g1": [1.0], "d": [1.0]}
    found = parts(tasks, by_task)
    assert list(found) == ["level 1", "level 5", "type geometry"]
    assert (found["level 1"].mean, found["level 1"].n, found["level 5"].n) == (0.75, 2, 1)
    alone = mean_at_k({"a": by_task["a"], "b": by_task["b"]})
    assert (found["level 1"].low, found["level 1"].high) == (alone.low, alone.high)
    assert subset(task("x", subset="\x1b[1mhard", level=2)) == "subset ?[1mhard" and subset(task("x", level=[1])) == ""


@pytest.mark.parametrize(
    ("name", "pair"),
    [
        ("current", ("theta-0002", "h0002")),
        ("start", ("theta-0000", "h0000")),
        ("theta-0001, h0000", ("theta-0001", "h0000")),
    ],
)
def test_pairs_have_names(name: str, pair: tuple[str, str]) -> None:
    state = Simulator(make_config()).state
    state.policy, state.harness = "theta-0002", "h0002"
    assert evaluate.resolve(state, name) == pair
    assert evaluate.resolve(state, "best") == ("theta-0002", "h0002"), "nothing is tested: the current pair"
    with pytest.raises(control.Refused, match="best, current, start or THETA,HARNESS"):
        evaluate.resolve(state, "theta-0001")


def test_the_best_pair_is_the_best_seen_and_an_evaluation_keeps_its_label() -> None:
    sim = Simulator(make_config(test__samples=2, test__at="phases")).run()
    best = sim.state.best
    assert best and evaluate.resolve(sim.state, "best") == (best.policy, best.harness)
    sim = Simulator(make_config())
    sim.until(todo.TrainStep)
    sim.step()
    sim.command("evaluate", policy="theta-0001", harness="h0000", samples=3, label="eval")
    assert sim.next() == todo.Test("theta-0001", "h0000", "eval", 3, 1)
    sim.step()
    assert sim.state.tests[-1].label == "eval" and not sim.state.wanted


# ------------------------------------------------------------------------------------------------------- on a real run


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """A run that is asked for a pair while it goes on, to its end; and what the asking printed. It is paused first, so
    that the wish surely meets a live engine."""
    folder = tmp_path_factory.mktemp("eval")
    with pytest.MonkeyPatch.context() as patch:
        for key, value in environment(folder).items():
            patch.setenv(key, value)
        config = write_config(
            folder, run__cycles=1, run__first_phase="weight", test__samples=1, test__at="ends", sinks__tensorboard=True
        )
        cli("run", str(config), "--detach", folder=folder)
        run, said = RunDir(folder / "runs" / "tiny"), list[str]()
        wait_for(lambda: run.journal.exists() and state_of(run).settings, what="the run's start")
        wait_for(lambda: command(run, "pause").ok, what="the pause")
        words = ("eval", "tiny", "--pair", "start", "--samples", "4")
        asking = threading.Thread(target=lambda: said.append(cli(*words, folder=folder).stdout))
        asking.start()
        wait_for(lambda: state_of(run).wanted, what="the wish")
        assert command(run, "resume").ok
        asking.join(60)
        wait_for(lambda: state_of(run).status == "finished" and not run.is_locked(), what="the end")
        yield folder, said[0]


@pytest.fixture
def folder(live: tuple[Path, str]) -> Path:
    return live[0]


def test_a_run_that_goes_on_is_asked_and_measures_at_its_next_safe_point(live: tuple[Path, str]) -> None:
    run = RunDir(live[0] / "runs" / "tiny")
    assert "once the run is resumed" in live[1] and "theta-0000 x h0000: mean@4" in live[1]
    (test,) = [e for e in events_of(run) if isinstance(e, r.TestScored) and e.score.label == "eval"]
    assert (test.score.policy, test.score.harness, test.score.samples) == ("theta-0000", "h0000", 4)
    assert [p.phase for p in state_of(run).phases] == ["weight", "harness"]


def test_a_run_that_has_ended_is_measured_by_an_engine_of_its_own(folder: Path) -> None:
    run = RunDir(folder / "runs" / "tiny")
    before, state = events_of(run), state_of(run)
    pair = f"{state.policy},{state.harness}"
    asked = ("eval", "tiny", "--pair", "start", "--pair", pair)
    out = json.loads(cli(*asked, "--samples", "6", "--json", folder=folder).stdout)
    assert not run.is_locked()
    events = events_of(run)
    assert essence(events[: len(before)]) == essence(before)
    made = events[len(before) :]
    assert [type(e) for e in made] == [r.TestScored, r.TestScored], "nothing else of the run went on"
    assert [e.score.label for e in made if isinstance(e, r.TestScored)] == ["eval", "eval"]
    assert state_of(run).status == "finished" and state_of(run).policy == state.policy
    assert [(o["policy"], o["harness"], o["samples"], o["tasks"]) for o in out] == [
        ("theta-0000", "h0000", 6, 6), (state.policy, state.harness, 6, 6)
    ]  # fmt: skip
    first, second = (e.score for e in made if isinstance(e, r.TestScored))
    gap = out[1]["against_first"]
    assert gap["mean"] == pytest.approx(second.mean - first.mean) and gap["tasks"] == 6
    assert gap["low"] <= gap["mean"] <= gap["high"] and out[0]["against_first"] is None

    journal = Journal(run.journal, read_only=True)
    chances = [
        {(e.task, e.sample): e.calls[0].seed for e in journal.segment(event.segment)}
        for event in events
        if isinstance(event, r.TestScored)
    ]
    assert journal.rewards(made[0].segment).keys() == {f"test-{n}" for n in range(6)}  # type: ignore[union-attr]
    journal.close()
    assert chances[-1] == chances[-2] and len(set(chances[-1].values())) == 36, "the same chances for every pair"
    assert len(chances) == 5
    for earlier in chances[:-2]:
        assert earlier.items() <= chances[-1].items(), "in the run's own tests too, whenever they were made"

    again = cli(*asked, "--samples", "2", folder=folder)
    assert len(events_of(run)) == len(events), "a pair with as many samples is not measured again"
    assert "mean@6" in again.stdout and "tasks better" in again.stdout


def test_what_cannot_be_measured_is_refused(folder: Path) -> None:
    for words, status, says in (
        (("tiny", "--pair", "theta-0099,h0000"), 3, "no policy version theta-0099"),
        (("tiny", "--pair", "nonsense"), 3, "best, current, start or"),
        (("tiny", "--samples", "0"), 2, "from 1 to"),
    ):
        assert says in cli("eval", *words, folder=folder, check=status).stderr


def test_an_engine_feeds_the_sinks_that_its_config_names(folder: Path) -> None:
    run = RunDir(folder / "runs" / "tiny")
    points = [p for p in state_of(run).points if p.kind == "step"]
    found = written(run.path / "tensorboard")["weight/step"]
    assert [x for x, _ in found] == [p.x for p in points] and len(points) == 2
    assert [value for _, value in found] == pytest.approx([p.value for p in points])
