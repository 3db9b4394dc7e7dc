"""Training with several processes, each on a device of its own: the policy worker's end of it.

The worker starts them, tells all of them the same and waits for all. They hang on its connections, so that they end
with it, however it ends. What one of them meets (memory that runs out, its death) leaves the others waiting inside a
collective: then all are ended, and started anew from the version that they were at.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from whale_tui.policy.parts import PADDED_ROWS, too_large
from whale_tui.policy.protocol import PolicyFailure, Trained, TrainRequest
from whale_tui.policy.trainer import Interrupted

LOOK_SECONDS = 0.1
"""Between two looks whether the call has been abandoned."""
END_SECONDS = 5.0


class Ranks:
    """Same interface as trainer.Trainer, of which each process has one. threads: of each on a CPU."""

    module = "whale_tui.policy.rank"

    def __init__(
        self,
        folder: Path,
        device: torch.device,
        size: int,
        *,
        threads: int,
        note: Callable[[str], None] = lambda text: None,
        **options: Any,
    ) -> None:
        self._folder, self._device, self._size, self._threads = folder, device, size, threads
        self._note = note
        self._options: dict[str, Any] = {"padded_rows": PADDED_ROWS, **options}
        self._processes: list[subprocess.Popen[bytes]] = []
        self._ends: list[Connection] = []
        self._at: tuple[Path | None, bool] = (None, False)
        self._start()

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    # ------------------------------------------------------------------------------------------------- as of a Trainer

    def train(self, request: TrainRequest, interrupted: Callable[[], bool], note: Callable[[str], None]) -> Trained:
        """As of a Trainer. Where memory runs out the whole of it is begun anew in smaller parts."""
        while True:
            try:
                self._need()
                self._send("train", request)
                done: Trained = self._gather(interrupted, note)
                return done
            except _OutOfMemory as short:
                if short.alone:
                    raise PolicyFailure("out-of-memory", too_large(short.alone, short.detail)) from None
                what = "pack_nodes" if self._options["packed"] else "padded_rows"
                self._options[what] = max(1, self._options[what] // 2)
                size = f"{self._options[what]} {'nodes' if self._options['packed'] else 'rows'}"
                note(f"training: out of memory ({short.detail}); begun anew in parts of {size}")

    def restore(self, folder: Path | None, *, with_optimizer: bool) -> None:
        self._at = (folder, with_optimizer)
        if self._processes:  # else it is where they will start
            self._tell("restore", folder, with_optimizer)

    def write(self, folder: Path, version: str, base_hash: str) -> tuple[str, str]:
        made: tuple[str, str] = self._tell("write", folder, version, base_hash)
        self._at = (folder, True)
        return made

    def prove_written(self, folder: Path) -> None:
        self._tell("prove_written", folder)

    def probe(self, ids: list[int]) -> Tensor:
        return torch.tensor(self._tell("probe", ids))

    def give_back(self) -> None:
        if self._processes:
            self._tell("give_back")

    # --------------------------------------------------------------------------------------------------- the processes

    def _start(self) -> None:
        self._note(f"starting {self._size} processes that train")
        self._meeting = tempfile.TemporaryDirectory(prefix="whale-tui-")
        for rank in range(self._size):
            ours, theirs = Pipe()
            with theirs:
                self._processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", self.module, "--fd", str(theirs.fileno())],
                        pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL,
                    )
                )  # fmt: skip
            self._ends.append(ours)
            device = f"{self._device.type}:{rank}" if self._device.type == "cuda" else self._device.type
            ours.send(
                {
                    "rank": rank, "size": self._size, "device": device, "threads": self._threads,
                    "folder": str(self._folder), "meeting": f"{self._meeting.name}/meeting", "options": self._options,
                }
            )  # fmt: skip
        try:
            self.numbers, self.trained_parameters = self._gather(lambda: False, self._note)
        except _OutOfMemory as short:
            raise PolicyFailure("out-of-memory", short.detail) from None

    def end(self) -> None:
        """End them all. What follows starts them anew."""
        for end in self._ends:
            end.close()
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_SECONDS)
            process.kill()
            process.wait()
        self._ends, self._processes = [], []
        self._meeting.cleanup()

    def _need(self) -> None:
        """Where a failure has ended them: start them anew, at the version that they were at."""
        if not self._processes:
            self._start()
            if self._at[0] is not None:
                self._tell("restore", *self._at)

    def _tell(self, name: str, *args: Any) -> Any:
        """Have all of them do it. Returns what the first one says."""
        self._need()
        self._send(name, *args)
        try:
            return self._gather(lambda: False, self._note)
        except _OutOfMemory as short:
            raise PolicyFailure("out-of-memory", short.detail) from None

    def _send(self, name: str, *args: Any) -> None:
        for end in self._ends:
            with contextlib.suppress(OSError):  # it is gone: `_gather` says so
                end.send((name, args))

    def _gather(self, interrupted: Callable[[], bool], note: Callable[[str], None]) -> Any:
        """The answers of all. Where one fails for itself, all are ended."""
        answers: dict[int, tuple[str, Any]] = {}
        told = False
        while len(answers) < self._size:
            for ready in wait([end for n, end in enumerate(self._ends) if n not in answers], LOOK_SECONDS):
                rank = self._ends.index(ready)  # type: ignore[arg-type]
                try:
                    kind, value = self._ends[rank].recv()
                except (EOFError, OSError):
                    code = self._processes[rank].wait()
                    self.end()
                    raise PolicyFailure("worker-died", f"{self._name(rank)} {_ended(code)}; see worker.log") from None
                if kind == "note":
                    if rank == 0:
                        note(value)
                    continue
                if kind == "failed":
                    self.end()
                    what, detail, alone = value
                    if what == "out-of-memory":
                        raise _OutOfMemory(detail, alone)
                    raise PolicyFailure(what, f"{self._name(rank)}: {detail}")
                answers[rank] = (kind, value)
            if not told and interrupted():
                told = True
                for end in self._ends:
                    end.send("interrupt")
        if any(kind == "interrupted" for kind, _ in answers.values()):
            raise Interrupted
        return answers[0][1]

    def _name(self, rank: int) -> str:
        return f"training process {rank + 1} of {self._size}"


class _OutOfMemory(Exception):
    """alone: tokens of the part in work, where it was a single sample."""

    def __init__(self, detail: str, alone: int) -> None:
        super().__init__(detail)
        self.detail, self.alone = detail, alone


def _ended(code: int) -> str:
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
