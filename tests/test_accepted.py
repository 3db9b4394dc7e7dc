"""The accepted set, its minibatches, the order of tasks; and what a proposer may read of them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as limits
from hypothesis import strategies as st

from whale_tui.config import Config, ConfigError, Weight
from whale_tui.loop.accepted import accepted_set, draw_tasks, minibatches
from whale_tui.loop.archive import _without_answer
from whale_tui.loop.retention import kept_versions
from whale_tui.loop.state import RunState, Version
from whale_tui.records import Call, Episode, Sampling, Task, TestScore


def call(*output: int, prompt: tuple[int, ...] = (1, 2)) -> Call:
    return Call(
        prompt_ids=list(prompt), output_ids=list(output), logprobs=[-0.5] * len(output), finish_reason="stop", seed=0,
        max_tokens=8,
    )  # fmt: skip


def episode(id: str, task: str, *calls: Call, verdict: str = "accept", **more: Any) -> Episode:
    values: dict[str, Any] = {
        "id": id, "cycle": 1, "phase": "weight", "step": 1, "iteration": 0, "purpose": "train", "task": task,
        "task_hash": task, "sample": 0, "policy": "theta-0000", "policy_hash": "p0", "harness": "h0000",
        "harness_hash": "s", "tokenizer_hash": "t", "sampling": Sampling(), "calls": list(calls or (call(5, 6),)),
        "tools": [], "answer": "", "verdict": verdict, "reason": "", "truncated": False,
        "reward": None if verdict == "invalid" else float(verdict == "accept"), "seconds": 0.1,
    }  # fmt: skip
    return Episode(**(values | more))


# ------------------------------------------------------------------------------------------------------- accepted set


def test_only_accepted_episodes_in_the_order_they_were_run() -> None:
    episodes = [
        episode("a", "t1"), episode("b", "t1", verdict="reject"), episode("c", "t2", verdict="invalid"),
        episode("d", "t3"), episode("e", "t2"),
    ]  # fmt: skip
    assert [e.id for e in accepted_set(episodes, "p0", Weight())] == ["a", "d", "e"]


def test_truncated_episodes_are_left_out_unless_asked_for() -> None:
    episodes = [episode("a", "t"), episode("b", "t", truncated=True)]
    assert [e.id for e in accepted_set(episodes, "p0", Weight())] == ["a"]
    assert [e.id for e in accepted_set(episodes, "p0", Weight(train_truncated=True))] == ["a", "b"]


def test_an_accepted_episode_of_another_version_raises_and_others_do_not_matter() -> None:
    with pytest.raises(ValueError, match="b was sampled from p1, not p0"):
        accepted_set([episode("a", "t"), episode("b", "t", policy_hash="p1")], "p0", Weight())
    rejected = [episode("b", "t", verdict="reject", policy_hash="p1")]
    assert accepted_set(rejected, "p0", Weight()) == []


def test_an_episode_without_a_sampled_token_teaches_nothing() -> None:
    """A harness that answers by a tool alone is accepted, but there is nothing of the policy's in it."""
    none = episode("a", "t")
    none.calls = []
    empty, some = episode("b", "t", call()), episode("c", "t", call(), call(7))
    assert [e.id for e in accepted_set([none, empty, some], "p0", Weight())] == ["c"]
    assert minibatches(accepted_set([none, empty], "p0", Weight()), 4, "s") == []


def test_the_cap_drops_repeats_and_what_is_over_it_per_task() -> None:
    same, other = call(5, 6), call(5, 7)
    episodes = [
        episode("a", "t1", same), episode("b", "t1", same), episode("c", "t1", other), episode("d", "t1", call(9)),
        episode("e", "t2", same), episode("f", "t1", same, other),
    ]  # fmt: skip
    assert [e.id for e in accepted_set(episodes, "p0", Weight(max_accepted_per_task=2))] == ["a", "c", "e"]
    assert [e.id for e in accepted_set(episodes, "p0", Weight(max_accepted_per_task=9))] == ["a", "c", "d", "e", "f"]
    assert len(accepted_set(episodes, "p0", Weight())) == 6  # off: the paper's rule


episodes_of_any_kind = st.lists(
    st.tuples(
        st.sampled_from(["accept", "reject", "invalid"]), st.integers(0, 4), st.booleans(),
        st.lists(st.lists(st.integers(0, 2), max_size=2), max_size=3),
    ),
    max_size=20,
)  # fmt: skip


def build(rows: list[tuple[str, int, bool, list[list[int]]]]) -> list[Episode]:
    made = []
    for n, (verdict, task, cut, outputs) in enumerate(rows):
        one = episode(f"e{n}", f"t{task}", verdict=verdict, truncated=cut)
        one.calls = [call(*ids, prompt=(n, k)) for k, ids in enumerate(outputs)]
        made.append(one)
    return made


