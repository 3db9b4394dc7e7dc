"""The held-out slice, confirmation, failures of the machinery and budgets, in whole searches."""

from __future__ import annotations

import asyncio
import itertools
import random
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.answered import World, Writer, answer_to, difficulty, harness
from tests.simulator import Simulator, make_config
from tests.simulator import World as Made
from whale_tui import records as r
from whale_tui.config import ConfigError
from whale_tui.journal import Journal
from whale_tui.loop import alternation as todo
from whale_tui.loop import control
from whale_tui.loop.archive import read_archive
from whale_tui.loop.holdout import APART, gap_chance, set_aside, warning
from whale_tui.loop.rollouts import Where
from whale_tui.loop.words import words
from whale_tui.records import Batch, Sampling, Score, Task
from whale_tui.service import lines
from whale_tui.tui.look import Look
from whale_tui.tui.panes import Candidates, card_lines, card_of


def tasks(count: int) -> list[Task]:
    return [Task(key=str(n), public={"n": n}, private={"answer": str(n)}) for n in range(count)]


def score(accepted: int, episodes: int, invalid: int = 0) -> Score:
    valid = episodes - invalid
    batch = Batch(
        episodes=episodes, accepted=accepted, invalid=invalid, mean=accepted / valid if valid else None
    )  # fmt: skip
    return Score(policy="t", policy_hash="p", harness_hash="h", tasks_hash="d", sampling=Sampling(), batch=batch)


# ------------------------------------------------------------------------------------------------------------ the slice


def test_the_slice_depends_on_seed_and_tasks_alone() -> None:
    dev, held = set_aside(tasks(100), 30, seed=1)
    assert len(dev) == 70 and len(held) == 30
    assert {t.key for t in dev} | {t.key for t in held} == {t.key for t in tasks(100)}
    again = set_aside(tasks(100)[::-1], 30, seed=1)
    assert {t.key for t in again[1]} == {t.key for t in held}
    assert {t.key for t in set_aside(tasks(100), 30, seed=2)[1]} != {t.key for t in held}
    more = set_aside(tasks(101), 30, seed=1)[1]  # a task more moves at most one
    assert len({t.key for t in more} & {t.key for t in held}) >= 29
    assert set_aside(tasks(5), 0, seed=1) == (tasks(5), [])


def test_the_chance_of_a_gap_is_a_permutation_test() -> None:
    """All ways to choose which 4 of 7 tasks are the dev ones, counted."""
    results = [1, 1, 0, 1, 0, 0, 0]
    splits = list(itertools.combinations(range(7), 4))
    as_far = sum(sum(results[n] for n in dev) >= 3 for dev in splits)
    dev, held = score(3, 4).batch, score(0, 3).batch
    assert gap_chance(dev, held) == pytest.approx(as_far / len(splits))


def test_a_harness_that_is_not_fitted_is_seldom_warned_of() -> None:
    draw, warned = random.Random(5), 0
    for _ in range(2000):
        rate = draw.random()
        dev, held = (sum(draw.random() < rate for _ in range(n)) for n in (96, 32))
        warned += bool(warning("h", score(dev, 96), score(held, 32)))
    assert warned / 2000 <= APART


def test_the_warning_says_both_scores_and_how_likely_the_gap_is() -> None:
    text = warning("h0004", score(120, 192), score(20, 64))
    assert text.startswith("h0004 does better on what the proposer sees: 62.5% on 192 dev tasks, 31.2% on 64 held out")
    assert warning("h0004", score(120, 192), score(38, 64)) == ""
    assert warning("h0004", score(20, 192), score(40, 64)) == ""  # better on what it has not seen: no overfitting
    assert warning("h0004", score(120, 192), score(0, 64, invalid=64)) == ""


def search(folder: Path, *rounds: list[str], **changes: Any) -> World:
    changes = {"schedule__iterations": 1 + len(rounds)} | changes
    return World(folder, Writer(*rounds), **changes)


