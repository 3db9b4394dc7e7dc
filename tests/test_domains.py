# ruff: noqa: E501 (tables, a few cases a line)
"""The built-in domains: splits that share nothing, tools that bear any argument, verdicts on tricky answers, loading."""

from __future__ import annotations

import ast
import importlib
import itertools
import random
import re
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whale_tui.domains import arithmetic, base, encyclopedia
from whale_tui.domains.arithmetic import problems
from whale_tui.domains.arithmetic.calculator import MAX_VALUE, calculate
from whale_tui.domains.arithmetic.problems import TEMPLATES
from whale_tui.domains.encyclopedia.world import PLAIN, RELATIONS
from whale_tui.harness import checks, fst
from whale_tui.records import Split, Task

NAMES = ("encyclopedia", "arithmetic")
SPLITS: tuple[Split, ...] = ("weight", "harness", "test")
DOMAINS = {name: base.load(name) for name in NAMES}


def verdict(name: str, answer: str, reference: str) -> str:
    task = Task("key", {"question": "?"}, {"answer": reference})
    return DOMAINS[name].verify(task, answer, None).decision  # type: ignore[arg-type]


# ----------------------------------------------------------------------------------------------------------- splits


@pytest.mark.parametrize("name", NAMES)
def test_splits_have_their_sizes_and_share_no_question_and_no_key(name: str) -> None:
    tasks = {split: DOMAINS[name].tasks(split) for split in SPLITS}
    assert {split: len(of) for split, of in tasks.items()} == {"weight": 4096, "harness": 128, "test": 256}
    everything = [task for of in tasks.values() for task in of]
    assert len({task.key for task in everything}) == len(everything)
    assert len({task.public["question"] for task in everything}) == len(everything)
    assert all(task.public.keys() == {"question"} and task.private.keys() == {"answer"} for task in everything)


@pytest.mark.parametrize("name", NAMES)
def test_a_seed_is_a_world_and_the_same_one_each_time(name: str) -> None:
    again, other = base.load(name), base.load(name, {"seed": 1})
    for split in SPLITS:
        assert [t.hash for t in again.tasks(split)] == [t.hash for t in DOMAINS[name].tasks(split)]
        assert [t.hash for t in other.tasks(split)] != [t.hash for t in DOMAINS[name].tasks(split)]
    assert again.brief == DOMAINS[name].brief


@pytest.mark.parametrize("seed", [0, 1, 7])
def test_encyclopedia_asks_of_entities_of_one_split_alone_and_never_answers_with_one_of_another(seed: int) -> None:
    domain = base.load("encyclopedia", {"seed": seed})
    about = {split: {task.key.split("/")[0] for task in domain.tasks(split)} for split in SPLITS}
    for one, other in itertools.combinations(SPLITS, 2):
        assert not about[one] & about[other]
    answers = {task.private["answer"].lower().replace(" ", "-") for split in SPLITS for task in domain.tasks(split)}
    assert not answers & (about["harness"] | about["test"])
    assert len({(t.key.split("/")[0], t.key.split("/")[1]) for t in domain.tasks("test")}) == 256


@pytest.mark.parametrize("seed", [0, 1, 7])
def test_arithmetic_splits_share_no_template_with_the_same_numbers(seed: int) -> None:
    domain = base.load("arithmetic", {"seed": seed})
    shown = {re.sub(r"[^0-9 ]", "", d.tools[0]["args"]["expression"]) for d in domain.brief.demonstrations}
    assert len(shown) == len(TEMPLATES)
    signs = ["".join(re.findall(r"[-+*/]", d.tools[0]["args"]["expression"])) for d in domain.brief.demonstrations]
    assert [len(each) for each in signs[:6]] == [2, 1, 3, 2, 1, 3] and len(set(signs[:6])) == 6
    for task in domain.tasks("weight"):
        assert int(task.private["answer"]) > 0
    used = {int(task.key[1:3]) for task in domain.tasks("harness")}
    assert used == set(range(len(TEMPLATES)))


def test_the_generators_are_as_rich_as_they_say() -> None:
    patterns = {sentence for relation in RELATIONS.values() for sentence in relation.told}
    questions = {question for relation in RELATIONS.values() for question in relation.asked}
    assert len(RELATIONS) >= 12 and len(patterns) >= 25 and len(questions) == 4 * len(RELATIONS)
    domain = DOMAINS["encyclopedia"]
    assert {task.key.split("/")[1] for task in domain.tasks("test")} == set(RELATIONS)
    assert {relation.values for relation in RELATIONS.values()} <= {*PLAIN, "year", "person", "place", "institution"}
    assert len({t.text for t in TEMPLATES}) >= 20 and {t.operations for t in TEMPLATES} == {1, 2, 3}


