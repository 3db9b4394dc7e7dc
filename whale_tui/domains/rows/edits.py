"""What the `rules` proposer knows of rows of any kind: five forms of an answer, each with its parser."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from whale_tui.proposers.edits import DomainRules, Format
from whale_tui.records import Demonstration

WHOLE = """
def parse(text, tools):
    return text.strip()
"""
LINE = """
def parse(text, tools):
    return text.strip().split("\\n")[0].strip()
"""
TAGGED = """
def parse(text, tools):
    _, tag, rest = text.rpartition("<answer>")
    return rest.partition("</answer>")[0].strip() if tag else ""
"""
BOXED = """
def parse(text, tools):
    _, box, rest = text.rpartition("\\\\boxed{")
    return rest.partition("}")[0].strip() if box else ""
"""
LAST = """
def parse(text, tools):
    return text.strip().split("\\n")[-1].removeprefix("Answer:").strip()
"""


def rules_for(turn: str) -> DomainRules:
    """The rules for a user turn that shows the public columns, a format string."""
    return DomainRules(
        formats=(
            Format(
                words="the whole reply",
                turns=(turn, f"{turn}\nReply with the answer alone.", f"{turn}\nAnswer:"),
                shown="{answer}",
                parse=WHOLE,
            ),
            Format(
                words="the bare answer on the first line",
                turns=(turn, f"{turn}\nReply with the answer alone.", f"{turn}\nAnswer:"),
                shown="{answer}",
                parse=LINE,
                stop=("\n",),
            ),
            Format(
                words="the answer in tags",
                turns=(f"{turn}\nGive the answer as <answer>...</answer>.",),
                shown="<answer>{answer}</answer>",
                parse=TAGGED,
                stop=("</answer>\n",),
            ),
            Format(
                words="the answer in a box",
                turns=(f"{turn}\nPut the final answer in \\boxed{{{{}}}}.",),
                shown="\\boxed{{{answer}}}",
                parse=BOXED,
            ),
            Format(
                words="the answer on the last line",
                turns=(f"{turn}\nThink first. End with a line that says Answer: and the answer.",),
                shown="Answer: {answer}",
                parse=LAST,
            ),
        ),
        fields=_fields,
        systems=("Reply with the answer and nothing else.", "You are careful. You answer in as few words as you can."),
    )


def _fields(shown: Demonstration, constants: Mapping[str, Any]) -> dict[str, str]:
    """As `shown` of harness.py writes them."""

    def text(value: Any) -> str:
        return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)

    return {**{name: text(value) for name, value in shown.task.items()}, "answer": shown.answer}
