"""A whole small run whose rollouts come from a real server, which is killed once on the way."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from tests.engines import cli, environment, events_of, state_of, wait_for, write_config
from tests.tiny import real_model
from tests.vllm.real_server import OPTIONS, PYTHON, children
from whale_tui import records as r
from whale_tui.rundir import RunDir


def server_pids(run: RunDir) -> list[int]:
    """The servers of a run: what its engine's keepers hold."""
    info = run.engine_info()
    keepers = [pid for pid in children(info.pid) if "keeper.py" in cmdline(pid)] if info else []
    return [pid for keeper in keepers for pid in children(keeper)]


def cmdline(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""


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
    killed = server_pids(run)
    assert len(killed) == 1
    os.kill(killed[0], signal.SIGKILL)
    again = wait_for(lambda: [pid for pid in server_pids(run) if pid not in killed], 60, "another server")
    wait_for(lambda: state_now().status == "finished", 300, "the end")
    events = events_of(run)
    published = [event for event in events if isinstance(event, r.VersionPublished)]
    assert published and all(abs(event.probe_rollout - event.probe_trainer) < 0.1 for event in published)
    assert any(isinstance(event, r.Warned) and "is back, and has proved" in event.text for event in events)
    assert [phase.phase for phase in state_of(run).phases][:2] == ["weight", "harness"]
    wait_for(lambda: not run.is_locked(), 60, "the end of the engine")
    assert killed != again and not Path(f"/proc/{again[0]}").exists(), "a server ends with its run"
    assert re.search(r"\$ .*vllm.entrypoints.cli.main serve", (run.path / "vllm-1.log").read_text())


def _toml(value: object) -> str:
    import tomli_w

    return tomli_w.dumps({"x": value}).split("=", 1)[1].strip()