def test_values_are_shared_so_that_no_answer_gives_its_question_away() -> None:
    answers = [task.private["answer"] for task in DOMAINS["encyclopedia"].tasks("test")]
    plain = [answer for answer in answers if not answer.isdigit()]
    assert len(set(plain)) < 0.7 * len(plain)


@pytest.mark.parametrize("name", NAMES)
def test_demonstrations_belong_to_no_split_and_hold_none_of_its_answers(name: str) -> None:
    domain = DOMAINS[name]
    shown = domain.brief.demonstrations
    assert len(shown) >= 12
    questions = {task.public["question"] for split in SPLITS for task in domain.tasks(split)}
    for demonstration in shown:
        assert demonstration.task["question"] not in questions
        assert demonstration.tools and demonstration.answer
        assert verdict(name, demonstration.answer, demonstration.answer) == "accept"
    if name == "encyclopedia":
        text = " ".join(str(d) for d in shown).lower()
        answers = {task.private["answer"].lower() for split in SPLITS for task in domain.tasks(split)}
        held = {answer for answer in answers if re.search(rf"\b{re.escape(answer)}\b", text)}
        assert not held
        assert all(d.tools[0]["result"][0]["title"] in d.task["question"] for d in shown)
        assert all(d.answer in d.tools[0]["result"][0]["text"] for d in shown)


# ------------------------------------------------------------------------------------------------------------ tools


def test_search_finds_the_article_that_answers() -> None:
    domain = DOMAINS["encyclopedia"]
    hits = {1: 0, 3: 0}
    tasks = [*domain.tasks("harness"), *domain.tasks("test")]
    for task in tasks:
        found = domain.tools(task)["search"](task.public["question"], 3)
        assert len(found) == 3 and all(article.keys() == {"title", "text"} for article in found)
        places = [n for n, a in enumerate(found) if a["title"].lower().replace(" ", "-") == task.key.split("/")[0]]
        hits[1] += places == [0]
        hits[3] += bool(places)
        if places:
            assert task.private["answer"] in found[places[0]]["text"]
    assert hits[1] / len(tasks) > 0.93 and hits[3] / len(tasks) > 0.98


def test_articles_are_short_and_as_many_as_promised() -> None:
    search = DOMAINS["encyclopedia"].tools(DOMAINS["encyclopedia"].tasks("test")[0])["search"]
    articles = {a["title"]: a["text"] for word in ("it", "she", "he", "the", "was", "is") for a in search(word, 20)}
    assert all(3 <= text.count(".") <= 5 and len(text) < 260 for text in articles.values())
    assert 4 * sum(encyclopedia.ENTITIES.values()) == 400


@pytest.mark.parametrize(
    ("query", "k"), [("", 1), ("   ", 1), (None, 1), (5, 1), ("a" * 1001, 1), ("x", 0), ("x", 21), ("x", 1.5), ("x", True)]
)  # fmt: skip
def test_search_refuses_in_words(query: Any, k: Any) -> None:
    with pytest.raises(ValueError, match=r"search\(query, k\)"):
        DOMAINS["encyclopedia"].tools(DOMAINS["encyclopedia"].tasks("test")[0])["search"](query, k)


@given(st.text(min_size=1, max_size=200), st.integers(1, 20))
def test_search_bears_any_text(query: str, k: int) -> None:
    search = DOMAINS["encyclopedia"].tools(DOMAINS["encyclopedia"].tasks("test")[0])["search"]
    try:
        found = search(query, k)
    except ValueError:
        assert not query.strip()
    else:
        assert len(found) <= k


def test_search_results_are_the_harness_s_own_to_change() -> None:
    search = DOMAINS["encyclopedia"].tools(DOMAINS["encyclopedia"].tasks("test")[0])["search"]
    search("Academy", 1)[0]["text"] = "changed"
    assert search("Academy", 1)[0]["text"] != "changed"


@pytest.mark.parametrize(
    ("expression", "value"),
    [("1 + 2", 3), ("2 * (3 + 4)", 14), ("7 / 2", 3.5), ("7 // 2", 3), ("-3 + 5", 2), ("+4", 4), (" 10/5 ", 2),
     ("1 / 3 * 3", 1), ("0.1 + 0.2", 0.3), ("1.5 * 2", 3), ("((((1))))", 1), ("1_000 + 1", 1001), ("6 - 2 - 1", 3)],
)  # fmt: skip
def test_calc_works_out(expression: str, value: float) -> None:
    assert calculate(expression) == value
    assert isinstance(calculate(expression), int) == (value == int(value))


