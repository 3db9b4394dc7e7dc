"""Checks before a candidate costs an episode, and the prompt-only rule, as tables."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

from whale_tui.harness import contract, fst
from whale_tui.harness.checks import check, source_hash
from whale_tui.harness.contract import MODULES, ToolError, use_tool
from whale_tui.harness.sealed import can_seal

GOOD = '''"""Ask once."""
import re
from collections.abc import Iterable

SYSTEM = "Answer in <answer> tags."

def run(task, model, tools):
    # the simplest harness
    reply = model.chat([{"role": "system", "content": SYSTEM}, {"role": "user", "content": task["question"]}])
    return reply.text
'''
RUN = "def run(task, model, tools):\n    return ''\n"


def test_a_good_harness_passes_without_a_word():
    checked = check(GOOD, archive_hashes={"0" * 16}, answers=["Marlow"], fst_base=None)
    assert (checked.ok, checked.reason, checked.warnings) == (True, "", [])
    assert checked.source_hash == source_hash(GOOD)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("def run(task, model, tools:\n  pass", "line 1: it doesn't parse"),
        ("x = 1\ndef f(:\n", "line 2: it doesn't parse"),
        ("x = '\0'", "doesn't parse"),
        ("x = " + "(" * 300 + ")" * 300, "doesn't parse"),
        ("x = " + "-" * 30_000 + "1", "doesn't parse"),
        ("", "line 1: no top-level `def run(task, model, tools)`"),
        ("class A:\n    def run(self, task, model, tools): pass", "no top-level"),
        ("if True:\n    def run(task, model, tools): pass", "no top-level"),
        ("run = lambda task, model, tools: ''", "no top-level"),
        ("x = 1\n\ndef run(task, model): return ''", "line 3: `run` must take exactly (task, model, tools)"),
        ("def run(model, task, tools): return ''", "must take exactly"),
        ("def run(task, model, tools, more=1): return ''", "must take exactly"),
        ("def run(task, model, tools, *rest): return ''", "must take exactly"),
        ("def run(task, model, *, tools): return ''", "must take exactly"),
        ("def run(task, model, tools, **kw): return ''", "must take exactly"),
        ("async def run(task, model, tools): return ''", "line 1: `run` must be a plain function"),
        (RUN + "class run: pass\n", "line 3: `run` must be a plain function"),
        ("def run(task, model, tools):\n    yield ''", "line 2: `run` must return its answer"),
        ("import os\n" + RUN, "line 1: a harness can't import 'os'"),
        ("import json, subprocess\n" + RUN, "'subprocess'"),
        ("from os import path\n" + RUN, "'os'"),
        ("import os.path as json\n" + RUN, "'os.path'"),
        ("from . import x\n" + RUN, "a harness can't import '.'"),
        ("from .json import x\n" + RUN, "'.json'"),
        ("import xml\n" + RUN, "'xml'"),
        ("from urllib import request\n" + RUN, "'urllib'"),
        ("import urllib.request\n" + RUN, "'urllib.request'"),
        ("import whale_tui\n" + RUN, "'whale_tui'"),
        ("import time\n" + RUN, "'time'"),
        ("import threading\n" + RUN, "'threading'"),
        ("import ctypes\n" + RUN, "'ctypes'"),
        ("def run(task, model, tools):\n    import socket\n    return ''", "line 2: a harness can't import 'socket'"),
        ("import importlib\n" + RUN, "'importlib'"),
        ("from importlib import import_module\n" + RUN, "'importlib'"),
        (RUN + "x = __import__('os')\n", "line 3: a harness imports with `import` alone"),
        (RUN + "x = __builtins__['__import__']('os')\n", "line 3: a harness imports with `import` alone"),
        (RUN + "x = re.__import__\n", "imports with `import` alone"),
        ("#" * (contract.SOURCE_BYTES + 1) + "\n" + RUN, "bytes; at most 64,000"),
        ("#" + "é" * (contract.SOURCE_BYTES // 2) + "\n" + RUN, "bytes; at most 64,000"),
    ],
)
def test_what_is_refused_and_the_words_for_it(source, reason):
    checked = check(source)
    assert not checked.ok
    assert reason in checked.reason
    assert checked.warnings == []


@pytest.mark.parametrize("name", sorted(MODULES - {"__future__"}))
def test_every_allowed_module_may_be_imported_either_way(name):
    assert check(f"import {name}\n{RUN}").ok
    assert check(f"def run(task, model, tools):\n    from {name} import __name__\n    return ''").ok


def test_future_imports_and_submodules_from_their_package():
    assert check("from __future__ import annotations\nfrom urllib import parse\nfrom collections import abc\n" + RUN).ok


@pytest.mark.parametrize("source", ["x = " + "-" * 30_000 + "1", "x = " + "(" * 300, "x = '\0'", "'\ud800'", "def"])
def test_what_has_no_identity_says_so_in_two_ways_only(source):
    with pytest.raises((SyntaxError, ValueError)):
        source_hash(source)


def test_a_generator_inside_run_is_fine():
    assert check("def run(task, model, tools):\n    def lines():\n        yield 'a'\n    return ''.join(lines())").ok


@pytest.mark.parametrize(
    "same",
    [
        GOOD.replace("# the simplest harness", "# another remark"),
        GOOD.replace('"""Ask once."""', '"""Ask one time."""'),
        GOOD.replace('"""Ask once."""\n', ""),
        GOOD.replace("\n\n", "\n\n\n"),
        GOOD.replace('"Answer in <answer> tags."', "('Answer in '\n    '<answer> tags.')"),
    ],
)
def test_formatting_comments_and_docstrings_make_no_new_harness(same):
    assert same != GOOD
    checked = check(same, archive_hashes={source_hash(GOOD)})
    assert not checked.ok
    assert "already in the archive" in checked.reason
    assert checked.source_hash == source_hash(GOOD)


@pytest.mark.parametrize(
    "other", [GOOD.replace("answer>", "a>"), GOOD.replace('"user"', '"system"'), GOOD + "\nX = 1\n"]
)
def test_any_change_of_code_or_text_makes_a_new_harness(other):
    assert check(other, archive_hashes={source_hash(GOOD)}).ok


@pytest.mark.parametrize(
    ("text", "answer", "warned"),
    [
        ("Q: who? A: Marlow", "Marlow", True),
        ("q: who? a: MARLOW.", "marlow", True),
        ("the Marlow Bridge", "Marlow Bridge", True),
        ("Marlowe", "Marlow", False),
        ("unMarlow", "Marlow", False),
        ("Marlow", "Marlow Bridge", False),
        ("A: 42", "42", False),
        ("A: 1984", "1984", True),
        ("x11984", "1984", False),
        ("north of it", "north", False),
        ("C++ (language)", "C++ (language)", True),
        ("Zürich", "ZÜRICH", True),
    ],
)
def test_reference_answers_in_literals_are_warned_of(text, answer, warned):
    checked = check(f"\nEXAMPLE = {text!r}\n{RUN}", answers=[answer, "unrelated thing"])
    assert checked.ok
    assert bool(checked.warnings) == warned
    if warned:
        assert checked.warnings[0].startswith("line 2: ")


def test_an_answer_in_an_f_string_counts_and_one_in_a_comment_or_handed_over_does_not():
    assert check(f"def f(x): return f'Marlow {{x}}'\n{RUN}", answers=["Marlow"]).warnings
    assert not check(f"# Marlow\n{RUN}", answers=["Marlow"]).warnings
    assert not check(f"X = 'Marlow'\n{RUN}", answers=["Marlow"], given="Demonstration: Marlow.").warnings


def test_warnings_are_bounded():
    answers = [f"answer{n}" for n in range(300)]
    warnings = check(f"X = {' '.join(answers)!r}\n{RUN}", answers=answers).warnings
    assert len(warnings) == 11
    assert warnings[-1] == "and 290 more reference answers"


H0 = '''"""Base."""
import re

SYSTEM = "Answer the question."
EXAMPLES = ["Q: a\\nA: b"]
SHOTS = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
NOTHING = []
PAIR = ("before", "after")
TAG = r"<answer>(.*?)</answer>"
STOP = "\\n\\n"
PREFIX = "find: "
LIMIT = 64
MARK = "yes"
lower = "text"
FORMAT = f"{LIMIT} words"


def run(task, model, tools):
    """Drive."""
    passage = tools.search(PREFIX + task["question"])
    text = model.chat([{"role": "system", "content": SYSTEM}, *SHOTS], stop=STOP, max_tokens=LIMIT).text
    if text == MARK:
        return "inline"
    return re.search(TAG, text).group(1)
'''

ALLOWED = {
    "a prompt's text": ("Answer the question.", "Think, then answer."),
    "a prompt to several lines": ('"Answer the question."', '"""Think.\n\nThen answer."""'),
    "implicit joining": ('"Answer the question."', '("Answer " "now.")'),
    "joining with +": ('"Answer the question."', '"Answer " + "now."'),
    "an empty prompt": ('"Answer the question."', '""'),
    "a list that grows": ('["Q: a\\nA: b"]', '["Q: a\\nA: b", "Q: c\\nA: d"]'),
    "a list that shrinks": ('["Q: a\\nA: b"]', "[]"),
    "a list that was empty": ("NOTHING = []", 'NOTHING = ["something"]'),
    "more shots": ('"content": "a"}]', '"content": "a"}, {"role": "user", "content": "more"}]'),
    "a shot's text": ('"content": "q"', '"content": "another"'),
    "a tuple's text": ('("before", "after")', '("first", "last")'),
    "a docstring": ('"""Drive."""', '"""Drive on."""'),
    "no docstring": ('    """Drive."""\n', ""),
    "a comment": ("import re\n", "import re  # for the tag\n"),
    "blank lines": ("\n\n\ndef run", "\n\ndef run"),
}
FORBIDDEN = {
    "an inline string": ('"inline"', '"other"', 23),
    "a number": ("LIMIT = 64", "LIMIT = 65", 12),
    "a regular expression": ("(.*?)", "(.*)", 9),
    "a stop string": ('"\\n\\n"', '"\\n"', 10),
    "what goes to a tool": ('"find: "', '"look: "', 11),
    "what is compared": ('MARK = "yes"', 'MARK = "no"', 13),
    "a lower-case name": ('lower = "text"', 'lower = "other"', 14),
    "an f-string": ('f"{LIMIT} words"', 'f"{LIMIT} tokens"', 15),
    "a prompt turned into an f-string": ('"Answer the question."', 'f"Answer {1}"', 4),
    "a prompt turned into a call": ('"Answer the question."', 'str("x")', 4),
    "a prompt turned into a list": ('"Answer the question."', '["x"]', 4),
    "a prompt turned into a number": ('"Answer the question."', "7", 4),
    "a list of another kind": ('["Q: a\\nA: b"]', '[["Q", "A"]]', 5),
    "a list with code in it": ('["Q: a\\nA: b"]', '["Q", print("x")]', 5),
    "a list turned into a tuple": ('["Q: a\\nA: b"]', '("Q",)', 5),
    "a shot's keys": ('"content": "q"}', '"text": "q"}', 6),
    "a new constant": ("LIMIT = 64", 'LIMIT = 64\nMORE = "text"', 13),
    "a constant removed": ('MARK = "yes"\n', "", 13),
    "a prompt assigned twice": ('EXAMPLES = ["Q', 'SYSTEM = "again"\nEXAMPLES = ["Q', 5),
    "a prompt renamed": ("SYSTEM", "SYS", 4),
    "another argument": ("max_tokens=LIMIT", "max_tokens=8", 21),
    "one call more": ("    if text == MARK:", "    model.chat(SHOTS)\n    if text == MARK:", 22),
    "an import": ("import re\n", "import re\nimport json\n", 3),
    "a line at the end": ("group(1)\n", "group(1)\nprint()\n", 25),
    "a default": ("def run(task, model, tools)", "def run(task, model, tools=None)", 18),
    "an annotation": ('SYSTEM = "', 'SYSTEM: str = "', 4),
}


@pytest.mark.parametrize("edit", ALLOWED)
def test_fst_allows(edit):
    before, after = ALLOWED[edit]
    assert before in H0 and before != after
    assert fst.violation(H0, H0.replace(before, after, 1)) is None


@pytest.mark.parametrize("edit", FORBIDDEN)
def test_fst_forbids_and_names_the_line(edit):
    before, after, line = FORBIDDEN[edit]
    assert before in H0
    found = fst.violation(H0, H0.replace(before, after) if edit == "a prompt renamed" else H0.replace(before, after, 1))
    assert found is not None
    assert found.startswith(f"line {line}: "), found


def test_fst_is_a_check():
    assert check(H0.replace("Answer the question.", "Think."), fst_base=H0).ok
    refused = check(H0.replace('"inline"', '"other"'), fst_base=H0)
    assert not refused.ok
    assert "prompt constants" in refused.reason


def test_the_prompts_of_h0_by_name():
    assert set(fst.prompts(ast.parse(H0))) == {"SYSTEM", "EXAMPLES", "SHOTS", "NOTHING", "PAIR"}


def test_tools_refuse_in_words_and_break_out_loud():
    def search(query: str, k: int = 1) -> list[str]:
        if k < 1:
            raise ValueError("k must be at least 1")
        if query == "break":
            raise RuntimeError("the index is gone")
        if query == "bug":
            raise TypeError("a bug of the tool's own")
        return [query] * k

    tools = {"search": search}
    assert use_tool(tools, "search", ["a"], {"k": 2}) == ["a", "a"]
    for args, kwargs, words in [([], {}, "query"), (["a"], {"n": 1}, "'n'"), (["a"], {"k": 0}, "at least 1")]:
        with pytest.raises(ToolError, match=words):
            use_tool(tools, "search", args, kwargs)
    with pytest.raises(ToolError, match="no tool 'find'; there are: search"):
        use_tool(tools, "find", [], {})
    with pytest.raises(RuntimeError):
        use_tool(tools, "search", ["break"], {})
    with pytest.raises(TypeError):
        use_tool(tools, "search", ["bug"], {})


def test_the_contract_names_everything_that_a_proposer_needs():
    for word in (
        "def run(task, model, tools) -> str",
        "model.chat",
        "ToolError",
        "finish_reason",
        "remaining",
        "64,000",
    ):
        assert word in contract.CONTRACT
    assert all(name in contract.CONTRACT for name in MODULES - {"__future__"})


def kernel_offers_seccomp() -> bool:
    try:
        import pyseccomp  # noqa: F401

        return sys.platform == "linux" and "\nSeccomp:" in Path("/proc/self/status").read_text()
    except (ImportError, RuntimeError, OSError):
        return False


@pytest.mark.skipif(not kernel_offers_seccomp(), reason="no seccomp in this kernel, or no libseccomp")
def test_what_can_be_sealed_is_sealed():
    """So that a broken seal is a failure, and not a reason to skip every test of it."""
    assert can_seal() == (True, "sealed with seccomp")
