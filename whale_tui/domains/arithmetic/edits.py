"""What the `rules` proposer knows of word problems: formats of an answer, with and without the calculator."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from whale_tui.proposers.edits import DomainRules, Format
from whale_tui.records import Demonstration

BOXED = Format(
    words="the answer in a box",
    turns=("{question}\nPut the final answer in \\boxed{{}}.", "{question}\nReply with \\boxed{{number}} alone."),
    shown="\\boxed{{{answer}}}",
    parse="""
def parse(text, tools):
    boxed = re.findall(r"\\\\boxed\\{([^{}]*)\\}", text)
    return boxed[-1].strip() if boxed else ""
""",
)
LINE = Format(
    words="the bare number on the first line",
    turns=("{question}", "{question}\nReply with the number alone."),
    shown="{answer}",
    parse="""
def parse(text, tools):
    return text.strip().split("\\n")[0].strip()
""",
    stop=("\n",),
)
STEPS = Format(
    words="the expression with its result",
    turns=("{question}", "{question}\nReply with the calculation and its result."),
    shown="{expression} = {answer}",
    parse="""
def parse(text, tools):
    return text.strip().split("\\n")[0].split("=")[-1].strip()
""",
    stop=("\n",),
)
CALC = Format(
    words="an expression that calc works out",
    turns=("{question}", "{question}\nExpression:", "{question}\nReply with the expression that solves it."),
    shown="{expression}",
    parse="""
def parse(text, tools):
    expression = text.strip().split("\\n")[0].split("=")[0].strip()
    return str(tools.calc(expression))
""",
    raises=True,
    stop=("\n",),
    tool="calc",
)
FOUND = Format(
    words="the first expression in the reply, which calc works out",
    turns=("{question}", "{question}\nExpression:"),
    shown="{expression}",
    parse="""
def parse(text, tools):
    found = re.search(r"[0-9(][0-9+\\-*/(). ]*[0-9)]", text.split("=")[0])
    return str(tools.calc(found[0])) if found else ""
""",
    raises=True,
    stop=("\n",),
    tool="calc",
)


def _fields(shown: Demonstration, constants: Mapping[str, Any]) -> dict[str, str]:
    expression = shown.tools[0]["args"]["expression"]
    return {"question": shown.task["question"], "expression": expression, "answer": shown.answer}


RULES = DomainRules(
    formats=(BOXED, LINE, STEPS, CALC, FOUND),
    systems=(
        "Write the calculation that solves the problem.",
        "You solve word problems. Reply with one line.",
    ),
    fields=_fields,
)
