"""The run directory: one owner, no half files, no guessing at a newer layout, a private socket."""

from __future__ import annotations

import fcntl
import os
import signal
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from whale_tui.rundir import FORMAT, EngineInfo, RunDir, RunDirError, sha256_file, write_atomic
from whale_tui.service.server import Server, socket_path

ROOT = Path(__file__).parent.parent


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path / "one")
    made.create()
    return made


# -------------------------------------------------------------------------------------------------------------- lock

OWNER = """
import os, subprocess, sys
from pathlib import Path
import msgspec
from whale_tui.rundir import EngineInfo, RunDir
run = RunDir(Path(sys.argv[1]))
with run.lock():
    run.engine.write_bytes(msgspec.json.encode(EngineInfo(os.getpid(), "s", "0", 0.0)))
    child = subprocess.Popen(["sleep", "60"])  # as workers do: it outlives its parent's kill
    print(child.pid, flush=True)
    sys.stdin.read()
"""


def owner(run: RunDir) -> tuple[subprocess.Popen[bytes], int]:
    process = subprocess.Popen([sys.executable, "-c", OWNER, str(run.path)], stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE, cwd=ROOT)  # fmt: skip
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def test_a_second_owner_is_refused_with_the_pid_of_the_first_and_a_dead_one_holds_nothing(run: RunDir) -> None:
    assert not run.is_locked()
    process, child = owner(run)
    try:
        assert run.is_locked()
        with (
            pytest.raises(RunDirError, match=rf"one already has an engine \(pid {process.pid}\).*attach one"),
            run.lock(),
        ):
            pass
        process.send_signal(signal.SIGKILL)
        process.wait()
        os.kill(child, 0)  # its child lives on, and must not hold the lock for it
        assert not run.is_locked()
        with run.lock():
            assert run.is_locked()
        assert not run.is_locked()
    finally:
        os.kill(child, signal.SIGKILL)
        for stream in (process.stdin, process.stdout):
            assert stream is not None
            stream.close()


def test_looking_at_the_lock_never_keeps_an_engine_from_starting(run: RunDir) -> None:
    """`status` and the terminal look at it all the time, by taking it for an instant."""
    with (run.path / "lock").open("w") as looking:
        fcntl.flock(looking, fcntl.LOCK_SH)
        release = threading.Timer(0.05, fcntl.flock, (looking, fcntl.LOCK_UN))
        release.start()
        with run.lock():
            assert run.is_locked()
        release.join()


def test_an_error_inside_gives_the_lock_back(run: RunDir) -> None:
    with pytest.raises(KeyError), run.lock():
        raise KeyError
    assert not run.is_locked()


def test_no_lock_file_is_no_lock(tmp_path: Path) -> None:
    assert not RunDir(tmp_path / "nowhere").is_locked()


# ------------------------------------------------------------------------------------------------------------ format


def test_a_newer_layout_is_refused_and_left_alone(run: RunDir) -> None:
    (run.path / "format").write_text(f"{FORMAT + 1}\n")
    for use in (run.create, run.check_format):
        with pytest.raises(RunDirError, match=rf"newer whale-tui \(layout {FORMAT + 1}.*update whale-tui"):
            use()
    assert (run.path / "format").read_text() == f"{FORMAT + 1}\n"


def test_a_layout_that_is_no_number_is_refused(run: RunDir) -> None:
    (run.path / "format").write_text("two")
    with pytest.raises(RunDirError):
        run.check_format()


def test_creating_twice_is_harmless_and_private(run: RunDir) -> None:
    run.write_harness("h0000", "x = 1\n", {"hypothesis": "the base harness"})
    run.create()
    run.check_format()
    assert run.harness_source("h0000") == "x = 1\n"
    for folder in (run.path, run.episodes, run.harnesses, run.weights, run.proposer):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_engine_info_that_cannot_be_read_is_none(run: RunDir) -> None:
    assert run.engine_info() is None
    run.engine.write_bytes(b"{half")
    assert run.engine_info() is None
    run.engine.write_bytes(msgspec.json.encode(EngineInfo(7, "s", "0", 1.0)))
    assert run.engine_info() == EngineInfo(7, "s", "0", 1.0)


# ------------------------------------------------------------------------------------------------------ atomic writes

WRITER = """
import sys
from pathlib import Path
from whale_tui.rundir import write_atomic
path, n = Path(sys.argv[1]), 0
print("ready", flush=True)
while True:
    n += 1
    write_atomic(path, (b"%08d" % n) * 40_000)
"""


@pytest.mark.parametrize("after", [0.03, 0.11])
def test_a_writer_killed_at_any_moment_leaves_the_old_or_the_new(tmp_path: Path, after: float) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"00000000" * 40_000)
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, cwd=ROOT)
    assert writer.stdout is not None and writer.stdout.readline() == b"ready\n"
    for _ in range(20):
        data = path.read_bytes()  # while it is being written over
        assert len(data) == 320_000 and data == data[:8] * 40_000
    with pytest.raises(subprocess.TimeoutExpired):
        writer.wait(after)
    writer.kill()
    writer.wait()
    writer.stdout.close()
    data = path.read_bytes()
    assert len(data) == 320_000 and data == data[:8] * 40_000


def test_a_write_that_fails_leaves_the_old_and_nothing_beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    write_atomic(path, b"old")

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomic(path, b"new")
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


def test_a_write_is_on_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    sync, replace = os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (order.append(f"sync {Path(f'/proc/self/fd/{fd}').readlink().name}"),
                                                 sync(fd))[1])  # fmt: skip
    monkeypatch.setattr(Path, "replace", lambda self, to: (order.append("rename"), replace(self, to))[1])
    write_atomic(tmp_path / "file", b"x")
    assert order[0].startswith("sync .file.") and order[1:] == ["rename", f"sync {tmp_path.name}"]


def test_sha256_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    assert sha256_file(tmp_path / "a") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


# ------------------------------------------------------------------------------------------------------------ socket


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for sockets, whose paths have to be short."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        yield Path(folder)


async def test_the_socket_is_private(run: RunDir, short: Path) -> None:
    (short / "whale-tui").mkdir(mode=0o755)
    path = socket_path(run)
    assert path.is_relative_to(short)
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700  # also where the folder was there, and open to others
    path.write_text("a socket left by an engine that was killed")
    server = Server("one", path)
    await server.start()
    assert stat.S_ISSOCK(path.stat().st_mode) and stat.S_IMODE(path.stat().st_mode) == 0o600
    await server.close()
    assert not path.exists()


async def test_a_socket_is_made_where_the_folder_for_sockets_is_too_deep(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / ("deep" * 20)))
    path = socket_path(run)
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700 and not path.is_relative_to(tmp_path)
    server = Server("one", path)
    await server.start()
    await server.close()


@pytest.mark.usefixtures("short")
def test_sockets_of_two_runs_differ_and_a_folder_of_another_user_is_refused(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert socket_path(run) != socket_path(RunDir(tmp_path / "two" / "one"))
    assert socket_path(run) == socket_path(RunDir(run.path))
    monkeypatch.setattr(os, "getuid", lambda: run.path.stat().st_uid + 1)
    with pytest.raises(RunDirError, match="belongs to another user; set XDG_RUNTIME_DIR"):
        socket_path(run)