@pytest.mark.parametrize(
    "expression",
    ["", "   ", "x", "1 +", "2 ** 8", "10 ** 10 ** 10", "1 / 0", "1 // 0", "5 % 2", "__import__('os')", "(1, 2)", "[1]", "True",
     "1 if 1 else 2", "1 < 2", "'a' * 3", "lambda: 1", "abs(1)", "1; 2", "1\n2", "1j", "1e400", "9" * 150, "1e12 * 10", "9" * 201,
     "(" * 90 + "1" + ")" * 90 + "+", "+".join(["1"] * 99), "１+１", "1 <<  3", "~1", "not 1", "a:=1", "0/0", "1e-300 * 1e-300"],
)  # fmt: skip
def test_calc_refuses_in_words(expression: str) -> None:
    with pytest.raises(ValueError, match="calc"):
        calculate(expression)


@given(st.text(alphabet="0123456789+-*/(). ,e_xj'\"[]{}:", max_size=200))
def test_calc_bears_any_text(text: str) -> None:
    try:
        value = calculate(text)
    except ValueError:
        return
    assert abs(value) <= MAX_VALUE


@given(st.recursive(st.integers(0, 99).map(str), lambda e: st.tuples(e, st.sampled_from("+-*"), e).map(lambda t: f"({t[0]} {t[1]} {t[2]})"), max_leaves=8))  # fmt: skip
def test_calc_agrees_with_exact_arithmetic(expression: str) -> None:
    expected = eval(compile(ast.parse(expression, mode="eval"), "expected", "eval"))
    if abs(expected) < 10**10 and len(expression) <= 200:
        assert Fraction(calculate(expression)) == expected


# --------------------------------------------------------------------------------------------------------- verifiers


@pytest.mark.parametrize(
    ("answer", "reference", "decision"),
    [
        ("Otter River", "Otter River", "accept"), ("the otter river.", "Otter River", "accept"), ("  OTTER   river ", "Otter River", "accept"),
        ('"Otter River"', "Otter River", "accept"), ("“Otter River”", "Otter River", "accept"), ("Otter-River", "Otter River", "accept"),
        ("Ｏtter River", "Otter River", "accept"), ("Otter\nRiver", "Otter River", "accept"), ("A lion", "lion", "accept"),
        ("1784.", "1784", "accept"), ("1784", "1748", "reject"), ("in 1784", "1784", "reject"), ("17 84", "1784", "reject"),
        ("It is the Otter River", "Otter River", "reject"), ("Otter", "Otter River", "reject"), ("Otter Rivers", "Otter River", "reject"),
        ("", "Otter River", "reject"), ("  ", "Otter River", "reject"), ("the", "Otter River", "reject"), ("?!", "Otter River", "reject"),
        ("Otter River Otter River", "Otter River", "reject"), ("<answer>Otter River</answer>", "Otter River", "reject"),
    ],
)  # fmt: skip
def test_search_answers_match_when_normalised(answer: str, reference: str, decision: str) -> None:
    assert verdict("encyclopedia", answer, reference) == decision


@pytest.mark.parametrize(
    ("answer", "reference", "decision"),
    [
        ("42", "42", "accept"), (" 42 ", "42", "accept"), ("42.", "42", "accept"), ("42.0", "42", "accept"), ("42.00", "42", "accept"),
        ("+42", "42", "accept"), ("042", "42", "accept"), ("1,234", "1234", "accept"), ("1,234,567.0", "1234567", "accept"),
        ("$42", "42", "accept"), ("-0", "0", "accept"), ("\u22125", "-5", "accept"), ("４２", "42", "accept"), ("1 234", "1234", "accept"),
        ("42.5", "42", "reject"), ("42 apples", "42", "reject"), ("x = 42", "42", "reject"), ("4 2", "42", "reject"), ("12,34", "1234", "reject"),
        ("-42", "42", "reject"), ("", "42", "reject"), ("forty-two", "42", "reject"), ("42/1", "42", "reject"), ("4.2e1", "42", "reject"),
        ("\\boxed{42}", "42", "reject"), ("42\n43", "42", "reject"), ("0x2a", "42", "reject"), ("42,", "42", "reject"), ("1,234", "1.234", "reject"),
    ],
)  # fmt: skip
def test_numbers_match_as_whole_numbers(answer: str, reference: str, decision: str) -> None:
    assert verdict("arithmetic", answer, reference) == decision


@pytest.mark.parametrize("name", NAMES)
@given(answer=st.text(max_size=60))
def test_no_answer_breaks_a_verifier_or_is_told_the_reference(name: str, answer: str) -> None:
    task = DOMAINS[name].tasks("harness")[0]
    judged = DOMAINS[name].verify(task, answer, None)  # type: ignore[arg-type]
    assert judged.decision in ("accept", "reject") and task.private["answer"] not in judged.reason


@pytest.mark.parametrize("name", NAMES)
def test_every_reference_is_accepted_as_it_stands(name: str) -> None:
    for split in SPLITS:
        for task in DOMAINS[name].tasks(split):
            assert DOMAINS[name].verify(task, task.private["answer"], None).decision == "accept"  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------------ h0 and brief


