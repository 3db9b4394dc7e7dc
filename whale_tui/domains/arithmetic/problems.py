# ruff: noqa: E501, SIM905 (a table of texts, one a line)
"""Word problems from templates: one to three operations on whole numbers, whole and positive at every step."""

from __future__ import annotations

import random
from collections import Counter
from fractions import Fraction
from itertools import zip_longest

from msgspec import Struct

from whale_tui.domains.arithmetic.calculator import calculate


class Template(Struct, frozen=True):
    """A problem with numbers `{a}`, `{b}`, `{c}`, people `{p}`, `{q}` and things `{t}`, and the expression that solves it.

    `ranges` give the least and greatest value of each number; `solve` is the expression in the same letters.
    """

    text: str
    solve: str
    ranges: dict[str, tuple[int, int]]

    @property
    def operations(self) -> int:
        return sum(self.solve.count(sign) for sign in "+-*/")


class Problem(Struct, frozen=True):
    """`key` names the template and the numbers: two problems with one key have the same solution."""

    key: str
    question: str
    expression: str
    answer: int


def _numbers(**ranges: tuple[int, int]) -> dict[str, tuple[int, int]]:
    return ranges


SMALL, MEDIUM, LARGE = (2, 9), (11, 49), (60, 240)

TEMPLATES: tuple[Template, ...] = (
    # one operation
    Template("{p} has {a} {t}. {q} gives {p} {b} more. How many {t} does {p} have now?", "{a} + {b}", _numbers(a=MEDIUM, b=MEDIUM)),
    Template("{p} counts {a} {t} and {q} counts {b} {t}. How many {t} do they count together?", "{a} + {b}", _numbers(a=LARGE, b=LARGE)),
    Template("A shop has {a} {t} and gets {b} more. How many {t} does it have then?", "{a} + {b}", _numbers(a=LARGE, b=MEDIUM)),
    Template("{p} has {a} {t} and loses {b} of them. How many {t} are left?", "{a} - {b}", _numbers(a=LARGE, b=MEDIUM)),
    Template("A shop has {a} {t} and sells {b} of them. How many {t} are left?", "{a} - {b}", _numbers(a=LARGE, b=MEDIUM)),
    Template("{p} needs {a} {t} and has {b}. How many {t} are missing?", "{a} - {b}", _numbers(a=LARGE, b=MEDIUM)),
    Template("{p} buys {a} boxes with {b} {t} in each. How many {t} is that?", "{a} * {b}", _numbers(a=SMALL, b=MEDIUM)),
    Template("There are {a} rows of {b} {t}. How many {t} are there?", "{a} * {b}", _numbers(a=MEDIUM, b=SMALL)),
    Template("{p} makes {a} {t} a day. How many {t} does {p} make in {b} days?", "{a} * {b}", _numbers(a=MEDIUM, b=SMALL)),
    Template("{a} {t} are shared by {b} people. How many {t} does each person get?", "{a} / {b}", _numbers(a=LARGE, b=SMALL)),
    Template("{p} puts {a} {t} into bags of {b}. How many bags does {p} need?", "{a} / {b}", _numbers(a=LARGE, b=SMALL)),
    # two operations
    Template("{p} has {a} {t}, finds {b} and gives away {c}. How many {t} does {p} have now?", "{a} + {b} - {c}", _numbers(a=MEDIUM, b=MEDIUM, c=SMALL)),
    Template("{p} has {a} {t}. {p} gives {b} to {q} and loses {c}. How many {t} are left?", "{a} - {b} - {c}", _numbers(a=LARGE, b=SMALL, c=SMALL)),
    Template("{p} has {a} {t}, {q} has {b} and their friend has {c}. How many {t} do they have together?", "{a} + {b} + {c}", _numbers(a=MEDIUM, b=MEDIUM, c=MEDIUM)),
    Template("{p} has {a} {t} and buys {b} boxes of {c} {t}. How many {t} does {p} have now?", "{a} + {b} * {c}", _numbers(a=MEDIUM, b=SMALL, c=SMALL)),
    Template("{p} buys {a} boxes of {b} {t} and loses {c} {t}. How many {t} are left?", "{a} * {b} - {c}", _numbers(a=SMALL, b=MEDIUM, c=SMALL)),
    Template("A shop has {a} {t} and sells {b} a day. How many {t} are left after {c} days?", "{a} - {b} * {c}", _numbers(a=LARGE, b=SMALL, c=SMALL)),
    Template("{p} packs {a} {t} a day for {b} days and then {c} more. How many {t} is that?", "{a} * {b} + {c}", _numbers(a=MEDIUM, b=SMALL, c=MEDIUM)),
    Template("{p} and {q} have {a} and {b} {t}. They share them with {c} people in equal parts. How many {t} does each person get?", "({a} + {b}) / {c}", _numbers(a=LARGE, b=MEDIUM, c=SMALL)),
    Template("{p} keeps {a} of {b} {t} and puts the rest into {c} equal bags. How many {t} are in a bag?", "({b} - {a}) / {c}", _numbers(a=SMALL, b=LARGE, c=SMALL)),
    # three operations
    Template("{p} has {a} {t}, buys {b} boxes of {c} and gives away {d}. How many {t} does {p} have now?", "{a} + {b} * {c} - {d}", _numbers(a=MEDIUM, b=SMALL, c=SMALL, d=SMALL)),
    Template("{p} buys {a} boxes of {b} {t} and {c} boxes of {d} {t}. How many {t} is that?", "{a} * {b} + {c} * {d}", _numbers(a=SMALL, b=SMALL, c=SMALL, d=SMALL)),
    Template("There are {a} rows of {b} {t}. {c} are taken and {d} are brought. How many {t} are there now?", "{a} * {b} - {c} + {d}", _numbers(a=MEDIUM, b=SMALL, c=SMALL, d=SMALL)),
    Template("{p} has {a} {t}, {q} has {b}, their friend has {c}. They give away {d}. How many {t} are left?", "{a} + {b} + {c} - {d}", _numbers(a=MEDIUM, b=MEDIUM, c=MEDIUM, d=SMALL)),
)  # fmt: skip

