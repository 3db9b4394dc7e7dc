"""The run directory: the source of truth of a run, and the care with which it is written.

    config.toml  journal.sqlite  episodes/  harnesses/  weights/  proposer/  engine.log  engine.json  lock

An artifact is written beside its final name, fsynced and renamed, and only then named by an event.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

FORMAT = 1
"""Version of the run directory's layout. A directory of a newer version is refused, never guessed at."""


class RunDirError(Exception):
    """The run directory can't be used; the text names it and the mend."""


class EngineInfo(Struct):
    """engine.json: which process owns the run, and where it listens."""

    pid: int
    socket: str
    version: str
    started_at: float


def runs_folder() -> Path:
    """Where new runs go: $WHALE_RUNS, or `runs` in the current folder."""
    return Path(os.environ.get("WHALE_RUNS") or "runs")


class RunDir:
    """Paths of a run, and the few ways in which they are written."""

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()
        self.config = self.path / "config.toml"
        self.journal = self.path / "journal.sqlite"
        self.episodes = self.path / "episodes"
        self.harnesses = self.path / "harnesses"
        self.weights = self.path / "weights"
        self.proposer = self.path / "proposer"
        self.log = self.path / "engine.log"
        self.worker_log = self.path / "worker.log"
        self.engine = self.path / "engine.json"

    @property
    def name(self) -> str:
        return self.path.name

    def create(self) -> None:
        """Make the folders. Harmless where they exist. Raises RunDirError for a run of a newer layout."""
        marker = self.path / "format"
        for folder in (self.path, self.episodes, self.harnesses, self.weights, self.proposer):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if marker.exists():
            self.check_format()
        else:
            write_atomic(marker, f"{FORMAT}\n".encode())

    def check_format(self) -> None:
        text = (self.path / "format").read_text().strip() if (self.path / "format").exists() else "0"
        if not text.isdigit() or int(text) > FORMAT:
            raise RunDirError(
                f"{self.path} was written by a newer whale-tui (layout {text}, this one knows {FORMAT}); "
                "update whale-tui, or start under another name with --set run.name=..."
            )

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Own the run. The kernel holds the lock, so a dead process can't. Raises RunDirError when another lives."""
        fd = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if not _take(fd):
                info = self.engine_info()
                raise RunDirError(
                    f"{self.name} already has an engine{f' (pid {info.pid})' if info else ''}; "
                    f"watch it with: whale-tui attach {self.name}"
                )
            yield
        finally:
            os.close(fd)

    def is_locked(self) -> bool:
        """True while an engine lives on this run."""
        try:
            fd = os.open(self.path / "lock", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
        except BlockingIOError:
            return True
        finally:
            os.close(fd)

    def engine_info(self) -> EngineInfo | None:
        try:
            return msgspec.json.decode(self.engine.read_bytes(), type=EngineInfo)
        except (OSError, msgspec.DecodeError):
            return None

    def harness_source(self, harness: str) -> str:
        return (self.harnesses / harness / "harness.py").read_text(encoding="utf-8")

    def write_harness(self, harness: str, source: str, proposal: dict[str, Any]) -> None:
        """harnesses/h0007/: harness.py and proposal.toml."""
        import tomli_w

        folder = self.harnesses / harness
        folder.mkdir(exist_ok=True)
        write_atomic(folder / "harness.py", source.encode())
        write_atomic(folder / "proposal.toml", tomli_w.dumps(proposal).encode())

    def free_bytes(self) -> int:
        return shutil.disk_usage(self.path).free


def _take(fd: int) -> bool:
    """Lock the file. Tries for a moment, since whoever looks whether it is locked holds it for an instant."""
    for _ in range(20):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            time.sleep(0.01)
    return False


def write_atomic(path: Path, data: bytes) -> None:
    """Write beside the final name, fsync, rename, fsync the folder. A reader sees the old or the new, never half."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with beside.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sha256_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
