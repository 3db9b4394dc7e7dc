"""The alternation through whole simulated runs: what comes next, when it ends, what is accepted, what it may cost."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as limits
from hypothesis import strategies as st

from tests.simulator import Simulator, World, batch, make_config
from whale_tui import records as r
from whale_tui.loop import alternation as todo
from whale_tui.loop import control
from whale_tui.loop.alternation import Ask, Confirm, EndPhase, Evaluate, Finish, Look, Propose, SampleStep, Test
from whale_tui.records import Batch


def simulate(world: World | None = None, **changes: Any) -> Simulator:
    return Simulator(make_config(**changes), world)


def named(sim: Simulator, kind: type) -> list[Any]:
    return [a for a in sim.actions if isinstance(a, kind)]


# --------------------------------------------------------------------------------------------------------- conditions


def test_whale_alternates_with_fixed_lengths() -> None:
    sim = simulate(run__cycles=3).run()
    assert sim.phases == ["1w", "1h", "2w", "2h", "3w", "3h"]
    assert [len(p.signal) for p in sim.state.phases] == [2, 3] * 3
    assert sim.state.reason == "3 cycles done"
    assert sim.state.ledger["weight/train"].episodes == 3 * 2 * 8
    first, proposals = 10, 2 * 2
    assert sim.state.ledger["harness/search"].episodes == 3 * (first + proposals * 10)
    assert sim.state.ledger["harness/smoke"].episodes == 3 * proposals


def test_adaptive_ends_each_phase_by_patience() -> None:
    sim = simulate(
        run__condition="adaptive", run__cycles=1, schedule__weight_min=0.08, schedule__weight_window=0.04,
        schedule__weight_patience=0.12, schedule__harness_min=2, schedule__harness_patience=2,
    ).run()  # fmt: skip
    weight, harness = sim.state.phases
    assert len(weight.signal) == 1 + 3  # a first best, then three steps without a better one
    assert len(harness.signal) == 1 + 2
    assert "3 of 3 without a new best" in weight.ended


def test_weight_only_never_searches_and_harness_only_never_trains() -> None:
    weights = simulate(run__condition="weight-only", run__cycles=2).run()
    assert weights.phases == ["1w", "2w"] and weights.state.harness == "h0000"
    searches = simulate(run__condition="harness-only", run__cycles=2).run()
    assert searches.phases == ["1h", "2h"] and searches.state.policy == "theta-0000"
    assert searches.state.tasks_drawn == 0


def test_harness_only_measures_the_incoming_harness_once_per_policy() -> None:
    sim = simulate(run__condition="harness-only", run__cycles=3).run()
    assert sum("h0000" in a.harnesses for a in named(sim, Evaluate)) == 1


def test_fst_alternates_like_whale() -> None:
    assert simulate(run__condition="fst", run__cycles=2).run().phases == ["1w", "1h", "2w", "2h"]


def test_stagewise_spends_the_weight_budget_then_the_harness_budget() -> None:
    sim = simulate(run__condition="stagewise", schedule__stagewise_weight_share=0.5).run()
    kinds = [p.phase for p in sim.state.phases]
    assert kinds == sorted(kinds, reverse=True) and set(kinds) == {"weight", "harness"}  # w..w h..h
    assert sim.state.ledger["weight/train"].episodes == 200
    assert 200 + 178 <= sim.state.budget_used <= 400  # what is left doesn't hold an iteration of 22


def test_stagewise_runs_both_stages_whatever_cycles_says() -> None:
    kinds = {p.phase for p in simulate(run__condition="stagewise", run__cycles=1).run().state.phases}
    assert kinds == {"weight", "harness"}


# -------------------------------------------------------------------------------------------------------- first phase


def test_first_phase_harness_is_cycle_0_and_cycles_count_weight_phases() -> None:
    sim = simulate(run__first_phase="harness", run__cycles=2).run()
    assert sim.phases == ["0h", "1w", "1h", "2w", "2h"]


@pytest.mark.parametrize(
    ("accepted", "invalid", "first"),
    [(0, 0, "harness"), (1, 0, "harness"), (2, 0, "weight"), (1, 40, "weight"), (0, 64, "weight")],
)
def test_auto_looks_at_h0_and_counts_only_valid_episodes(accepted: int, invalid: int, first: str) -> None:
    """3% of 64 is 1.92: one accepted is under it, two are not; one of 24 valid ones is over it."""

    class Looked(World):
        def batch(self, sim: Simulator, harness: str, episodes: int, purpose: str) -> Batch:
            if purpose == "look":
                return batch(episodes, accepted, invalid)
            return super().batch(sim, harness, episodes, purpose)

    sim = simulate(Looked(), run__first_phase="auto", run__cycles=1, run__budget_episodes=1000)
    sim.until(SampleStep if first == "weight" else Evaluate)
    assert len(named(sim, Look)) == 1
    assert sim.state.phases[0].phase == first
    assert (f"{accepted} of {64 - invalid} episodes" if invalid < 64 else "measured nothing") in sim.state.phases[0].why
    assert sim.state.ledger["-/look"].episodes == 64
    assert named(sim.run(), Look) == [Look()]  # never again


@pytest.mark.parametrize("condition", ["weight-only", "harness-only", "stagewise"])
def test_conditions_with_one_order_never_look(condition: str) -> None:
    assert not named(simulate(run__condition=condition, run__first_phase="auto", run__cycles=1).run(), Look)


# ------------------------------------------------------------------------------------------------------------- budgets


def test_a_step_that_does_not_fit_ends_the_phase_and_the_run() -> None:
    sim = simulate(run__condition="weight-only", run__budget_episodes=30, schedule__epochs=1.0).run()
    assert sim.state.budget_used == 24
    assert sim.state.phases[0].ended == "budget: 6 episodes left, a step needs 8"
    assert sim.state.reason == "budget spent: 6 episodes left, the next step needs 8"


def test_an_iteration_that_does_not_fit_ends_the_phase_after_what_was_measured() -> None:
    sim = simulate(run__budget_episodes=16 + 10 + 22 + 21).run()
    assert sim.state.phases[1].ended == "budget: 21 episodes left, an iteration needs up to 22"
    assert len(sim.state.phases[1].signal) == 2


def test_a_persons_candidates_do_not_overspend() -> None:
    """Candidates of a person come on top of the proposer's: their smoke episodes and evaluations must fit too."""
    sim = simulate(run__budget_episodes=16 + 10 + 22 + 5)
    sim.until(Propose)
    for _ in range(3):
        sim.propose()
    sim.run()
    assert sim.state.budget_used <= 53


