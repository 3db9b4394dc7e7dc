"""The terminal: time to the first screen, key to answer with busy cores, bytes a second, CPU at 200 events a second.

python -m benchmarks.terminal            the small run
python -m benchmarks.terminal --large    also attach, filter and memory on 1,000,000 episodes and 500 candidates

The program runs in a pseudo-terminal of 120x36, as over SSH. Its engine is a stand-in that speaks the real protocol.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import pty
import select
import statistics
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.scripted import SAMPLING, Script, write_run
from whale_tui import records as r
from whale_tui.journal import Journal, Segment
from whale_tui.loop import control
from whale_tui.service import protocol as p

SIZE = (120, 36)
TICK = os.sysconf("SC_CLK_TCK")


# ------------------------------------------------------------------------------------------------------- the engine


class StandIn:
    """Serves a scripted run: activity ten times a second, events as they are told, commands by the real controls."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.busy = False
        self.events_per_second = 0
        self.loop = asyncio.new_event_loop()
        self.clients: list[asyncio.StreamWriter] = []
        self.socket = script.rundir.path / "socket"
        threading.Thread(target=self._run, daemon=True).start()
        while not self.socket.exists():
            time.sleep(0.01)
        info = {"pid": os.getpid(), "socket": str(self.socket), "version": "0", "started_at": time.time()}
        script.rundir.engine.write_text(json.dumps(info))

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.script.journal = Journal(self.script.rundir.journal)  # SQLite connections belong to their thread
        self.loop.run_until_complete(asyncio.start_unix_server(self._serve, str(self.socket)))
        self.loop.create_task(self._tick())
        self.loop.run_forever()

    async def _tick(self) -> None:
        n = 0
        while True:
            await asyncio.sleep(0.1)
            n += 1
            if self.busy:
                rate = 400.0 + n % 9
                self._send(
                    p.Activity(doing="sampling step 7", done=n % 48, total=48, accepted=n % 20, tokens_per_second=rate)
                )
            count = self.events_per_second // 10
            if count:
                self._tell([r.Warned(text=f"event {n}.{i}") for i in range(count)])

    def _tell(self, events: list[r.AnyEvent]) -> None:
        first = self.script.state.seq + 1
        self.script.tell(*events, seconds=0.01)
        self._send(p.Events(first=first, events=[p.Raw(r.encode_event(e)) for e in events]))

    def _send(self, message: p.FromEngine) -> None:
        for writer in self.clients:
            writer.write(p.line(message))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            match p.client_decoder.decode(line):
                case p.Hello():
                    self.clients.append(writer)
                    writer.write(p.line(p.Welcome(run="x", pid=0, version="0", seq=self.script.state.seq)))
                case p.CommandRequest() as request:
                    planned = control.plan(self.script.state, request.what, request.args, request.who)
                    taken = r.CommandTaken(
                        id=request.id, who=request.who, what=request.what, args=planned.args, effect=planned.effect
                    )
                    self._tell([taken, *planned.events])
                    writer.write(p.line(p.CommandReply(id=request.id, ok=True, effect=planned.effect)))
        if writer in self.clients:
            self.clients.remove(writer)


# ----------------------------------------------------------------------------------------------------- the terminal


