# ruff: noqa: E501 (tables, a few cases a line)
"""The `rules` proposer: every edit parses, keeps the contract, is new, leaks nothing, and answers to what the archive shows."""

from __future__ import annotations

import ast
import asyncio
import itertools
import json
import re
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from whale_tui.domains import base
from whale_tui.harness import checks, contract, fst
from whale_tui.proposers.base import Request
from whale_tui.proposers.edits import (
    RETRYING,
    VOTING,
    DomainRules,
    Kit,
    Source,
    cross,
    generic,
    kinds_between,
)
from whale_tui.proposers.rules import Rules
from whale_tui.records import Archived, ArchivedEpisode, Proposal, ToolUse

NAMES = ("encyclopedia", "arithmetic")
DOMAINS = {name: base.load(name) for name in NAMES}
KITS = {name: Kit(domain.edits, domain.brief) for name, domain in DOMAINS.items()}
REPLIES = (
    "",
    "lion",
    "Answer: lion",
    "<answer>lion</answer> and more",
    "\\boxed{7}",
    "3 + 4 = 7",
    "3 +",
    "a\nb",
    "{}%s{text}",
)


def ended(
    answer: str = "", decision: str = "reject", *, truncated: bool = False, tool: str = "", reason: str = ""
) -> ArchivedEpisode:
    tools = [ToolUse("calc", "'x'", tool, 0.0, 1)] if tool else []
    return ArchivedEpisode({"question": "?"}, ["..."], tools, answer, decision, reason, truncated)  # type: ignore[arg-type]


def archived(name: str, source: str, parent: str = "", **fields: Any) -> Archived:
    values: dict[str, Any] = {
        "hypothesis": "", "proposer": "rules", "outcome": "scored", "reason": "", "iteration": 1, "cycle": 1,
        "calls": 1, "tokens": 20, "mean": 0.0, "episodes": [ended(truncated=True)] * 8,
    } | fields  # fmt: skip
    return Archived(id=name, source=source, parent=parent, **values)


def propose(name: str, archive: list[Archived], *, candidates: int = 3, seed: int = 0, **more: Any) -> list[Proposal]:
    domain = DOMAINS[name]
    fields: dict[str, Any] = {"iteration": 2, "fst": False, "incumbent": archive[0].id} | more
    request = Request(archive=archive, brief=domain.brief, candidates=candidates, seed=seed, **fields)
    return list(asyncio.run(Rules(domain.edits).propose(request)))


def start(name: str, **fields: Any) -> list[Archived]:
    return [archived("h0000", DOMAINS[name].h0, outcome="accepted", **fields)]


class Refused(Exception):
    """Stands in for the contract's ToolError."""


def episode(name: str, source: str, reply: str, *, calls: int | None = 4) -> tuple[Any, list[list[dict[str, str]]]]:
    """Run a harness on a real task with its real tools and a policy that always says `reply`; the answer and the prompts."""
    domain, prompts = DOMAINS[name], []
    task = domain.tasks("harness")[0]
    remaining = SimpleNamespace(calls=calls, tokens=None)

    def chat(messages: Any, *, max_tokens: Any = None, stop: Any = None, thinking: Any = None) -> Any:
        assert remaining.calls != 0, "called beyond its budget"
        prompts.append(messages)
        remaining.calls = None if remaining.calls is None else remaining.calls - 1
        assert all(isinstance(m["content"], str) and m["role"] in ("system", "user", "assistant") for m in messages)
        assert isinstance(max_tokens, int) and 0 < max_tokens <= 64 and isinstance(stop, list)
        text = reply
        for each in stop:
            text = text.split(each)[0]
        return SimpleNamespace(text=text, finish_reason="stop", prompt_tokens=1, completion_tokens=1)

    def tool(function: Any) -> Any:
        def use(*args: Any) -> Any:
            try:
                return function(*args)
            except ValueError as error:
                raise Refused(str(error)) from error

        return use

    tools = SimpleNamespace(**{key: tool(function) for key, function in domain.tools(task).items()})
    names: dict[str, Any] = {"ToolError": Refused}
    exec(compile(source, "harness.py", "exec"), names)
    return names["run"](dict(task.public), SimpleNamespace(chat=chat, remaining=remaining), tools), prompts


# ------------------------------------------------------------------------------------------------------------- edits