def test_a_budget_lowered_in_the_middle_ends_things_in_good_order() -> None:
    sim = simulate()
    sim.until(Evaluate)
    sim.command("set", budget_episodes=20)
    sim.run()
    assert sim.state.budget_used <= 20 and sim.state.status == "finished"


@pytest.mark.parametrize("condition", ["whale", "weight-only", "harness-only", "stagewise", "adaptive", "fst"])
@pytest.mark.parametrize("episodes", [36, 64, 101, 399])
def test_the_budget_is_never_exceeded_and_what_is_left_is_less_than_a_round(condition: str, episodes: int) -> None:
    sim = simulate(run__condition=condition, run__budget_episodes=episodes).run()
    assert episodes - 32 <= sim.state.budget_used <= episodes
    assert sim.state.reason.startswith("budget spent")


# ----------------------------------------------------------------------------------------------------- the acceptance


class Measured(World):
    """Batches of D_harness by hand: harness -> (accepted, invalid, calls, tokens)."""

    def __init__(self, **table: tuple[int, int, int, int]) -> None:
        super().__init__()
        self.table = table

    def batch(self, sim: Simulator, harness: str, episodes: int, purpose: str) -> Batch:
        if purpose in ("search", "confirm") and harness in self.table:
            accepted, invalid, calls, tokens = self.table[harness]
            return batch(episodes, accepted, invalid, calls, tokens)
        return super().batch(sim, harness, episodes, purpose)


