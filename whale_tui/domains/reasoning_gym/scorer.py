"""Scoring inside the sealed worker: a generator's own `score_answer`, with no answer ever evaluated as Python.

The worker imports this before it seals itself, beside a module that names the generator and its config. Several
generators call `eval` on an answer, or SymPy's `parse_expr`, which does; both would let an answer set its own score.
"""

import ast
import base64
import builtins
import pickle
import re
import sys

import reasoning_gym
import sympy
from whale_tui_scored import CONFIG, NAME

WORDS = frozenset("sin cos tan sec csc cot asin acos atan sinh cosh tanh exp log ln sqrt pi Abs".split())  # noqa: SIM905
"""Names of more than one letter that a formula may hold."""

answer = ""


def careful_eval(text, *scope):
    """A list or a number where the text is the answer; a generator's own text as ever."""
    return ast.literal_eval(text) if text.strip() == answer.strip() else builtins.eval(text, *scope)


def careful_parse(text, *args, **kwargs):
    """SymPy's parse_expr, for formulas alone."""
    words = re.findall(r"[^\W\d]\w*", str(text))
    if not re.fullmatch(r"[\w\s.+\-*/^(),=]*", str(text)) or not all(len(w) == 1 or w in WORDS for w in words):
        raise ValueError("not a formula")
    return parse_expr(text, *args, **kwargs)


def score(entry: str, given: str) -> float:
    """The score in [0, 1] of an answer, for an entry as base64 of its pickle."""
    global answer
    answer = given
    return float(dataset.score_answer(given, pickle.loads(base64.b64decode(entry))))


parse_expr, sympy.parse_expr = sympy.parse_expr, careful_parse
for module in [module for name, module in sys.modules.items() if name.startswith("reasoning_gym")]:
    names = vars(module)
    names["eval"] = careful_eval
    if names.get("parse_expr") is parse_expr:
        names["parse_expr"] = careful_parse
dataset = reasoning_gym.create_dataset(NAME, size=1, seed=0, **CONFIG)
for warm in (dataset[0]["answer"], "0"):  # what it imports or opens when it scores, it can't after the seal
    try:
        dataset.score_answer(warm, dataset[0])
    except Exception:  # of whichever generator; what a warm-up scores is thrown away, its imports are what is wanted
        continue