def environment_of(folder: Path) -> dict[str, str]:
    """Nobody's settings, and modules compiled once, as where it is installed."""
    environment = dict(os.environ) | {"WHALE_RUNS": str(folder), "TERM": "xterm-256color", "LANG": "C.UTF-8"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    environment["PYTHONPYCACHEPREFIX"] = str(folder / ".pyc")
    return environment | {f"XDG_{x}_HOME": str(folder / ".xdg") for x in ("CONFIG", "STATE", "DATA")}


class Screen:
    def __init__(self, folder: Path, name: str) -> None:
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", SIZE[1], SIZE[0], 0, 0))
        self.start = time.perf_counter()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "whale_tui", "attach", name],
            stdin=slave, stdout=slave, stderr=slave, env=environment_of(folder), start_new_session=True,
        )  # fmt: skip
        os.close(slave)
        self.output = b""

    def read(self, seconds: float) -> bytes:
        got, end = b"", time.perf_counter() + seconds
        while (left := end - time.perf_counter()) > 0:
            if select.select([self.master], [], [], left)[0]:
                got += os.read(self.master, 65536)
        self.output += got
        return got

    def until(self, *wanted: bytes, seconds: float = 60.0) -> float:
        """Seconds since the start of the wait until one of the texts has been written."""
        start, at = time.perf_counter(), len(self.output)
        while not any(w in self.output[at:] for w in wanted):
            if time.perf_counter() - start > seconds:
                raise TimeoutError(f"never wrote {wanted}")
            if select.select([self.master], [], [], 1.0)[0]:
                self.output += os.read(self.master, 65536)
        return time.perf_counter() - start

    def cpu(self) -> float:
        """Seconds of one core used so far."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICK

    def memory(self) -> float:
        """Resident megabytes."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))

    def press(self, key: bytes) -> None:
        os.write(self.master, key)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.master)


@contextmanager
def burning(count: int) -> Iterator[None]:
    """Every core busy, as while a policy worker trains: it lowers its own priority by 5, and so do these."""
    code = "import os; os.nice(5)\nwhile True: sum(range(10**6))"
    burners = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(count)]
    try:
        yield
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()


# ------------------------------------------------------------------------------------------------------ measurements


def say(what: str, value: float, unit: str, target: float) -> None:
    print(f"{what:58} {value:9.2f} {unit:6} target under {target:g}")


def attach_seconds(folder: Path, name: str, wanted: bytes) -> tuple[float, Screen]:
    screen = Screen(folder, name)
    screen.until(wanted)
    return time.perf_counter() - screen.start, screen


def small(folder: Path) -> None:
    script = write_run(folder / "first-light", until="training")
    attach_seconds(folder, "first-light", b"since best")[1].close()  # compiles the modules
    helps = []
    for _ in range(5):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-m", "whale_tui", "--help"], env=environment_of(folder), capture_output=True)
        helps.append(time.perf_counter() - start)
    say("whale-tui --help, median of 5", statistics.median(helps), "s", 0.25)
    times = []
    for _ in range(5):
        seconds, screen = attach_seconds(folder, "first-light", b"since best")
        times.append(seconds)
        screen.close()
    say("attach to the first screen with data, median of 5", statistics.median(times), "s", 0.6)

    engine = StandIn(script)
    _, screen = attach_seconds(folder, "first-light", b"since best")
    screen.read(2.0)
    say("bytes written, idle", len(screen.read(5.0)) / 5, "B/s", 1)
    engine.busy = True
    screen.read(1.0)
    say("bytes written, a phase running", len(screen.read(5.0)) / 5000, "kB/s", 8)
    engine.events_per_second = 200
    screen.read(1.0)
    before, start = screen.cpu(), time.perf_counter()
    written = len(screen.read(8.0))
    spent = (screen.cpu() - before) / (time.perf_counter() - start)
    say("CPU at 200 events a second", spent * 100, "% core", 15)
    say("bytes written at 200 events a second", written / 8000, "kB/s", 8)
    engine.events_per_second, engine.busy = 0, False
    screen.read(1.0)

    latencies = []
    with burning(os.cpu_count() or 1):
        screen.read(1.0)
        for n in range(40):
            screen.press(b"p")
            latencies.append(screen.until(b"pauses at the next" if n % 2 == 0 else b"goes on now") * 1000)
            screen.read(0.3)
    latencies.sort()
    say("key to visible answer, all cores busy, median of 40", statistics.median(latencies), "ms", 50)
    say("key to visible answer, all cores busy, 95th percentile", latencies[int(len(latencies) * 0.95)], "ms", 150)
    screen.close()