DRAWS = 100
"""Draws in a row without a new problem after which a template counts as used up."""

_PEOPLE = "Anna Bruno Clara Felix Hugo Leo Rosa Simon Victor Emma Laura Oscar Alice Ruth Ivan Nina Sara Adam Lucas Helen".split()
_THINGS = "apples books cards coins cups eggs flowers keys lamps nails pens plates shells stamps stones".split()


def draw(rng: random.Random, count: int, taken: set[str]) -> list[Problem]:
    """`count` problems, the templates in turn, none with a key in `taken`; their keys are added to it.

    A template that has no more to give is left out of its turn. Raises ValueError when none has.
    """
    found: list[Problem] = []
    live = list(range(len(TEMPLATES)))
    while len(found) < count:
        for number in list(live):
            problem = _new(rng, number, taken)
            if problem is None:
                live.remove(number)
            elif len(found) < count:
                taken.add(problem.key)
                found.append(problem)
        if not live:
            raise ValueError(f"the templates give {len(taken)} different problems, and no more")
    rng.shuffle(found)
    return found


def _new(rng: random.Random, number: int, taken: set[str]) -> Problem | None:
    for _ in range(DRAWS):
        problem = _problem(rng, number)
        if problem is not None and problem.key not in taken:
            return problem
    return None


def different_first(found: list[Problem]) -> list[Problem]:
    """Two, one and three operations in turn, each time a shape of expression not yet shown while there is one.

    Few of them show much: a policy that has seen one operation alone writes one operation alone.
    """
    seen: Counter[str] = Counter()
    by_length: dict[int, list[tuple[int, Problem]]] = {2: [], 1: [], 3: []}
    for problem in sorted(found, key=lambda p: p.key):
        signs = "".join(sign for sign in problem.expression if sign in "+-*/")
        by_length[len(signs)].append((seen[signs], problem))
        seen[signs] += 1
    queues = [[p for _, p in sorted(group, key=lambda pair: pair[0])] for group in by_length.values()]
    return [problem for turn in zip_longest(*queues) for problem in turn if problem is not None]


def _problem(rng: random.Random, number: int) -> Problem | None:
    """One draw from a template; None where the numbers give a step that is not whole and positive."""
    template = TEMPLATES[number]
    values = {letter: rng.randint(*limits) for letter, limits in template.ranges.items()}
    if "/" in template.solve:
        values = _divisible(rng, template, values)
    expression = template.solve.format(**values)
    answer = calculate(expression)
    if not isinstance(answer, int) or answer < 1:
        return None
    p, q = rng.sample(_PEOPLE, 2)
    question = template.text.format(p=p, q=q, t=rng.choice(_THINGS), **values)
    return Problem(f"t{number:02d}-" + "-".join(map(str, values.values())), question, expression, answer)


def _divisible(rng: random.Random, template: Template, values: dict[str, int]) -> dict[str, int]:
    """The largest number raised until the division comes out whole."""
    largest = max(values, key=lambda letter: template.ranges[letter][1])
    for _ in range(max(values.values())):
        if Fraction(calculate(template.solve.format(**values))).denominator == 1:
            return values
        values = {**values, largest: values[largest] + 1}
    return values
