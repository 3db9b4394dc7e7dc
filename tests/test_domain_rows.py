"""Rows of one's own: which columns go where, one file cut into three splits, a verifier that nobody vouches for."""

from __future__ import annotations

import csv
import inspect
import json
from pathlib import Path
from typing import Any

import pytest

from whale_tui.domains import base
from whale_tui.domains.base import DomainError
from whale_tui.harness import checks
from whale_tui.harness.contract import Reply
from whale_tui.harness.wire import Limits
from whale_tui.harness.worker import HarnessRunner, can_seal
from whale_tui.proposers.edits import Kit, Source, generic
from whale_tui.records import Demonstration, Task, Verdict

VERIFY = "def verify(task, answer):\n    return answer == task['answer']\n"
SPLITS = ("weight", "harness", "test")


def rows(count: int, **more: Any) -> list[dict[str, Any]]:
    return [{"question": f"What is {n} + {n}?", "answer": str(2 * n), **more} for n in range(count)]


def write(file: Path, of: list[dict[str, Any]]) -> str:
    file.write_text("".join(json.dumps(row) + "\n" for row in of))
    return file.name


@pytest.fixture
def make(tmp_path: Path):
    """A rows domain in a folder: `data` as tasks.jsonl unless options name files, `code` as verifier.py."""

    def made(data: list[dict[str, Any]] | None = None, code: str = VERIFY, **options: Any) -> Any:
        (tmp_path / "verifier.py").write_text(code)
        if data is not None:
            write(tmp_path / "tasks.jsonl", data)
        given = {"verifier": "verifier.py", "train": "tasks.jsonl", **options}
        return base.load("rows", given, relative_to=tmp_path)

    return made


def verdict(domain: Any, answer: str, split: str = "weight") -> Verdict:
    return domain.verify(domain.tasks(split)[0], answer, None)


# ------------------------------------------------------------------------------------------------------------- columns


def test_answers_are_private_and_what_numbers_rows_is_neither(make) -> None:
    domain = make([{"id": f"dev-{n}", "split": "dev", **row} for n, row in enumerate(rows(10, level=3))])
    for task in (task for split in SPLITS for task in domain.tasks(split)):
        assert task.public.keys() == {"question", "level"} and task.private.keys() == {"answer"}
        assert "dev" not in task.key


def test_columns_can_be_named(make) -> None:
    data = [{"q": f"{n}?", "hint": "h", "note": "n", "gold": str(n)} for n in range(10)]
    code = "def verify(task, answer):\n    return answer == task['gold'] and sorted(task) == ['gold', 'q']\n"
    domain = make(data, code, public=["q"], private=["gold"])
    task = domain.tasks("weight")[0]
    assert (task.public.keys(), task.private.keys()) == ({"q"}, {"gold"})
    assert domain.verify(task, task.private["gold"], None).decision == "accept"
    assert [d for _, _, d in domain.known_answers()].count("accept") == 0, (
        "gold is no name that is known to be an answer"
    )