def large(folder: Path, episodes: int = 1_000_000, candidates: int = 500) -> None:
    if not (folder / "large").exists():
        write_large(folder / "large", episodes, candidates)
    seconds, screen = attach_seconds(folder, "large", b"since best")
    say(f"attach with {episodes:,} episodes, {candidates} candidates", seconds, "s", 1.5)
    screen.read(3.0)
    say("memory after it", screen.memory(), "MB", 300)
    screen.press(b"e")
    screen.until(b"purpose")
    screen.read(1.5)
    filters = {"verdict=accept h=h0042": "h0042", "slate": "slate", "nowhere-to-be-found": "no episode matches"}
    for words, wanted in filters.items():
        screen.press(b"/")
        screen.read(0.5)
        screen.press(b"\x15")
        screen.read(0.3)
        screen.press(words.encode())
        screen.read(0.5)
        screen.press(b"\r")
        say(f"filter {words!r}", screen.until(wanted.encode()), "s", 0.5)
        screen.read(1.0)
    say("memory at the end", screen.memory(), "MB", 300)
    screen.close()


def write_large(path: Path, episodes: int, candidates: int) -> None:
    """A journal of that size. Its index rows all point at one real segment."""
    s = Script(path)
    s.start("large", approval="auto", budget_episodes=10 * episodes)
    rows = s.journal.write_segment([s.episode("train", f"we-{n:03d}", 0, "h0000", 1, 0.3) for n in range(64)]).rows
    s.tell(r.PhaseStarted(cycle=1, phase="weight", reason="first"))
    per_step = 2048
    columns = [d[0] for d in s.journal.db.execute("SELECT * FROM episodes LIMIT 0").description][1:]
    at = {name: columns.index(name) for name in ("id", "task", "harness", "step")}
    tasks = [f"se-{n:03d}" for n in range(256)]
    for step in range(1, episodes // per_step + 1):
        made = []
        for n in range(per_step):
            row = list(rows[n % 64])
            row[at["id"]], row[at["task"]] = f"{step}.{n}", f"we-{(step * 256 + n // 8) % 20_000:05d}"
            row[at["harness"]], row[at["step"]] = f"h{(step + n) % candidates:04d}", step
            made.append(tuple(row))
        batch = r.Batch(episodes=per_step, accepted=700, tasks=256, solved=200, calls=per_step, mean=0.34)
        theta = s.state.policy
        s.tell(
            r.StepSampled(step=step, policy=theta, harness="h0000", tasks_drawn=step, batch=batch, segment="1"),
            r.StepFinished(step=step, policy=theta, trained=9, trained_tokens=9, loss=1.0, grad_norm=1.0, seconds=1),
            episodes=[Segment(name="x", rows=made)],
        )  # fmt: skip
    s.tell(r.PhaseFinished(cycle=1, phase="weight", reason="done"))
    s.tell(r.PhaseStarted(cycle=1, phase="harness", reason="next"))
    source = s.rundir.harness_source("h0000")
    for n in range(1, candidates):
        name = f"h{n:04d}"
        s.rundir.write_harness(name, source + f"# {n}\n", {"parent": "h0000"})
        score = r.Score(
            policy=s.state.policy, policy_hash=s.state.policy_hash, harness_hash=name, tasks_hash="d",
            sampling=SAMPLING,
            batch=r.Batch(episodes=256, accepted=n % 256, tasks=256, solved=9, mean=(n % 256) / 256),
            results={task: [float(i < n % 256)] for i, task in enumerate(tasks)},
        )  # fmt: skip
        s.tell(
            r.CandidateProposed(
                harness=name, iteration=1 + n // 3, parent=f"h{n - 1:04d}", hypothesis=f"idea {n}", proposer="rules",
                source_hash=name,
            ),
            r.CandidateChecked(harness=name, ok=True, reason=""),
            r.CandidateScored(harness=name, iteration=1 + n // 3, score=score),
        )  # fmt: skip


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        small(Path(scratch))
        if "--large" in sys.argv:
            large(Path(scratch))


if __name__ == "__main__":
    main()
