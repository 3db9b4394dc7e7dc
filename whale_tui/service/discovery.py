"""Finding runs: those in the runs folder, and those started elsewhere, from a list in the user's state."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec
import platformdirs
from msgspec import Struct

from whale_tui.journal import Journal, JournalError
from whale_tui.loop.state import RunState, replay
from whale_tui.rundir import RunDir, RunDirError, runs_folder, write_atomic

Seen = Literal["new", "running", "paused", "finished", "stopped", "crashed", "unreadable"]


class RunSummary(Struct):
    """One run of this machine."""

    name: str
    path: Path
    status: Seen
    condition: str = ""
    cycle: int = 0
    phase: str | None = None
    policy: str = ""
    harness: str = ""
    best_mean: float | None = None
    episodes: int = 0
    started_at: float = 0.0
    at: float = 0.0
    problem: str = ""


def status_of(run: RunDir, state: RunState) -> Seen:
    """`crashed`: the journal says it is running, and no engine holds the lock."""
    if state.status in ("running", "paused", "new") and not run.is_locked():
        return "crashed" if state.status != "new" else "new"
    return state.status


def read_state(run: RunDir) -> RunState:
    """State from the journal alone. Raises JournalError."""
    if not run.journal.exists():
        return RunState()
    journal = Journal(run.journal, read_only=True)
    try:
        return replay(list(journal.events()))
    finally:
        journal.close()


def weights_of(run: RunDir, state: RunState, policy: str, harness: str) -> Path | None:
    """Where a pair's weights lie; None: they are the base model's. Raises RunDirError where the pair can't be used."""
    for name, known in ((policy, state.versions), (harness, state.harnesses)):
        if name not in known:
            raise RunDirError(f"{run.name} has no {name or 'pair yet'}; there are {', '.join(known) or 'none'}")
    candidate, path = state.harnesses[harness], state.versions[policy].path
    if candidate.outcome in ("invalid", "crash", "timeout") or not candidate.checked:
        raise RunDirError(f"{harness} can't be used: it is {candidate.outcome or 'not checked yet'}")
    if path and not (run.path / path).is_dir():
        kept = [v.name for v in state.versions.values() if not v.path or (run.path / v.path).is_dir()]
        raise RunDirError(f"{policy} is no longer kept (retention.keep_versions); {', '.join(kept)} are")
    return run.path / path if path else None


def summarise(run: RunDir) -> RunSummary:
    try:
        state = read_state(run)
    except JournalError as error:
        return RunSummary(name=run.name, path=run.path, status="unreadable", problem=str(error))
    best = state.best
    return RunSummary(
        name=run.name, path=run.path, status=status_of(run, state), condition=state.condition, cycle=state.cycle,
        phase=state.phase, policy=state.policy, harness=state.harness, best_mean=best.mean if best else None,
        episodes=state.episodes, started_at=state.started_at, at=state.at,
    )  # fmt: skip


def list_runs() -> list[RunSummary]:
    """Every run known on this machine, the one last written to first."""
    folders = {path.resolve() for path in _remembered() if path.is_dir()}
    if runs_folder().is_dir():
        folders |= {path.parent.resolve() for path in runs_folder().glob("*/config.toml")}
    return sorted((summarise(RunDir(folder)) for folder in folders), key=lambda s: -s.at)


def find(name: str) -> RunDir | None:
    """A run by its path, its name in the runs folder, or its name elsewhere. None: there is none."""
    for path in (Path(name), runs_folder() / name):
        if (path / "config.toml").is_file():
            return RunDir(path)
    for path in reversed(_remembered()):
        if path.name == name and (path / "config.toml").is_file():
            return RunDir(path)
    return None


def remember(run: RunDir) -> None:
    """Put a run on the user's list."""
    paths = [str(path) for path in _remembered() if path != run.path and path.is_dir()]
    file = _list_file()
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(file, msgspec.json.encode([*paths, str(run.path)]))


def _list_file() -> Path:
    return Path(platformdirs.user_state_dir("whale-tui")) / "runs.json"


def _remembered() -> list[Path]:
    try:
        return [Path(path) for path in msgspec.json.decode(_list_file().read_bytes(), type=list[str])]
    except (OSError, msgspec.DecodeError):
        return []