@pytest.mark.parametrize(
    ("table", "accepted"),
    [
        ({"h0000": (5, 0, 20, 99), "h0001": (6, 0, 90, 999), "h0002": (5, 0, 10, 10)}, "h0001"),  # success first
        ({"h0000": (5, 0, 20, 99), "h0001": (5, 0, 19, 999), "h0002": (5, 0, 20, 10)}, "h0001"),  # then fewer calls
        ({"h0000": (5, 0, 20, 99), "h0001": (5, 0, 20, 98), "h0002": (5, 0, 20, 97)}, "h0002"),  # then fewer tokens
        ({"h0000": (5, 0, 20, 99), "h0001": (5, 0, 20, 99), "h0002": (5, 0, 20, 99)}, "h0000"),  # then the earlier
        (
            {"h0000": (5, 0, 20, 99), "h0001": (4, 0, 10, 10), "h0002": (3, 0, 10, 10)},
            "h0000",
        ),  # ends as it began
        ({"h0000": (5, 0, 20, 99), "h0001": (4, 5, 20, 99), "h0002": (5, 0, 20, 99)}, "h0001"),  # 4 of 5 valid ones
        ({"h0000": (5, 0, 20, 99), "h0001": (0, 10, 1, 1), "h0002": (4, 0, 1, 1)}, "h0000"),  # nothing valid: no part
    ],
)
def test_acceptance_order(table: dict[str, tuple[int, int, int, int]], accepted: str) -> None:
    sim = simulate(Measured(**table), run__first_phase="harness", schedule__iterations=2)
    end = sim.until(EndPhase)
    assert isinstance(end, EndPhase) and end.accept == accepted
    ranked = [c.id for c in sim.state.ranking()]
    assert ranked[0] == accepted
    sim.step()
    assert sim.state.harness == accepted
    assert (sim.state.accepted == ["h0000"]) == (accepted == "h0000")


def test_scores_of_another_policy_take_no_part() -> None:
    """Harnesses that were far better under theta-0000 may not win by their old scores after training."""

    class Aged(World):
        def rate(self, sim: Simulator, harness: str) -> float:
            if sim.state.cycle == 0:
                return {"h0001": 0.9, "h0002": 1.0}.get(harness, 0.1)
            return {"h0002": 0.1, "h0003": 0.2}.get(harness, 0.0)

    sim = simulate(Aged(), run__first_phase="harness", schedule__iterations=2, run__cycles=1)
    sim.until(SampleStep)
    assert sim.state.harness == "h0002"
    sim.until(EndPhase)
    sim.step()
    assert sim.state.ranking() == []  # a new policy: nothing is measured yet
    sim.until(EndPhase)
    assert [c.id for c in sim.state.ranking()] == ["h0003", "h0002", "h0004"]
    sim.step()
    assert sim.state.harness == "h0003"


def test_revisit_measures_the_best_others_again() -> None:
    world = World()
    world.rates = {"h0000": 0.1, "h0001": 0.7, "h0002": 0.9, "h0003": 0.2, "h0004": 0.8}
    sim = simulate(world, run__first_phase="harness", run__cycles=1, harness__revisit=2)
    sim.until(SampleStep)
    assert sim.state.harness == "h0002"
    evaluated = sim.until(Evaluate)
    assert evaluated == Evaluate(("h0002", "h0004", "h0001"))
    sim.step()
    assert isinstance(sim.step(), todo.EndIteration)
    assert not named(sim, Confirm)


def test_confirm_measures_leader_and_runner_up_once_and_may_turn_the_order() -> None:
    class Lucky(World):
        def batch(self, sim: Simulator, harness: str, episodes: int, purpose: str) -> Batch:
            rate = {"h0001": 1.0 if purpose == "search" else 0.2, "h0002": 0.8}.get(harness, 0.5)
            return batch(episodes, round(episodes * rate))

    sim = simulate(Lucky(), run__first_phase="harness", schedule__iterations=2, harness__confirm=2, run__cycles=1)
    assert sim.until(Confirm) == Confirm(("h0001", "h0002"))
    sim.step()
    end = sim.until(EndPhase)
    assert isinstance(end, EndPhase) and end.accept == "h0002"
    assert sim.state.harnesses["h0001"].mean("p0") == pytest.approx((10 + 4) / 30)
    assert sim.state.ledger["harness/confirm"].episodes >= 2 * 2 * 10
    for name, candidate in sim.state.harnesses.items():
        assert len(candidate.confirms) <= 1, name


