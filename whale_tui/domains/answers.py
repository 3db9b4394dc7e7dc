"""Short answers compared as the study's search QA does: normalised exact match over what the policy generated."""

from __future__ import annotations

import re
import string
import unicodedata
from collections.abc import Iterable, Sequence

from whale_tui.records import Verdict


def normalise(answer: str) -> str:
    """Lower case, without punctuation and articles, one space between words."""
    folded = unicodedata.normalize("NFKC", answer).casefold()
    bare = "".join(" " if c in "-\u2010\u2013\u2014" else c for c in folded)
    bare = "".join(c for c in bare if c not in string.punctuation and not unicodedata.category(c).startswith("P"))
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", bare).split())


def exact_match(answer: str, references: Iterable[str]) -> Verdict:
    """Accept an answer that equals one of the references once both are normalised."""
    given = normalise(answer)
    if not given:
        return Verdict("reject", "no answer")
    if any(given == normalise(reference) for reference in references):
        return Verdict("accept", "the answer matches")
    return Verdict("reject", "another answer than the reference")


def generated(answer: str, sampled: Sequence[str]) -> bool:
    """Whether the answer stands, as whole words once normalised, in the text of one call of the policy.

    Punctuation ends a word there (`<answer>1912</answer>`) or belongs to none (`U.S.`): either reading will do.
    """
    return any(
        f" {normalise(read(answer))} " in f" {normalise(read(text))} " for text in sampled for read in (str, _spaced)
    )


def _spaced(text: str) -> str:
    return "".join(c if c.isalnum() else " " for c in unicodedata.normalize("NFKC", text))
