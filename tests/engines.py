"""Small real runs for tests: a tiny random model, the letters domain, a real engine process."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.tiny import tiny_model
from whale_tui.journal import Journal
from whale_tui.loop.state import RunState, replay
from whale_tui.records import AnyEvent
from whale_tui.rundir import RunDir
from whale_tui.service.client import RunClient

LETTERS = Path(__file__).parent / "letters"

CONFIG = """
[run]
seed = 3
first_phase = "auto"
look_episodes = 4
cycles = 2
budget_episodes = 2000
[model]
name = "{model}"
lora_rank = 2
[domain]
name = "{domain}"
[rollout]
max_tokens = 4
max_rows = 16
episode_seconds = 5
[weight]
prompts_per_step = 4
samples_per_task = 2
minibatch = 4
learning_rate = 1e-3
train_truncated = true
[harness]
candidates = 2
revisit = 1
[schedule]
epochs = 0.17
iterations = 2
[test]
samples = 2
[retention]
min_free_gb = 0
"""


def write_config(folder: Path, text: str = "", **changes: Any) -> Path:
    """quickstart-like config on a tiny model. `text` is appended; `changes` are `table__key=value`."""
    import tomli
    import tomli_w

    model = folder / "model"
    if not model.exists():
        tiny_model(model)
    raw = tomli.loads(CONFIG.format(model=model, domain=LETTERS) + text)
    for key, value in changes.items():
        table, _, name = key.partition("__")
        raw.setdefault(table, {})[name] = value
    path = folder / "tiny.toml"
    path.write_text(tomli_w.dumps(raw))
    return path


def cli(*words: str, folder: Path, check: int | None = 0, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """Run the command line with runs under `folder`."""
    done = subprocess.run(
        [sys.executable, "-m", "whale_tui", *words], capture_output=True, text=True, timeout=timeout,
        env=environment(folder), stdin=subprocess.DEVNULL,
    )  # fmt: skip
    if check is not None:
        assert done.returncode == check, f"{words}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def environment(folder: Path) -> dict[str, str]:
    return os.environ | {
        "WHALE_RUNS": str(folder / "runs"),
        "XDG_STATE_HOME": str(folder / "state"),
        "XDG_RUNTIME_DIR": str(folder / "runtime"),
        "PYTHONPATH": str(Path(__file__).parent.parent),
    }


def events_of(run: RunDir) -> list[AnyEvent]:
    journal = Journal(run.journal, read_only=True)
    try:
        return list(journal.events())
    finally:
        journal.close()


def state_of(run: RunDir) -> RunState:
    return replay(events_of(run))


def wait_for(condition: Callable[[], Any], seconds: float = 60, what: str = "it") -> Any:
    """Poll until the condition holds; AssertionError after `seconds`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.05)
    raise AssertionError(f"{what} did not happen within {seconds} s")


def command(run: RunDir, what: str, args: dict[str, Any] | None = None, **more: Any) -> Any:
    return asyncio.run(RunClient(run, "tester").command(what, args, **more))


def essence(events: Sequence[AnyEvent]) -> list[tuple[Any, ...]]:
    """Events without what may differ between two runs of the same seed: times, process ids, restarts."""
    import msgspec

    from whale_tui import records as r

    def strip(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: strip(v) for k, v in value.items() if k not in ("at", "seconds", "run", "config_hash")}
        return [strip(v) for v in value] if isinstance(value, list) else value

    skipped = r.EngineStarted | r.Failure | r.Paused | r.Resumed
    return [strip(msgspec.to_builtins(e)) for e in events if not isinstance(e, skipped)]