def test_the_leader_and_the_incumbent_are_scored_on_it_and_it_counts_as_its_own_purpose(tmp_path: Path) -> None:
    world = search(tmp_path, [harness(60), harness(50)], [harness(55)], harness__holdout=25).go()
    state = world.state
    assert state.splits == {"weight": 100, "harness": 75, "test": 5, "holdout": 25}
    measured = {name: c.holdouts["p0"].batch.episodes for name, c in state.harnesses.items() if c.holdouts}
    assert measured == {"h0000": 25, "h0001": 25}  # h0003 never led
    held = {t.key for t in world.run.holdout}
    wanted = sum(difficulty(t.public["number"]) < 60 for t in world.run.holdout) / 25
    assert state.harnesses["h0001"].holdouts["p0"].mean == wanted
    for name, candidate in state.harnesses.items():
        assert set(candidate.scores["p0"].results) & held == set(), name
        assert len(candidate.scores["p0"].results) == 75
    assert state.ledger["harness/holdout"].episodes == 50
    assert state.budget_used == 4 * 75 + 3 + 50
    assert Journal(world.rundir.journal, read_only=True).counts()["holdout"] == 50
    said = " ".join(lines.describe("x", state, "finished").split())
    assert f"held out: h0001 {wanted:.1%}" in said and "dev " in said


def test_nothing_of_it_reaches_a_proposer(tmp_path: Path) -> None:
    """Archive, notes, files beside a harness: no held-out task, answer, score or warning of one."""
    fitted = harness(0, answer="ANSWERS.get(str(task['number']), reply.text)")
    dev, _ = set_aside(World(tmp_path / "probe", Writer()).domain.tasks("harness"), 30, 0)
    table = {str(t.public["number"]): f"mineral-{t.public['number'] * 7 + 1000}" for t in dev}
    overfit = f"ANSWERS = {table!r}\n{fitted}"
    world = search(tmp_path / "run", [overfit], [harness(70)], harness__holdout=30, harness__candidates=1).go()
    warned = [e.text for e in world.events(r.Warned) if "what the proposer sees" in e.text]
    assert len(warned) == 1 and warned[0].startswith("h0001") and "0.0% on 30 held out" in warned[0]
    assert world.state.harness == "h0001"  # it decides nothing
    held = [t.public["number"] for t in world.run.holdout]
    seen = msgspec.json.encode([world.writer.requests[-1].archive, world.writer.requests[-1].notes]).decode()
    seen += msgspec.json.encode(read_archive(world.rundir, world.state)).decode()
    for file in world.rundir.harnesses.rglob("*"):
        seen += file.read_text() if file.is_file() else ""
    for number in held:
        assert f'"number":{number},' not in seen and f"{answer_to(number)}" not in seen
        assert f'harness-{number}"' not in seen
    for word in ("holdout", "held out", "what the proposer sees"):
        assert word not in seen
    assert f'"number":{dev[0].public["number"]},' in seen  # the search itself found what it looks for


def test_a_slice_that_leaves_no_dev_task_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="leaves nothing of D_harness"):
        search(tmp_path, tasks=20, harness__holdout=20).go()


def test_a_leader_that_confirmation_brings_up_is_held_out_before_it_is_accepted() -> None:
    class Lucky(Made):
        def batch(self, sim: Simulator, harness: str, episodes: int, purpose: str) -> Batch:
            from tests.simulator import batch

            rate = {"h0001": 1.0 if purpose == "search" else 0.2, "h0002": 0.8}.get(harness, 0.5)
            return batch(episodes, round(episodes * rate))

    splits = {"weight": 100, "harness": 10, "holdout": 4, "test": 5}
    config = make_config(run__first_phase="harness", schedule__iterations=2, harness__confirm=2, run__cycles=1)
    sim = Simulator(config, Lucky(), splits)
    assert sim.until(todo.HoldOut) == todo.HoldOut(("h0000",))
    sim.step()
    assert sim.until(todo.HoldOut) == todo.HoldOut(("h0001",))
    sim.step()
    assert sim.until(lambda a: isinstance(a, todo.Confirm | todo.HoldOut)) == todo.Confirm(("h0001", "h0002"))
    sim.step()
    assert sim.step() == todo.Confirm(("h0000",))  # the runner-up now
    assert sim.step() == todo.HoldOut(("h0002",))
    end = sim.next()
    assert isinstance(end, todo.EndPhase) and end.accept == "h0002"