def test_confirm_is_left_out_where_the_budget_does_not_hold_it_or_nothing_would_change() -> None:
    better = World()
    better.rates["h0001"] = 0.9
    short = simulate(
        better, run__first_phase="harness", schedule__iterations=2, harness__confirm=2, run__budget_episodes=71
    )
    assert isinstance(short.until(EndPhase), EndPhase) and not named(short, Confirm)
    same = simulate(run__first_phase="harness", schedule__iterations=2, harness__confirm=2)
    assert isinstance(same.until(EndPhase), EndPhase) and not named(same, Confirm)


def test_an_incoming_harness_that_was_not_measured_is_not_replaced() -> None:
    """Its evaluation was lost to the machinery: a candidate may not win against nothing."""
    sim = simulate(Measured(h0000=(0, 10, 1, 1)), run__first_phase="harness", schedule__iterations=2)
    end = sim.until(EndPhase)
    assert isinstance(end, EndPhase) and end.accept == "h0000" and "not measured" in end.reason


# -------------------------------------------------------------------------------------------------- rounds without use


def test_ten_steps_with_nothing_accepted_end_the_phase() -> None:
    world = World()
    world.rates["h0000"] = 0.0
    sim = simulate(world, schedule__epochs=2.0, run__budget_episodes=300)
    sim.until(EndPhase)
    assert len(sim.state.phases[0].signal) == 10
    assert sim.state.policy == "theta-0000" and list(sim.state.versions) == ["theta-0000"]
    sim.step()
    assert "10 steps in a row" in sim.state.phases[0].ended
    assert isinstance(sim.next(), todo.StartPhase)


def test_accepted_episodes_that_are_all_cut_off_count_as_nothing_to_train_on() -> None:
    class Cut(World):
        def trained(self, sim: Simulator, sampled: Batch) -> int:
            return 0

    sim = simulate(Cut(), schedule__epochs=2.0, run__budget_episodes=300)
    sim.until(EndPhase)
    assert len(sim.state.phases[0].signal) == 10


def test_one_trained_step_starts_the_count_again() -> None:
    class Rare(World):
        def trained(self, sim: Simulator, sampled: Batch) -> int:
            return int(sim.state.total_steps == 8)

    sim = simulate(Rare(), schedule__epochs=4.0, run__budget_episodes=900)
    sim.until(EndPhase)
    assert len(sim.state.phases[0].signal) == 9 + 10


@pytest.mark.parametrize("outcome", ["infra", "crash", "timeout", "invalid"])
def test_failed_candidates_are_no_result_and_no_lack_of_improvement(outcome: r.Outcome) -> None:
    class Failing(World):
        def outcome(self, sim: Simulator, harness: str) -> r.Outcome:
            return outcome

        def check(self, sim: Simulator, harness: str) -> bool:
            return outcome != "invalid"

    sim = simulate(Failing(), run__condition="adaptive", run__first_phase="harness", run__budget_episodes=2000)
    sim.until(SampleStep, limit=200)
    phase = sim.state.phases[0]
    assert phase.signal == [0.5] + [None] * 14 and "its cap" in phase.ended  # patience never ran, the cap ended it
    assert sim.state.harness == "h0000" and [c.id for c in sim.state.ranking()] == ["h0000"]


def test_vetoed_candidates_are_no_lack_of_improvement() -> None:
    class Vetoing(World):
        def person(self, sim: Simulator, action: Ask) -> bool:
            for harness in action.harnesses:
                sim.command("veto", harness=harness, reason="no")
            return True

    sim = simulate(
        Vetoing(), run__condition="adaptive", run__first_phase="harness", harness__approval="before-eval",
        run__budget_episodes=2000,
    )  # fmt: skip
    sim.until(SampleStep, limit=200)
    assert sim.state.phases[0].signal == [0.5] + [None] * 14
    assert sim.state.ledger["harness/search"].episodes == 10  # the incoming harness alone


@pytest.mark.parametrize("condition", ["harness-only", "stagewise", "whale"])
@pytest.mark.parametrize("iterations", [1, 3])
def test_a_proposer_without_ideas_ends_the_run_instead_of_going_round(condition: str, iterations: int) -> None:
    class Dry(World):
        def proposals(self, sim: Simulator, wanted: int) -> int:
            return 0

    sim = simulate(Dry(), run__condition=condition, schedule__iterations=iterations, run__budget_episodes=200)
    sim.run(limit=400)
    assert sim.state.status == "finished"


