"""Which policy versions stay on disk, and what a run will need of it."""

from __future__ import annotations

import shutil

from whale_tui.config import Config
from whale_tui.loop.state import RunState
from whale_tui.rundir import RunDir


def kept_versions(state: RunState, newest: int) -> set[str]:
    """Versions that stay: the newest few, the current one, those tested or to be tested, and every phase's last."""
    names = list(state.versions)
    ends = {v.cycle: v.name for v in state.versions.values()}
    tests = {t.policy for t in state.tests} | {w.policy for w in state.wanted}
    return {state.policy, *names[-newest:], *tests, *ends.values()}


def clean(rundir: RunDir, state: RunState, newest: int) -> None:
    """Remove the weights of versions that need not stay, and optimizer states of all but the newest version."""
    keep = kept_versions(state, newest)
    last = next(reversed(state.versions))
    for version in state.versions.values():
        folder = rundir.path / version.path
        if version.path and folder.is_dir():
            if version.name not in keep:
                shutil.rmtree(folder)
            elif version.name != last:
                (folder / "optimizer.pt").unlink(missing_ok=True)


def version_bytes(config: Config, trained: int, served: int) -> tuple[int, int]:
    """Disk of a version, and of what resuming needs beside the newest. trained: numbers that training changes; served:
    bytes of one as rollouts hold it.
    """
    optimizer = 8 * trained if config.weight.optimizer == "adamw" else 0
    if config.model.adapt == "lora":
        return 4 * trained, optimizer
    return served * trained, optimizer + (4 * trained if served < 4 else 0)


def forecast_bytes(
    kept: int, resume: int, newest: int, phases: int, episodes: int, bytes_per_episode: int = 1500
) -> int:
    """Disk that a run will hold at its end: versions, what two of them need to resume, and episode records."""
    return kept * (newest + phases + 2) + 2 * resume + episodes * bytes_per_episode
