"""The sample configs, shortened, on the real model: the search finds a harness, and training takes it up."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.engines import cli, command, environment, state_of, wait_for
from tests.tiny import real_model
from whale_tui.journal import Journal
from whale_tui.loop.state import RunState
from whale_tui.rundir import RunDir

SAMPLES = Path(__file__).parent.parent / "sample_configs"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    real_model()  # fetched before the clock runs; skips where it can't be had
    for key, value in environment(tmp_path).items():
        monkeypatch.setenv(key, value)
    yield tmp_path
    for lock in tmp_path.glob("runs/*/lock"):
        run = RunDir(lock.parent)
        info = run.engine_info()
        if info is not None and run.is_locked():
            os.kill(info.pid, signal.SIGKILL)


def run_until(folder: Path, sample: str, enough: Callable[[RunState], bool], *changes: str) -> tuple[RunDir, RunState]:
    """Run a sample config until its state is enough, stop it, and return what the journal then holds."""
    words = [word for change in ("run.name=short", "test.samples=0", *changes) for word in ("--set", change)]
    cli("run", str(SAMPLES / sample), *words, "--detach", folder=folder)
    run = RunDir(folder / "runs" / "short")

    def reached() -> bool:
        if not run.journal.exists():
            return False
        state = state_of(run)
        assert run.is_locked() or state.status == "finished", run.log.read_text()[-2000:]
        return enough(state) or state.status == "finished"

    wait_for(reached, 500, f"enough of {sample}")
    with contextlib.suppress(ConnectionError):  # it may end by itself meanwhile
        if state_of(run).status != "finished":
            command(run, "stop")
    wait_for(lambda: not run.is_locked(), 60, "the stop")
    return run, state_of(run)


def test_the_search_finds_a_harness_and_training_takes_it_up(folder: Path) -> None:
    changes = (
        "domain.options.harness=24",
        "weight.prompts_per_step=8",
        "schedule.epochs=0.004",
        "run.look_episodes=16",
    )
    run, state = run_until(folder, "quickstart.toml", lambda s: s.total_steps >= 2, *changes)
    assert state.looked is not None and state.looked.accepted <= 1
    assert [phase.phase for phase in state.phases][:2] == ["harness", "weight"]
    found = state.harnesses[state.accepted[-1]]
    untrained = found.mean(state.versions["theta-0000"].hash)
    assert found.id != "h0000" and untrained is not None and untrained > 0.10
    first, second = [point.value for point in state.points if point.kind == "step"][:2]
    assert first is not None and second is not None
    assert second > first > 0.10, "the second step samples from what the first one trained"
    assert list(state.versions)[:3] == ["theta-0000", "theta-0001", "theta-0002"]
    assert state.versions["theta-0002"].parent == "theta-0001"
    ledger: dict[str, int] = {}
    for key, spend in state.ledger.items():
        if spend.episodes:
            purpose = key.partition("/")[2]
            ledger[purpose] = ledger.get(purpose, 0) + spend.episodes
    assert ledger == Journal(run.journal, read_only=True).counts()


def test_the_search_finds_a_harness_for_arithmetic(folder: Path) -> None:
    def best(state: RunState) -> float:
        means = [c.mean(state.policy_hash) for c in state.harnesses.values()] if state.versions else []
        return max((mean for mean in means if mean is not None), default=0.0)

    changes = ('run.condition="harness-only"', "run.cycles=1", "domain.options.harness=24")
    _, state = run_until(folder, "arithmetic.toml", lambda s: best(s) > 0.05, *changes)
    base = state.harnesses["h0000"].mean(state.policy_hash)
    assert base is not None and base <= 0.03
    assert best(state) > 0.05
