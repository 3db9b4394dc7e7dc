"""What the `rules` proposer knows of search questions over real text: h0's two turns, or a passage read beforehand.

h0 leaves the query to the policy. The other shape searches for the question itself and asks once, with the passages in
the turn: it has the names that the edits of the made-up encyclopaedia work on, so from there on these apply.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from whale_tui.domains.encyclopedia.edits import LABEL, LINE, NAMES, TAGS, WHOLE
from whale_tui.domains.encyclopedia.edits import RULES as READING
from whale_tui.domains.searchqa.reading import telling, trimmed
from whale_tui.proposers.edits import Edit, Format, Kit, Source, set_constants, set_function
from whale_tui.records import Demonstration


def _source(function: Callable[..., Any]) -> str:
    return re.sub(r"  # (noqa|type): .*", "", inspect.getsource(function))


READ_FIRST = f'''\
"""The question is searched for as it stands; the passages are in the turn, and the policy is asked once."""

import re

SYSTEM = ""
TURN = ""
PASSAGE = ""
EXAMPLES = []
SEARCH_K = 1
PASSAGE_CHARS = 800
SENTENCES = 0  # of a passage that are read; 0: all, as far as PASSAGE_CHARS
MAX_TOKENS = 64
STOP = []


def query(task):
    return task["question"]


{_source(telling)}

def shorten(text, question):
    return telling(text, question, SENTENCES) if SENTENCES else text[:PASSAGE_CHARS]


def ask(task, tools):
    found = tools.search(query(task)[:1000], SEARCH_K)
    shown = [PASSAGE.format(title=p["title"], text=shorten(p["text"], task["question"])) for p in found]
    return TURN.format(passages="\\n".join(shown), question=task["question"])


def messages(turn):
    chat = [{{"role": "system", "content": SYSTEM}}] if SYSTEM else []
    for user, assistant in EXAMPLES:
        chat += [{{"role": "user", "content": user}}, {{"role": "assistant", "content": assistant}}]
    return [*chat, {{"role": "user", "content": turn}}]


def attempt(chat, model, tools):
    reply = model.chat(chat, max_tokens=MAX_TOKENS, stop=STOP)
    return parse(reply.text, tools)


def run(task, model, tools):
    return attempt(messages(ask(task, tools)), model, tools)
'''
TRIMMING = """
def attempt(chat, model, tools):
    reply = model.chat(chat, max_tokens=MAX_TOKENS, stop=STOP)
    return trimmed(parse(reply.text, tools), chat[-1]["content"])
"""
KEPT = ("SYSTEM", "PASSAGE", "SEARCH_K", "PASSAGE_CHARS")
"""What the harness that is rewritten hands on."""


def _trimming(source: Source, kit: Kit) -> Source | None:
    """The answer is cut out of the reply: words that the passages have and the question has not."""
    functions = source.functions()
    if not {"attempt", "parse"} <= functions.keys() or "trimmed" in functions["attempt"]:
        return None
    return source.with_function(_source(trimmed)).with_function(TRIMMING)


def _reading_first(
    wanted: Format, examples: int, sentences: int, trims: bool
) -> Callable[[Source, Kit], Source | None]:
    """The other shape in one of the formats, with that many of the brief's demonstrations."""

    def change(source: Source, kit: Kit) -> Source | None:
        constants = source.constants()
        if "attempt" in source.functions() or not constants.keys() >= {*KEPT}:
            return None
        kept = {name: constants[name] for name in KEPT}
        new = Source(READ_FIRST).with_constants(
            TURN=wanted.turns[0], STOP=list(wanted.stop), SENTENCES=sentences, **kept
        )  # fmt: skip
        new = new.with_function(wanted.parse)
        new = (_trimming(new, kit) if trims else None) or new
        shown = kit.examples(new, kit.brief.demonstrations[:examples])
        return new if shown is None else new.with_constants(EXAMPLES=shown)

    return change


def _first(wanted: Format, examples: int, sentences: int, trims: bool, weight: float) -> Edit:
    read = {0: "the passage", 1: "its most telling sentence"}.get(sentences, f"its {sentences} telling sentences")
    shown = f", {examples} worked examples" if examples else ""
    trimmed = ", the reply trimmed" if trims else ""
    words = f"the question searched for and {read} read before asking, {wanted.words}{trimmed}{shown}"
    return Edit("format", words, _reading_first(wanted, examples, sentences, trims), "none", weight)


def _fields(shown: Demonstration, constants: Mapping[str, Any]) -> dict[str, str]:
    """As in the encyclopaedia; where a harness reads telling sentences, its examples show these."""
    count = constants.get("SENTENCES")
    if not count:
        return READING.fields(shown, constants)
    use, question = shown.tools[0], shown.task["question"]
    short = [{**p, "text": telling(p["text"], question, count)} for p in use["result"]]
    again = msgspec.structs.replace(shown, tools=[{**use, "result": short}])
    return READING.fields(again, constants)


RULES = msgspec.structs.replace(
    READING,
    fields=_fields,
    edits=(
        *(
            _first(wanted, examples, sentences, trims, weight)
            for wanted in (LINE, LABEL, TAGS)
            for examples, sentences, trims, weight in (
                (4, 1, True, 3.0),
                (3, 2, True, 1.5),
                (3, 1, False, 1.0),
                (3, 0, False, 0.7),
                (0, 0, False, 0.3),
            )
        ),
        Edit("retry", "the reply trimmed to what the passages have and the question has not", _trimming, weight=2.0),
        *(
            Edit("search", f"of each passage {what}", set_constants(SENTENCES=n), weight=weight)
            for n, what, weight in (
                (1, "the sentence that shares most with the question", 1.5),
                (2, "the two sentences that share most with the question", 1.0),
                (0, "all that PASSAGE_CHARS lets through", 0.7),
            )
        ),
        *(Edit("search", f"the {k} best passages", set_constants(SEARCH_K=k), weight=0.7) for k in (2, 3)),
        Edit("search", "the best passage alone", set_constants(SEARCH_K=1), weight=0.5),
        *(
            Edit("search", f"passages of up to {n} characters", set_constants(PASSAGE_CHARS=n), cures, 0.7)
            for n, cures in ((300, "cost"), (1600, "cut"))
        ),
        Edit("search", "passages without their titles", set_constants(PASSAGE="{text}"), weight=0.5),
        Edit("query", "a search for the names alone", set_function(NAMES), weight=0.3),
        Edit("query", "a search for the whole question", set_function(WHOLE), weight=0.3),
    ),
)