# -------------------------------------------------------------------------------------------------------------- tests


@pytest.mark.parametrize(
    ("at", "labels"),
    [
        ("ends", ["start", "end"]),
        ("end", ["start", "end"]),
        ("cycles", ["start", "cycle 1", "end"]),
        ("phases", ["start", "cycle 1", "cycle 1", "cycle 2", "end"]),
    ],
)
def test_test_points(at: str, labels: list[str]) -> None:
    class Improving(World):
        def rate(self, sim: Simulator, harness: str) -> float:
            return 0.2 + int(harness[1:]) / 20

    sim = simulate(Improving(), test__samples=2, test__at=at, run__cycles=2, run__first_phase="weight")
    sim.run()
    assert [t.label for t in sim.state.tests] == labels
    pairs = [(t.policy, t.harness) for t in sim.state.tests]
    assert pairs[0] == ("theta-0000", "h0000") and pairs[-1] == (sim.state.policy, sim.state.harness)
    assert len(set(pairs)) == len(pairs)  # a pair is measured once
    assert sim.state.ledger["-/test"].episodes == 10 * len(labels)
    tested = [n for n, a in enumerate(sim.actions) if isinstance(a, Test)]
    assert (tested[0] == 0) == (at != "end")


def test_tests_at_cycles_come_after_each_cycle_of_any_condition() -> None:
    weights = simulate(run__condition="weight-only", test__samples=1, run__cycles=3).run()
    assert [t.label for t in weights.state.tests] == ["start", "cycle 1", "cycle 2", "end"]


def test_tests_are_not_budgeted_and_no_samples_is_no_test() -> None:
    assert not named(simulate(run__cycles=1).run(), Test)
    with_tests, without = simulate(test__samples=8).run(), simulate().run()
    assert with_tests.state.budget_used == without.state.budget_used
    assert with_tests.state.episodes > with_tests.state.budget_used


# ---------------------------------------------------------------------------------------------------------- the person


def test_before_eval_asks_after_the_checks_and_before_an_episode_is_paid_for() -> None:
    sim = simulate(run__first_phase="harness", harness__approval="before-eval")
    asked = sim.until(Ask)
    assert asked == Ask(("h0001", "h0002"), "eval")
    sim.command("veto", harness="h0001", reason="no")
    assert sim.next() == Ask(("h0002",), "eval")
    sim.command("approve", harness="h0002")
    assert sim.next() == Evaluate(("h0002",))
    sim.step()
    assert sim.state.harnesses["h0001"].outcome == "vetoed" and not sim.state.harnesses["h0001"].scores


def test_before_accept_asks_for_the_leader_then_for_the_next() -> None:
    world = World()
    world.rates |= {"h0001": 0.8, "h0002": 0.9}
    sim = simulate(world, run__first_phase="harness", schedule__iterations=2, harness__approval="before-accept")
    assert sim.until(Ask) == Ask(("h0002",), "accept")
    sim.command("veto", harness="h0002", reason="no")
    assert sim.next() == Ask(("h0001",), "accept")
    sim.command("approve", harness="h0001")
    assert isinstance(sim.step(), EndPhase)
    assert sim.state.harness == "h0001"


def test_an_approval_before_evaluation_is_none_before_acceptance() -> None:
    """Approving early, even twice, lets a candidate be evaluated; whether it is accepted is asked with its score."""
    world = World()
    world.rates["h0001"] = 0.9
    sim = simulate(world, run__first_phase="harness", schedule__iterations=2, harness__approval="before-accept")
    sim.until(Evaluate)
    sim.step()
    sim.until(Evaluate)
    sim.command("approve", harness="h0001")
    sim.command("approve", who="bob", harness="h0001")
    assert sim.until(Ask) == Ask(("h0001",), "accept")


def test_no_question_where_the_incoming_harness_stays_or_was_accepted_before() -> None:
    sim = simulate(run__first_phase="harness", run__cycles=1, harness__approval="before-accept").run()
    assert not named(sim, Ask)


def test_turning_approval_off_lets_the_waiting_go_on() -> None:
    sim = simulate(run__first_phase="harness", harness__approval="before-eval")
    sim.until(Ask)
    sim.command("set", approval="auto")
    assert isinstance(sim.next(), Evaluate)