@pytest.mark.parametrize("name", NAMES)
def test_every_edit_and_every_pair_of_edits_keeps_the_contract_and_leaks_nothing(name: str) -> None:
    domain, kit = DOMAINS[name], KITS[name]
    h0 = Source(domain.h0)
    answers = [task.private["answer"] for task in domain.tasks("harness")]
    questions = [task.public["question"] for split in ("weight", "harness", "test") for task in domain.tasks(split)]  # type: ignore[arg-type]
    given = domain.brief.text + str(domain.brief.demonstrations)
    edits = generic(kit)
    changed = {edit.words: new for edit in edits if (new := edit.change(h0, kit)) is not None}
    kinds = {edit.kind for edit in edits if edit.words in changed}
    assert kinds >= {"format", "examples", "system", "length", "retry", "vote"}
    for first, second in itertools.combinations(edits, 2):
        if first.words in changed and first.kind != second.kind:
            new = second.change(changed[first.words], kit)
            if new is not None:
                changed[f"{first.words}, {second.words}"] = new
    assert len(changed) > 100
    for words, new in changed.items():
        checked = checks.check(new.text, answers=answers, given=given, archive_hashes=[checks.source_hash(domain.h0)])
        assert checked.ok, (words, checked.reason)
        assert not checked.warnings, (words, checked.warnings)
        assert Source(new.text).text == new.text
    together = "\n".join(new.text for new in changed.values())
    assert not [question for question in questions if question in together]


@pytest.mark.parametrize("name", NAMES)
def test_every_edit_gives_a_harness_that_runs_whatever_the_policy_says(name: str) -> None:
    kit, h0 = KITS[name], Source(DOMAINS[name].h0)
    single = [new for edit in generic(kit) if (new := edit.change(h0, kit)) is not None]
    for new, reply in itertools.product(single, REPLIES):
        answer, prompts = episode(name, new.text, reply)
        assert isinstance(answer, str) and 1 <= len(prompts) <= 4


@pytest.mark.parametrize("name", NAMES)
def test_a_format_parses_what_its_own_examples_show(name: str) -> None:
    """Format and parser belong together: a policy that answers as the example does is understood."""
    kit, h0 = KITS[name], Source(DOMAINS[name].h0)
    examples = next(edit for edit in generic(kit) if edit.words == "3 worked examples")
    formats = [new for edit in generic(kit) if edit.kind == "format" and (new := edit.change(h0, kit)) is not None]
    assert len(formats) >= 3
    for source in [h0, *formats]:
        new = examples.change(source, kit)
        assert new is not None
        pairs = new.constants()["EXAMPLES"]
        for (user, assistant), demonstration in zip(pairs, DOMAINS[name].brief.demonstrations, strict=False):
            assert demonstration.task["question"] in user
            answer, prompts = episode(name, new.text, assistant)
            assert answer == demonstration.answer
        # The task is put as the examples are: the same wording around the same fields.
        wording = map(re.escape, re.split(r"\{\w+\}", new.constants()["TURN"].replace("{{", "{").replace("}}", "}")))
        shape = re.compile(".+".join(wording), re.DOTALL)
        assert all(shape.fullmatch(text) for text in (pairs[0][0], prompts[0][-1]["content"]))


def test_examples_follow_the_passages_and_the_format_of_the_harness() -> None:
    kit = KITS["encyclopedia"]
    by_words = {edit.words: edit for edit in generic(kit)}
    source = Source(DOMAINS["encyclopedia"].h0)
    for words in (
        "2 worked examples",
        "the 3 best passages",
        "passages of up to 400 characters",
        "the bare answer on the first line",
    ):
        new = by_words[words].change(source, kit)
        assert new is not None
        source = new
    shown = DOMAINS["encyclopedia"].brief.demonstrations[:2]
    for (user, assistant), demonstration in zip(source.constants()["EXAMPLES"], shown, strict=True):
        assert all(passage["text"] in user for passage in demonstration.tools[0]["result"])
        assert assistant == demonstration.answer and "<answer>" not in user


def test_retry_shows_the_error_and_stays_within_its_calls() -> None:
    kit = KITS["arithmetic"]
    by_words = {edit.words: edit for edit in generic(kit)}
    source = Source(DOMAINS["arithmetic"].h0)
    for words in ("an expression that calc works out", "2 more tries with the error shown"):
        source = by_words[words].change(source, kit) or pytest.fail(words)
    answer, prompts = episode("arithmetic", source.text, "3 +")
    assert answer == "" and len(prompts) == 3
    assert "is not an expression" in prompts[1][-1]["content"] and prompts[1][-2]["content"] == "3 +"
    assert len(episode("arithmetic", source.text, "3 +", calls=2)[1]) == 2
    assert episode("arithmetic", source.text, "3 + 4")[0] == "7"


