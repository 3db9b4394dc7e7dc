"""Early rejection: the rule against brute force and simulation, and whole searches with it."""

from __future__ import annotations

import asyncio
import itertools
import random
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as limits
from hypothesis import strategies as st

from tests.answered import World, Writer, difficulty, harness
from tests.engines import essence
from whale_tui import records as r
from whale_tui.journal import Journal
from whale_tui.loop.early import Leader, chance, forecast, rejection, slices
from whale_tui.records import Task


def leader(outcomes: list[bool]) -> Leader:
    return Leader("h0004", sum(outcomes) / len(outcomes), {str(n): [float(v)] for n, v in enumerate(outcomes)})


def seen(outcomes: list[bool], count: int) -> dict[str, list[float]]:
    return {str(n): [float(v)] for n, v in enumerate(outcomes[:count])}


def left(outcomes: list[bool], count: int) -> list[str]:
    return [str(n) for n in range(count, len(outcomes))]


# ------------------------------------------------------------------------------------------------------------- the rule


@pytest.mark.parametrize(("successes", "tries", "more"), [(0, 0, 3), (2, 5, 4), (5, 5, 2), (0, 7, 5)])
def test_the_forecast_is_laplaces_rule_of_succession_over_and_over(successes: int, tries: int, more: int) -> None:
    """Each next task succeeds with (s + 1) / (n + 2): the chance of every sequence, summed, is the forecast."""
    exact = [Fraction(0)] * (more + 1)
    for sequence in itertools.product([0, 1], repeat=more):
        p, s, n = Fraction(1), successes, tries
        for success in sequence:
            rate = Fraction(s + 1, n + 2)
            p *= rate if success else 1 - rate
            s, n = s + success, n + 1
        exact[sum(sequence)] += p
    assert forecast(successes, tries, more) == pytest.approx([float(p) for p in exact])


@limits(max_examples=60)
@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=2, max_size=12), st.data())
def test_the_chance_is_the_sum_over_all_ways_to_go_on(pairs: list[tuple[bool, bool]], data: st.DataObject) -> None:
    theirs, ours = [a for a, _ in pairs], [b for _, b in pairs]
    count = data.draw(st.integers(1, len(pairs)))
    kinds = {kind: [n for n in range(len(pairs)) if theirs[n] == kind] for kind in (True, False)}
    dist = {
        kind: forecast(sum(ours[n] for n in at if n < count), sum(n < count for n in at), sum(n >= count for n in at))
        for kind, at in kinds.items()
    }
    need = sum(theirs) - sum(ours[:count])
    expected = sum(p * q for x, p in enumerate(dist[True]) for y, q in enumerate(dist[False]) if x + y >= need)
    assert chance(seen(ours, count), left(ours, count), leader(theirs)) == pytest.approx(expected)


@limits(max_examples=80)
@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=4, max_size=60), st.integers(1, 59))
def test_who_solves_all_that_the_leader_solves_is_never_rejected(pairs: list[tuple[bool, bool]], count: int) -> None:
    """The deterministic limit: a candidate that is better task by task goes on at every look, whatever the limit."""
    theirs, ours = [a for a, _ in pairs], [a or b for a, b in pairs]
    count = min(count, len(pairs) - 1)
    assert rejection(seen(ours, count), left(ours, count), leader(theirs), 0.999) == ""


@limits(max_examples=80)
@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=4, max_size=40), st.integers(1, 39))
def test_at_a_limit_of_nothing_only_the_impossible_is_rejected(pairs: list[tuple[bool, bool]], count: int) -> None:
    theirs, ours = [a for a, _ in pairs], [b for _, b in pairs]
    count = min(count, len(pairs) - 1)
    rest = len(pairs) - count
    hopeless = sum(ours[:count]) + rest < sum(theirs)
    assert bool(rejection(seen(ours, count), left(ours, count), leader(theirs), 1e-300)) == hopeless


