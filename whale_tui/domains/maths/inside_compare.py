"""What is run in a fork to compare an answer with its reference: math-verify, whose own time limits need the main
thread's alarm and can't hold what sympy does in C. The fork's limits do. The result is one letter."""

import logging
import os

EQUAL, DIFFERENT, UNREADABLE = b"=", b"!", b"?"
KINDS = (
    ("\\frac{1}{2}", "0.5"),
    ("\\{1, 2\\}", "\\{2, 1\\}"),
    ("x^2-1", "(x-1)(x+1)"),
    ("[1, 2)", "[1,2)"),
    ("5", "5 cm"),
    ("1+\\sqrt{2}", "2.41421356"),
    ("x=3", "3"),
    ("\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}", "(1, 2)"),
    ("a < 2", "2 > a"),
    ("50\\%", "0.5"),
)
"""One pair of each kind of answer: what they need is in memory before the first fork."""


def warm():
    """Once, before the first fork: grammars and caches that are built at first use."""
    logging.disable(logging.CRITICAL)
    for reference, answer in KINDS:
        compare(reference, answer)


def run(payload):
    os.write(1, compare(payload["reference"], payload["answer"]))


def compare(reference: str, answer: str) -> bytes:
    from math_verify import LatexExtractionConfig, parse, verify

    kinds = [LatexExtractionConfig()]  # the other kind of extraction evaluates text as Python
    gold, given = (parse(f"\\boxed{{{text}}}", kinds, parsing_timeout=None) for text in (reference, answer))
    if not gold or not given:
        return UNREADABLE
    return EQUAL if verify(gold, given, timeout_seconds=None) else DIFFERENT