def test_a_vote_takes_the_most_common_answer() -> None:
    names: dict[str, Any] = {"VOTES": 4, "messages": lambda turn: turn, "ask": lambda task, tools: "turn"}
    said = iter(["b", "a", "", "a"])
    names["attempt"] = lambda chat, model, tools: next(said)
    exec(VOTING, names)
    assert names["run"]({}, SimpleNamespace(remaining=SimpleNamespace(calls=9)), None) == "a"


def test_an_edit_brings_the_import_that_it_needs() -> None:
    """A harness written by hand may lack it."""
    names = "def query(task):\n    string = task['question']\n    return re.findall('[A-Z]', string)\n"
    bare = 'def query(task):\n    return ""\n\n\ndef run(task, model, tools):\n    return query(task)\n'
    for head in ("", '"""Doc."""\n\n', "from json import loads\n\n", "import json, math\n"):
        text = Source(head + bare).with_function(names).text
        assert text.count("import re\n") == 1 and "import string" not in text
        assert ast.get_docstring(ast.parse(text)) == ("Doc." if head.startswith('"') else None)
        found: dict[str, object] = {}
        exec(text, found)
        assert found["run"]({"question": "Ab C"}, None, None) == ["A", "C"]
    assert Source("import re\n" + bare).with_function(names).text.count("import re") == 1
    assert (
        Source("import re as r\nfrom os import path as re\n" + bare).with_function(names).text.count("import re\n") == 0
    )


def test_a_source_keeps_what_an_edit_does_not_touch() -> None:
    text = '"""Doc."""\n\nimport re\n\n# why\nSYSTEM = "a"  # trailing\nEXAMPLES = [("u", "v")]\n\n\ndef run(task, model, tools):\n    return SYSTEM  # note\n'
    source = Source(text)
    assert source.constants() == {"SYSTEM": "a", "EXAMPLES": [("u", "v")]}
    changed = source.with_constants(SYSTEM='quo"te\n\\', NEW=3)
    assert changed.constants() == {"SYSTEM": 'quo"te\n\\', "EXAMPLES": [("u", "v")], "NEW": 3}
    assert "# why\nSYSTEM" in changed.text and "# note" in changed.text
    assert changed.text.index("NEW") < changed.text.index("def run")
    assert Source(text).with_constants(SYSTEM="a").constants() == source.constants()
    with pytest.raises(ValueError, match="not Python"):
        Source("def (")


@given(st.dictionaries(st.sampled_from(["SYSTEM", "NEW", "EXAMPLES"]), st.one_of(
    st.text(), st.integers(), st.lists(st.text()), st.lists(st.tuples(st.text(), st.text()))), max_size=3))  # fmt: skip
def test_constants_come_back_as_they_were_set(values: dict[str, Any]) -> None:
    set_to = Source(DOMAINS["arithmetic"].h0).with_constants(**values)
    assert {name: set_to.constants()[name] for name in values} == values
    compile(set_to.text, "harness.py", "exec")


def test_a_harness_outside_the_convention_only_loses_the_edits_it_cannot_take() -> None:
    for name in NAMES:
        source = Source(
            "MAX_TOKENS = 32\n\n\ndef run(task, model, tools):\n    return model.chat([], max_tokens=MAX_TOKENS).text\n"
        )
        kinds = {edit.kind for edit in generic(KITS[name]) if edit.change(source, KITS[name]) is not None}
        assert kinds == {"length"}
    assert generic(Kit(DomainRules(), DOMAINS["arithmetic"].brief))


def test_examples_of_an_unknown_parser_are_written_as_those_already_there() -> None:
    """An agent's own format: the way of its examples is kept when others are added."""
    kit = KITS["arithmetic"]
    first = DOMAINS["arithmetic"].brief.demonstrations[0]
    own = Source(DOMAINS["arithmetic"].h0).with_function(
        'def parse(text, tools):\n    return text.split("=>")[-1].strip()\n'
    )
    own = own.with_constants(EXAMPLES=[(first.task["question"], f"so {{it}} is => {first.answer}")])
    two = next(edit for edit in generic(kit) if edit.words == "2 worked examples").change(own, kit)
    assert two is not None
    assert [assistant for _, assistant in two.constants()["EXAMPLES"]] == [
        f"so {{it}} is => {d.answer}" for d in DOMAINS["arithmetic"].brief.demonstrations[:2]
    ]