@pytest.mark.parametrize("size", [8, 32])
def test_of_those_rejected_fewer_than_the_limit_would_have_made_it(size: int) -> None:
    """Rates drawn as the rule assumes, looked at after every slice: those rejected that end at the leader or above."""
    draw, total, rejected, wrong = random.Random(size), 96, 0, 0
    for _ in range(1500):
        theirs = [draw.random() < 0.45 for _ in range(total)]
        on_solved, on_others = draw.random(), draw.random()
        ours = [draw.random() < (on_solved if won else on_others) for won in theirs]
        best = leader(theirs)
        for count in range(size, total, size):
            if rejection(seen(ours, count), left(ours, count), best, 0.05):
                rejected += 1
                wrong += sum(ours) >= sum(theirs)
                break
    assert rejected > 400, "it saves nothing"
    assert wrong / rejected <= 0.05


def test_an_equal_of_the_leader_is_seldom_rejected() -> None:
    """The hardest case for a forecast: a true rate equal to the leader's, on tasks that are hard and easy alike."""
    draw, wrong, trials = random.Random(3), 0, 600
    for _ in range(trials):
        hard = [draw.random() for _ in range(128)]
        theirs, ours = ([draw.random() > h for h in hard] for _ in range(2))
        best = leader(theirs)
        stopped = any(rejection(seen(ours, n), left(ours, n), best, 0.05) for n in (32, 64, 96))
        wrong += stopped and sum(ours) >= sum(theirs)
    assert wrong / trials <= 0.05  # 2% here


def test_invalid_episodes_are_left_out_on_both_sides() -> None:
    best = Leader("h0004", 0.5, {"a": [1.0], "b": [], "c": [1.0], "d": [0.0]})
    assert rejection({"a": [1.0], "b": [0.0], "c": []}, ["d"], best, 0.99) == ""
    assert "0 of 1 solved" in rejection({"a": [0.0], "b": [0.0]}, ["d"], best, 0.99)


def test_the_reason_is_in_words() -> None:
    theirs, ours = [True, False] * 64, [False] * 128
    assert rejection(seen(ours, 48), left(ours, 48), leader(theirs), 0.05) == (
        "rejected early after 48 of 128 tasks: under 0.1% chance to reach h0004 "
        "(0 of 48 solved, h0004 solved 24 of them)"
    )


def test_slices_take_each_task_once_in_an_order_of_the_runs_own() -> None:
    tasks = [Task(key=str(n), public={"n": n}, private={}) for n in range(50)]
    made = list(slices(tasks, 16, seed=1))
    assert [len(piece) for piece in made] == [16, 16, 16, 2]
    order = [task.key for piece in made for task in piece]
    assert sorted(order, key=int) == [task.key for task in tasks] != order
    assert order == [t.key for piece in slices(tasks[::-1], 50, seed=1) for t in piece]
    assert order != [t.key for piece in slices(tasks, 50, seed=2) for t in piece]


# ---------------------------------------------------------------------------------------------------------- in searches


def search(folder: Path, *rounds: list[str], **changes: object) -> World:
    changes = {"harness__early_rejection": 0.05, "harness__early_slice": 25} | changes
    return World(folder, Writer(*rounds), schedule__iterations=1 + len(rounds), **changes)


