# ruff: noqa: E501 (tables, a few cases a line)
"""Maths: every spelling of a row, answers right, wrong and tricky, the python tool's limits and seal, a sandbox server."""

from __future__ import annotations

import ast
import asyncio
import itertools
import json
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st

from whale_tui import config
from whale_tui.domains import base, tables
from whale_tui.domains.maths import verdict
from whale_tui.domains.maths.demonstrations import DEMONSTRATIONS
from whale_tui.domains.maths.python_tool import SandboxPython
from whale_tui.domains.maths.rows import read_task
from whale_tui.harness import checks
from whale_tui.harness.forks import ForkFailure, Forks
from whale_tui.loop.rollouts import Job, Rollouts, Subject, Where
from whale_tui.proposers.edits import Kit, Source, generic
from whale_tui.records import Sampling, Split, Task
from whale_tui.service import launch

ROOT = Path(__file__).parents[1]
DATA = ROOT.parent / "shared" / "data"
SPLITS: tuple[Split, ...] = ("weight", "harness", "test")
in_one_loop = pytest.mark.asyncio(loop_scope="module")


def real(name: str) -> Path:
    if not (DATA / name).is_file():
        pytest.skip(f"{name} is not in {DATA}")
    return DATA / name


def problems(folder: Path, count: int = 40) -> Path:
    file = folder / "problems.jsonl"
    file.write_text(
        "".join(json.dumps({"question": f"What is {n} + {n}?", "answer": 2 * n}) + "\n" for n in range(count))
    )
    return file


