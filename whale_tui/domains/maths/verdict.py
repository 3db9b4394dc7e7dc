"""When an answer is right: the two rules of `verifier`, and the cheap half of the first.

`math-verify`: the returned answer and the reference are the same mathematics. Where the answer holds a \\boxed{}, what
is in the last one counts. Plain numbers and fractions are compared here, to six decimals as math-verify does; the rest
by math-verify, in a process that may be cut (inside_compare.py).

`boxed`: the rule of the study. The last \\boxed{} in the text that the policy wrote is, character for character, the
reference; what the harness returns does not matter.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from fractions import Fraction

MAX_CHARS = 1_000
"""A longer answer is none."""
DECIMALS = 6
OPENING = re.compile(r"\\f?boxed\s*\{")


def last_boxed(text: str) -> str | None:
    """What stands in the last complete \\boxed{...}, its braces balanced; None where there is none."""
    for opening in reversed(list(OPENING.finditer(text))):
        depth, at = 1, opening.end()
        while at < len(text):
            if text[at] == "\\":
                at += 1  # an escaped brace opens and closes nothing
            elif text[at] in "{}":
                depth += 1 if text[at] == "{" else -1
                if depth == 0:
                    return text[opening.end() : at].strip()
            at += 1
    return None


def last_written_box(sampled: Sequence[str]) -> str | None:
    """The last \\boxed{} that the policy wrote in an episode. A box is looked for within a reply, never across two."""
    return next((box for text in reversed(sampled) if (box := last_boxed(text)) is not None), None)


def tidy(answer: str) -> str:
    """An answer as it is compared: the last box if there is one, compatibility characters folded, outer marks off."""
    boxed = last_boxed(answer)
    text = (
        unicodedata.normalize("NFKC", answer if boxed is None else boxed)
        .replace("\u2212", "-")
        .replace("**", "^")
        .strip()
    )
    while len(text) > 1 and text[0] == text[-1] == "$":
        text = text[1:-1].strip()
    return text.rstrip(".").strip() if not re.search(r"\.\.$", text) else text


def number(text: str) -> Fraction | None:
    """A plain number or fraction of whole numbers, thousands separators and currency sign aside; None for the rest."""
    bare = re.sub(r"\\[,!;: ]|\{,\}", ",", text).strip()
    bare = re.sub(r"^([+-]?)\s*(?:\\?\$|[€£])\s*", r"\1", bare)
    if re.fullmatch(r"[+-]?[0-9]{1,3}(,[0-9]{3})+(\.[0-9]*)?", bare):
        bare = bare.replace(",", "")
    simple = re.fullmatch(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)", bare)
    ratio = re.fullmatch(r"([+-]?[0-9]+)\s*/\s*([0-9]+)", bare) or re.fullmatch(
        r"([+-]?)\\[dt]?frac\s*\{\s*([0-9]+)\s*\}\s*\{\s*([0-9]+)\s*\}", bare
    )
    if len(bare) > 200:
        return None
    if simple:
        return Fraction(bare.rstrip(".") if bare.endswith(".") else bare)
    if ratio and int(ratio[ratio.re.groups]):
        above = ratio[1] if ratio.re.groups == 2 else ratio[1] + ratio[2]
        return Fraction(int(above), int(ratio[ratio.re.groups]))
    return None


def same_number(answer: str, reference: str) -> bool | None:
    """Whether two plain numbers are the same to six decimals; None where one of them is something else."""
    given, wanted = number(answer), number(reference)
    if given is None or wanted is None:
        return None
    return round(given, DECIMALS) == round(wanted, DECIMALS)
