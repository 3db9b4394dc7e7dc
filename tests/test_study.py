"""Studies: the plan, a study that is killed and goes on, its report; and which half a diagnosis finds."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines import cli, environment, state_of, wait_for, write_config
from tests.simulator import Simulator, World, batch
from whale_tui import diagnose, study
from whale_tui.config import ConfigError, load
from whale_tui.diagnose import Gain, decide
from whale_tui.journal import Journal
from whale_tui.loop.state import RunState
from whale_tui.records import Batch
from whale_tui.rundir import RunDir

ROOT = Path(__file__).parent.parent

# ----------------------------------------------------------------------------------------------------------- the plan


def test_a_plan_is_every_condition_for_each_seed_at_one_budget() -> None:
    plans = study.plan(["whale", "fst"], [1, 2], 500, ["weight.minibatch=8"])
    assert [p.name for p in plans] == ["whale-1", "fst-1", "whale-2", "fst-2"]
    for planned in plans:
        config = load(ROOT / "sample_configs" / "study.toml", planned.overrides).config
        assert f"{config.run.condition}-{config.run.seed}" == config.run.name == planned.name
        assert (config.run.budget_episodes, config.run.cycles, config.weight.minibatch) == (500, 0, 8)
    plain = load(ROOT / "sample_configs" / "study.toml", study.plan(["whale"], [1], None, [])[0].overrides).config
    assert plain.run.budget_episodes == load(ROOT / "sample_configs" / "study.toml").config.run.budget_episodes


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--conditions", "whale,wale"), "no condition 'wale'"), (("--conditions", ","), "no condition"),
        (("--seeds", "one"), "not a list of numbers"), (("--seeds", "-1"), "not a list"),
    ],
)  # fmt: skip
def test_a_plan_that_cannot_be_is_refused_at_once(words: tuple[str, ...], says: str) -> None:
    given = dict(zip(words[::2], words[1::2], strict=True))
    with pytest.raises(ConfigError, match=says):
        study.compare(
            ROOT / "sample_configs" / "study.toml", given.get("--conditions", "whale"), given.get("--seeds", "1"), None,
            [], None,
        )  # fmt: skip


# ------------------------------------------------------------------------------------------------------------ real runs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("study")
    write_config(folder, run__first_phase="weight", test__samples=1, test__at="ends")
    yield folder
    for lock in folder.glob("**/lock"):
        info = RunDir(lock.parent).engine_info()
        if info is not None and RunDir(lock.parent).is_locked():
            os.kill(info.pid, signal.SIGKILL)


def test_a_study_that_is_killed_goes_on_and_runs_nothing_twice(folder: Path) -> None:
    words = ["compare", str(folder / "tiny.toml"), "--conditions", "weight-only,harness-only", "--seeds", "1"]
    words += ["--budget", "64", "--out", str(folder / "out")]
    first, second = (
        RunDir(folder / "out" / "runs" / "weight-only-1"),
        RunDir(folder / "out" / "runs" / "harness-only-1"),
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "whale_tui", *words], env=environment(folder), stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    wait_for(lambda: second.journal.exists() and state_of(second).settings, what="the second run")
    process.kill()
    info = second.engine_info()
    assert info is not None
    os.kill(info.pid, signal.SIGKILL)
    process.communicate()
    wait_for(lambda: not second.is_locked(), what="the kill")
    ended = state_of(first)
    assert ended.status == "finished" and state_of(second).status == "running"

    out = cli(*words, folder=folder).stdout
    assert "1 of 2: weight-only-1" in out and "harness-only-1: finished" in out
    assert state_of(first).seq == ended.seq, "what has finished is left alone"
    again = state_of(second)
    assert again.status == "finished" and again.engine_starts == 2
    for run in (first, second):
        assert state_of(run).budget_used <= 64 and state_of(run).splits["test"] == 6
    table = (folder / "out" / "report" / "report.md").read_text()
    assert "| weight-only | 1 of 1 |" in table and "| harness-only | 1 of 1 |" in table
    assert "harness-only minus weight-only" in table

    other = cli(*words[:-4], "--budget", "96", "--out", str(folder / "out"), folder=folder, check=1)
    assert "was started with another config" in other.stderr


# ---------------------------------------------------------------------------------------------------- the diagnosis


class Rates(World):
    """How good each harness is under each policy; fresh episodes of a winner are worse than those that made it one."""

    def __init__(self, found: float, fresh: float, trained: float) -> None:
        super().__init__()
        self.found, self.fresh, self.trained_rate = found, fresh, trained

    def batch(self, sim: Simulator, harness: str, episodes: int, purpose: str) -> Batch:
        rate = self.trained_rate if sim.state.policy != "theta-0000" else 0.2
        if harness == "h0003":
            rate = self.fresh if purpose == "confirm" else self.found
        return batch(episodes, round(episodes * rate))


def simulated(path: Path, planned: study.Planned, world: World) -> RunDir:
    """The run that a plan means, by the real alternation, in a journal."""
    config = load(ROOT / "sample_configs" / "quickstart.toml", planned.overrides).config
    sim = Simulator(config, world, {"weight": 4096, "harness": 40, "test": 10}).run()
    run = RunDir(path)
    run.create()
    journal = Journal(run.journal)
    journal.commit(sim.events)
    journal.close()
    return run


def diagnosed(folder: Path, world: World, steps: int | None = None) -> tuple[diagnose.Diagnosis, RunState, RunState]:
    settings = load(ROOT / "sample_configs" / "quickstart.toml").config
    search = simulated(folder / "search", diagnose.search_plan(settings, []), world)
    training = simulated(folder / "training", diagnose.training_plan(settings, [], state_of(search), steps), world)
    return diagnose.read(search, training), state_of(search), state_of(training)


def test_a_diagnosis_is_a_search_and_a_training_from_the_start(tmp_path: Path) -> None:
    found, searched, trained = diagnosed(tmp_path, Rates(found=0.9, fresh=0.7, trained=0.225))
    assert [(p.phase, len(p.signal)) for p in searched.phases] == [("harness", diagnose.ITERATIONS)]
    assert [(p.phase, len(p.signal)) for p in trained.phases] == [("weight", 2), ("harness", 1)]
    assert searched.policy == "theta-0000" and trained.harness == "h0000" and not searched.tests + trained.tests
    assert found.half == "harness-limited"
    assert found.harness.points == pytest.approx(50), "of its fresh episodes, not of those that made it the winner"
    assert found.harness.episodes == sum(searched.ledger[f"harness/{p}"].episodes for p in ("search", "smoke"))
    assert found.weight.points == pytest.approx(2.5) and found.weight.episodes == 2 * 128


def test_a_search_that_finds_nothing_gained_nothing(tmp_path: Path) -> None:
    found, searched, trained = diagnosed(tmp_path, Rates(found=0.1, fresh=0.1, trained=0.8), steps=3)
    assert searched.harness == "h0000" and found.harness.points == 0.0
    assert len(trained.phases[0].signal) == 3 and found.half == "weight-limited"


# ------------------------------------------------------------------------------------------------------------- the rule


def gain(points: float, low: float, high: float, episodes: int = 1000) -> Gain:
    return Gain(0.1, 0.1 + points / 100, points, low, high, episodes, 64)


@pytest.mark.parametrize(
    ("harness", "weight", "half"),
    [
        (gain(30, 20, 40), gain(5, 0, 10), "harness-limited"),
        (gain(5, 0, 10), gain(30, 20, 40), "weight-limited"),
        (gain(30, 20, 40), gain(25, 15, 35), "undecided"),
        (gain(0, 0, 0), gain(-5, -9, -1), "undecided"),
        (gain(0, 0, 0), gain(3, -1, 7), "undecided"),
        (gain(30, 20, 40, 2000), gain(15, 8, 22, 250), "weight-limited"),
    ],
)
def test_the_half_that_gains_more_for_its_episodes_is_the_limit(harness: Gain, weight: Gain, half: str) -> None:
    found = decide(harness, weight)
    assert found.half == half and "points per 1,000" in found.words
    assert ("open" in found.words) == (half == "undecided")


def test_a_gain_is_paired_by_task_and_by_its_episodes() -> None:
    before = {f"t{n}": [float(n < 10)] for n in range(40)}
    after = {f"t{n}": [float(n < 30)] for n in range(40)} | {"other": [1.0]}
    found = diagnose.gain(before, after, 400)
    assert (found.points, found.tasks) == (50.0, 40) and found.low < 50 < found.high
    assert found.rate == pytest.approx((125.0, 2.5 * found.low, 2.5 * found.high))
