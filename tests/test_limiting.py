"""Which half holds the system back: by table over made-up runs, and on the scripted one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scripted import SAMPLING, write_run
from whale_tui.loop.limiting import limiting
from whale_tui.loop.state import Candidate, PhaseRecord, RunState, Version
from whale_tui.records import Batch, Score

TASKS = 100


def score(policy: str, accepted: int) -> Score:
    """The first `accepted` of the tasks are solved, so that two scores differ on as few tasks as they can."""
    return Score(
        policy=policy, policy_hash=policy, harness_hash="h", tasks_hash="d", sampling=SAMPLING,
        batch=Batch(episodes=TASKS, accepted=accepted, tasks=TASKS, mean=accepted / TASKS),
        results={f"t{n}": [float(n < accepted)] for n in range(TASKS)},
    )  # fmt: skip


def phase(kind: str, episodes: int, before: str, after: str, **more: object) -> PhaseRecord:
    (policy, harness), (policy_after, harness_after) = before.split(), after.split()
    return PhaseRecord(
        cycle=1, phase=kind, why="", started_at=0.0, episodes_before=0, ended="done", episodes=episodes, policy=policy,
        harness=harness, policy_after=policy_after, harness_after=harness_after, **more,
    )  # fmt: skip


def state(*phases: PhaseRecord, **scores: dict[str, int]) -> RunState:
    """scores: harness -> {policy: tasks solved}."""
    made = {
        h: Candidate(id=h, source_hash=h, scores={p: score(p, n) for p, n in by.items()}) for h, by in scores.items()
    }
    return RunState(
        phases=list(phases), versions={p: Version(name=p, hash=p) for p in ("p0", "p1", "p2")}, harnesses=made
    )


SEARCH, TRAINING = phase("harness", 500, "p0 h0", "p0 h1"), phase("weight", 500, "p0 h1", "p1 h1")


@pytest.mark.parametrize(
    ("under_p0", "h1_under_p1", "half"),
    [
        ({"h0": 10, "h1": 60}, 62, "harness-limited"),
        ({"h0": 10, "h1": 12}, 70, "weight-limited"),
        ({"h0": 10, "h1": 30}, 52, "undecided"),
        ({"h0": 10, "h1": 10}, 10, "undecided"),
    ],
)
def test_the_half_that_gains_more_for_its_episodes_was_the_limit(
    under_p0: dict[str, int], h1_under_p1: int, half: str
) -> None:
    found = limiting(state(SEARCH, TRAINING, h0={"p0": under_p0["h0"]}, h1={"p0": under_p0["h1"], "p1": h1_under_p1}))
    assert found.half == half and found.words
    assert found.harness and found.harness.mean == pytest.approx((under_p0["h1"] - under_p0["h0"]) / 0.5)
    assert found.weight and found.weight.mean == pytest.approx((h1_under_p1 - under_p0["h1"]) / 0.5)
    assert found.weight.low <= found.weight.mean <= found.weight.high


def test_the_same_gain_for_ten_times_the_episodes_is_a_tenth() -> None:
    scores = {"h0": {"p0": 10}, "h1": {"p0": 40, "p1": 70}}
    dear = phase("weight", 5000, "p0 h1", "p1 h1")
    assert limiting(state(SEARCH, TRAINING, **scores)).half == "undecided"
    assert limiting(state(SEARCH, dear, **scores)).half == "harness-limited"


def test_a_search_that_accepts_nothing_gained_nothing_and_at_most_its_best_challenger() -> None:
    nothing = phase("harness", 500, "p0 h0", "p0 h0")
    training = phase("weight", 500, "p0 h0", "p1 h0")
    found = limiting(state(nothing, training, h0={"p0": 30, "p1": 75}, h1={"p0": 20}))
    assert found.half == "weight-limited" and found.harness and (found.harness.mean, found.harness.high) == (0.0, 0.0)
    close = limiting(state(nothing, training, h0={"p0": 30, "p1": 32}, h1={"p0": 30}))
    assert close.half == "undecided"


def test_a_weight_phase_not_measured_on_the_search_tasks_goes_by_its_steps() -> None:
    steps = phase("weight", 500, "p0 h1", "p1 h1", signal=[0.2, None, 0.4], tasks=[64, 0, 64])
    found = limiting(state(SEARCH, steps, h0={"p0": 10}, h1={"p0": 12}))
    assert found.weight and found.weight.mean == pytest.approx(20 / 0.5)
    assert found.weight.low < 30 < found.weight.high, "64 tasks say little"


@pytest.mark.parametrize("phases", [(), (SEARCH,), (TRAINING,)])
def test_one_half_alone_decides_nothing(phases: tuple[PhaseRecord, ...]) -> None:
    found = limiting(state(*phases, h0={"p0": 10}, h1={"p0": 60, "p1": 61}))
    assert found.half == "undecided" and "has been measured yet" in found.words


def test_only_what_has_ended_counts_and_the_newest_goes_first() -> None:
    running = phase("harness", 0, "p1 h1", "p1 h1")
    running.ended = ""
    earlier = phase("harness", 500, "p0 h0", "p0 h0")
    found = limiting(state(earlier, SEARCH, TRAINING, running, h0={"p0": 10}, h1={"p0": 60, "p1": 61}))
    assert found.half == "harness-limited"


def test_on_a_whole_run(tmp_path: Path) -> None:
    found = limiting(write_run(tmp_path / "run", until="finished").state)
    assert found.weight and found.harness and found.harness.cycle == 2
