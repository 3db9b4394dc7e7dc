"""The reducer: one state whoever folds the events, at any prefix, and a ledger that misses nothing."""

from __future__ import annotations

import msgspec
import pytest

from tests.scripted import Script, write_run
from tests.simulator import Simulator, World, make_config
from whale_tui import records as r
from whale_tui.loop.state import RunState, reduce, replay, snapshot
from whale_tui.loop.words import words


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Script:
    return write_run(tmp_path_factory.mktemp("run") / "first-light", until="finished")


def test_replaying_the_journal_yields_the_state_that_the_engine_holds(script: Script) -> None:
    assert replay(list(script.journal.events())) == script.state


def test_any_prefix_is_the_state_of_that_moment(script: Script) -> None:
    events = list(script.journal.events())
    assert {type(e) for e in events} >= {r.StepSampled, r.CandidateScored, r.CommandTaken, r.TestScored, r.RunFinished}
    state = RunState()
    for count, event in enumerate(events, 1):
        reduce(state, event)
        assert state.seq == count
        if count % 7 == 0 or count == len(events):
            assert replay(events[:count]) == state
            assert msgspec.to_builtins(snapshot(state)) == msgspec.to_builtins(state)


def test_a_snapshot_shares_nothing_with_the_state(script: Script) -> None:
    events = list(script.journal.events())
    state = replay(events[: len(events) // 2])
    taken, before = snapshot(state), msgspec.json.encode(state)
    mutables = {id(v) for v in _mutable(state)}
    assert mutables and not mutables & {id(v) for v in _mutable(taken)}
    for event in events[len(events) // 2 :]:
        reduce(state, event)
    assert msgspec.json.encode(taken) == before


def _mutable(value: object) -> list[object]:
    """Every list, dict and struct that can be changed, all the way down. Frozen structs may be shared."""
    out: list[object] = []
    if isinstance(value, msgspec.Struct):
        if not value.__struct_config__.frozen:
            out.append(value)
        for name in value.__struct_fields__:
            out += _mutable(getattr(value, name))
    elif isinstance(value, dict):
        out.append(value)
        for item in value.values():
            out += _mutable(item)
    elif isinstance(value, list):
        out.append(value)
        for item in value:
            out += _mutable(item)
    return out


def test_the_ledger_is_the_sum_of_the_episode_records_by_purpose(script: Script) -> None:
    by_purpose: dict[str, int] = {}
    for key, spend in script.state.ledger.items():
        purpose = key.partition("/")[2]
        by_purpose[purpose] = by_purpose.get(purpose, 0) + spend.episodes
    counted = script.journal.counts()
    assert {k: n for k, n in by_purpose.items() if n} == counted
    assert script.state.episodes == sum(counted.values())
    assert script.state.budget_used == sum(n for purpose, n in counted.items() if purpose != "test")


def test_the_ledger_keeps_tokens_and_dollars_of_the_proposer_apart(script: Script) -> None:
    told = [e for e in script.journal.events() if isinstance(e, r.ProposalsIn)]
    spend = script.state.ledger["harness/propose"]
    assert spend.episodes == 0
    assert spend.prompt_tokens == sum(e.prompt_tokens for e in told)
    assert spend.dollars == pytest.approx(sum(e.dollars for e in told))


def test_every_event_has_words_in_one_line(script: Script) -> None:
    for event in script.journal.events():
        assert words(event) and "\n" not in words(event), event


def test_a_phase_record_holds_its_signal_and_cost(script: Script) -> None:
    events = list(script.journal.events())
    steps = [e.batch for e in events if isinstance(e, r.StepSampled)]
    first = script.state.phases[0]
    assert first.signal == [b.mean for b in steps[:10]]
    assert first.episodes == sum(b.episodes for b in steps[:10])
    assert (first.start_value, first.end_value) == (first.signal[0], first.signal[9])


def test_a_step_that_was_never_sampled_cannot_finish() -> None:
    sim = Simulator(make_config())
    sim.step()
    with pytest.raises(ValueError, match="never sampled"):
        sim.record(r.StepFinished(step=1, policy="theta-0000", trained=0, trained_tokens=0, loss=None, grad_norm=None,
                                  seconds=1.0))  # fmt: skip


def test_stopped_runs_go_on_and_paused_ones_stay_paused() -> None:
    sim = Simulator(make_config())
    sim.record(r.Paused(reason="by ann"), r.EngineStarted(pid=2, resumed=True))
    assert sim.state.status == "paused"
    sim.record(r.RunFinished(status="stopped", reason="by ann"))
    assert sim.state.status == "stopped"
    sim.record(r.EngineStarted(pid=3, resumed=True))
    assert (sim.state.status, sim.state.reason, sim.state.engine_starts) == ("running", "", 3)


def test_a_veto_stays_whatever_an_evaluation_in_flight_comes_to() -> None:
    sim = Simulator(make_config(run__first_phase="harness"))
    sim.until(lambda a: type(a).__name__ == "Evaluate" and len(a.harnesses) == 2)
    action = sim.next()
    sim.command("veto", harness="h0001", reason="reads the clock")
    sim.perform(action)
    sim.record(r.CandidateOutcome(harness="h0001", outcome="crash", reason="late"))
    candidate = sim.state.harnesses["h0001"]
    assert (candidate.outcome, candidate.reason, candidate.decided) == ("vetoed", "reads the clock", "vetoed")
    assert "h0001" not in [c.id for c in sim.state.ranking()]
    assert candidate.scores  # measured and paid for all the same


def test_score_keys_differ_in_each_of_their_parts() -> None:
    base = r.Score(policy="theta-0001", policy_hash="p", harness_hash="h", tasks_hash="t", sampling=r.Sampling(),
                   batch=r.Batch())  # fmt: skip
    other = msgspec.structs.replace
    keys = {
        s.key
        for s in (
            base, other(base, policy_hash="q"), other(base, harness_hash="i"), other(base, tasks_hash="u"),
            other(base, sampling=r.Sampling(temperature=0.5)),
        )
    }  # fmt: skip
    assert len(keys) == 5
    assert other(base, policy="renamed").key == base.key  # nothing is looked up by name


def test_best_is_the_best_pair_and_the_earlier_of_equals() -> None:
    world = World()
    world.rates = {"h0000": 0.5, "h0001": 0.5}
    sim = Simulator(make_config(test__samples=2, test__at="phases", run__cycles=1), world).run()
    assert len(sim.state.tests) > 1
    assert sim.state.best is sim.state.tests[0]
    nothing = msgspec.structs.replace(sim.state.tests[0], n=0, mean=0.0)
    assert RunState(tests=[nothing]).best is None


def test_invalid_episodes_enter_no_average() -> None:
    assert r.Verdict("invalid", "").reward is None
    assert r.summarise([], 0.0).mean is None
