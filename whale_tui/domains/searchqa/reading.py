"""What a small policy needs done for it: `telling` before it is asked, `trimmed` after.

Harnesses have these as functions of their own: the edits put their source there (edits.py).
"""

from __future__ import annotations

import re


def telling(text, question, count):
    """The `count` sentences of a text that share most words with a question, rare words first, in their order."""
    parts = [part.strip() for part in re.split(r"(?<=[.!?])\s+(?=[A-Z0-9\"'(])", text) if part.strip()]
    stems = [
        {word[:5] for word in re.findall(r"[^\W_]+", each.lower()) if len(word) > 3 or word.isdigit()}
        for each in [question, *parts]
    ]
    weight = {word: 1 / (1 + sum(word in held for held in stems[1:])) for word in stems[0]}
    shared = [sum(weight[word] for word in sorted(stems[0] & held)) for held in stems[1:]]
    best = sorted(range(len(parts)), key=lambda n: -shared[n])[:count]
    return " ".join(parts[n] for n in sorted(best))


def trimmed(text, turn):
    """Of a reply, the first words in a row that stand so in the turn and are not the question's own; failing that, all.

    A small policy says a sentence where a few words are wanted, and says much that it has not read.
    """
    small = """a about also an and are as at be been but by did do does for from had has have he her his how in into
    is it its many much not of on or she so than that the their then there they this to was were what when where which
    who whom whose why with""".split()  # noqa: SIM905

    def bare(words):
        return [re.sub(r"^\W+|\W+$", "", word).lower() for word in words.split()]

    question = (re.findall(r"Question: (.*)", turn) or [""])[-1]
    asked, passages = {word[:5] for word in bare(question)}, " ".join(bare(turn.replace(question, " ? ")))
    words, runs, start = bare(text), [], 0
    while start < len(words):
        end = start
        while end < len(words) and words[end] and words[end][:5] not in asked:
            if f" {' '.join(words[start : end + 1])} " not in f" {passages} ":
                break
            end += 1
        if words[start] in small:
            end = start
        run = text.split()[start:end]
        while run and words[start + len(run) - 1] in small:
            run.pop()
        runs += [" ".join(run)] if run else []
        start = max(start + 1, end)
    return re.sub(r"^[^\w$(]+|[^\w)%]+$", "", runs[0]) if runs else text