def test_hopeless_candidates_stop_early_and_the_ledger_says_what_that_saved(tmp_path: Path) -> None:
    world = search(tmp_path, [harness(2), harness(80), harness(38)], [harness(41), harness(0)]).go()
    outcomes = {name: c.outcome for name, c in world.state.harnesses.items()}
    assert outcomes["h0002"] == "accepted" and outcomes["h0001"] == outcomes["h0005"] == "rejected"
    bad = world.state.harnesses["h0001"]
    assert bad.scores == {} and bad.reason.startswith("rejected early after 25 of 100 tasks: ")
    assert "chance to reach h0000" in bad.reason
    assert "chance to reach h0002" in world.state.harnesses["h0004"].reason  # good once, and no longer
    spent = world.state.ledger["harness/search"]
    full = 100 * 6
    assert spent.saved > 150 and spent.episodes + spent.saved == full
    assert Journal(world.rundir.journal, read_only=True).counts()["search"] == spent.episodes
    assert "h0001" not in [c.id for c in world.state.ranking()]
    second = world.writer.requests[1].archive[1]
    assert second.outcome == "rejected" and second.mean is None and "rejected early" in second.reason
    assert second.episodes, "the proposer sees what it did on the tasks it had"
    assert not (world.rundir.harnesses / "h0001" / "eval.json").exists()


def test_off_by_default_every_candidate_is_evaluated_in_full(tmp_path: Path) -> None:
    world = search(tmp_path, [harness(0)], harness__early_rejection=0.0).go()
    assert world.state.harnesses["h0001"].mean("p0") == 0.0
    assert world.state.ledger["harness/search"].episodes == 200


def test_with_and_without_it_the_same_harness_is_accepted_with_the_same_score(tmp_path: Path) -> None:
    rounds = [harness(5), harness(60), harness(45)], [harness(55), harness(61)]
    early, full = search(tmp_path / "a", *rounds).go(), search(tmp_path / "b", *rounds, harness__early_rejection=0).go()
    assert early.state.harness == full.state.harness == "h0005"
    for name in ("h0000", "h0002", "h0005"):
        assert early.state.harnesses[name].mean("p0") == full.state.harnesses[name].mean("p0")
        ours, theirs = (w.state.harnesses[name].scores["p0"].results for w in (early, full))
        assert ours == theirs


def test_a_slice_of_all_candidates_is_one_batch(tmp_path: Path) -> None:
    world, batches = search(tmp_path, [harness(60), harness(61), harness(62)]), []
    episodes = world.run.rollouts.run

    async def counted(jobs, where, report):
        if where.purpose == "search":
            batches.append((len({j.subject.id for j in jobs}), len({j.task.key for j in jobs}), len(jobs)))
        return await episodes(jobs, where, report)

    world.run.rollouts.run = counted
    world.go()
    assert batches == [(1, 100, 100)] + [(3, 25, 75)] * 4  # the incoming harness in one piece: nothing to be behind


@pytest.mark.parametrize("flushes", [2, 3, 4])
def test_a_run_cut_between_slices_does_the_evaluation_again_and_ends_alike(tmp_path: Path, flushes: int) -> None:
    rounds = [harness(3), harness(70)], [harness(75), harness(20)]
    whole = search(tmp_path / "whole", *rounds).go()
    cut = search(tmp_path / "cut", *rounds)

    async def until_cut() -> None:
        main = asyncio.ensure_future(cut.run.run())
        count = 0

        def flushed() -> None:
            nonlocal count
            if cut.state.proposed_for:
                count += 1
                if count == flushes:
                    main.cancel()

        cut.policy.after_flush = flushed
        await asyncio.gather(main, return_exceptions=True)

    cut.run.begin(1)
    asyncio.run(until_cut())
    assert cut.state.status == "running" and "h0001" in cut.state.harnesses
    cut.journal.close()
    again = search(tmp_path / "cut", *rounds).go()
    assert again.state.status == "finished"

    def told(world: World) -> list:
        return essence(list(Journal(world.rundir.journal, read_only=True).events()))

    assert told(again) == told(whole)


def test_a_rejected_iteration_is_one_without_improvement(tmp_path: Path) -> None:
    world = search(tmp_path, [harness(0)], [harness(1)]).go()
    assert [e.measured for e in world.events(r.IterationFinished)] == [True, True, True]
    assert world.state.harness == "h0000"


def test_difficulties_are_even() -> None:
    assert sorted(difficulty(n) for n in range(100)) == list(range(100))