@pytest.mark.parametrize("name", NAMES)
def test_h0_passes_the_checks_and_keeps_the_documented_names(name: str) -> None:
    domain = DOMAINS[name]
    answers = [task.private["answer"] for task in domain.tasks("harness")]
    checked = checks.check(domain.h0, answers=answers)
    assert checked.ok and not checked.warnings
    tree = ast.parse(domain.h0)
    assert {"SYSTEM", "TURN", "EXAMPLES"} <= fst.prompts(tree).keys()
    defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert {"ask", "messages", "parse", "attempt", "run"} <= defined
    documented = set(re.findall(r"`([A-Z_]+|[a-z]+)[(`]", domain.brief.text))
    assigned = {t.id for n in tree.body if isinstance(n, ast.Assign) for t in n.targets if isinstance(t, ast.Name)}
    assert defined | assigned <= documented
    assert not re.search(r"\bcalc\b|EXAMPLES = \[\(", domain.h0)


# ---------------------------------------------------------------------------------------------------------- loading


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("encyclopdia", {}, "did you mean encyclopedia?"),
        ("zzz", {}, "there is arithmetic, .*encyclopedia"),
        ("encyclopedia", {"sed": 1}, "domain.options.sed.*did you mean seed?"),
        ("encyclopedia", {"seed": "a"}, "Expected `int`, got `str` - at `domain.options.seed`"),
        ("encyclopedia", {"weight": 0}, "domain.options.weight"),
        ("encyclopedia", {"test": 100_000}, "domain.options.test = 100000: the world holds [0-9]+ questions"),
        ("arithmetic", {"wight": 5}, "did you mean weight?"),
    ],
)
def test_a_wrong_name_or_option_says_the_nearest_one(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(base.DomainError, match=message.replace("?", r"\?")):
        base.load(name, options)


def test_sizes_can_be_asked_for() -> None:
    for name in NAMES:
        domain = base.load(name, {"weight": 24, "harness": 8, "test": 16})
        assert [len(domain.tasks(split)) for split in SPLITS] == [24, 8, 16]


def test_more_problems_than_there_are_is_said_and_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(problems, "TEMPLATES", problems.TEMPLATES[9:10])
    with pytest.raises(ValueError, match=r"give [0-9]+ different problems"):
        problems.draw(random.Random(0), 4000, set())


OWN = """
import msgspec
from whale_tui.records import Brief, Task, Verdict

class Options(msgspec.Struct, forbid_unknown_fields=True):
    answer: str = "yes"

class Own:
    name, h0, edits = "own", "def run(task, model, tools):\\n    return 'yes'\\n", None
    brief = Brief(text="Say yes.", tools={})
    def __init__(self, options): self.answer = options.answer
    def tasks(self, split): return [Task(split, {"question": split}, {"answer": self.answer})]
    def tools(self, task): return {}
    def verify(self, task, answer, episode): return Verdict("accept" if answer == self.answer else "reject", "compared")

def build(options): return Own(options)
"""


def test_a_domain_of_ones_own_is_a_folder(tmp_path: Path) -> None:
    (tmp_path / "domain.py").write_text(OWN)
    domain = base.load("my own", {"answer": "no"}, tmp_path)
    assert domain.verify(domain.tasks("test")[0], "no", None).decision == "accept"  # type: ignore[arg-type]
    with pytest.raises(base.DomainError, match=r"domain\.options\.anser.*did you mean answer\?"):
        base.load("my own", {"anser": "no"}, tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [(None, "does not exist"), ("import nothing_of_the_kind", "fails to load: ModuleNotFoundError"), ("x = (", "SyntaxError"), ("x = 1", "does not define build")],
)  # fmt: skip
def test_a_broken_folder_is_named(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "domain.py").write_text(text)
    with pytest.raises(base.DomainError, match=message):
        base.load("broken", {}, tmp_path)


def test_a_domain_of_another_package_is_found_by_its_entry_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "their_domain.py").write_text(OWN)
    info = tmp_path / "theirs-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{base.GROUP}]\ntheirs = their_domain\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    assert "theirs" in base.names()
    assert base.load("theirs").name == "own"
    sys.modules.pop("their_domain")


def test_the_files_of_a_domain_are_beside_its_module() -> None:
    for module in (encyclopedia, arithmetic):
        folder = Path(module.__file__).parent
        assert (folder / "harness.py").read_text() == DOMAINS[folder.name].h0
        assert (folder / "brief.md").read_text() == DOMAINS[folder.name].brief.text


def test_a_library_that_a_domain_needs_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [name for name in sys.modules if name.startswith("whale_tui.domains.chess")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "chess", None)
    with pytest.raises(base.DomainError, match=r"pip install 'whale-tui\[chess\]'"):
        base.load("chess", {"puzzles": "none.csv"})