def test_a_persons_proposer_waits_and_takes_up_what_comes() -> None:
    sim = simulate(run__first_phase="harness", proposer__kind="person", schedule__iterations=2)
    assert sim.until(Ask) == Ask((), "propose")
    name = sim.propose()
    assert sim.next() == todo.Check((name,))
    sim.step()
    assert sim.step() == Evaluate((name,))
    assert isinstance(sim.step(), todo.EndIteration)
    assert isinstance(sim.next(), EndPhase)


def test_a_proposal_made_in_a_weight_phase_is_evaluated_in_the_next_search() -> None:
    sim = simulate(run__cycles=1)
    sim.until(todo.TrainStep)
    name = sim.propose()
    sim.run()
    assert sim.state.harnesses[name].outcome in ("scored", "accepted")
    assert len(sim.state.phases[1].signal) == 3


@pytest.mark.parametrize("when", ["sampling", "training"])
def test_switch_safe_ends_the_weight_phase_after_the_step(when: str) -> None:
    sim = simulate(schedule__epochs=1.0)
    sim.until(SampleStep)
    if when == "training":
        sim.step()
        sim.command("switch")
        assert isinstance(sim.step(), todo.TrainStep)  # its episodes are paid for
    else:
        action = sim.next()
        sim.command("switch")  # arrives while the step is being sampled
        sim.perform(action)
        assert isinstance(sim.step(), todo.TrainStep)
    assert sim.next() == EndPhase("switched by ann at a safe point")
    sim.step()
    assert sim.state.step == 1 and sim.state.switch == ""
    assert isinstance(sim.next(), todo.StartPhase)


def test_switch_now_drops_what_is_in_flight_but_never_a_step_that_is_paid_for() -> None:
    sim = simulate(schedule__epochs=1.0)
    sim.until(SampleStep)
    assert sim.command("switch", now=True).interrupt
    assert sim.next() == EndPhase("switched by ann at once")
    assert sim.state.budget_used == 0

    sim = simulate(schedule__epochs=1.0)
    sim.until(todo.TrainStep)
    planned = sim.command("switch", now=True)
    assert not planned.interrupt and "step 1 is trained" in planned.effect
    assert isinstance(sim.step(), todo.TrainStep)
    assert sim.next() == EndPhase("switched by ann at once")


def test_switch_safe_ends_the_search_after_the_iteration() -> None:
    sim = simulate(run__first_phase="harness")
    sim.until(Propose)
    sim.command("switch")
    assert isinstance(sim.next(), EndPhase)  # nothing of the next iteration has begun
    sim = simulate(run__first_phase="harness")
    sim.until(todo.Check)
    sim.command("switch")
    end = sim.until(EndPhase)
    assert isinstance(end, EndPhase) and end.reason == "switched by ann at a safe point"
    assert sim.state.iteration == 2 and sim.state.harnesses["h0002"].outcome == "scored"


def test_switch_safe_in_the_first_iteration_still_measures_the_incoming_harness() -> None:
    sim = simulate(run__first_phase="harness")
    sim.until(Evaluate)
    sim.command("switch")
    assert sim.next() == Evaluate(("h0000",))
    sim.until(EndPhase)
    assert sim.state.phases[0].signal == [0.5]


def test_switch_now_ends_the_search_at_once_and_accepts_what_is_measured() -> None:
    world = World()
    world.rates["h0001"] = 0.9
    sim = simulate(world, run__first_phase="harness", harness__confirm=1)
    sim.until(lambda a: isinstance(a, Propose) and a.iteration == 3)
    sim.command("switch", now=True)
    end = sim.next()
    assert isinstance(end, EndPhase) and end.accept == "h0001" and end.reason.endswith("at once")
    early = simulate(run__first_phase="harness")
    early.until(Evaluate)
    early.command("switch", now=True)
    end = early.next()
    assert isinstance(end, EndPhase) and end.accept == "h0000"


def test_what_a_search_leaves_undecided_is_taken_up_by_the_next() -> None:
    sim = simulate(run__first_phase="harness", run__cycles=1)
    sim.until(todo.Check)
    sim.command("switch", now=True)
    sim.run()
    assert all(c.outcome for c in sim.state.harnesses.values())


