"""What the `rules` proposer knows of generated questions: forms of the answer."""

from __future__ import annotations

from whale_tui.proposers.edits import DomainRules, Format

TAGS = Format(
    words="the answer in tags",
    turns=(
        "{question}\nGive the final answer inside <answer> and </answer>.",
        "{question}\nReply in this form: <answer>the answer</answer>",
    ),
    shown="<answer>{answer}</answer>",
    parse="""
def parse(text, tools):
    tagged = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
    return tagged[-1].strip() if tagged else ""
""",
)
WHOLE = Format(
    words="the whole reply as the answer",
    turns=("{question}", "{question}\nReply with the answer alone."),
    shown="{answer}",
    parse="""
def parse(text, tools):
    return text.strip()
""",
)
LABEL = Format(
    words="the answer behind a label on the last line",
    turns=(
        "{question}\nThink step by step. End with a line that begins with 'Answer:'.",
        "{question}\nReply with one line that begins with 'Answer:'.",
    ),
    shown="Answer: {answer}",
    parse="""
def parse(text, tools):
    labelled = re.findall(r"[Aa]nswer:(.*)", text)
    return labelled[-1].strip() if labelled else ""
""",
)
RULES = DomainRules(
    formats=(TAGS, WHOLE, LABEL),
    systems=("Reply with the answer alone.", "Work step by step, then give the answer in the form that is asked for."),
)
