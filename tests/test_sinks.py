"""Sinks: the chart's points reach TensorBoard's files, and one that fails, hangs or is missing never stops a run."""

from __future__ import annotations

import struct
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.simulator import Simulator, make_config
from whale_tui import sinks
from whale_tui.rundir import RunDir
from whale_tui.sinks import Sinks, scalars


def written(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Scalars of TensorBoard's event files: records of length, checksum, message, checksum."""
    from tensorboardX.proto.event_pb2 import Event

    found: dict[str, list[tuple[int, float]]] = {}
    for file in folder.iterdir():
        data = file.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            event = Event.FromString(data[12 : 12 + length])
            for value in event.summary.value:
                found.setdefault(value.tag, []).append((event.step, value.simple_value))
            data = data[16 + length :]
    return found


def told(sim: Simulator) -> dict[str, list[tuple[int, float]]]:
    out: dict[str, list[tuple[int, float]]] = {}
    for point in sim.state.points:
        for name, value in scalars(point).items():
            out.setdefault(name, []).append((point.x, value))
    return out


def test_tensorboard_gets_every_point_once_also_after_a_restart(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    config = make_config(sinks__tensorboard=True, test__samples=2)
    sim, warned = Simulator(config), list[str]()
    for restart in range(2):
        made = Sinks(config, RunDir(tmp_path), warned.append)
        for _ in range(12 if restart == 0 else 200):
            made.feed(sim.state)
            if sim.state.status == "finished":
                break
            sim.step()
        made.feed(sim.state)
        made.close()
    found, expected = written(tmp_path / "tensorboard"), told(sim)
    assert not warned and set(found) == set(expected) >= {
        "weight/step",
        "weight/window",
        "harness/iteration",
        "D_test/mean",
    }
    for name, points in expected.items():
        assert [x for x, _ in found[name]] == [x for x, _ in points]
        assert [v for _, v in found[name]] == pytest.approx([v for _, v in points])


class Broken:
    def __init__(self, *_: Any) -> None:
        raise ImportError("No module named 'wandb'")


class Failing:
    def __init__(self, *_: Any) -> None:
        self.sent = 0

    def send(self, number: int, x: int, scalars: dict[str, float]) -> None:
        self.sent += 1
        raise SystemExit("no disk")

    def close(self) -> None:
        raise AssertionError("it is over already")


class Hanging(Failing):
    def send(self, number: int, x: int, scalars: dict[str, float]) -> None:
        threading.Event().wait(30)  # its thread ends with the process


@pytest.mark.parametrize(
    ("sink", "says"), [(Broken, "install whale-tui[wandb]"), (Failing, "SystemExit: no disk"), (Hanging, "")]
)
def test_a_sink_that_does_not_work_stops_nothing(
    sink: type, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sinks, "Wandb", sink)
    monkeypatch.setattr(sinks, "END_SECONDS", 0.2)
    config = make_config(sinks__wandb=True)
    sim, warned = Simulator(config).run(), list[str]()
    start = time.monotonic()
    made = Sinks(config, RunDir(tmp_path), warned.append)
    for _ in range(3):
        made.feed(sim.state)
    made.close()
    assert time.monotonic() - start < 2
    assert len(warned) == bool(says) and all(says in text for text in warned)


def test_without_a_word_in_the_config_nothing_is_sent(tmp_path: Path) -> None:
    made = Sinks(make_config(), RunDir(tmp_path), pytest.fail)
    made.feed(Simulator(make_config()).run().state)
    made.close()
    assert not list(tmp_path.iterdir())
