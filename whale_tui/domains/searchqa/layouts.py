"""What stands in a row: a question, its right answers, and the paragraphs that some layouts bring along.

Read are SQuAD (nested as published, or a question a row), HotpotQA (as published, or in the hub's columns), NQ and
HotpotQA as Search-R1 ships them (its own builder's columns, or verl's), and plain question, answer(s) rows. A row's
layout is told by its columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from whale_tui.domains.answers import normalise
from whale_tui.domains.base import DomainError
from whale_tui.domains.tables import Drop, Row, read_rows
from whale_tui.records import Task, content_hash

Passage = tuple[str, str]
"""A title, which may be empty, and a text."""

COLUMNS = (
    "expected question with answer, answers or golden_answers (and context, for its paragraphs), or the title and "
    "paragraphs of a SQuAD file"
)


class Question(Struct, frozen=True):
    """One question as a row gives it, answers not yet looked at. `article` is the article it was asked of, `source` the
    data set that the row names (data_source), or empty."""

    where: str
    text: str
    answers: list[str]
    article: str = ""
    source: str = ""

    def task(self) -> Task:
        """Raises Drop where no answer could be judged."""
        if not self.text:
            raise Drop("no question")
        if not self.answers:
            raise Drop("no answer")
        if not any(map(normalise, self.answers)):
            raise Drop("an answer of nothing but punctuation and articles")
        public = {"question": self.text}
        return Task(content_hash(public), public, {"answers": self.answers})


def read(path: Path, get: str) -> Iterator[tuple[list[Question], list[Passage]]]:
    """Row for row: the questions and the paragraphs in it. Raises DomainError with the file, the line and the mend."""
    for row in read_rows(path, get):
        try:
            yield _row(row)
        except (TypeError, KeyError, AttributeError, ValueError) as error:
            words = f"{type(error).__name__}: {error}" if isinstance(error, KeyError) else str(error)
            raise DomainError(f"{row.where}: this row is broken: {words}; mend the row or delete it") from error


def corpus(path: Path, get: str) -> Iterator[Passage]:
    """The passages of a corpus: rows with `contents`, a quoted title on its first line and the text below it
    (wiki-18), or with `title` and `text`. Raises DomainError with the file, the line and the mend."""
    for row in read_rows(path, get):
        values = row.values
        if isinstance(values.get("contents"), str):
            yield titled(values["contents"])
        elif isinstance(values.get("text"), str):
            yield str(values.get("title") or ""), values["text"]
        else:
            held = ", ".join(values) or "none"
            raise DomainError(f"{row.where}: expected text in contents, or in title and text; its columns: {held}")


def titled(contents: str) -> Passage:
    """`"Title"\\nbody` as title and body; text of one line has no title."""
    title, newline, body = contents.partition("\n")
    return (title.strip().strip('"').strip(), body.strip()) if newline else ("", contents.strip())


def _row(row: Row) -> tuple[list[Question], list[Passage]]:
    values = row.values
    if "paragraphs" in values:
        return _article(row)
    text = values.get("question") or _in(values, "extra_info", "question")
    if text is None and "question" not in values:
        raise DomainError(f"{row.where}: no question in its columns ({', '.join(values) or 'none'}); {COLUMNS}")
    context, title = values.get("context"), _title(values.get("title"))
    question = Question(row.where, _text(text), _answers(row), title, _text(values.get("data_source")))
    if isinstance(context, str):
        return [question], [(title, context.strip())]
    return [question], list(_paragraphs(context)) if context else []


def _article(row: Row) -> tuple[list[Question], list[Passage]]:
    """An article of a SQuAD file: its paragraphs, each with questions."""
    title = _title(row.values.get("title"))
    questions, passages = [], []
    for number, paragraph in enumerate(row.values["paragraphs"], 1):
        passages.append((title, paragraph["context"].strip()))
        for n, asked in enumerate(paragraph["qas"], 1):
            answers = [] if asked.get("is_impossible") else _listed(asked["answers"])
            where = f"{row.where}: paragraph {number}, question {n}"
            questions.append(Question(where, _text(asked["question"]), answers, title))
    return questions, passages


def _answers(row: Row) -> list[str]:
    """From the first of the known columns that holds any."""
    values = row.values
    ground_truth = _in(values, "reward_model", "ground_truth")
    target = ground_truth.get("target") if isinstance(ground_truth, Mapping) else ground_truth
    columns = {name: values[name] for name in ("golden_answers", "answers", "answer") if name in values}
    if not columns and target is None:
        raise DomainError(f"{row.where}: no answer in its columns ({', '.join(values)}); {COLUMNS}")
    return next((found for value in (*columns.values(), target) if (found := _listed(value))), [])


def _listed(value: Any) -> list[str]:
    """Answers in any of the layouts' forms: a text, a list of texts, SQuAD's list of spans, the hub's {"text": [...]},
    or, in CSV, a list written as JSON. Empty ones are left out, repeated ones named once."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = msgspec.json.decode(value)
        except msgspec.DecodeError:
            value = [value]
    if isinstance(value, Mapping):
        value = value["text"]
    if not isinstance(value, list | tuple):
        value = [value]
    texts = [_text(each["text"] if isinstance(each, Mapping) else each) for each in value]
    return list(dict.fromkeys(text for text in texts if text))


def _paragraphs(context: Any) -> Iterator[Passage]:
    """HotpotQA's paragraphs: {"title": [...], "sentences": [[...], ...]}, or [[title, [sentence, ...]], ...]."""
    pairs: Iterable[Any] = context
    if isinstance(context, Mapping):
        if len(context["title"]) != len(context["sentences"]):
            raise ValueError("context has another number of titles than of paragraphs")
        pairs = zip(context["title"], context["sentences"], strict=True)
    for title, sentences in pairs:
        yield _title(title), " ".join(sentence.strip() for sentence in sentences).strip()


def _in(values: Mapping[str, Any], column: str, key: str) -> Any:
    """A key of a column that holds an object; CSV writes that as JSON."""
    held = values.get(column)
    return held.get(key) if isinstance(held, Mapping) else None


def _title(value: Any) -> str:
    """SQuAD writes its titles with underscores."""
    return _text(value).replace("_", " ")


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(f"expected text, got {str(value)[:60]!r}")
    return " ".join(str(value).split())