# --------------------------------------------------------------------------------------------------------- confirmation


def test_confirmation_runs_leader_and_runner_up_on_other_random_streams(tmp_path: Path) -> None:
    """A harness that was lucky in the search (here: on those streams alone) loses to the one that is good."""
    world = search(tmp_path, [harness(50), harness(60)], harness__confirm=3, harness__candidates=2)
    search_seeds: set[int] = set()
    confirmed: list[tuple[int, int]] = []
    says = world.policy.says

    def lucky(level: int, number: int, seed: int) -> str:
        if level == 50:
            if world.run.activity.doing.startswith("confirming"):
                confirmed.append((number, seed))
                return says(30, number, seed)
            search_seeds.add(seed)
            return says(90, number, seed)
        return says(level, number, seed)

    world.policy.says = lucky
    world.go()
    assert world.state.harness == "h0002"
    assert {n for n, c in world.state.harnesses.items() if c.confirms} == {"h0001", "h0002"}
    assert world.state.harnesses["h0001"].mean("p0") == pytest.approx((90 + 3 * 30) / 400)
    assert len({seed for _, seed in confirmed}) == 300 and not search_seeds & {seed for _, seed in confirmed}
    assert world.state.ledger["harness/confirm"].episodes == 2 * 3 * 100


def test_random_streams_differ_by_purpose_sample_and_call_and_not_by_harness_or_iteration() -> None:
    def where(purpose: r.Purpose, iteration: int = 2) -> Where:
        return Where(
            cycle=1, phase="harness", step=0, iteration=iteration, purpose=purpose, policy="t", policy_hash="p", seed=0
        )

    assert where("search").call_seed("t1", 0, 0) == where("search", 5).call_seed("t1", 0, 0)
    seeds = {
        where(purpose).call_seed("t1", sample, call)
        for purpose in ("search", "confirm", "holdout", "smoke") for sample in range(3) for call in range(2)
    }  # fmt: skip
    assert len(seeds) == 4 * 3 * 2


# ------------------------------------------------------------------------------------------------------- the machinery


def test_invalid_episodes_run_again_and_a_score_is_over_valid_ones(tmp_path: Path) -> None:
    world = search(tmp_path, [harness(60)], harness__candidates=1)
    failed: set[str] = set()

    def broken(task: Task, episode: r.Episode) -> bool:
        first = episode.harness == "h0001" and episode.purpose == "search" and task.key not in failed
        if first and difficulty(task.public["number"]) % 10 == 0:
            failed.add(task.key)
            return True
        return False

    world.domain.broken = broken
    world.go()
    found = world.state.harnesses["h0001"]
    assert len(failed) == 10 and found.scores["p0"].batch.invalid == 10
    assert found.mean("p0") == 0.6 and len(found.scores["p0"].results) == 100
    assert world.state.ledger["harness/search"].episodes == 210  # what was run again is paid for
    rows = Journal(world.rundir.journal, read_only=True).page(limit=1000, harness="h0001", purpose="search")
    assert len({row.id for row in rows}) == len(rows) == 110
    assert "10 run again (1): verifier failed: ConnectionError" in next(e.detail for e in world.events(r.Failure))


def test_a_candidate_of_which_nothing_can_be_measured_is_infra_and_the_iteration_goes_on(tmp_path: Path) -> None:
    world = search(tmp_path, [harness(90), harness(60)], harness__infra_retries=1)
    world.domain.broken = lambda task, episode: episode.harness == "h0001"
    world.go()
    bad = world.state.harnesses["h0001"]
    assert (bad.outcome, bad.scores) == ("infra", {}) and "the verifier's server is gone" in bad.reason
    assert world.state.harness == "h0002"
    assert world.state.ledger["harness/search"].episodes == 100 + 200 + 100  # h0000; h0001 twice; h0002


def test_episodes_run_again_only_as_far_as_the_budget_goes(tmp_path: Path) -> None:
    world = search(tmp_path, [harness(60)], harness__candidates=1, run__budget_episodes=100 + 101 + 5)
    world.domain.broken = lambda task, episode: task.public["number"] < 3 and episode.harness == "h0001"
    world.go()
    assert world.state.budget_used == 100 + 101 + 3
    assert world.state.harnesses["h0001"].scores["p0"].batch.invalid == 3 + 3


