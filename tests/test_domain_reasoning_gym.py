"""reasoning-gym: generators by name, splits that share nothing, answers scored behind the seal and never evaluated."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from whale_tui import config
from whale_tui.domains import base
from whale_tui.domains.base import DomainError
from whale_tui.harness import checks
from whale_tui.harness.worker import can_seal
from whale_tui.proposers.edits import Kit, Source, generic

SAMPLE = Path(__file__).parent.parent / "sample_configs" / "reasoning-gym-small.toml"
needs_it = pytest.mark.skipif(
    importlib.util.find_spec("reasoning_gym") is None, reason="reasoning-gym is not installed"
)
needs_seal = pytest.mark.skipif(not can_seal()[0], reason="no seal here")


def load(generator: str, **options: Any) -> Any:
    sizes = {"weight": 8, "harness": 4, "test": 4}
    return base.load("reasoning_gym", {"generator": generator, **sizes, **options})


@pytest.fixture
async def opened() -> AsyncIterator[Any]:
    """Load domains, and close them in the end."""
    domains = []

    def load_one(generator: str, **options: Any) -> Any:
        domains.append(load(generator, **options))
        return domains[-1]

    yield load_one
    for domain in domains:
        await base.close(domain)


def test_without_the_package_the_command_that_installs_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(DomainError, match=r'pip install "whale-tui\[reasoning-gym\]"'):
        load("chain_sum")


@needs_it
def test_splits_share_no_question_and_follow_the_seed() -> None:
    domain, again, other = (load("chain_sum", seed=seed, weight=64) for seed in (0, 0, 1))
    tasks = [task for split in ("weight", "harness", "test") for task in domain.tasks(split)]
    shown = [demonstration.task["question"] for demonstration in domain.brief.demonstrations]
    questions = [task.public["question"] for task in tasks] + shown
    assert len(tasks) == 72 and len(shown) == 12 and len(set(questions)) == 84
    assert all(task.public.keys() == {"question"} and task.private["answer"] for task in tasks)
    assert [t.hash for t in again.tasks("test")] == [t.hash for t in domain.tasks("test")]
    assert not {t.hash for t in other.tasks("test")} & {t.hash for t in domain.tasks("test")}
    assert domain.report.counts["weight"].kept == 64


@needs_it
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"generator": "chain_sums"}, r"no generator 'chain_sums'; did you mean chain_sum"),
        ({"generator": "chain_sum", "config": {"max_term": 3}}, r"config\.max_term: .*did you mean .*max_terms"),
        ({"generator": "chain_sum", "config": {"seed": 3}}, r"config\.seed: sizes and seed are options of the domain"),
        (
            {"generator": "chain_sum", "config": {"min_terms": 5, "max_terms": 2}},
            r"config of chain_sum: AssertionError",
        ),
        (
            {"generator": "chain_sum", "config": {"max_terms": 2, "max_digits": 1}, "weight": 9000},
            r"domain\.options\.weight = 9000: chain_sum gave \d+ questions .*ask for fewer",
        ),
        ({"generator": "chain_sum", "accept_from": 0}, "accept_from"),
    ],
)
def test_what_is_wrong_is_named_with_the_mend(options: dict[str, Any], words: str) -> None:
    with pytest.raises(DomainError, match=words):
        load(**options)


@needs_it
@needs_seal
@pytest.mark.parametrize("generator", ["chain_sum", "simple_integration", "word_ladder"])
async def test_a_generator_accepts_its_own_answers_and_no_other(opened: Any, generator: str) -> None:
    domain = opened(generator)
    assert await base.problems(domain) == []
    for task in domain.tasks("test"):
        assert (await domain.verify(task, task.private["answer"], None)).decision == "accept"
        for wrong in ("", "  ", "nonsense", "-1 -1", "\0", "((((", "é" * 1000):
            assert (await domain.verify(task, wrong, None)).decision == "reject", wrong


@needs_it
@needs_seal
async def test_no_answer_is_evaluated_as_python(opened: Any) -> None:
    """These generators hand an answer to eval: a literal is read, an expression that gives the same is not."""
    domain = opened("spiral_matrix", accept_from=0.1)  # what it gives for a list in Python's form
    task = domain.tasks("test")[0]
    literal = str([int(each) for each in task.private["answer"].split()])
    assert (await domain.verify(task, literal, None)).decision == "accept"
    for code in (f"[x for x in {literal}]", f"{literal} + []", f"eval({literal!r})"):
        assert (await domain.verify(task, code, None)).decision == "reject", code
    domain = opened("polynomial_multiplication")
    task = domain.tasks("test")[0]
    right = task.private["answer"]
    assert (await domain.verify(task, f"({right})", None)).decision == "accept"
    for code in (f'eval("{right}")', f"[{right}][0]", f"sympify({right})", f"(lambda: {right})()"):
        assert (await domain.verify(task, code, None)).decision == "reject", code


@needs_it
@needs_seal
async def test_an_answer_that_hangs_or_swells_is_rejected_and_costs_no_other(opened: Any) -> None:
    domain = opened("polynomial_multiplication", score_seconds=1)
    task = domain.tasks("test")[0]
    verdict = await domain.verify(task, "9**9**9**9", None)
    assert verdict.decision == "reject" and "can't be scored" in verdict.reason
    assert (await domain.verify(task, task.private["answer"], None)).decision == "accept"


@needs_it
@needs_seal
async def test_a_lower_score_is_accepted_where_the_config_says_so(opened: Any) -> None:
    for accept_from, decision in ((1.0, "reject"), (0.005, "accept")):
        domain = opened("countdown", accept_from=accept_from)
        assert (await domain.verify(domain.tasks("test")[0], "1 + 1", None)).decision == decision


@needs_it
def test_the_sample_config_loads_and_every_edit_of_h0_keeps_the_contract() -> None:
    domain = base.load("reasoning_gym", config.load(SAMPLE).config.domain.options)
    kit, h0 = Kit(domain.edits, domain.brief), Source(domain.h0)
    assert checks.check(domain.h0).ok and kit.format_of(h0) is not None
    changed = [new for edit in generic(kit) if (new := edit.change(h0, kit)) is not None]
    assert len(changed) > 20 and all(checks.check(new.text).ok for new in changed)
    answers = {task.private["answer"] for task in domain.tasks("harness")}
    given = domain.brief.text + str(domain.brief.demonstrations)
    assert not [w for new in changed for w in checks.check(new.text, answers=sorted(answers), given=given).warnings]
