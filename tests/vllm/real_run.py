"""A whole small run whose rollouts come from a real server, which is killed once on the way."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from tests.engines import cli, environment, events_of, state_of, wait_for, write_config
from tests.tiny import real_model
from tests.vllm.real_server import OPTIONS, PYTHON
from whale_tui import records as r
from whale_tui.rundir import RunDir


def server_pids(run: RunDir) -> list[int]:
    """The API servers that belong to a run, by their command line."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if "serve" in words and "vllm.entrypoints.cli.main" in words and words[0] == str(PYTHON):
            found.append(int(folder.name))
    return found


def test_a_run_alternates_over_a_real_server_and_outlives_its_death(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not PYTHON.exists():
        pytest.skip("there is no .venv-vllm: make vllm-env")
    model = real_model()
    for key, value in environment(tmp_path).items():
        monkeypatch.setenv(key, value)
    config = write_config(
        tmp_path, model__name=str(model), rollout__engine="vllm", rollout__max_context=1024, run__first_phase="weight",
        run__cycles=1, run__budget_episodes=60, weight__prompts_per_step=4, test__samples=0,
    )  # fmt: skip
    text = config.read_text()
    options = "\n".join(f"{key} = {_toml(value)}" for key, value in OPTIONS.items() if key != "env")
    config.write_text(f'{text}\n[vllm]\n{options}\n[vllm.env]\nVLLM_CPU_KVCACHE_SPACE = "1"\n')
    cli("run", str(config), "--detach", folder=tmp_path, timeout=300)
    run = RunDir(tmp_path / "runs" / "tiny")

    def state_now():
        assert run.is_locked() or state_of(run).status == "finished", run.log.read_text()[-3000:]
        return state_of(run)

    wait_for(lambda: run.journal.exists() and state_now().total_steps >= 1, 300, "a first step")
    for pid in server_pids(run):
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: state_now().status == "finished", 300, "the end")
    events = events_of(run)
    published = [event for event in events if isinstance(event, r.VersionPublished)]
    assert published and all(abs(event.probe_rollout - event.probe_trainer) < 0.1 for event in published)
    assert any(isinstance(event, r.Warned) and "is back, and has proved" in event.text for event in events)
    assert [phase.phase for phase in state_of(run).phases][:2] == ["weight", "harness"]
    wait_for(lambda: not server_pids(run), 30, "the end of the server")
    assert re.search(r"\$ .*vllm.entrypoints.cli.main serve", (run.path / "vllm-1.log").read_text())


def _toml(value: object) -> str:
    import tomli_w

    return tomli_w.dumps({"x": value}).split("=", 1)[1].strip()
