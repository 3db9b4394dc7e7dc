"""The leak checks by planted leaks, and by what must not be taken for one."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from tests.answered import World, Writer, answer_to, harness
from whale_tui import records as r
from whale_tui.domains.base import load
from whale_tui.harness.checks import check
from whale_tui.harness.leaks import in_source, reads_outside, task_texts, tool_uses, unsaid, unsaid_words

QUESTION = "What is the hill town of Arlen known for among travellers?"
RUN = "\ndef run(task, model, tools):\n    return ''\n"


def leaks(source: str, answers: list[str] = (), texts: list[str] = (), given: str = "") -> list[str]:
    return in_source(ast.parse(source + RUN), answers, texts, given)


# ------------------------------------------------------------------------------------------------------- in the source


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("X = 'Marlow'", True),
        ("X = {'a': ['deep', 'MARLOW river']}", True),
        ("X = 'Mar' 'low'", True),  # joined by the parser
        ("def f(x):\n    return f'{x} Marlow'", True),
        ("X = {'q': 'Marlow'}.get", True),
        ("X = 'Marlowe'", False),  # another word
        ("X = 'The answer is unknown'", False),
        ("# Marlow", False),
        ("Marlow = 1", False),  # a name says nothing to the policy
    ],
)
def test_reference_answers(source: str, found: bool) -> None:
    warnings = leaks(source, ["Marlow", "unknown", "42", "no"])
    assert bool(warnings) == found
    if found:
        assert "'marlow', the reference answer of a D_harness task" in warnings[0]


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("ANSWERS = {'a': 74210}", True),
        ("ANSWERS = [1, 74210]", True),
        ("ANSWERS = (0, {'x': [74210]})", True),
        ("MAX_TOKENS = 74210", False),  # a setting
        ("ANSWERS = [742]", False),  # in every program by chance
    ],
)
def test_numbers_are_looked_for_in_tables_alone(source: str, found: bool) -> None:
    assert bool(leaks(source, ["74210", "742"])) == found


@pytest.mark.parametrize(
    ("source", "found"),
    [
        (f"X = {QUESTION!r}", True),
        (f"X = {QUESTION.upper()!r}", True),
        ("X = 'e.g. what is the hill town of  arlen\\nknown for, then'", True),  # a run of eight words
        ("X = 'What is the hill town of Arlen?'", False),  # seven
        ("X = 'Which mines?'", False),
        ("X = 'Say which mines of Corvo closed'", True),  # a short text as a whole
        ("X = 'Answer the question from the passages that follow it here'", False),  # all tasks have it
    ],
)
def test_texts_of_tasks(source: str, found: bool) -> None:
    frame = "Answer the question from the passages that follow it here. "
    texts = [
        frame + QUESTION,
        frame + "Who built the bridge at Dunmere when the war was over?",
        "which mines of Corvo?",
    ]
    assert bool(leaks(source, texts=texts)) == found


def test_what_the_proposer_was_given_is_no_leak() -> None:
    source = f"EXAMPLES = [({QUESTION!r}, 'Marlow')]"
    assert len(leaks(source, ["Marlow"], [QUESTION])) == 2
    assert leaks(source, ["Marlow"], [QUESTION], given=f"For example: {QUESTION} Marlow.") == []


def test_warnings_are_few_and_count_the_rest() -> None:
    texts = [f"number {n} of these long questions is about its very own thing {n}" for n in range(30)]
    found = leaks(f"X = {texts!r}", texts=texts)
    assert len(found) == 11 and found[-1] == "and 20 more texts of tasks"


@pytest.mark.parametrize("name", ["encyclopedia", "arithmetic"])
def test_no_built_in_h0_or_demonstration_is_a_leak(name: str) -> None:
    domain = load(name)
    tasks = domain.tasks("harness")
    texts = [text for task in tasks for text in task_texts(task.public)]
    answers = [answer for task in tasks for answer in task.answers]
    shown = f"EXAMPLES = {[str(d.task) for d in domain.brief.demonstrations]!r}"
    assert check(domain.h0, answers=answers, texts=texts).warnings == []
    given = domain.brief.text + str(domain.brief.demonstrations)
    assert in_source(ast.parse(shown), answers, texts, given) == []


def test_a_verbatim_task_of_a_built_in_domain_is_found() -> None:
    domain = load("encyclopedia")
    tasks = domain.tasks("harness")
    texts = [text for task in tasks for text in task_texts(task.public)]
    question = str(tasks[5].public["question"])
    found = check(f"EXAMPLES = [{question!r}]\n{domain.h0}", texts=texts, answers=tasks[5].answers).warnings
    assert [w for w in found if "quotes a D_harness task" in w]


# ---------------------------------------------------------------------------------------------------------- in the loop


def search(folder: Path, *sources: str, **changes: Any) -> World:
    changes = {"schedule__iterations": 3, "harness__candidates": len(sources)} | changes
    return World(folder, Writer(list(sources), [harness(41)]), **changes).go()


LEAKY = harness(60, more=f"\nTABLE = {{{3!r}: {answer_to(3)!r}}}\n")


def test_a_leak_is_a_warning_on_the_card_and_in_the_feedback(tmp_path: Path) -> None:
    world = search(tmp_path, LEAKY)
    card = world.state.harnesses["h0001"]
    assert card.outcome == "accepted" and answer_to(3) in card.warnings[0]
    archived = world.writer.requests[1].archive[1]
    assert archived.warnings == card.warnings
    assert any("h0001" in note and "reference answer" in note for note in world.writer.requests[1].notes)


def test_strict_leaks_make_it_invalid_before_it_costs_an_episode(tmp_path: Path) -> None:
    quote = harness(60, more="\nX = 'The number 7 of the harness tasks wants its own mineral named here'\n")
    world = search(tmp_path, LEAKY, quote, harness(50), harness__strict_leaks=True)
    for name in ("h0001", "h0002"):
        bad = world.state.harnesses[name]
        assert bad.outcome == "invalid" and bad.reason.startswith("leak: line ")
        assert not bad.scores
    assert world.state.harness == "h0003"
    assert world.state.ledger["harness/smoke"].episodes == 2  # h0003, h0004


INVENTS = harness(60, answer="f\"mineral-{task['number'] * 7 + 1000}\"")


@pytest.mark.parametrize("mode", ["off", "warn", "strict"])
def test_answers_that_the_policy_never_gave(tmp_path: Path, mode: str) -> None:
    world = search(tmp_path, INVENTS, harness(55), harness__answer_from_samples=mode)
    bad, good = world.state.harnesses["h0001"], world.state.harnesses["h0002"]
    words = "40 of 100 answers do not occur in what the policy said (40%)"
    if mode == "off":
        assert bad.warnings == [] and world.state.harness == "h0001"
    elif mode == "warn":
        assert bad.warnings == [words] and world.state.harness == "h0001"
        assert any(words in event.warnings for event in world.events(r.CandidateScored))
    else:
        assert (bad.outcome, bad.reason, bad.scores) == ("invalid", words, {}) and world.state.harness == "h0002"
    assert good.warnings == []


def test_case_spacing_and_punctuation_make_no_answer_strange() -> None:
    said = ["The answer is 1,000 Grey-Slate tiles."]
    assert unsaid([("grey slate", said), ("1000", said), ("  ", said), ("GREY SLATE!", said)]) == (0, 3)
    assert unsaid([("tin", said), ("slate", [])]) == (2, 2)
    assert unsaid_words(1, 20) == "" and unsaid_words(0, 0) == ""
    assert unsaid_words(5, 20) == "5 of 20 answers do not occur in what the policy said (25%)"


# ------------------------------------------------------------------------------------------------- outside the folder


@pytest.mark.parametrize(
    ("tool", "arguments", "outside"),
    [
        ("Read", {"file_path": "/s/it-1/archive/index.md"}, ""),
        ("Read", {"file_path": "archive/index.md"}, ""),
        ("Read", {"file_path": "./archive/../brief.md"}, ""),
        ("Read", {"file_path": "../journal.sqlite"}, "../journal.sqlite"),
        ("Read", {"file_path": "/s/it-10/brief.md"}, "/s/it-10/brief.md"),
        ("Read", {"file_path": "/etc/passwd"}, "/etc/passwd"),
        ("Glob", {"pattern": "*.py", "path": "~/data"}, "~/data"),
        ("edit", {"edits": [{"path": "/s/other.py"}]}, "/s/other.py"),
        ("Bash", {"command": "cat brief.md | grep -n 'a/b' && ./check candidates/a.py"}, ""),
        ("Bash", {"command": "/usr/bin/python3 -c 'print(1)' 2>/dev/null"}, ""),
        ("Bash", {"command": "awk '/town/ {print $1}' brief.md | sed 's/a/b/'"}, ""),
        ("Bash", {"command": "cat ../../journal.sqlite"}, "../../journal.sqlite"),
        ("Bash", {"command": "cd /s/it-1/../ ; ls"}, "/s/it-1/../"),
        ("bash", {"command": ["bash", "-lc", "head -3 ~/.ssh/config"]}, "~/.ssh/config"),
        ("Bash", {"command": "python - <<E\nopen('/data/test.jsonl')\nE"}, "/data/test.jsonl"),
        ("Bash", {"command": "echo 'an unclosed quote /home/x"}, "/home/x"),
        ("Write", {"file_path": "candidates/a.py", "content": "open('/etc/passwd')"}, ""),
    ],
)
def test_reads_outside_the_scratch_folder(tool: str, arguments: dict, outside: str) -> None:
    found = reads_outside([(tool, arguments)], Path("/s/it-1"))
    assert found == ([f"{tool} {outside}, outside its folder"] if outside else [])


TRANSCRIPT = [
    {
        "type": "assistant",
        "message": {"content": [{"type": "tool_use", "name": "Read", "input": {"file_path": "/a/1"}}]},
    },
    {"type": "item.completed", "item": {"type": "command_execution", "command": "bash -lc 'cat /a/2'"}},
    {"type": "tool_use", "tool_name": "read_file", "parameters": {"absolute_path": "/a/3"}},
    {"type": "tool_use", "part": {"tool": "bash", "state": {"input": {"command": "ls /a/4"}, "output": "/a/no"}}},
    {"type": "tool_use", "name": "read", "input": {"path": "/a/5"}},
    {"type": "tool-return", "name": "read", "text": "/a/no"},
    {"type": "assistant", "message": {"content": [{"type": "text", "text": "I read /a/no"}]}},
]


def test_calls_are_found_in_the_transcripts_of_all_agents() -> None:
    lines = [json.dumps(event).encode() for event in TRANSCRIPT] + [b"plain /a/no", b'{"cut', b"[" * 100_000, b""]
    found = reads_outside(tool_uses(lines), Path("/s"))
    assert [text.split()[1].rstrip(",") for text in found] == [f"/a/{n}" for n in range(1, 6)]


def test_allowed_places_are_no_reads_outside() -> None:
    uses = [("Read", {"path": "/opt/tool/README"}), ("Read", {"path": "/home/me/cache/x"})]
    assert reads_outside(uses, Path("/s"), [Path("/home/me/cache")]) == []
    assert len(reads_outside([("Read", {"path": f"/data/{n}"}) for n in range(50)], Path("/s"))) == 11