def test_kinds_tell_what_changed() -> None:
    kit, h0 = KITS["encyclopedia"], Source(DOMAINS["encyclopedia"].h0)
    for edit in generic(kit):
        new = edit.change(h0, kit)
        if new is not None and edit.words != "the bare answer on the first line" and "label" not in edit.words:
            assert kinds_between(h0, new) == {edit.kind}, edit.words
    assert kinds_between(h0, h0.with_function(RETRYING)) == {"retry"}


# ------------------------------------------------------------------------------------------------------------ search


@pytest.mark.parametrize("name", NAMES)
@given(seed=st.integers(0, 2**32), limited=st.booleans())
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_a_search_proposes_new_valid_harnesses_for_as_long_as_it_is_asked(name: str, seed: int, limited: bool) -> None:
    """Several iterations with made-up scores: each candidate is new, checks, names its parents, and repeats with the seed."""
    domain, archive = DOMAINS[name], start(name)
    answers = [task.private["answer"] for task in domain.tasks("harness")]
    given = domain.brief.text + str(domain.brief.demonstrations)
    for iteration in range(2, 5):
        proposals = propose(name, archive, seed=seed, iteration=iteration, fst=limited)
        again = propose(name, archive, seed=seed, iteration=iteration, fst=limited)
        assert proposals == again and len(proposals) == 3
        hashes = {checks.source_hash(a.source) for a in archive}
        for proposal in proposals:
            checked = checks.check(
                proposal.source, archive_hashes=hashes, answers=answers, given=given, fst_base=domain.h0 if limited else None
            )  # fmt: skip
            assert checked.ok and not checked.warnings, (checked.reason, checked.warnings)
            hashes.add(checked.source_hash)
            ids = {a.id for a in archive}
            assert proposal.parent in ids and set(proposal.also_from) <= ids
            assert proposal.hypothesis and "\n" not in proposal.hypothesis
            assert isinstance(episode(name, proposal.source, REPLIES[seed % len(REPLIES)])[0], str)
            mean = (int(checked.source_hash, 16) + seed) % 50 / 100
            episodes = [ended("x", "accept")] * int(10 * mean) + [ended("y"), ended(tool="ToolError: no")] * 3
            number = f"h{len(archive):04d}"
            archive.append(archived(number, proposal.source, proposal.parent, mean=mean, episodes=episodes))


def test_another_seed_is_another_search() -> None:
    found = {tuple(p.source for p in propose("encyclopedia", start("encyclopedia"), seed=seed)) for seed in range(5)}
    assert len(found) == 5


@pytest.mark.parametrize("name", NAMES)
def test_from_nothing_accepted_the_first_candidates_bring_examples_and_a_format(name: str) -> None:
    """Single edits on a harness at 0% show nothing, so the first iteration combines what such a harness lacks most."""
    best = []
    for seed in range(12):
        h0 = Source(DOMAINS[name].h0)
        kinds = [kinds_between(h0, Source(p.source)) for p in propose(name, start(name), seed=seed)]
        best.append(any({"examples", "format"} <= k for k in kinds))
        assert (
            sum(
                "examples" in Source(p.source).constants() or "examples" in k
                for p, k in zip(propose(name, start(name), seed=seed), kinds, strict=True)
            )
            >= 1
        )
        if name == "arithmetic":
            best[-1] &= any("tools.calc" in p.source for p in propose(name, start(name), seed=seed))
    assert sum(best) >= 10


def test_a_tool_that_the_code_never_calls_is_brought_in() -> None:
    used = sum(
        "tools.calc" in p.source for seed in range(10) for p in propose("arithmetic", start("arithmetic"), seed=seed)
    )
    assert used >= 12


def measured(name: str, **fields: Any) -> tuple[list[Archived], Source]:
    """An archive whose best harness has three examples, found from h0."""
    kit, source = KITS[name], Source(DOMAINS[name].h0)
    for words in ("the bare answer on the first line", "an expression that calc works out", "3 worked examples"):
        edit = next((e for e in generic(kit) if e.words == words), None)
        source = (edit.change(source, kit) if edit else None) or source
    return [*start(name), archived("h0001", source.text, "h0000", **({"mean": 0.4} | fields))], source


def share(name: str, archive: list[Archived], source: Source, kind: str, **more: Any) -> float:
    """The share of proposals from a harness that change a kind of thing."""
    proposals = [p for seed in range(12) for p in propose(name, archive, seed=seed, incumbent="h0001", **more)]
    mine = [p for p in proposals if p.parent == "h0001" and not p.also_from]
    assert len(mine) > 12
    return sum(kind in kinds_between(source, Source(p.source)) for p in mine) / len(mine)


