"""Sinks: the series of a run's chart, sent on to TensorBoard or wandb as they come. Off unless the config asks.

Each sink has a thread of its own and a queue: nothing that it does, waits for or raises reaches the run. One that fails
says so once and is over. What is sent are the points of the state (loop/state.py, `Point`) by budgeted episodes: the
same series that the screen and the report draw.
"""

from __future__ import annotations

import queue
import shutil
import threading
from collections.abc import Callable
from typing import Any, Protocol

from whale_tui.config import Config
from whale_tui.loop.state import Point, RunState
from whale_tui.rundir import RunDir

END_SECONDS = 10.0
"""How long the end of a run waits for a sink."""


class Sink(Protocol):
    """Where scalars go. Both methods run in the sink's thread and may raise anything."""

    def send(self, number: int, x: int, scalars: dict[str, float]) -> None: ...

    def close(self) -> None: ...


def scalars(point: Point) -> dict[str, float]:
    """What a point of the chart says, by name. Empty for a mark without a value."""
    found: dict[str, float] = {}
    if point.value is not None:
        place = "D_test/mean" if point.kind == "test" else f"{point.phase}/{point.kind}"
        found[place] = point.value
    if point.window is not None:
        found[f"{point.phase}/window"] = point.window
    if point.batch is not None:
        if point.batch.pass_at is not None:
            found[f"{point.phase}/pass"] = point.batch.pass_at
        found[f"{point.phase}/truncated"] = point.batch.truncated / max(1, point.batch.episodes)
    return found


class Sinks:
    """All sinks of a run. `warn` is called from their threads, once for each that failed."""

    def __init__(self, config: Config, rundir: RunDir, warn: Callable[[str], None]) -> None:
        makers: list[tuple[str, Callable[[], Sink]]] = []
        if config.sinks.tensorboard:
            makers.append(("tensorboard", lambda: TensorBoard(rundir)))
        if config.sinks.wandb:
            makers.append(("wandb", lambda: Wandb(rundir, config)))
        self._threads = [_Thread(name, make, warn) for name, make in makers]
        self._sent = 0

    def feed(self, state: RunState) -> None:
        """Send what the state has beyond what was sent: at first, all that the journal holds."""
        for number in range(self._sent, len(state.points)):
            point = state.points[number]
            for thread in self._threads:
                thread.put((number, point.x, scalars(point)))
        self._sent = len(state.points)

    def close(self) -> None:
        """Let the sinks finish, but not for long."""
        for thread in self._threads:
            thread.put(None)
        for thread in self._threads:
            thread.join(END_SECONDS)


Item = tuple[int, int, dict[str, float]] | None


class _Thread(threading.Thread):
    """Makes a sink and feeds it until it fails or is closed. It does not keep the process alive."""

    def __init__(self, name: str, make: Callable[[], Sink], warn: Callable[[str], None]) -> None:
        super().__init__(name=f"sink {name}", daemon=True)
        self._sink_name, self._make, self._warn = name, make, warn
        self._items: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self._over = False
        self.start()

    def put(self, item: Item) -> None:
        if not self._over:
            self._items.put(item)

    def run(self) -> None:
        try:
            sink = self._make()
            while (item := self._items.get()) is not None:
                if item[2]:
                    sink.send(*item)
            sink.close()
        except ImportError as error:
            self._warn(f"{self._sink_name} gets nothing: {error}; install whale-tui[{self._sink_name}]")
        except BaseException as error:  # a sink is somebody else's code: whatever it raises, the run goes on
            self._warn(f"{self._sink_name} gets nothing any more: {type(error).__name__}: {error}")
        finally:
            self._over = True


class TensorBoard:
    """RUN/tensorboard, written anew by each engine from the journal, so that a resumed run shows once."""

    def __init__(self, rundir: RunDir) -> None:
        from tensorboardX import SummaryWriter

        folder = rundir.path / "tensorboard"
        shutil.rmtree(folder, ignore_errors=True)
        self._writer: Any = SummaryWriter(str(folder))

    def send(self, number: int, x: int, scalars: dict[str, float]) -> None:
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, x)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """A wandb run under the run's name; taken up again, it goes on after the last point that it has."""

    def __init__(self, rundir: RunDir, config: Config) -> None:
        import msgspec
        import wandb

        self._run: Any = wandb.init(
            project=config.sinks.wandb_project, name=rundir.name, id=f"whale-{config.hash}",
            resume="allow", dir=str(rundir.path), config=msgspec.to_builtins(config),
        )  # fmt: skip
        self._run.define_metric("*", step_metric="episodes")
        self._next = int(self._run.summary.get("point", -1)) + 1

    def send(self, number: int, x: int, scalars: dict[str, float]) -> None:
        if number >= self._next:
            self._run.log({**scalars, "episodes": x, "point": number})

    def close(self) -> None:
        self._run.finish()