@pytest.mark.parametrize(
    ("source", "outcome", "words"),
    [
        ("def run(task, model, tools:\n", "invalid", "doesn't parse"),
        ("def go(task):\n    return 1\n", "invalid", "no top-level"),
        ("import os\ndef run(task, model, tools):\n    return ''\n", "invalid", "can't import"),
        ("def run(task, model, tools):\n    return 1 / 0\n", "invalid", "ZeroDivisionError"),
        (harness(90, more="\n").replace("reply = ", "1 / (task['number'] % 97 == 1)\n    reply = "), "any", "Zero"),
        ("def run(task, model, tools):\n    while True:\n        pass\n", "invalid", "timeout"),
    ],
    ids=["unparsable", "without run", "imports", "fails", "fails on most", "hangs"],
)
def test_one_bad_candidate_never_ends_an_iteration(tmp_path: Path, source: str, outcome: str, words: str) -> None:
    world = search(tmp_path, [source, harness(60)], harness__candidates=2, rollout__episode_seconds=0.4).go()
    bad = world.state.harnesses["h0001"]
    assert bad.outcome == outcome or (outcome == "any" and bad.outcome in ("invalid", "crash", "scored"))
    assert outcome == "any" or words in bad.reason
    assert world.state.harness == "h0002" and world.state.status == "finished"


def test_a_policy_that_goes_silent_is_cut_said_so_and_started_anew(tmp_path: Path) -> None:
    world = search(tmp_path, [harness(60)], harness__candidates=1, rollout__stall_seconds=0.4)
    flushes = 0

    def silent_once() -> None:
        nonlocal flushes
        flushes += 1
        if flushes == 2:  # the smoke episode's call was the one before
            world.policy.silent = True

    world.policy.after_flush = silent_once
    world.go()
    assert world.state.status == "finished" and world.state.harness == "h0001"
    failures = [e for e in world.events(r.Failure) if e.kind == "stalled"]
    assert len(failures) == 1 and "rollout.stall_seconds" in failures[0].detail
    assert world.policy.starts == 1


def test_a_policy_that_will_not_let_go_holds_up_no_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("whale_tui.loop.rollouts.DROP_SECONDS", 0.2)
    world = search(tmp_path, [harness(60)], harness__candidates=1)
    seen: list[int] = []

    def stop() -> None:
        if not seen:
            seen.append(1)
            world.policy.silent = world.policy.hangs_on_drop = True
            world.run.command("c1", "ann", "stop", {})

    world.policy.after_flush = stop
    world.go()
    assert world.state.status == "stopped"


# ------------------------------------------------------------------------------------------------ policies and budgets


def test_scores_of_an_older_policy_are_shown_as_such_and_compared_with_nothing(tmp_path: Path) -> None:
    world = search(tmp_path, [harness(60)]).go()
    state = world.state
    state.versions["theta-0001"] = msgspec.structs.replace(state.versions["theta-0000"], name="theta-0001", hash="p1")
    state.policy = "theta-0001"
    shown = {a.id: a for a in read_archive(world.rundir, state)}
    assert shown["h0001"].mean is None and shown["h0001"].older_means == {"theta-0000": 0.6}
    assert state.ranking() == []
    state.phase, state.iteration = "harness", 0
    assert todo.next_action(state, make_config(harness__revisit=1)) == todo.Evaluate(("h0001", "h0000"))


@pytest.mark.parametrize("condition", ["whale", "adaptive", "weight-only", "harness-only", "stagewise", "fst"])
@pytest.mark.parametrize("budget", [150, 333, 700])
def test_all_conditions_stop_within_a_round_of_the_same_budget(condition: str, budget: int) -> None:
    """With a held-out slice, confirmation, early rejection and candidates that fail, too."""

    class Mixed(Made):
        def outcome(self, sim: Simulator, harness: str) -> r.Outcome:
            return ("scored", "rejected", "infra", "crash")[int(harness[1:]) % 4]

        def rate(self, sim: Simulator, harness: str) -> float:
            return min(1.0, 0.3 + int(harness[1:]) / 50)

    config = make_config(
        run__condition=condition, run__budget_episodes=budget, harness__confirm=1, harness__revisit=1,
        harness__early_rejection=0.05,
    )  # fmt: skip
    sim = Simulator(config, Mixed(), {"weight": 100, "harness": 10, "holdout": 4, "test": 5}).run()
    settings = sim.state.settings
    assert settings is not None and sim.state.reason.startswith("budget spent")
    rounds = [todo.step_cost(config), *(todo.iteration_cost(sim.state, config, settings, first) for first in (0, 1))]
    assert budget - max(rounds) < sim.state.budget_used <= budget


