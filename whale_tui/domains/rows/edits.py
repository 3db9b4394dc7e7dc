"""What the `rules` proposer knows of rows of any kind: four forms of an answer, each with its parser."""

from __future__ import annotations

from whale_tui.proposers.edits import DomainRules, Format

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
        systems=("Reply with the answer and nothing else.", "You are careful. You answer in as few words as you can."),
    )
