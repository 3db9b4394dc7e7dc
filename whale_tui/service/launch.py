"""Starting an engine in its own process and session, and waiting until it answers."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct

from whale_tui import config, rundir
from whale_tui.domains.base import DomainError, absolute
from whale_tui.rundir import RunDir, RunDirError, write_atomic
from whale_tui.service import discovery

START_SECONDS = 30.0


class Wish(Struct):
    """A pair that an engine is started to measure on D_test."""

    policy: str
    harness: str
    samples: int
    label: str


def config_file(target: Path) -> Path:
    """The config that a target means: the file itself, run.toml of a folder that `init` wrote, or a run's own."""
    if (target / "run.toml").is_file():
        return target / "run.toml"
    known = discovery.find(str(target))
    return known.config if known is not None else target


def prepare(target: Path, overrides: Sequence[str] = (), *, new: bool = False, into: Path | None = None) -> RunDir:
    """The run directory for a config file, a folder that `init` wrote, a run directory or a run's name; made where the
    config has none yet.

    A run that exists goes on with the config it was started with, unless nothing of it has happened yet. `new` takes
    the next free name instead (of a run: with that run's config). `into` is the folder for runs, where it is not the
    usual one.
    Raises ConfigError or RunDirError.
    """
    if (target / "run.toml").is_file():
        target = target / "run.toml"
    known = discovery.find(str(target))
    if known is not None and new:
        target = known.config
    elif known is not None:
        if overrides:
            raise config.ConfigError(
                f"{known.name} exists and keeps its config; change it with: whale-tui ctl {known.name} set KEY=VALUE"
            )
        known.check_format()
        return known
    resolved = config.load(target, overrides)
    make_paths_absolute(resolved)
    runs = into or rundir.runs_folder()
    folder = runs / resolved.config.run.name
    number = 2
    while new and folder.exists():
        folder = runs / f"{resolved.config.run.name}-{number}"
        number += 1
    run = RunDir(folder)
    resolved.config.run.name = run.name
    if run.config.exists():
        run.check_format()
        if config.load(run.config).config.hash == resolved.config.hash:
            return run
        if run.is_locked() or discovery.read_state(run).status != "new":
            raise config.ConfigError(
                f"{run.path} was started with another config; go on with it by `whale-tui run {run.path}`, "
                "or start anew with --new or --set run.name=..."
            )
    run.create()
    write_atomic(run.config, config.dump(resolved).encode())
    discovery.remember(run)
    return run


def make_paths_absolute(resolved: config.Resolved) -> None:
    """Paths of a config start from its folder; the copy in the run directory must not depend on it."""
    domain, model = resolved.config.domain, resolved.config.model
    if domain.harness:
        domain.harness = str((resolved.folder / domain.harness).resolve())
    own = resolved.folder / domain.name
    is_own = (own / "domain.py").is_file()
    with contextlib.suppress(DomainError):  # the engine says what is wrong, with all else that it finds
        domain.options = absolute(domain.name, domain.options, own if is_own else None, resolved.folder)
    if is_own:
        domain.name = str(own.resolve())
    python = resolved.config.vllm.python
    for start in (resolved.folder, Path.cwd()):
        if "/" in python and (start / python).exists():  # absolute, not resolved: a link would lead out of its venv
            resolved.config.vllm.python = str((start / python).absolute())
            break
    if (resolved.folder / model.name).is_dir():
        model.name = str((resolved.folder / model.name).resolve())


def start_engine(run: RunDir, *more: str) -> int:
    """Start the engine of a run (`more`: its further arguments) and return its pid once it answers.

    Raises RunDirError with what keeps it from it.
    """
    if run.is_locked():
        info = run.engine_info()
        return info.pid if info else 0
    exit_file = run.path / "engine.exit"
    exit_file.unlink(missing_ok=True)
    with run.log.open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "whale_tui.service.engine", str(run.path), *more],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, cwd=run.path,
        )  # fmt: skip
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        info = run.engine_info()
        if info is not None and info.pid == process.pid:
            return process.pid
        if process.poll() is not None:
            raise RunDirError(failure(run) or f"the engine ended with status {process.returncode}; see {run.log}")
        time.sleep(0.02)
    process.kill()
    raise RunDirError(f"the engine did not answer within {START_SECONDS:g} s; see {run.log}")


def launch(target: Path, overrides: Sequence[str] = ()) -> RunDir:
    """Prepare a run and start its engine."""
    run = prepare(target, overrides)
    start_engine(run)
    return run


def failure(run: RunDir) -> str:
    """What kept the engine from starting or going on, in its own words."""
    try:
        return (run.path / "engine.exit").read_text().strip()
    except OSError:
        return ""