@pytest.mark.parametrize(
    ("data", "options", "said"),
    [
        ([], {}, "tasks.jsonl: no rows"),
        ([{"q": 1}] * 3, {}, "tasks.jsonl:1: none of the columns q is known to be the reference answer; name it in"),
        ([{"answer": 1, "id": 2}], {}, "no public column is left"),
        (rows(9), {"public": ["question", "answer"]}, "'answer' is both public and private"),
        (rows(9), {"private": ["gold"]}, "tasks.jsonl:1: no column 'gold'; it has question, answer"),
        ([*rows(4), {"question": "?"}], {}, "tasks.jsonl:5: no column 'answer'; it has question"),
        ([*rows(4), {"question": "?", "answer": "1", "anwser": 2}], {}, "tasks.jsonl:5: column 'anwser' is not in the"),
        ([{"a.b": 1, "answer": 2, "c": n} for n in range(9)], {}, "column 'a.b': a name with one of"),
        (rows(9), {"verifer": "x"}, "no such option; did you mean verifier?"),
        (rows(2), {"dev_size": 3}, "2 tasks are too few"),
    ],
)  # fmt: skip
def test_a_broken_table_names_file_line_and_mend(make, data: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(DomainError, match=r".*") as refused:
        make(data, **options)
    assert said in str(refused.value)


def test_a_missing_table_is_named(make) -> None:
    with pytest.raises(DomainError, match=r"tasks\.jsonl: no such file"):
        make()


# -------------------------------------------------------------------------------------------------------------- splits


def test_one_file_is_cut_by_a_seed_whatever_the_order(make) -> None:
    def keys(domain: Any) -> dict[str, set[str]]:
        return {split: {task.key for task in domain.tasks(split)} for split in SPLITS}

    first = keys(make(rows(50), dev_size=10, test_size=0.1))
    assert {split: len(of) for split, of in first.items()} == {"weight": 35, "harness": 10, "test": 5}
    assert len(set.union(*first.values())) == 50
    assert keys(make(rows(50)[::-1], dev_size=10, test_size=0.1)) == first
    assert keys(make(rows(50), dev_size=10, test_size=0.1, seed=1)) != first


def test_splits_with_files_of_their_own_keep_them(make, tmp_path: Path) -> None:
    with (tmp_path / "test.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["question", "answer"])
        writer.writeheader()
        writer.writerows([{"question": f"new {n}", "answer": "x"} for n in range(4)])
    domain = make(rows(20), test="test.csv", dev_size=5)
    assert [len(domain.tasks(split)) for split in SPLITS] == [15, 5, 4]
    write(tmp_path / "dev.jsonl", [{"question": f"dev {n}", "answer": "x"} for n in range(3)])
    domain = make(rows(20), test="test.csv", dev="dev.jsonl")
    assert [len(domain.tasks(split)) for split in SPLITS] == [20, 3, 4]
    assert any("D_test: 4 tasks, from 4 rows" in line for line in domain.report.lines())


def test_repeated_rows_go_and_a_test_on_training_tasks_is_refused(make, tmp_path: Path) -> None:
    domain = make(rows(20) * 3)
    assert sum(len(domain.tasks(split)) for split in SPLITS) == 20
    assert any("40 duplicates dropped" in line for line in domain.report.lines())
    write(tmp_path / "same.jsonl", rows(2))
    with pytest.raises(DomainError, match="2 tasks are in both D_test and D_weight"):
        make(rows(20), test="same.jsonl", dev="same.jsonl")
    allowed = make(rows(20), test="same.jsonl", dev="same.jsonl", allow_overlap=True)
    assert allowed.report.overlaps["D_test and D_weight"] == 2


# ------------------------------------------------------------------------------------------------------ the user's file


@pytest.mark.parametrize(
    ("returned", "decision", "reason"),
    [
        ("True", "accept", "verify returned True"),
        ("False", "reject", "verify returned False"),
        ("Verdict('reject', 'too long')", "reject", "too long"),
        ("Verdict('invalid', 'no judge')", "invalid", "no judge"),
        ("Verdict('maybe', '')", "invalid", "must return True, False or a Verdict"),
        ("Verdict('accept', 3)", "invalid", "must return True, False or a Verdict"),
        ("None", "invalid", "verify returned None (NoneType); it must return True, False or a Verdict"),
        ("1", "invalid", "verify returned 1 (int)"),
        ("'accept'", "invalid", "verify returned 'accept' (str)"),
        ("task['gold']", "invalid", "verify failed at verifier.py:3: KeyError: 'gold'"),
        ("1 / 0", "invalid", "verify failed at verifier.py:3: ZeroDivisionError"),
    ],
)
@pytest.mark.parametrize("kind", ["def", "async def"])
async def test_what_verify_returns_becomes_a_verdict(
    make, kind: str, returned: str, decision: str, reason: str
) -> None:
    code = f"from whale_tui.records import Verdict\n{kind} verify(task, answer):\n    return {returned}\n"
    said = verdict(make(rows(9), code), "1")
    judged = await said if inspect.isawaitable(said) else said
    assert inspect.isawaitable(said) == (kind == "async def") or decision == "invalid"
    assert judged.decision == decision and reason in judged.reason


def test_verify_may_take_the_episode_and_cannot_change_the_task(make) -> None:
    code = "def verify(task, answer, episode):\n    task['answer'].append('x')\n    return episode is not None\n"
    data = [{"question": str(n), "answer": ["a"]} for n in range(9)]
    domain = make(data, code)
    task = domain.tasks("weight")[0]
    assert domain.verify(task, "a", None).decision == "reject"
    assert domain.verify(task, "a", object()).decision == "accept"
    assert task.private == {"answer": ["a"]}


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("x = 1", "verifier.py does not define verify(task, answer) -> bool | Verdict"),
        ("verify = 3", "verify must be a function"),
        ("def verify(answer): ...", "verify(answer) must take (task, answer), or (task, answer, episode)"),
        ("def verify(task, answer, *, strict): ...", "must take (task, answer)"),
        ("def verify(task, answer)\n", "verifier.py:1: it doesn't parse"),
        ("import nowhere_to_be_found", "fails to load: ModuleNotFoundError"),
        (VERIFY + "TOOLS = ['search']", "tools must be a dict of names and functions"),
        (VERIFY + "TOOLS = {'a b': len}", "tools must be a dict of names and functions"),
        (VERIFY + "TOOLS = {}\ndef tools(task): return {}", "it has both TOOLS and tools(task)"),
        (VERIFY + "def tools(): return {}", "tools() must take (task)"),
        (VERIFY + "def tools(task): return task['nothing']", "tools failed at verifier.py:3: KeyError"),
    ],
)
def test_a_file_that_will_not_do_is_refused_with_the_mend(make, code: str, said: str) -> None:
    with pytest.raises(DomainError) as refused:
        make(rows(9), code)
    assert said in str(refused.value)


