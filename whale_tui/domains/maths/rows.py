"""Rows of maths problems in the spellings of the field: DAPO-Math-17K, GSM8K, AIME, MATH, MAWPS, and plain ones."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from whale_tui.domains.base import DomainError
from whale_tui.domains.maths.verdict import last_boxed
from whale_tui.domains.tables import Drop, Row
from whale_tui.records import Task, content_hash

QUESTIONS = ("problem", "question", "input", "query", "prompt")
ANSWERS = ("answer", "final_answer", "expected_answer", "ground_truth", "target", "label")
"""Names of columns in any case, the first found wins. Then `reward_model.ground_truth`, and a box in `solution`."""

DAPO_HEAD = re.compile(r"\s*Solve the following math problem step by step\. The last line of your response should be .*?\n\n", re.S)  # fmt: skip  # noqa: E501
DAPO_TAIL = re.compile(r'\n\s*Remember to put your answer on its own line after "Answer:"\.?\s*$')
"""What DAPO-Math-17K wraps around each problem: how to answer is the harness's to say, so it is taken off."""


def read_task(row: Row) -> Task:
    """A row as a task: public `question`, private `answer`, both texts. The key is a hash of the question.

    Raises DomainError for a row without the columns or with something else in them, Drop for one whose text is empty.
    """
    values = {str(name).strip().lower(): value for name, value in row.values.items()}
    question, answer = _question(row, values), _answer(row, values)
    if not question:
        raise Drop("no question")
    if not answer:
        raise Drop("no reference answer")
    public = {"question": question}
    return Task(content_hash(public), public, {"answer": answer})


def _question(row: Row, values: Mapping[str, Any]) -> str:
    name = next((name for name in QUESTIONS if values.get(name) is not None), None)
    if name is None:
        raise _missing(row, "a problem", QUESTIONS)
    value = values[name]
    if isinstance(value, Sequence) and not isinstance(value, str):  # a chat: the problem is its last user turn
        turns = [turn for turn in value if isinstance(turn, Mapping) and turn.get("role") == "user"]
        value = turns[-1].get("content") if turns else None
    if not isinstance(value, str):
        raise DomainError(f"{row.where}: {name} must be a text or a chat with a user turn; mend the row or delete it")
    return DAPO_TAIL.sub("", DAPO_HEAD.sub("", value, count=1)).strip()


def _answer(row: Row, values: Mapping[str, Any]) -> str:
    name = next((name for name in ANSWERS if values.get(name) is not None), None)
    value = values[name] if name is not None else None
    if value is None and isinstance(reward := values.get("reward_model"), Mapping):
        name, value = "reward_model.ground_truth", reward.get("ground_truth")
    if value is None and isinstance(solution := values.get("solution"), str):
        boxed = last_boxed(solution)
        name, value = "solution", boxed if boxed is not None else solution if len(solution) < 60 else None
    if value is None:
        raise _missing(row, "a reference answer", (*ANSWERS, "reward_model.ground_truth", "solution with a \\boxed{}"))
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise DomainError(f"{row.where}: {name} must be a text or a number, this is {value!r:.60}")
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    text = str(value)
    if "####" in text:  # GSM8K: the working, then the result
        text = text.rpartition("####")[2].replace(",", "")
    return text.strip()


def _missing(row: Row, what: str, names: Sequence[str]) -> DomainError:
    return DomainError(
        f"{row.where}: no column with {what}; it has {', '.join(row.values)}; name one of {', '.join(names)}"
    )
