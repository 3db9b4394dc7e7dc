"""What the `rules` proposer knows of maths with Python: how to ask, how many turns, what counts without a box."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from whale_tui.proposers.edits import DomainRules, Edit, Format, Sign, set_constants, set_function
from whale_tui.records import ArchivedEpisode, Demonstration

BOXED = Format(
    words="the answer in a box",
    turns=(
        "{question}\n\nYou may write one ```python block: it is run, and what it prints is shown to you. "
        "Put the final answer in \\boxed{{}}.",
        "{question}\n\nWrite a ```python block that computes the answer and prints it. Once you have seen what it "
        "prints, put the answer in \\boxed{{}}.",
        "{question}\n\nPlease reason step by step, and put your final answer within \\boxed{{}}.",
    ),
    shown="```python\n{code}\n```\nIt prints {output}, so the answer is \\boxed{{{answer}}}.",
    parse="""
def parse(text, tools):
    start = text.rfind("\\\\boxed{")
    depth = 0
    for place in range(start + 6, len(text)) if start >= 0 else ():
        depth += (text[place] == "{") - (text[place] == "}")
        if depth == 0:
            return text[start + 7 : place].strip()
    return ""
""",
)
PRINTED = """
def attempt(chat, model, tools):
    printed = ""
    for turn in range(1, TURNS + 1):
        reply = model.chat(chat, max_tokens=MAX_TOKENS, stop=STOP)
        code = program(reply.text)
        if not code.strip():
            break
        try:
            output = tools.python(code)
            printed = output.strip().split("\\n")[-1] or printed
        except ToolError as refusal:
            output = str(refusal)
        if turn == TURNS or model.remaining.calls == 0:
            break
        turns = [("assistant", reply.text), ("user", OUTPUT.format(output=output.strip()))]
        chat = [*chat, *({"role": role, "content": content} for role, content in turns)]
    return parse(reply.text, tools) or printed
"""


def _raised(episode: ArchivedEpisode, constants: Mapping[str, Any]) -> bool:
    return any("Error" in use.result for use in episode.tools)


def _unused(episode: ArchivedEpisode, constants: Mapping[str, Any]) -> bool:
    return not episode.tools


def _fields(shown: Demonstration, constants: Mapping[str, Any]) -> dict[str, str]:
    use = shown.tools[0]
    return {
        "question": shown.task["question"],
        "code": use["args"]["code"],
        "output": use["result"].strip(),
        "answer": shown.answer,
    }


RULES = DomainRules(
    formats=(BOXED,),
    systems=(
        "You solve mathematics problems with Python, and check the result before you answer.",
        "You are a careful mathematician. Reason step by step.",
    ),
    edits=(
        Edit(
            "retry",
            "what the program printed is the answer where no box follows",
            set_function(PRINTED),
            "none",
            2.0,
            "python",
        ),
        *(Edit("turns", f"{n} turns", set_constants(TURNS=n), "raised", 1.5, "python") for n in (3, 4)),
        Edit("turns", "one turn", set_constants(TURNS=1), "cost", 0.3),
    ),
    signs={
        "raised": Sign("ran a program that raised an error", _raised),
        "unused": Sign("ran no program", _unused),
    },
    fields=_fields,
)