def test_the_file_may_import_what_lies_beside_it(make, tmp_path: Path) -> None:
    (tmp_path / "beside_rows.py").write_text("RIGHT = 'yes'\n")
    domain = make(rows(9), "from beside_rows import RIGHT\ndef verify(task, answer):\n    return answer == RIGHT\n")
    assert verdict(domain, "yes").decision == "accept"


def test_tools_are_fixed_or_made_for_each_episode(make) -> None:
    fixed = make(
        rows(9), VERIFY + "def double(n: int):\n    'Twice the number.'\n    return 2 * n\nTOOLS = {'double': double}"
    )
    task = fixed.tasks("weight")[0]
    assert fixed.tools(task)["double"](4) == 8
    assert fixed.brief.tools == {"double": "double(n: int): Twice the number."}
    code = (
        VERIFY + "def tools(task):\n    seen = []\n    return {'note': lambda text: seen.append(text) or len(seen)}\n"
    )
    fresh = make(rows(9), code)
    one, other = fresh.tools(task)["note"], fresh.tools(task)["note"]
    assert [one("a"), one("b"), other("c")] == [1, 2, 1], "state is an episode's own"


def test_known_answers_are_the_files_own_or_the_references(make) -> None:
    derived = make(rows(9)).known_answers()
    assert {(answer == task.private["answer"], right) for task, answer, right in derived} == {
        (True, "accept"),
        (False, "reject"),
    }
    code = (
        f"{VERIFY}def known_answers():\n    task = {{'question': '?', 'answer': '1'}}\n"
        "    return [(task, 1, True), (task, '2', 'reject')]\n"
    )
    given = make(rows(9), code).known_answers()
    assert [(type(task), answer, right) for task, answer, right in given] == [
        (Task, "1", "accept"),
        (Task, "2", "reject"),
    ]
    with pytest.raises(DomainError, match=r"known_answers failed at verifier\.py:4: ValueError"):
        make(rows(9), VERIFY + "def known_answers():\n    raise ValueError('no')\n").known_answers()


# ----------------------------------------------------------------------------------------------- h0, examples and edits


def test_an_example_is_no_task_of_any_split(make, tmp_path: Path) -> None:
    write(tmp_path / "examples.jsonl", [{"question": "What is 90 + 1?", "answer": ["91", "ninety-one"]}])
    domain = make(rows(9), examples="examples.jsonl")
    assert domain.brief.demonstrations == [Demonstration({"question": "What is 90 + 1?"}, [], "91")]
    write(tmp_path / "examples.jsonl", [{"question": "What is 8 + 8?", "answer": "16"}])
    with pytest.raises(DomainError, match=r"examples\.jsonl:1: this example is a task of D_"):
        make(rows(9), examples="examples.jsonl")


@pytest.mark.skipif(not can_seal()[0], reason=can_seal()[1])
async def test_h0_and_every_edit_of_it_run_sealed_on_columns_of_any_name(make, tmp_path: Path) -> None:
    data = [{"two words": f"q{n} {{x}}", "options": ["a", "b"], "answer": "right one"} for n in range(9)]
    write(
        tmp_path / "examples.jsonl", [{"two words": f"shown {n}", "options": [], "answer": f"s{n}"} for n in range(3)]
    )
    domain = make(data, examples="examples.jsonl")
    assert checks.check(domain.h0).ok
    kit, h0 = Kit(domain.edits, domain.brief), Source(domain.h0)
    assert kit.format_of(h0) == domain.edits.formats[0], "so that examples can be shown in h0 itself"
    changed = {edit.words: new.text for edit in generic(kit) if (new := edit.change(h0, kit)) is not None}
    formats = {format.words: format for format in domain.edits.formats[1:]}
    assert formats.keys() <= changed.keys() and any("worked example" in words for words in changed)
    task = domain.tasks("weight")[0]

    async def answered(source: str, text: str) -> tuple[str, str]:
        prompts: list[str] = []

        async def chat(messages: list[dict[str, str]], *_: Any) -> Reply:
            prompts.append(messages[-1]["content"])
            return Reply(text, "stop", 1, 1)

        async with HarnessRunner(source, Limits(memory_mb=512)) as runner:
            end = await runner.run_episode(task.public, chat, chat)
        assert end.kind == "answer", end.detail
        return prompts[0], end.answer

    prompt, answer = await answered(domain.h0, " right one \n")
    assert prompt == f"two words: {task.public['two words']}\noptions: a, b" and answer == "right one"
    for words, kind in formats.items():
        prompt, answer = await answered(
            changed[words],
            "so: " * ("first" not in words and "last" not in words) + kind.shown.format(answer="right one"),
        )
        assert answer == "right one", words
        assert task.public["two words"] in prompt