@pytest.mark.parametrize(
    ("kind", "shown", "other"),
    [
        ("retry", [ended(tool="ToolError: no")] * 9 + [ended("1", "accept")], [ended("1")] * 9 + [ended("1", "accept")]),
        ("length", [ended("1", truncated=True)] * 9 + [ended("1", "accept")], [ended("1")] * 9 + [ended("1", "accept")]),
        ("format", [ended()] * 9 + [ended("1", "accept")], [ended("1")] * 9 + [ended("1", "accept")]),
    ],
)  # fmt: skip
def test_edits_answer_to_what_the_episodes_show(
    kind: str, shown: list[ArchivedEpisode], other: list[ArchivedEpisode]
) -> None:
    """Against the same harness with the same score and plain wrong answers, more of what mends this goes in."""
    name = {"retry": "RETRIES", "length": "STOP MAX_TOKENS", "format": "parse"}[kind]

    def part(episodes: list[ArchivedEpisode]) -> float:
        archive, source = measured("arithmetic", episodes=episodes)
        old = {**source.constants(), **source.functions()}
        proposals = [p for seed in range(20) for p in propose("arithmetic", archive, seed=seed) if p.parent == "h0001"]
        new = [Source(p.source) for p in proposals if not p.also_from]
        assert len(new) > 30
        both = [{**each.constants(), **each.functions()} for each in new]
        return sum(any(each.get(n) != old.get(n) for n in name.split()) for each in both) / len(new)

    assert part(shown) > 1.4 * part(other)


def test_a_domain_s_own_sign_is_mended_by_its_own_edit() -> None:
    """Passages that the harness cuts, seen in the record of its searches, bring longer ones."""
    long, short = ([ended("x")] * 6 + [ended("y", "accept")] * 4 for _ in range(2))
    for episodes, length in ((long, 200), (short, 60)):
        for e in episodes:
            e.tools = [ToolUse("search", "'?'", json.dumps([{"title": "A", "text": "x" * length}]), 0.0, 0)]
    cut, whole = (measured("encyclopedia", episodes=episodes)[0] for episodes in (long, short))
    found = {
        key: [p for seed in range(12) for p in propose("encyclopedia", archive, seed=seed)]
        for key, archive in (("cut", cut), ("whole", whole))
    }
    longer = {key: sum(Source(p.source).constants()["PASSAGE_CHARS"] > 120 for p in of) for key, of in found.items()}
    assert longer["cut"] > 2 * longer["whole"]
    assert any("read a passage that was cut short" in p.hypothesis for p in found["cut"])
    assert not any("cut short" in p.hypothesis for p in found["whole"])


def test_what_paid_before_is_tried_more_and_what_cost_less() -> None:
    episodes = [ended("x")] * 5 + [ended("y", "accept")] * 5
    archive, source = measured("encyclopedia", episodes=episodes)
    shorter = source.with_constants(MAX_TOKENS=20)
    archive.append(archived("h0002", shorter.text, "h0001", mean=0.2, episodes=episodes))
    tried = shorter.with_constants(SYSTEM="Say the answer.").text
    paid = [*archive, archived("h0003", tried, "h0002", mean=0.38, episodes=episodes)]
    cost = [*archive, archived("h0003", tried, "h0002", mean=0.0, episodes=episodes)]
    assert share("encyclopedia", paid, source, "system") > 1.5 * share("encyclopedia", cost, source, "system")


def test_a_vetoed_kind_of_edit_is_left_alone_for_a_while() -> None:
    episodes = [ended("x")] * 5 + [ended("y", "accept")] * 5
    archive, source = measured("encyclopedia", episodes=episodes)
    system = source.with_constants(SYSTEM="Say the answer.").text
    vetoed = archived("h0002", system, "h0001", outcome="vetoed", reason="not like that", mean=None, episodes=[])
    assert share("encyclopedia", archive, source, "system") > 0.1
    barred = [p for seed in range(8) for p in propose("encyclopedia", [*archive, vetoed], seed=seed, incumbent="h0001")]
    assert all(kinds_between(source, Source(p.source)) != {"system"} for p in barred if p.parent == "h0001")
    later = [
        archived(f"h{n:04d}", source.with_constants(MAX_TOKENS=n).text, "h0001", mean=0.1, episodes=episodes)
        for n in range(3, 16)
    ]
    assert share("encyclopedia", [*archive, vetoed, *later], source, "system") > 0