def options(file: Path, **more: Any) -> dict[str, Any]:
    return {"train": str(file), "harness": 8, "test": 8, "python_seconds": 1, **more}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def maths(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Any]:
    """One domain with its two fork servers, for all tests of this file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("whale_tui.domains.maths.COMPARE_SECONDS", 2)
        domain = base.load("maths", options(problems(tmp_path_factory.mktemp("maths"))))
    yield domain
    await base.close(domain)


async def judged(domain: Any, answer: str, reference: str, sampled: tuple[str, ...] = ()) -> Any:
    return await domain.verify(Task("key", {"question": "?"}, {"answer": reference}), answer, None, sampled=sampled)


# ------------------------------------------------------------------------------------------------------------- rows

DAPO = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: $Answer "
    "(without quotes) where $Answer is the answer to the problem.\n\nWhat is 1 + 1?\n\n"
    'Remember to put your answer on its own line after "Answer:".'
)


@pytest.mark.parametrize(
    ("values", "question", "answer"),
    [
        ({"question": "Q", "answer": "7"}, "Q", "7"),
        ({"question": "Q", "answer": "He has 3 * 4 = <<3*4=12>>12.\n#### 1,080"}, "Q", "1080"),
        ({"problem": "P", "solution": "So \\boxed{7}", "answer": "204", "id": 60, "url": "u", "year": "2024"}, "P", "204"),
        ({"Problem": "P", "Solution": "S", "Answer": 33}, "P", "33"),
        ({"ID": "2024-I-1", "Problem": "P", "Answer": "033"}, "P", "033"),
        ({"input": "I", "target": 43.0}, "I", "43"),
        ({"input": "I", "target": 0.6666666667}, "I", "0.6666666667"),
        ({"input": "I", "target": -5}, "I", "-5"),
        ({"data_source": "d", "prompt": [{"content": DAPO, "role": "user"}], "ability": "MATH", "reward_model": {"ground_truth": "2", "style": "rule"}, "extra_info": {"index": "i"}}, "What is 1 + 1?", "2"),
        ({"prompt": [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}], "answer": "1"}, "U", "1"),
        ({"prompt": "What is 1 + 1?", "solution": "2", "reward_model": {"ground_truth": "2", "style": "rule"}}, "What is 1 + 1?", "2"),
        ({"problem": "P", "solution": "It is $\\boxed{\\frac{1}{2}}$, not \\boxed{3}? No, $\\boxed{\\frac{1}{\\sqrt{2}}}$.", "level": "5"}, "P", "\\frac{1}{\\sqrt{2}}"),
        ({"QUESTION ": "Q", "final_answer": "x"}, "Q", "x"),
        ({"question": None, "problem": "P", "answer": 0}, "P", "0"),
    ],
)  # fmt: skip
def test_rows_are_read_in_every_spelling(values: dict[str, Any], question: str, answer: str) -> None:
    read = read_task(tables.Row(Path("f.jsonl"), 1, values))
    assert (read.public, read.private) == ({"question": question}, {"answer": answer})


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "Q", "answer": "1"}, r"p\.jsonl:2: no column with a problem; it has text, answer; name one of problem, question"),
        ({"question": "Q"}, r"p\.jsonl:2: no column with a reference answer; it has question"),
        ({"question": 5, "answer": "1"}, r"p\.jsonl:2: question must be a text or a chat with a user turn"),
        ({"prompt": [{"role": "system", "content": "S"}], "answer": "1"}, r"p\.jsonl:2: prompt must be a text or a chat"),
        ({"question": "Q", "answer": ["1", "2"]}, r"p\.jsonl:2: answer must be a text or a number, this is \['1', '2'\]"),
        ({"question": "Q", "answer": True}, r"p\.jsonl:2: answer must be a text or a number"),
        ({"problem": "P", "solution": "a long proof without a box " * 5}, r"p\.jsonl:2: no column with a reference answer"),
    ],
)  # fmt: skip
def test_a_row_that_is_no_problem_is_named(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"question": "Q1", "answer": "1"}\n' + json.dumps(row) + "\n")
    with pytest.raises(base.DomainError, match=message):
        base.load("maths", {"train": str(file)})


def test_empty_texts_are_dropped_and_repeated_rows_deduplicated(tmp_path: Path) -> None:
    rows = [{"question": f"Q{n % 40}", "answer": str(n % 40)} for n in range(4000)] + [
        {"question": " ", "answer": "1"},
        {"question": "Q", "answer": ""},
    ]
    file = tmp_path / "p.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    domain: Any = base.load("maths", options(file))
    assert {split: len(domain.tasks(split)) for split in SPLITS} == {"weight": 24, "harness": 8, "test": 8}
    assert domain.report.lines()[0] == (
        f"p.jsonl: 40 tasks, from 4,002 rows, 3,960 duplicates dropped, 1 dropped: no question (first at {file}:4001), "
        f"1 dropped: no reference answer (first at {file}:4002)"
    )


def test_splits_come_from_files_of_their_own_or_are_cut(tmp_path: Path) -> None:
    train, test = problems(tmp_path), tmp_path / "aime.csv"
    test.write_text("ID,Problem,Answer\n" + "".join(f"i{n},Another problem {n},{n}\n" for n in range(30)))
    domain = base.load("maths", {"train": str(train), "harness": 8, "test_file": str(test)})
    assert {split: len(domain.tasks(split)) for split in SPLITS} == {"weight": 32, "harness": 8, "test": 30}
    assert (
        len(
            base.load(
                "maths", {"train": str(train), "harness": 8, "test_file": str(test), "test": 5, "weight": 3}
            ).tasks("test")
        )
        == 5
    )
    other = base.load("maths", options(train, seed=1))
    assert {t.key for t in other.tasks("test")} != {t.key for t in base.load("maths", options(train)).tasks("test")}
    with pytest.raises(base.DomainError, match="40 tasks are in both D_test and D_weight"):
        base.load("maths", {"train": str(train), "harness_file": str(test), "test_file": str(train)})
    assert base.load(
        "maths", {"train": str(train), "harness_file": str(test), "test_file": str(train), "allow_overlap": True}
    )


def test_missing_data_are_named_with_how_to_get_them(tmp_path: Path) -> None:
    with pytest.raises(base.DomainError, match=r"domain\.options\.train is not set; put a file of problems there"):
        base.load("maths")
    with pytest.raises(base.DomainError, match=r"data/none\.jsonl: no such file; put .*DAPO-Math-17K.*GSM8K"):
        base.load("maths", {"train": "data/none.jsonl"}, relative_to=tmp_path)


def test_paths_start_from_the_config_s_folder_and_can_be_made_absolute(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    file = problems(tmp_path / "data")
    given_ = {"train": "data/problems.jsonl", "harness": 8, "test": 8}
    assert len(base.load("maths", given_, relative_to=tmp_path).tasks("test")) == 8
    assert base.absolute("maths", given_, None, tmp_path) == {"train": str(file), "harness": 8, "test": 8}
    with pytest.raises(base.DomainError, match=r"Expected a path, got 5 - at `domain\.options\.train`"):
        base.load("maths", {"train": 5})
    with pytest.raises(base.DomainError, match=r"domain\.options\.sandbox: 'host' is no URL"):
        base.load("maths", {**given_, "train": str(file), "sandbox": ["host"]})


def test_the_config_of_a_run_names_its_data_wherever_the_run_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WHALE_RUNS", str(tmp_path / "runs"))
    (tmp_path / "data").mkdir()
    file = problems(tmp_path / "data").rename(tmp_path / "data" / "mawps_test.jsonl")
    (tmp_path / "small.toml").write_text((ROOT / "sample_configs" / "maths-small.toml").read_text())
    run = launch.prepare(tmp_path / "small.toml", ["domain.options.harness=8", "domain.options.test=8"])
    kept = config.load(run.config).config.domain.options
    assert kept == {"train": str(file), "harness": 8, "test": 8, "tool": "calc", "verifier": "math-verify"}
    assert len(base.load("maths", kept, relative_to=run.path).tasks("weight")) == 24


@pytest.mark.parametrize("name", ["maths-small", "math-2b", "math-4b"])
def test_sample_configs_load_and_say_which_data_are_missing(name: str, tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text((ROOT / "sample_configs" / f"{name}.toml").read_text())
    resolved = config.load(tmp_path / "c.toml")
    with pytest.raises(base.DomainError, match=rf"{tmp_path}/data/.*: no such file; put a file of problems there"):
        base.load("maths", resolved.config.domain.options, relative_to=resolved.folder)


@pytest.mark.parametrize(
    ("name", "kept", "duplicates"),
    [("gsm8k_test.jsonl", 1319, 0), ("gsm8k_train_2000.jsonl", 2000, 0), ("aime_2024.jsonl", 30, 0), ("mawps_test.jsonl", 1981, 84), ("mawps_multiarith.jsonl", 580, 20)],
)  # fmt: skip
def test_real_files_are_read_whole(name: str, kept: int, duplicates: int) -> None:
    counts = tables.Counts()
    read = tables.distinct(tables.convert(tables.read_rows(real(name)), read_task, counts), counts)
    dropped = sum(d.count for d in counts.dropped.values())
    assert (len(read), counts.duplicates + dropped) == (kept, duplicates)
    assert all(verdict.number(t.private["answer"]) is not None for t in read)


# ---------------------------------------------------------------------------------------------------------- verdicts


@pytest.mark.parametrize(
    ("text", "box"),
    [
        ("\\boxed{42}", "42"), ("so \\boxed{ 42 }.", "42"), ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"), ("\\boxed{1} then \\boxed{2}", "2"),
        ("\\boxed{\\{1, 2\\}}", "\\{1, 2\\}"), ("\\boxed{{{a}}}", "{{a}}"), ("\\fboxed{3}", "3"), ("\\boxed {4}", "4"), ("\\boxed{é√}", "é√"),
        ("\\boxed{}", ""), ("\\boxed{1} and \\boxed{2", "1"), ("\\boxed{\\boxed{5}}", "5"), ("\\boxed{a\\}b}", "a\\}b"),
        ("boxed{1}", None), ("\\boxed 7", None), ("\\boxed{1", None), ("", None), ("{1}", None),
    ],
)  # fmt: skip
def test_the_last_whole_box_counts(text: str, box: str | None) -> None:
    assert verdict.last_boxed(text) == box


@given(st.text(alphabet="\\boxed{}1 ", max_size=60))
def test_any_text_has_a_box_or_none(text: str) -> None:
    box = verdict.last_boxed(text)
    assert box is None or box in text


@in_one_loop
@pytest.mark.parametrize(
    ("answer", "reference", "decision"),
    [
        ("42", "42", "accept"), (" 42. ", "42", "accept"), ("\\boxed{42}", "42", "accept"), ("so it is \\boxed{42}", "42", "accept"), ("42.0", "42", "accept"),
        ("042", "42", "accept"), ("42", "042", "accept"), ("-0", "0", "accept"), ("\u22125", "-5", "accept"), ("４２", "42", "accept"), ("+7", "7", "accept"),
        ("$42$", "42", "accept"), ("$18", "18", "accept"), ("\\$18.00", "18", "accept"), ("18", "\\$18", "accept"), ("1,234", "1234", "accept"),
        ("1{,}234", "1234", "accept"), ("1\\,234", "1234", "accept"), ("12,34", "1234", "reject"), ("1/2", "0.5", "accept"), ("0.5", "\\frac{1}{2}", "accept"),
        ("\\boxed{\\frac12}", "\\frac{1}{2}", "accept"), ("\\dfrac{2}{4}", "1/2", "accept"), ("2/3", "0.6666666667", "accept"), ("0.67", "2/3", "reject"),
        ("\\boxed{41} \\boxed{42}", "42", "accept"), ("\\boxed{42} \\boxed{41}", "42", "reject"), ("41 or 42", "42", "reject"), ("41, 42", "42", "reject"),
        ("2\\sqrt{2}", "\\sqrt{8}", "accept"), ("3", "\\sqrt{8}", "reject"), ("\\{2,1\\}", "\\{1,2\\}", "accept"), ("(2,1)", "(1,2)", "reject"),
        ("[1,2]", "[1,2)", "reject"), ("(x-1)(x+1)", "x^2-1", "accept"), ("(x-1)^2", "x^2-1", "reject"), ("5 cm", "5", "accept"), ("5\\text{ cm}", "5", "accept"),
        ("x=5", "5", "accept"), ("e - 2", "-2+e", "accept"), ("10^6", "1000000", "accept"), ("x**2-1", "(x-1)(x+1)", "accept"), ("3/2", "1 \\frac{1}{2}", "accept"), ("90", "90^\\circ", "accept"),
        ("east", "\\text{east}", "accept"), ("West", "east", "reject"), ("3.14", "\\pi", "reject"), ("-42", "42", "reject"), ("420", "42", "reject"),
        ("", "42", "reject"), ("  ", "42", "reject"), ("\\boxed{}", "42", "reject"), ("no idea", "42", "reject"), ("\\frac{1}{0}", "42", "reject"), ("1/0", "0", "reject"),
        ("__import__('os').write(1,b'=')", "42", "reject"), ("=", "42", "reject"), ("9" * 1001, "42", "reject"), ("1" * 300, "42", "reject"), ("\x00", "42", "reject"),
        ("\\boxed{4", "42", "reject"), ("}{", "42", "reject"), ("42\n43", "42", "reject"),
    ],
)  # fmt: skip
async def test_answers_are_compared_as_mathematics(maths: Any, answer: str, reference: str, decision: str) -> None:
    said = await judged(maths, answer, reference)
    assert said.decision == decision, said.reason
    assert reference not in said.reason or reference in ("0", "5")


@in_one_loop
async def test_a_hostile_answer_costs_seconds_of_its_own_process_and_no_more(maths: Any) -> None:
    started = time.monotonic()
    hostile = judged(maths, "9^{9^{9^{9}}}", "42")
    good = judged(maths, "2\\sqrt{2}", "\\sqrt{8}")
    bomb, right = await asyncio.gather(hostile, good)
    assert (bomb.decision, right.decision) == ("reject", "accept")
    assert "can't be compared" in bomb.reason and time.monotonic() - started < 60


@in_one_loop
async def test_the_rule_of_the_study_reads_what_the_policy_wrote_to_the_letter(tmp_path: Path) -> None:
    domain = base.load("maths", options(problems(tmp_path), verifier="boxed"))
    cases = [
        (("so \\boxed{1/2}",), "1/2", "accept"),
        (("\\boxed{3}", "and \\boxed{1/2}"), "1/2", "accept"),
        (("\\boxed{1/2}", "no box here"), "1/2", "accept"),
        (("\\boxed{1/2}", "\\boxed{3}"), "1/2", "reject"),
        (("\\boxed{0.5}",), "1/2", "reject"),
        (("\\boxed{1{,}000}",), "1000", "reject"),
        (("\\boxed{", "1/2}"), "1/2", "reject"),
        ((), "1/2", "reject"),
    ]
    for sampled, reference, decision in cases:
        for returned in ("", "\\boxed{1/2}", "1/2"):  # what stands in a prompt, or what a harness says, is nothing
            assert (await judged(domain, returned, reference, sampled)).decision == decision, sampled
    await base.close(domain)


@given(st.text(max_size=40))
def test_no_text_breaks_the_quick_comparison(text: str) -> None:
    tidied = verdict.tidy(text)
    assert verdict.same_number(tidied, "42") in (True, False, None)


@given(
    st.fractions(max_denominator=1000),
    st.sampled_from(["{n}/{d}", "\\frac{{{n}}}{{{d}}}", "${n}/{d}$", "\\boxed{{{n}/{d}}}"]),
)
def test_fractions_are_read_as_written(value: Any, form: str) -> None:
    if "frac" in form and value < 0:
        form = "-" + form.replace("{n}", "{m}")
    text = form.format(n=value.numerator, m=-value.numerator, d=value.denominator)
    assert verdict.number(verdict.tidy(text)) == value


# ---------------------------------------------------------------------------------------------------------- the tool


@in_one_loop
@pytest.mark.parametrize(
    ("code", "output"),
    [
        ("print(1 + 1)", "2\n"), ("print('a', end='')\nprint('b')", "ab\n"), ("1 + 1", ""), ("print('é', chr(0xd800))", "é ?\n"),
        ("import sympy as sp\nx = sp.symbols('x')\nprint(sp.solve(x**2 - 5*x + 6, x), sp.limit(sp.sin(x)/x, x, 0))", "[2, 3] 1\n"),
        ("from sympy import *\nx = symbols('x')\nprint(integrate(exp(-x**2), (x, -oo, oo)), factorint(2**24 - 1))", "sqrt(pi) {3: 2, 5: 1, 7: 1, 13: 1, 17: 1, 241: 1}\n"),
        ("from sympy import *\nprint(summation(1/Symbol('n')**2, (Symbol('n'), 1, oo)), nsimplify('0.5'), diophantine(Symbol('x')**2 - 9))", "pi**2/6 1/2 {(3,), (-3,)}\n"),
        ("import numpy as np\nprint(np.linalg.det(np.eye(3)), np.roots([1, -3, 2]).round(6))", "1.0 [2. 1.]\n"),
        ("from fractions import Fraction\nfrom itertools import permutations\nimport math\nprint(Fraction(1, 3) + 1, len(list(permutations(range(4)))), math.comb(10, 3))", "4/3 24 120\n"),
        ("import sys\nprint('out')\nsys.exit(3)", "out\n"), ("exit()", ""), ("def f(n):\n    return n if n < 2 else f(n-1) + f(n-2)\nprint(f(15))", "610\n"),
        ("import threading\nt = threading.Thread(target=print, args=('t',))\nt.start()\nt.join()", "t\n"),
    ],
)  # fmt: skip
async def test_python_gives_back_what_is_printed(maths: Any, code: str, output: str) -> None:
    assert await maths.tools(maths.tasks("test")[0])["python"](code) == output


@in_one_loop
@pytest.mark.parametrize(
    ("code", "end"),
    [
        ("print(1)\n1/0", "ZeroDivisionError: division by zero\n"), ("x = (", "SyntaxError: '(' was never closed\n"), ("print(y)", "NameError: name 'y' is not defined\n"),
        ("input()", "EOFError: EOF when reading a line\n"), ("import pandas", "ModuleNotFoundError: No module named 'pandas'\n"), ("f = lambda: f()\nf()", "maximum recursion depth exceeded\n"),
        ("x = [0] * 10**10", "MemoryError\n"), ("x = []\nwhile True:\n    x.append(bytes(2**24))", "MemoryError\n"), ("raise SystemError('x' * 9999)", "xxx\n"),
    ],
)  # fmt: skip
async def test_python_gives_back_the_error(maths: Any, code: str, end: str) -> None:
    said = await maths.tools(None)["python"](code)
    assert said.endswith(end) and len(said) < 2100
    assert "inside_python" not in said and str(ROOT) not in said


@in_one_loop
@pytest.mark.parametrize(
    ("code", "start", "mark"),
    [
        ("print('before')\nwhile True: pass", "before\n", "[cut: still running after 1 s]\n"),
        ("print('before')\nimport time\ntime.sleep(60)", "before\n", "[cut: still running after 1 s]\n"),
        ("while True: print('0123456789')", "0123456789\n", "[cut: more than 4,000 characters]\n"),
        ("import sys\nsys.setrecursionlimit(10**9)\ndef f(): f()\nf()", "", "]\n"),
    ],
)  # fmt: skip
async def test_python_is_cut_with_a_mark(maths: Any, code: str, start: str, mark: str) -> None:
    said = await maths.tools(None)["python"](code)
    assert said.startswith(start) and said.endswith(mark) and len(said) < 4100


@in_one_loop
@pytest.mark.parametrize(
    "code",
    [
        "open('/etc/passwd')", "open('x', 'w')", "import os; os.listdir('/')", "import os; os.fork()", "import os; os.kill(os.getppid(), 9)",
        "import socket; socket.socket()", "import os; os.execv('/bin/sh', ['sh'])", "import os; os.close(1)",
        "import os; os.write(3, b'x')", "import os; os.dup(1)", "import numpy; numpy.fromfile('/etc/passwd')", "import mmap; mmap.mmap(-1, 10, prot=7)",
    ],
)  # fmt: skip
async def test_python_is_sealed(maths: Any, code: str) -> None:
    said = await maths.tools(None)["python"](code)
    assert "Error" in said and ("not permitted" in said or "Bad file descriptor" in said or "No module named" in said)
    assert await maths.tools(None)["python"]("print('still here')") == "still here\n"


@in_one_loop
async def test_calls_share_nothing_and_start_alike(maths: Any) -> None:
    python = maths.tools(None)["python"]
    await python("import math, sympy, random\nmath.pi = 3\nsympy.pi = 3\nx = 1\nrandom.seed(5)")
    said = await python("import math, sympy\nprint(math.pi > 3, sympy.pi, 'x' in globals())")
    assert said == "True pi False\n"
    draws = "import random, numpy\nprint(random.random(), numpy.random.rand(), hash('a'))"
    assert await python(draws) == await python(draws)
    assert (
        await python(
            "import os, gc\nprint(dict(os.environ), any('draws' in str(o) for o in gc.get_objects() if type(o) is str))"
        )
        == "{} False\n"
    )


@in_one_loop
async def test_a_call_takes_some_milliseconds(maths: Any) -> None:
    python = maths.tools(None)["python"]
    await python("print(1)")
    took = []
    for _ in range(20):
        started = time.perf_counter()
        assert await python("print(1)") == "1\n"
        took.append(time.perf_counter() - started)
    assert sorted(took)[5] < 0.1  # about 0.01 on a quiet machine
    assert await asyncio.gather(*(python(f"print({n})") for n in range(100))) == [f"{n}\n" for n in range(100)]


@in_one_loop
@pytest.mark.parametrize("code", ["", "  ", None, 5, ["print(1)"], "x" * 20_001])
async def test_python_refuses_in_words(maths: Any, code: Any) -> None:
    with pytest.raises(ValueError, match=r"python\(code\)"):
        await maths.tools(None)["python"](code)


@in_one_loop
async def test_the_server_is_started_again_where_it_died(maths: Any) -> None:
    forks: Forks = maths._python._forks
    assert forks._process is not None
    forks._process.kill()
    assert await maths.tools(None)["python"]("print(2)") == "2\n"
    running = asyncio.ensure_future(maths.tools(None)["python"]("while True: pass"))
    await asyncio.sleep(0.1)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert await maths.tools(None)["python"]("print(3)") == "3\n"


async def test_a_server_that_can_t_start_says_why(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("def warm(): raise RuntimeError('cold')\n")
    with pytest.raises(ForkFailure, match="did not start: RuntimeError: cold"):
        await Forks(program).run({})


@in_one_loop
@pytest.mark.parametrize("verifier", ["math-verify", "boxed"])
async def test_known_answers_get_their_verdicts(tmp_path: Path, verifier: str) -> None:
    domain: Any = base.load("maths", options(problems(tmp_path), verifier=verifier))
    known = list(domain.known_answers())
    assert {case.decision for case in known} == {"accept", "reject"}
    for case in known:
        said = await domain.verify(case.task, case.answer, None, sampled=[f"so \\boxed{{{case.answer}}}"])
        assert said.decision == case.decision, case
    await base.close(domain)


@in_one_loop
async def test_preflight_finds_nothing_wrong(maths: Any) -> None:
    assert await base.problems(maths) == []


@in_one_loop
async def test_worked_problems_are_right_in_every_part(maths: Any) -> None:
    assert len(DEMONSTRATIONS) >= 12
    for shown in DEMONSTRATIONS:
        use = shown.tools[0]
        assert await maths.tools(None)["python"](use["args"]["code"]) == use["result"]
        printed = await judged(maths, use["result"].strip().replace("E", "e"), shown.answer)
        assert printed.decision == "accept", shown.task


# ------------------------------------------------------------------------------------------------- a sandbox server


class Sandbox(BaseHTTPRequestHandler):
    """SandboxFusion's /run_code, with this machine's own Python behind it."""

    status = "Success"

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.path == "/run_code" and asked["language"] == "python"
        try:
            ran = subprocess.run(
                [sys.executable, "-c", asked["code"]], capture_output=True, text=True, timeout=asked["run_timeout"]
            )
            result = {
                "status": "Finished",
                "stdout": ran.stdout,
                "stderr": ran.stderr,
                "return_code": ran.returncode,
                "execution_time": 0.1,
            }
        except subprocess.TimeoutExpired:
            result = {
                "status": "TimeLimitExceeded",
                "stdout": "",
                "stderr": "",
                "return_code": None,
                "execution_time": 1.0,
            }
        body = json.dumps(
            {"status": self.status, "message": "m", "compile_result": None, "run_result": result, "files": {}}
        ).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def sandbox() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Sandbox)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    thread.join()
    server.server_close()


async def test_a_sandbox_server_runs_the_code(sandbox: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = SandboxPython([sandbox], 1, 512, 1000)
    assert await tool.python("print(1 + 1)") == "2\n"
    assert (await tool.python("print('x')\n1/0")).endswith("ZeroDivisionError: division by zero\n")
    assert (await tool.python("print('x' * 2000)")) == "x" * 1000 + "\n[cut: more than 1,000 characters]\n"
    assert (await tool.python("while True: pass")) == "[cut: still running after 1 s]\n"
    assert await tool.preflight() == []
    monkeypatch.setattr(Sandbox, "status", "SandboxError")
    assert "sandbox server" in (await tool.preflight())[0]
    await tool.close()


# -------------------------------------------------------------------------------------------------------- in an episode


class NoPolicy:
    """For harnesses that ask nothing of it."""

    def flush(self) -> None:
        pass

    async def drop(self) -> None:
        pass


async def episodes(domain: Any, source: str, count: int = 1) -> list[Any]:
    rollouts = Rollouts(NoPolicy(), SimpleNamespace(hash="t"), domain, config.Rollout(), Sampling())  # type: ignore[arg-type]
    subject = Subject("h0001", "hash", source)
    jobs = [Job(task, subject, 0) for task in itertools.islice(domain.tasks("test"), count)]
    return await rollouts.run(jobs, Where(0, None, 0, 0, "test", "theta-0000", "p", 0))


@in_one_loop
async def test_tool_and_verifier_wait_inside_an_episode(maths: Any) -> None:
    add = 'def run(task, model, tools):\n    a, b = task["question"][8:-1].split(" + ")\n    return tools.python(f"print({a} + {b})")\n'
    assert {episode.verdict for episode in await episodes(maths, add, 8)} == {"accept"}
    root = "def run(task, model, tools):\n    try:\n        tools.python('')\n    except ToolError as error:\n        return '\\\\sqrt{' + str(error)[:0] + '3}'\n"
    (wrong,) = await episodes(maths, root)
    assert (wrong.verdict, wrong.reason) == ("reject", "another answer than the reference")
    assert wrong.tools[0].result == "ToolError: python(code): code must be text, and not empty"


async def test_a_sandbox_that_is_down_makes_an_episode_invalid(tmp_path: Path) -> None:
    domain = base.load("maths", options(problems(tmp_path), sandbox=["http://127.0.0.1:9"]))
    (episode,) = await episodes(domain, "def run(task, model, tools):\n    return tools.python('print(1)')\n")
    assert episode.verdict == "invalid" and episode.reward is None and "127.0.0.1:9" in episode.reason
    assert "127.0.0.1:9" in (await base.problems(domain))[0]
    await base.close(domain)


async def test_a_verifier_that_never_answers_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    domain: Any = base.load("maths", options(problems(tmp_path)))

    async def never(task: Task, answer: str, episode: Any) -> Any:
        await asyncio.sleep(3600)

    monkeypatch.setattr("whale_tui.loop.rollouts.DOMAIN_SECONDS", 0.2)
    monkeypatch.setattr(domain, "verify", never)
    (episode,) = await episodes(domain, "def run(task, model, tools):\n    return '1'\n")
    assert (episode.verdict, episode.reason) == ("invalid", "verifier failed: TimeoutError: no answer within 0.2 s")


# ----------------------------------------------------------------------------------------------------- h0 and brief


@pytest.mark.parametrize("tool", ["python", "calc"])
def test_h0_passes_the_checks_and_its_names_are_documented(tmp_path: Path, tool: str) -> None:
    domain = base.load("maths", options(problems(tmp_path), tool=tool))
    answers = [task.private["answer"] for task in domain.tasks("harness")]
    assert checks.check(domain.h0, answers=answers).ok
    tree = ast.parse(domain.h0)
    named = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    named |= {t.id for n in tree.body if isinstance(n, ast.Assign) for t in n.targets if isinstance(t, ast.Name)}
    assert all(f"`{name}`" in domain.brief.text or f"`{name}(" in domain.brief.text for name in named)
    assert list(domain.brief.tools) == [tool] == list(domain.tools(domain.tasks("test")[0]))
    questions = {task.public["question"] for split in SPLITS for task in domain.tasks(split)}
    assert not questions & {shown.task["question"] for shown in domain.brief.demonstrations}


@pytest.mark.parametrize("tool", ["python", "calc"])
def test_every_edit_of_h0_is_a_harness(tmp_path: Path, tool: str) -> None:
    domain = base.load("maths", options(problems(tmp_path), tool=tool))
    kit, source = Kit(domain.edits, domain.brief), Source(domain.h0)
    changed = [(edit, new) for edit in generic(kit) if (new := edit.change(source, kit)) is not None]
    assert len(changed) > 12
    for edit, new in changed:
        assert checks.check(new.text).ok, edit.words


class Scripted:
    """model.chat that gives these replies in turn."""

    def __init__(self, *replies: str) -> None:
        self.replies, self.seen = list(replies), []
        self.remaining = SimpleNamespace(calls=8, tokens=None)

    def chat(self, messages: list[dict[str, str]], **_: Any) -> Any:
        self.seen.append(messages)
        return SimpleNamespace(text=self.replies.pop(0))


def test_h0_runs_one_block_a_turn_and_reads_the_box_of_the_last(tmp_path: Path) -> None:
    domain = base.load("maths", options(problems(tmp_path)))
    names: dict[str, Any] = {"ToolError": Exception}
    exec(domain.h0, names)
    tools = SimpleNamespace(python=lambda code: f"ran {code.strip()}\n")
    for replies, answer, calls in (
        (["It is \\boxed{\\frac{1}{2}}."], "\\frac{1}{2}", 1),
        (["```python\nprint(7)\n```", "So \\boxed{7}."], "7", 2),
        (["```python\nprint(7)\n``` I guess \\boxed{8}", "```python\nprint(9)\n```"], "", 2),
        (["no box"], "", 1),
    ):
        model = Scripted(*replies)
        assert names["run"]({"question": "Q"}, model, tools) == answer and len(model.seen) == calls
    assert model.seen[0][0]["role"] == "user" and "\\boxed{}" in model.seen[0][0]["content"]
    model = Scripted("```python\nprint(7)\n```", "\\boxed{7}")
    names["run"]({"question": "Q"}, model, tools)
    assert model.seen[1][-1] == {"role": "user", "content": "```output\nran print(7)\n```"}