@given(episodes_of_any_kind, st.integers(0, 3), st.integers(1, 5))
def test_the_accepted_set_is_a_pure_function_and_minibatches_hold_each_call_once(
    rows: list[tuple[str, int, bool, list[list[int]]]], cap: int, size: int
) -> None:
    options, episodes = Weight(max_accepted_per_task=cap), build(rows)
    kept = accepted_set(episodes, "p0", options)
    assert kept == accepted_set(build(rows), "p0", options)
    assert episodes == build(rows)  # untouched
    if cap:
        assert max(Counter(e.task for e in kept).values(), default=0) <= cap

    batches = minibatches(kept, size, "seed")
    assert batches == minibatches(kept, size, "seed")
    trained = Counter((tuple(s.prompt_ids), tuple(s.output_ids)) for batch in batches for s in batch)
    sampled = Counter((tuple(c.prompt_ids), tuple(c.output_ids)) for e in kept for c in e.calls if c.output_ids)
    assert trained == sampled  # every sampled id, once, as it was sampled
    assert len(batches) == -(-len(kept) // size) and all(batches)
    per_batch = [len({s.prompt_ids[0] for s in batch}) for batch in batches]  # prompts begin with the episode's number
    assert per_batch == [size] * (len(kept) // size) + ([len(kept) % size] if len(kept) % size else [])


def test_minibatches_keep_a_tasks_episodes_together_in_a_seeded_order() -> None:
    kept = [episode(f"{t}{n}", f"t{t}", call(5, prompt=(t, n))) for n in range(3) for t in range(8)]
    order = [s.prompt_ids[0] for batch in minibatches(kept, 5, "one") for s in batch]
    assert [t for n, t in enumerate(order) if n % 3 == 0] == list(dict.fromkeys(order))
    other = [s.prompt_ids[0] for batch in minibatches(kept, 5, "two") for s in batch]
    assert sorted(order) == sorted(other) and order != other


# -------------------------------------------------------------------------------------------------------- task order


@limits(max_examples=100)
@given(seed=st.integers(0, 99), total=st.integers(1, 60), count=st.integers(1, 60), rounds=st.integers(1, 12))
def test_no_task_comes_twice_in_an_epoch(seed: int, total: int, count: int, rounds: int) -> None:
    """`drawn` is all that a resumed or later phase knows, so splits into phases can't matter."""
    if count > total:
        with pytest.raises(ValueError, match="D_weight has"):
            draw_tasks(seed, total, 0, count)
        return
    per_epoch = total // count
    epochs: dict[int, list[int]] = {}
    for step in range(rounds):
        picked = draw_tasks(seed, total, step * count, count)
        assert picked == draw_tasks(seed, total, step * count, count)
        assert len(picked) == count and all(0 <= n < total for n in picked)
        epochs.setdefault(step // per_epoch, []).extend(picked)
    for tasks in epochs.values():
        assert len(set(tasks)) == len(tasks)


def test_epochs_and_seeds_differ_and_the_tail_changes() -> None:
    first = [n for step in range(3) for n in draw_tasks(0, 10, 3 * step, 3)]
    second = [n for step in range(3, 6) for n in draw_tasks(0, 10, 3 * step, 3)]
    assert first != second and len(set(first)) == len(set(second)) == 9
    assert draw_tasks(0, 100, 0, 10) != draw_tasks(1, 100, 0, 10)
    left_out = {
        (set(range(10)) - {n for step in range(3 * e, 3 * e + 3) for n in draw_tasks(0, 10, 3 * step, 3)}).pop()
        for e in range(20)
    }
    assert len(left_out) > 3


@pytest.mark.parametrize(
    ("tasks", "prompts", "steps"), [(4096, 24, 170), (4096, 256, 16), (256, 256, 1), (511, 256, 1)]
)
def test_steps_per_epoch_is_a_floor(tasks: int, prompts: int, steps: int) -> None:
    assert Config(weight=Weight(prompts_per_step=prompts)).steps_per_epoch(tasks) == steps


def test_steps_per_epoch_of_too_few_tasks_says_the_mend() -> None:
    with pytest.raises(ConfigError, match="set it to 255 or fewer"):
        Config(weight=Weight(prompts_per_step=256)).steps_per_epoch(255)


# ---------------------------------------------------------------------------------------- what a proposer may not read


@pytest.mark.parametrize(
    ("private", "reason", "shown"),
    [
        ({"answer": "slate"}, "answered 'tin', wanted 'slate'", "answered 'tin', wanted '(reference answer)'"),
        ({"answer": "Slate"}, "wanted slate", "wanted (reference answer)"),
        ({"answers": ["slate", "grey slate"]}, "wanted grey slate", "wanted (reference answer)"),
        ({"answer": 42}, "42 is wanted, not 421", "(reference answer) is wanted, not 421"),
        ({"steps": [{"move": "e2e4"}]}, "e2e4 was to be played", "(reference answer) was to be played"),
        ({"answer": "", "ok": True}, "True to form", "True to form"),
        ({"answer": "a.c"}, "abc a.c", "abc (reference answer)"),
    ],
)
def test_reasons_do_not_tell_the_reference_answer(private: dict[str, Any], reason: str, shown: str) -> None:
    assert _without_answer(reason, Task("k", {}, private)) == shown


# ---------------------------------------------------------------------------------------------------------- retention


def test_kept_versions_are_the_newest_the_current_the_tested_and_the_ends_of_cycles() -> None:
    versions = {f"theta-{n:04d}": Version(name=f"theta-{n:04d}", hash=f"p{n}", cycle=(n + 3) // 4) for n in range(13)}
    tested = TestScore("theta-0002", "h0000", "p2", "s", 0.5, 0.4, 0.6, 9, 8, 0.6)
    state = RunState(policy="theta-0006", versions=versions, tests=[tested])
    assert kept_versions(state, 2) == {
        "theta-0000", "theta-0002", "theta-0004", "theta-0006", "theta-0008", "theta-0011", "theta-0012"
    }  # fmt: skip
