"""Which policy versions stay on disk, and what a run will need of it."""

from __future__ import annotations

import shutil

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


def forecast_bytes(version_bytes: int, newest: int, phases: int, episodes: int, bytes_per_episode: int = 1500) -> int:
    """Disk that a run will hold at its end: kept versions (the newest with its optimizer) and episode records."""
    return version_bytes * (newest + phases + 2) + episodes * bytes_per_episode
