"""What the `rules` proposer knows of search questions over real text: h0's two turns, or a passage read beforehand.

h0 leaves the query to the policy. The other shape searches for the question itself and asks once, with the passages in
the turn: it has the names that the edits of the made-up encyclopaedia work on, so from there on these apply.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from whale_tui.domains.encyclopedia.edits import LABEL, LINE, NAMES, TAGS, WHOLE
from whale_tui.domains.encyclopedia.edits import RULES as READING
from whale_tui.proposers.edits import Edit, Format, Kit, Source, set_constants, set_function

READ_FIRST = '''
"""The question is searched for as it stands; the passages are in the turn, and the policy is asked once."""

import re

SYSTEM = ""
TURN = ""
PASSAGE = ""
EXAMPLES = []
SEARCH_K = 1
PASSAGE_CHARS = 800
MAX_TOKENS = 64
STOP = []


def query(task):
    return task["question"]


def ask(task, tools):
    found = tools.search(query(task)[:1000], SEARCH_K)
    passages = "\\n".join(PASSAGE.format(title=p["title"], text=p["text"][:PASSAGE_CHARS]) for p in found)
    return TURN.format(passages=passages, question=task["question"])


def messages(turn):
    chat = [{"role": "system", "content": SYSTEM}] if SYSTEM else []
    for user, assistant in EXAMPLES:
        chat += [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]
    return [*chat, {"role": "user", "content": turn}]


def attempt(chat, model, tools):
    reply = model.chat(chat, max_tokens=MAX_TOKENS, stop=STOP)
    return parse(reply.text, tools)


def run(task, model, tools):
    return attempt(messages(ask(task, tools)), model, tools)
'''
KEPT = ("SYSTEM", "PASSAGE", "SEARCH_K", "PASSAGE_CHARS")
"""What the harness that is rewritten hands on."""


def _reading_first(wanted: Format, examples: int) -> Callable[[Source, Kit], Source | None]:
    """The other shape in one of the formats, with that many of the brief's demonstrations."""

    def change(source: Source, kit: Kit) -> Source | None:
        constants = source.constants()
        if "attempt" in source.functions() or not constants.keys() >= {*KEPT}:
            return None
        kept = {name: constants[name] for name in KEPT}
        new = Source(READ_FIRST.lstrip()).with_constants(TURN=wanted.turns[0], STOP=list(wanted.stop), **kept)
        new = new.with_function(wanted.parse)
        shown = kit.examples(new, kit.brief.demonstrations[:examples])
        return new if shown is None else new.with_constants(EXAMPLES=shown)

    return change


def _first(wanted: Format, examples: int, weight: float) -> Edit:
    shown = f", {examples} worked examples" if examples else ""
    words = f"the question searched for and a passage read before asking, {wanted.words}{shown}"
    return Edit("format", words, _reading_first(wanted, examples), "none", weight)


RULES = msgspec.structs.replace(
    READING,
    edits=(
        *(_first(wanted, n, weight) for wanted in (LINE, TAGS, LABEL) for n, weight in ((3, 3.0), (2, 1.0), (0, 0.5))),
        *(Edit("search", f"the {k} best passages", set_constants(SEARCH_K=k), weight=0.7) for k in (2, 3)),
        Edit("search", "the best passage alone", set_constants(SEARCH_K=1)),
        *(
            Edit("search", f"passages of up to {n} characters", set_constants(PASSAGE_CHARS=n), cures, 1.0)
            for n, cures in ((300, "cost"), (500, "cost"), (1200, "cut"), (2000, "cut"))
        ),
        Edit("search", "passages without their titles", set_constants(PASSAGE="{text}"), weight=0.5),
        Edit("query", "a search for the names alone", set_function(NAMES), weight=0.5),
        Edit("query", "a search for the whole question", set_function(WHOLE), weight=0.5),
    ),
)
