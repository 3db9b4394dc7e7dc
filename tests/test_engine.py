"""The engine as a process, on small real runs: it runs, obeys, stops, is killed, goes on and finishes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.engines import cli, command, environment, essence, events_of, state_of, wait_for, write_config
from whale_tui import records as r
from whale_tui.journal import Journal
from whale_tui.rundir import RunDir

WEIGHT_ONLY = {"run__condition": "weight-only", "proposer__kind": "person"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for key, value in environment(tmp_path).items():
        monkeypatch.setenv(key, value)
    yield tmp_path
    for lock in tmp_path.glob("runs/*/lock"):
        info = RunDir(lock.parent).engine_info()
        if info is not None and RunDir(lock.parent).is_locked():
            os.kill(info.pid, signal.SIGKILL)


def started(folder: Path, config: Path) -> RunDir:
    cli("run", str(config), "--detach", folder=folder)
    run = RunDir(folder / "runs" / "tiny")
    wait_for(lambda: run.journal.exists() and state_of(run).phases, what="the first phase")
    return run


def finished(folder: Path, name: str = "tiny") -> RunDir:
    run = RunDir(folder / "runs" / name)
    wait_for(lambda: not run.is_locked(), 120, "the end of the run")
    assert state_of(run).status == "finished", run.log.read_text()[-2000:]
    return run


def test_a_run_finishes_and_its_books_agree(folder: Path) -> None:
    done = cli("run", str(write_config(folder, **WEIGHT_ONLY)), "--headless", folder=folder)
    assert "run finished: 2 cycles done" in done.stdout
    run = finished(folder)
    state, journal = state_of(run), Journal(run.journal, read_only=True)
    spent: dict[str, int] = {}
    for key, spend in state.ledger.items():
        spent[key.partition("/")[2]] = spent.get(key.partition("/")[2], 0) + spend.episodes
    assert spent == journal.counts()
    trained = [e for e in events_of(run) if isinstance(e, r.StepFinished) and e.trained]
    assert trained, "no step trained: the tiny model's luck changed; take another seed"
    assert len(state.versions) == 1 + len(trained)
    for version in list(state.versions.values())[1:]:
        assert abs(version.probe_trainer - version.probe_rollout) < 0.05
    for event in events_of(run):
        if isinstance(event, r.StepSampled):
            for episode in journal.segment(event.segment):
                assert episode.policy_hash == state.versions[event.policy].hash
                assert episode.reward == {"accept": 1.0, "reject": 0.0, "invalid": None}[episode.verdict]
    shown = json.loads(cli("status", "tiny", "--json", folder=folder).stdout)
    assert shown["state"] == "finished" and shown["best"]["n"] == 6 and shown["start"]["policy"] == "theta-0000"
    assert "is finished" in cli("run", "tiny", "--headless", folder=folder).stdout


def test_controls_have_one_effect_each(folder: Path) -> None:
    run = started(folder, write_config(folder, **WEIGHT_ONLY, run__cycles=40))
    slowest = 0.0

    def send(what: str, args: dict | None = None, **more):
        nonlocal slowest
        start = time.monotonic()
        reply = command(run, what, args, **more)
        slowest = max(slowest, time.monotonic() - start)
        return reply

    assert send("pause", dry_run=True).ok and state_of(run).status == "running"
    first = send("pause", id="one")
    again = send("pause", id="one")
    assert first.ok and not first.repeated and again.repeated and again.effect == first.effect
    wait_for(lambda: state_of(run).status == "paused", what="the pause")
    seq = wait_for(lambda: (a := state_of(run).seq) == (time.sleep(0.7) or state_of(run).seq) and a, what="quiet")
    assert sum(isinstance(e, r.CommandTaken) and e.id == "one" for e in events_of(run)) == 1
    assert send("pin").ok and state_of(run).pinned == "h0000"
    assert not send("pin", {"harness": "h0099"}).ok
    assert send("unpin").ok and not state_of(run).pinned
    assert send("set", {"epochs": 0.5}).ok and state_of(run).settings.epochs == 0.5
    assert not send("set", {"epoch": 0.5}).ok
    assert state_of(run).seq > seq
    phases = len(state_of(run).phases)
    assert send("resume").ok
    assert send("switch", {"now": True}).ok
    wait_for(lambda: len(state_of(run).phases) > phases, what="the next phase")
    assert any("at once" in p.ended for p in state_of(run).phases)
    assert send("switch").ok
    wait_for(lambda: any("at a safe point" in p.ended for p in state_of(run).phases), what="the safe switch")
    wait_for(lambda: len(state_of(run).versions) > 2, what="two versions")
    assert "at the next safe point" in send("evaluate", {"policy": "theta-0001", "samples": 3}).effect
    test = wait_for(lambda: state_of(run).measured("theta-0001", "h0000", 3), what="the test that was asked for")
    assert (test.label, test.n) == ("asked by tester", state_of(run).splits["test"])
    send("rollback", {"policy": "theta-0001"})
    wait_for(lambda: any(e.what == "rollback" for e in events_of(run) if isinstance(e, r.CommandTaken)))
    assert send("stop").ok
    wait_for(lambda: not run.is_locked(), what="the stop")
    assert state_of(run).status == "stopped"
    assert slowest < 5  # answered by the engine while it works; how fast is measured in benchmarks/
    assert cli("ctl", "tiny", "pause", folder=folder, check=4).stderr


def test_sigterm_stops_in_good_order_and_the_run_goes_on(folder: Path) -> None:
    config = write_config(folder, **WEIGHT_ONLY)
    run = started(folder, config)
    os.kill(run.engine_info().pid, signal.SIGTERM)
    wait_for(lambda: not run.is_locked(), what="the stop")
    assert state_of(run).status == "stopped"
    cli("run", str(config), "--headless", folder=folder)
    assert any(isinstance(e, r.EngineStarted) and e.resumed for e in events_of(finished(folder)))


def test_killing_the_policy_worker_costs_nothing_but_time(folder: Path) -> None:
    run = started(folder, write_config(folder, **WEIGHT_ONLY, run__cycles=3))
    engine = run.engine_info().pid
    children = subprocess.run(["pgrep", "-P", str(engine), "-f", "policy.worker"], capture_output=True, text=True)
    os.kill(int(children.stdout.split()[0]), signal.SIGKILL)
    run = finished(folder)
    assert run.engine_info().pid == engine
    kinds = [e.kind for e in events_of(run) if isinstance(e, r.Failure)]
    assert kinds == ["worker-died"]


def test_one_engine_per_run(folder: Path) -> None:
    run = started(folder, write_config(folder, **WEIGHT_ONLY, run__cycles=20))
    second = subprocess.run(
        [sys.executable, "-m", "whale_tui.service.engine", str(run.path)], capture_output=True, text=True
    )
    assert second.returncode == 1 and "already has an engine" in second.stdout
    command(run, "stop")
    wait_for(lambda: not run.is_locked(), what="the stop")


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"model__name": "/nowhere/at-all"}, ["bad-model", "/nowhere/at-all"]),
        ({"run__budget_episodes": 5}, ["run.budget_episodes = 5", "set it to 8 or more"]),
        ({"weight__prompts_per_step": 49}, ["prompts_per_step = 49", "48"]),
        ({"domain__name": "encyclopaedia"}, ["encyclopedia"]),
    ],
)
def test_what_keeps_a_run_from_starting_is_one_message(folder: Path, changes: dict, words: list[str]) -> None:
    config = write_config(folder, **WEIGHT_ONLY | changes)
    done = cli("run", str(config), "--headless", folder=folder, check=1)
    for word in words:
        assert word in done.stderr
    assert "Traceback" not in done.stderr + done.stdout


def test_a_corrupt_artifact_is_named_and_a_way_back_is_offered(folder: Path) -> None:
    run = started(folder, write_config(folder, **WEIGHT_ONLY, run__cycles=40))
    wait_for(lambda: len(state_of(run).versions) > 2, what="two versions")
    command(run, "stop")
    wait_for(lambda: not run.is_locked(), what="the stop")
    state = state_of(run)
    file = run.path / state.versions[state.policy].path / "adapter_model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    cli("run", "tiny", "--detach", folder=folder)
    state = wait_for(lambda: (s := state_of(run)).status == "paused" and s, what="the pause")
    assert "adapter_model.safetensors" in state.reason and "rollback" in state.reason
    earlier = list(state.versions)[-2]
    assert command(run, "rollback", {"policy": earlier}).ok and command(run, "resume").ok
    steps = state.total_steps
    wait_for(lambda: state_of(run).total_steps > steps, what="the next step")
    command(run, "stop")


def test_a_run_killed_at_every_commit_equals_one_that_never_was(folder: Path) -> None:
    """SIGKILL right after each commit in turn, and right before some: work in flight is lost, and nothing else."""
    config = write_config(folder, run__cycles=1, run__first_phase="weight", harness__revisit=0, test__at="end")
    cli("run", str(config), "--headless", folder=folder)
    whole = essence(events_of(finished(folder)))
    kinds = {event["type"] for event in whole}
    assert kinds >= {
        "run_started", "phase_started", "step_sampled", "version_published", "step_finished", "candidate_proposed",
        "candidate_checked", "candidate_scored", "iteration_finished", "phase_finished", "test_scored", "run_finished",
    }  # fmt: skip
    cli("run", str(config), "--set", "run.name=killed", "--detach", folder=folder)
    killed = RunDir(folder / "runs" / "killed")
    os.kill(killed.engine_info().pid, signal.SIGKILL)
    starts = 0
    while not killed.journal.exists() or state_of(killed).status != "finished":
        for when in ("before", "after") if starts % 3 == 0 else ("after",):
            wait_for(lambda: not killed.is_locked())
            subprocess.run(
                [sys.executable, "-m", "tests.killed_engine", str(killed.path), "2", when],
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip
            starts += 1
        assert starts < 100, f"no progress: {events_of(killed)[-3:]}"
    assert starts > len(kinds)
    for got, expected in zip(essence(events_of(killed)), whole, strict=True):
        assert got == expected
    assert (
        Journal(killed.journal, read_only=True).counts() == Journal(finished(folder).journal, read_only=True).counts()
    )
