"""What the `rules` proposer knows of search questions: formats of an answer, how much to read, what to search for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from whale_tui.proposers.edits import DomainRules, Edit, Format, Sign, set_constants, set_function
from whale_tui.records import ArchivedEpisode, Demonstration

TAGS = Format(
    words="the answer in tags",
    turns=(
        "{passages}\nQuestion: {question}\nAnswer from the text above, inside <answer> and </answer>.",
        "{passages}\nQuestion: {question}\nAnswer in this form: <answer>a few words</answer>",
        "Question: {question}\n{passages}\nAnswer inside <answer> and </answer>.",
    ),
    shown="<answer>{answer}</answer>",
    parse="""
def parse(text, tools):
    tagged = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
    return tagged[-1].strip() if tagged else ""
""",
)
LINE = Format(
    words="the bare answer on the first line",
    turns=(
        "{passages}\nQuestion: {question}",
        "{passages}\nQuestion: {question}\nShort answer:",
        "Question: {question}\n{passages}",
    ),
    shown="{answer}",
    parse="""
def parse(text, tools):
    return text.strip().split("\\n")[0].strip()
""",
    stop=("\n",),
)
LABEL = Format(
    words="the answer behind a label",
    turns=(
        "{passages}\nQuestion: {question}\nReply with one line that begins with 'Answer:'.",
        "{passages}\nQuestion: {question}\nReply in this form: 'Answer: a few words'.",
    ),
    shown="Answer: {answer}",
    parse="""
def parse(text, tools):
    labelled = re.search(r"[Aa]nswer:(.*)", text)
    return labelled[1].strip() if labelled else ""
""",
    stop=("\n",),
)
NAMES = """
def query(task):
    names = re.findall(r"[A-Z][a-z]+", task["question"].split(" ", 1)[-1])
    return " ".join(names) or task["question"]
"""
WHOLE = """
def query(task):
    return task["question"]
"""


def _fields(shown: Demonstration, constants: Mapping[str, Any]) -> dict[str, str]:
    found = shown.tools[0]["result"][: constants["SEARCH_K"]]
    cut, passage = constants["PASSAGE_CHARS"], constants["PASSAGE"]
    passages = "\n".join(passage.format(title=p["title"], text=p["text"][:cut]) for p in found)
    return {"passages": passages, "question": shown.task["question"], "answer": shown.answer}


def _cut(episode: ArchivedEpisode, constants: Mapping[str, Any]) -> bool:
    """Whether a search gave more text than the harness reads of it."""
    limit = constants.get("PASSAGE_CHARS")
    for use in episode.tools:
        try:
            found = msgspec.json.decode(use.result)
        except msgspec.DecodeError:  # a refusal, or a record that was cut
            continue
        if isinstance(limit, int) and use.name == "search" and found and len(found[0]["text"]) > limit:
            return True
    return False


RULES = DomainRules(
    formats=(TAGS, LINE, LABEL),
    systems=(
        "Answer with a few words copied from the text.",
        "You answer questions from a text. Say only the answer.",
        "Copy the short answer out of the text. Write nothing else.",
    ),
    edits=(
        *(Edit("search", f"the {k} best passages", set_constants(SEARCH_K=k)) for k in (2, 3)),
        Edit("search", "the best passage alone", set_constants(SEARCH_K=1)),
        *(
            Edit("search", f"passages of up to {n} characters", set_constants(PASSAGE_CHARS=n), "cut", weight)
            for n, weight in ((80, 0.1), (200, 1.0), (400, 1.0))
        ),
        Edit("search", "passages with their titles", set_constants(PASSAGE="{title}: {text}"), weight=0.5),
        Edit("query", "a search for the names alone", set_function(NAMES), weight=0.7),
        Edit("query", "a search for the whole question", set_function(WHOLE), weight=0.7),
    ),
    signs={"cut": Sign("read a passage that was cut short", _cut)},
    fields=_fields,
)  # fmt: skip