def test_pinned_harness_skips_the_search_and_stays() -> None:
    world = World()
    world.rates["h0001"] = 0.9
    sim = simulate(world, run__cycles=3)
    sim.until(lambda a: isinstance(a, SampleStep) and sim.state.cycle == 2)
    assert sim.state.harness == "h0001"
    sim.command("pin", harness="h0000")
    sim.until(lambda a: isinstance(a, SampleStep) and sim.state.cycle == 3)
    assert sim.phases == ["1w", "1h", "2w", "3w"] and sim.state.harness == "h0000"
    assert "h0000 is pinned" in sim.state.phases[-1].why
    sim.command("unpin")
    sim.run()
    assert sim.phases == ["1w", "1h", "2w", "3w", "3h"]


def test_pinning_in_a_search_ends_it_without_accepting() -> None:
    world = World()
    world.rates["h0001"] = 0.9
    sim = simulate(world, run__first_phase="harness")
    sim.until(lambda a: isinstance(a, Propose) and a.iteration == 3)
    sim.command("pin")
    end = sim.next()
    assert isinstance(end, EndPhase) and end.accept == "h0000" and "pinned" in end.reason


def test_search_only_searches_while_pinned_and_accepts_nothing() -> None:
    world = World()
    world.rates["h0001"] = 0.9
    sim = simulate(world, harness__while_pinned="search-only", run__cycles=1)
    sim.until(SampleStep)
    sim.command("pin")
    sim.run()
    assert sim.phases == ["1w", "1h"] and sim.state.harness == "h0000"
    assert len(sim.state.phases[1].signal) == 3 and sim.state.ranking()[0].id == "h0001"


@pytest.mark.parametrize("condition", ["harness-only", "stagewise"])
def test_pinning_where_only_searches_are_left_waits_for_unpin(condition: str) -> None:
    """Skipping the search would start and end empty phases for ever."""
    sim = simulate(run__condition=condition, run__budget_episodes=300)
    sim.until(Evaluate)
    sim.command("pin")
    sim.run(limit=100)
    assert sim.next() == Ask((), "unpin") and sim.state.status == "running"
    sim.command("unpin")
    sim.run()
    assert sim.state.status == "finished"


def test_after_a_rollback_in_a_search_the_incoming_harness_is_measured_under_that_policy() -> None:
    world = World()
    world.rates |= {"h0001": 0.4, "h0002": 0.3}
    sim = simulate(world, run__cycles=1)
    sim.until(lambda a: isinstance(a, Propose) and a.iteration == 2)
    sim.command("rollback", policy="theta-0000")
    assert sim.next() == Evaluate(("h0000",))
    sim.until(EndPhase)
    assert {c.id for c in sim.state.ranking()} >= {"h0000", "h0001"}
    sim.step()
    assert (sim.state.policy, sim.state.harness) == ("theta-0000", "h0000")


def test_a_rollback_while_a_step_is_open_leaves_that_step_untrained() -> None:
    """Also the way out when the version of an open step turns out to be damaged on disk."""
    sim = simulate(schedule__epochs=0.2, run__cycles=1)
    sim.until(lambda a: isinstance(a, todo.TrainStep) and sim.state.step == 2)
    planned = sim.command("rollback", policy="theta-0001")
    assert planned.interrupt and "step 3 is not trained" in planned.effect
    assert isinstance(sim.step(), todo.TrainStep)
    assert (sim.state.policy, sim.state.step, sim.state.open_step) == ("theta-0001", 3, None)
    assert sim.next() == SampleStep(4)


def test_versions_after_a_rollback_get_new_names() -> None:
    sim = simulate(schedule__epochs=0.2, run__cycles=1)
    sim.until(lambda a: isinstance(a, SampleStep) and a.step == 4)
    sim.command("rollback", policy="theta-0001")
    sim.step()
    sim.step()
    assert sim.state.policy == "theta-0004" and sim.state.versions["theta-0004"].parent == "theta-0001"


# --------------------------------------------------------------------------------------------------------- everything