def test_a_veto_that_names_a_kind_bars_that_kind_in_any_company() -> None:
    episodes = [ended("x")] * 5 + [ended("y", "accept")] * 5
    archive, source = measured("encyclopedia", episodes=episodes)
    both = source.with_constants(SYSTEM="Say the answer.", VOTES=3).with_function(VOTING).text
    vetoed = archived(
        "h0002", both, "h0001", outcome="vetoed", reason="No voting, it costs too much", mean=None, episodes=[]
    )
    assert share("encyclopedia", archive, source, "vote") > 0.02
    assert share("encyclopedia", [*archive, vetoed], source, "vote") == 0
    assert share("encyclopedia", [*archive, vetoed], source, "system") > 0
    noted = share("encyclopedia", archive, source, "system", notes=["leave the system prompt as it is"])
    assert noted == 0


def test_parents_are_the_best_of_the_current_policy_and_never_a_failure() -> None:
    archive, source = measured("encyclopedia", episodes=[ended("x")] * 6 + [ended("y", "accept")] * 4)
    archive += [
        archived(
            "h0002", source.with_constants(MAX_TOKENS=31).text, "h0001", mean=None, older_means={"theta-0000": 0.9}
        ),
        archived("h0003", source.with_constants(MAX_TOKENS=30).text, "h0001", mean=0.9, outcome="vetoed"),
        archived("h0004", "def run(", "h0001", mean=None, outcome="invalid"),
    ]
    parents = [p.parent for seed in range(20) for p in propose("encyclopedia", archive, seed=seed)]
    assert set(parents) <= {"h0000", "h0001"} and parents.count("h0001") > 40


def test_crossover_takes_one_kind_of_thing_and_says_from_whom() -> None:
    kit = KITS["encyclopedia"]
    archive, source = measured("encyclopedia", episodes=[ended("x")] * 6 + [ended("y", "accept")] * 4)
    other = source.with_constants(SYSTEM="Say the answer.", SEARCH_K=3, MAX_TOKENS=20)
    child = cross(kit, source, other, "search")
    assert child is not None and child.constants()["SEARCH_K"] == 3 and child.constants()["SYSTEM"] == ""
    assert len(child.constants()["EXAMPLES"][0][0]) > len(source.constants()["EXAMPLES"][0][0])
    assert cross(kit, source, source, "search") is None
    archive.append(archived("h0002", other.text, "h0001", mean=0.3, episodes=archive[1].episodes))
    crossed = [p for seed in range(20) for p in propose("encyclopedia", archive, seed=seed) if p.also_from]
    assert crossed
    for proposal in crossed:
        assert proposal.parent == "h0001" and proposal.also_from == ["h0002"] and "h0002" in proposal.hypothesis


def test_fst_changes_prompt_text_alone() -> None:
    for name, seed in itertools.product(NAMES, range(6)):
        for proposal in propose(name, start(name), seed=seed, fst=True):
            assert fst.violation(DOMAINS[name].h0, proposal.source) is None


def test_it_ends_when_it_has_no_more_ideas() -> None:
    """With hardly anything to change, the search stops instead of repeating itself or looping."""
    text = "MAX_TOKENS = 32\n\n\ndef run(task, model, tools):\n    return model.chat([], max_tokens=MAX_TOKENS).text\n"
    archive = [archived("h0000", text)]
    proposals = propose("arithmetic", archive, candidates=5)
    assert 1 <= len(proposals) < 5 and len({p.source for p in proposals}) == len(proposals)
    archive += [archived(f"h{n:04d}", p.source, p.parent) for n, p in enumerate(proposals, 1)]
    while more := propose("arithmetic", archive):
        archive += [archived(f"h{len(archive) + n:04d}", p.source, p.parent) for n, p in enumerate(more)]
        assert len(archive) < 20
    hashes = [checks.source_hash(a.source) for a in archive]
    assert len(set(hashes)) == len(hashes)


def test_a_domain_without_rules_of_its_own_is_searched_too() -> None:
    domain = DOMAINS["arithmetic"]
    request = Request(start("arithmetic"), "h0000", domain.brief, 3, 2, 0, False)
    proposals = asyncio.run(Rules(None).propose(request))
    assert len(proposals) == 3
    assert all(ast.parse(p.source) and contract.ENTRY in Source(p.source).functions() for p in proposals)
