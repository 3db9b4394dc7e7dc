"""Word problems with a calculator: whole numbers, one to three operations, the mirror of the search domain."""

from __future__ import annotations

import random
import re
import shutil
import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct

from whale_tui.domains.arithmetic.calculator import calculate
from whale_tui.domains.arithmetic.edits import RULES
from whale_tui.domains.arithmetic.problems import TEMPLATES, Problem, different_first, draw
from whale_tui.domains.base import DomainError, Tool, read_brief, read_h0
from whale_tui.records import Demonstration, Episode, Split, Task, Verdict

Size = Annotated[int, Meta(ge=1)]
EXPORTED = '''\
"""calc(expression), for harness.py."""

from calculator import calculate


def tools(task):
    return {"calc": calculate}
'''
CALC = "calc(expression) -> number: the value of an expression of numbers, + - * / // and ( )"


class Options(Struct, forbid_unknown_fields=True, frozen=True):
    """[domain.options] of the word problems."""

    seed: int = 0
    """Another seed is another set of problems."""
    weight: Size = 4096
    """Tasks of D_weight."""
    harness: Size = 128
    """Tasks of D_harness."""
    test: Size = 256
    """Tasks of D_test."""


class Arithmetic:
    name = "arithmetic"
    edits = RULES

    def __init__(self, options: Options) -> None:
        taken: set[str] = set()
        rng = random.Random(f"arithmetic {options.seed}")
        shown = different_first(draw(rng, len(TEMPLATES), taken))
        sizes: dict[Split, int] = {"test": options.test, "harness": options.harness, "weight": options.weight}
        try:
            self._tasks = {split: [_task(p) for p in draw(rng, size, taken)] for split, size in sizes.items()}
        except ValueError as error:
            raise DomainError(f"domain.options of arithmetic: {error}; ask for fewer tasks") from error
        self.h0 = read_h0(__file__)
        self.brief = read_brief(
            __file__,
            tools={"calc": CALC},
            demonstrations=[_demonstration(problem) for problem in shown],
        )

    def tasks(self, split: Split) -> Sequence[Task]:
        return self._tasks[split]

    def tools(self, task: Task) -> Mapping[str, Tool]:
        return {"calc": calculate}

    def export(self, folder: Path) -> list[str]:
        return export_calculator(folder)

    def verify(self, task: Task, answer: str, episode: Episode) -> Verdict:
        """The same whole number as the reference, however it is grouped; a unit or a word beside it is no number."""
        given = normalise(answer)
        if not given:
            return Verdict("reject", "no answer")
        if given == task.private["answer"]:
            return Verdict("accept", "the answer matches")
        return Verdict("reject", "another answer than the reference")


def build(options: Options) -> Arithmetic:
    return Arithmetic(options)


def export_calculator(folder: Path) -> list[str]:
    """The calculator for an exported pair."""
    shutil.copyfile(Path(__file__).with_name("calculator.py"), folder / "calculator.py")
    (folder / "tools.py").write_text(EXPORTED, encoding="utf-8")
    return []


def normalise(answer: str) -> str:
    """A number as plain digits: no thousands separators, currency sign, trailing `.0`, leading zeros or -0."""
    text = unicodedata.normalize("NFKC", answer).strip().replace("\u2212", "-").strip("$€£ ").rstrip(".").strip()
    if re.fullmatch(r"[+-]?[0-9]{1,3}(,[0-9]{3})+(\.0*)?", text) or re.fullmatch(r"[+-]?[0-9]{1,3}( [0-9]{3})+", text):
        text = text.replace(",", "").replace(" ", "")
    whole = re.fullmatch(r"([+-]?)0*([0-9]+)(\.0*)?", text)
    if whole is None:
        return text
    sign = "-" if whole[1] == "-" and whole[2] != "0" else ""
    return sign + whole[2]


def _task(problem: Problem) -> Task:
    return Task(problem.key, {"question": problem.question}, {"answer": str(problem.answer)})


def demonstrations() -> list[Demonstration]:
    """Worked problems for another domain that has the calculator."""
    problems = draw(random.Random("arithmetic, worked"), len(TEMPLATES), set())
    return [_demonstration(problem) for problem in different_first(problems)]


def _demonstration(problem: Problem) -> Demonstration:
    use = {"name": "calc", "args": {"expression": problem.expression}, "result": problem.answer}
    return Demonstration({"question": problem.question}, [use], str(problem.answer))