class Chaos(World):
    """Random outcomes, a random person."""

    def rate(self, sim: Simulator, harness: str) -> float:
        return self.random.choice([0.0, 0.0, 0.3, 0.6, 1.0])

    def batch(self, sim: Simulator, harness: str, episodes: int, purpose: str) -> Batch:
        invalid = self.random.choice([0, 0, 0, 1, episodes])
        return batch(episodes, self.random.randint(0, episodes - invalid), invalid)

    def trained(self, sim: Simulator, sampled: Batch) -> int:
        return sampled.accepted if self.random.random() < 0.8 else 0

    def proposals(self, sim: Simulator, wanted: int) -> int:
        return self.random.choice([0, wanted, wanted])

    def check(self, sim: Simulator, harness: str) -> bool:
        return self.random.random() < 0.7

    def outcome(self, sim: Simulator, harness: str) -> r.Outcome:
        outcomes: list[r.Outcome] = ["scored", "scored", "infra", "crash", "timeout"]
        return self.random.choice(outcomes)

    def person(self, sim: Simulator, action: Ask) -> bool:
        for harness in action.harnesses:
            if self.random.random() < 0.5:
                sim.command("approve", harness=harness)
            else:
                sim.command("veto", harness=harness, reason="no")
        if action.before == "propose":
            sim.propose()
        if action.before == "unpin":
            sim.command("unpin")
        return True


@limits(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    condition=st.sampled_from(["whale", "adaptive", "weight-only", "harness-only", "fst", "stagewise"]),
    first=st.sampled_from(["weight", "harness", "auto"]),
    approval=st.sampled_from(["auto", "before-eval", "before-accept"]),
    proposer=st.sampled_from(["rules", "person"]),
    budget=st.integers(60, 500),
    cycles=st.integers(0, 3),
    confirm=st.integers(0, 2),
    revisit=st.integers(0, 2),
    pinned=st.sampled_from(["skip", "search-only"]),
)
def test_whatever_happens_a_run_ends_within_its_budget(
    seed: int, condition: str, first: str, approval: str, proposer: str, budget: int, cycles: int, confirm: int,
    revisit: int, pinned: str,
) -> None:  # fmt: skip
    """Random outcomes and random commands: each action moves the run on, and none overspends (asserted by `run`)."""
    config = make_config(
        run__condition=condition, run__first_phase=first, run__budget_episodes=budget, run__cycles=cycles,
        run__look_episodes=10, harness__approval=approval, harness__confirm=confirm, harness__revisit=revisit,
        harness__while_pinned=pinned, proposer__kind=proposer, schedule__harness_min=2, schedule__harness_cap=5,
        test__samples=1, test__at="phases",
    )  # fmt: skip
    sim, choose = Simulator(config, Chaos(seed)), random.Random(seed)
    for _ in range(choose.randrange(30)):
        if sim.state.status != "running":
            break
        if choose.random() < 0.2:
            what = choose.choice(["switch", "pin", "unpin", "rollback", "approve", "propose"])
            args: dict[str, Any] = {"now": choose.random() < 0.5} if what == "switch" else {}
            if what in ("pin", "rollback", "approve"):
                args["harness"] = choose.choice(list(sim.state.harnesses))
            if what == "rollback":
                args["policy"] = choose.choice(list(sim.state.versions))
            if what == "propose":
                sim.propose()
                continue
            try:
                sim.command(what, **args)
            except control.Refused:
                continue
        sim.step()
        assert sim.state.budget_used <= budget
    if sim.state.status == "running":
        sim.run(limit=1500)
    assert isinstance(sim.actions[-1], Finish) and sim.state.phase is None
    if cycles and condition != "stagewise":
        assert sim.state.cycle <= cycles


@given(st.integers(0, 2**20), st.integers(0, 60))
def test_a_killed_run_asks_again_and_gets_the_same_answer(seed: int, at: int) -> None:
    """next_action depends on the state that the journal yields, and on nothing else."""
    from whale_tui.loop.state import replay

    sim = Simulator(make_config(harness__approval="before-eval", run__first_phase="auto", run__look_episodes=10))
    sim.world = Chaos(seed)
    for _ in range(at):
        if sim.state.status == "finished":
            return
        sim.step()
    again = replay([r.event_decoder.decode(r.encode_event(e)) for e in sim.events])
    assert todo.next_action(again, sim.config) == sim.next()