# ------------------------------------------------------------------------------------------------ fst, and the screen


def test_fst_holds_whoever_writes(tmp_path: Path) -> None:
    """A proposer's candidate fails the check; a person's is refused before it joins the archive."""
    h0 = harness(40).replace("LEVEL = 40", 'LEVEL = "level 40"').replace("level {LEVEL}", "{LEVEL}")
    prompt, code = h0.replace("40", "55"), h0.replace("max_tokens=24", "max_tokens=25")
    writer = Writer([prompt, code])
    world = World(tmp_path, writer, h0=h0, run__condition="fst", run__first_phase="harness")
    refused: list[str] = []

    def propose() -> None:
        if not refused:
            for number, source in enumerate((code, h0.replace("40", "70"))):
                try:
                    world.run.command(f"p{number}", "ann", "propose", {"source": source})
                except control.Refused as why:
                    refused.append(str(why))

    world.policy.after_flush = propose

    async def searched() -> None:
        world.run.begin(1)
        main = asyncio.ensure_future(world.run.run())
        while not main.done() and not any(p.ended for p in world.state.phases):
            await asyncio.wait([main], timeout=0.02)
        main.cancel()
        await asyncio.gather(main, return_exceptions=True)

    asyncio.run(searched())
    world.journal.close()
    found = {c.proposer: c for c in world.state.harnesses.values() if c.mean("p0") is not None}
    assert len(refused) == 1 and "fst changes the text of prompt constants" in refused[0]
    assert found["person"].mean("p0") == 0.7 and found["writer"].mean("p0") == 0.55
    bad = [c for c in world.state.harnesses.values() if c.outcome == "invalid"]
    assert [c.proposer for c in bad] == ["writer"] and "fst changes the text" in bad[0].reason
    assert writer.requests[0].fst


def test_the_screen_shows_held_out_scores_early_rejection_and_warnings(tmp_path: Path) -> None:
    dev, _ = set_aside(World(tmp_path / "probe", Writer()).domain.tasks("harness"), 25, 0)
    table = f"\nTABLE = {[dev[0].private['answer']]!r}\n"
    world = search(
        tmp_path / "run", [harness(60, more=table), harness(0)], harness__holdout=25, harness__early_rejection=0.05,
        harness__early_slice=25,
    ).go()  # fmt: skip
    state, look = world.state, Look()

    def card(name: str) -> str:
        return " ".join(row.plain for row in card_lines(card_of(state, state.harnesses[name]), 100, look))

    held_out = state.harnesses["h0001"].holdouts["p0"].mean
    assert f"held out {held_out:.1%}" in card("h0001") and "! line " in card("h0001")
    assert "rejected early after 25 of 75 tasks" in card("h0002") and "result" not in card("h0002")
    rejected = next(e for e in world.events(r.CandidateOutcome))
    assert words(rejected) == f"h0002 {state.harnesses['h0002'].reason}; 50 episodes saved"
    scored = [words(e) for e in world.events(r.CandidateScored) if e.purpose == "holdout"]
    assert scored[1].startswith("h0001 under theta-0000 on the held-out slice: ")
    pane = Candidates(look)
    rows = tuple(pane._row(state, c, False) for c in state.harnesses.values())
    pane.order(rows, False)
    lines_, (header,) = pane.draw((rows, "h0001", "", False), 110, 20)
    assert re.search(r"score +held +points", header.plain)
    shown = {line.plain.split()[1] if line.plain[0] != " " else line.plain.split()[0]: line.plain for line in lines_}
    assert f"{held_out:.1%}" in shown["h0001"] and "rejected" in shown["h0002"]
