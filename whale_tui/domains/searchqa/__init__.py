"""Search QA over data of one's own: HotpotQA, NQ, SQuAD or plain rows, and a retriever that is built in or a server."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta, Struct

from whale_tui.domains import tables
from whale_tui.domains.answers import exact_match, generated, normalise
from whale_tui.domains.base import DomainError, Tool, read_brief, read_h0
from whale_tui.domains.searchqa import layouts, retrievers
from whale_tui.domains.searchqa.edits import RULES
from whale_tui.domains.searchqa.judge import Judge, JudgeOptions
from whale_tui.domains.searchqa.layouts import Passage
from whale_tui.domains.searchqa.worked import demonstrations
from whale_tui.records import Decision, Episode, Split, Task, Verdict

GET = (
    "fetch questions in a layout that is read (hotpotqa/hotpot_qa or PeterJinGo/nq_hotpotqa_train on the Hugging Face "
    "hub, a SQuAD file such as xquad.en.json of google-deepmind/xquad on GitHub) or take rows of your own, and name "
    "the file in domain.options"
)
GET_CORPUS = (
    "fetch wiki-18.jsonl.gz of PeterJinGo/wiki-18-corpus on the Hugging Face hub and unpack it, or name JSONL rows of "
    "your own with title and text in domain.options.corpus"
)
Share = Annotated[float, Meta(gt=0, lt=1)]
Size = Annotated[int, Meta(ge=1)]
FILES: dict[Split, str] = {"weight": "train", "harness": "dev", "test": "test"}


class Options(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """[domain.options] of search QA. Paths start from the config's folder."""

    train: Path
    """Questions of D_weight, and of the splits that have no file: JSONL, JSON, CSV or Parquet (searchqa/layouts.py)."""
    dev: Path | None = None
    """Questions of D_harness. Unset: cut from `train`, SQuAD files article by article."""
    test: Path | None = None
    """Questions of D_test. Unset: cut from `train` likewise."""
    train_size: Size | None = None
    """Tasks of D_weight. Unset: all that there are."""
    dev_size: Size | Share = 256
    """Tasks of D_harness, or their share; of a file `dev`, at most so many."""
    test_size: Size | Share | None = None
    """Tasks of D_test likewise. Unset: a fifth of `train`, or the whole file `test`."""
    sources: list[str] = []
    """Values of the column data_source that are taken, e.g. ["hotpotqa"]. Empty: all."""
    seed: int = 0
    """Another seed is another cut."""
    allow_overlap: bool = False
    """Let D_test hold questions of the other splits."""
    corpus: Path | None = None
    """Passages to search: JSONL rows with `contents` (wiki-18) or `title` and `text`. Unset: the files' paragraphs."""
    servers: list[str] = []
    """URLs of Search-R1 retrieval servers that have the passages. Given: these are asked, and `corpus` is not read."""
    server_seconds: Annotated[float, Meta(gt=0)] = 20.0
    """Time that one attempt at a server may take."""
    server_tries: Size = 3
    """Rounds over the servers, with growing pauses, before the episode is `invalid`."""
    verifier: Literal["exact", "judge"] = "exact"
    """"exact": normalised exact match. "judge": what is no match is put before a model as well."""
    judge: JudgeOptions | None = None
    """[domain.options.judge]: the model, under `verifier = "judge"`."""


class SearchQA:
    name = "searchqa"
    edits = RULES

    def __init__(self, options: Options) -> None:
        self._judge = _judge(options)
        self.report = tables.Report()
        self._tasks, paragraphs = _tasks(options, self.report)
        self._retriever = _retriever(options, paragraphs)
        self.h0 = read_h0(__file__)
        self.brief = read_brief(
            __file__,
            tools={"search": "search(query, k=1) -> [{'title', 'text'}, ...]: the k best passages, best first"},
            demonstrations=demonstrations(),
        )

    def tasks(self, split: Split) -> Sequence[Task]:
        return self._tasks[split]

    def tools(self, task: Task) -> Mapping[str, Tool]:
        return {"search": self._retriever.search}

    def verify(
        self, task: Task, answer: str, episode: Episode, *, sampled: Sequence[str] | None = None
    ) -> Verdict | Awaitable[Verdict]:
        """Normalised exact match with any of the answers, else the judge's word, for an answer that the policy wrote.

        `sampled` is the text of the policy's calls: an answer that stands in none of them, such as a title that the
        harness took from a passage, is rejected. None: not known, and not asked.
        """
        verdict = exact_match(answer, task.private["answers"])
        if not normalise(answer) or (verdict.decision == "reject" and self._judge is None):
            return verdict
        if sampled is not None and not generated(answer, sampled):
            return Verdict("reject", "the answer stands in nothing that the policy wrote")
        if verdict.decision == "accept" or self._judge is None:
            return verdict
        return self._judge.verdict(task.key, task.public["question"], task.private["answers"], answer)

    def known_answers(self) -> list[tuple[Task, str, Decision]]:
        """Answers whose verdict is known, for the doctor. A judge is not paid for it: preflight asks it of its own."""
        known: list[tuple[Task, str, Decision]] = []
        for task in self._tasks["weight"][:8]:
            answer = task.private["answers"][0]
            known += [(task, answer, "accept"), (task, f'"The {answer}."', "accept"), (task, " ", "reject")]
            if self._judge is None:
                known.append((task, f"{answer}, or something else", "reject"))
        return known

    async def preflight(self) -> list[str]:
        judge = await self._judge.problems() if self._judge is not None else []
        return await self._retriever.problems() + judge

    async def close(self) -> None:
        await self._retriever.close()
        if self._judge is not None:
            await self._judge.close()


def build(options: Options) -> SearchQA:
    return SearchQA(options)


def _judge(options: Options) -> Judge | None:
    if options.verifier == "exact":
        return None
    if options.judge is None:
        raise DomainError('domain.options.verifier = "judge" needs [domain.options.judge] with url and model')
    return Judge(options.judge)


def _retriever(options: Options, paragraphs: list[Passage]) -> retrievers.Embedded | retrievers.Servers:
    if options.servers:
        return retrievers.Servers(options.servers, options.server_seconds, options.server_tries)
    if options.corpus is None and not paragraphs:
        raise DomainError(
            f"there is nothing to search: {options.train} holds no paragraphs; name a corpus in domain.options.corpus "
            f"({GET_CORPUS}), or Search-R1 servers in domain.options.servers"
        )
    return retrievers.embedded(options.corpus, paragraphs, GET_CORPUS)


# -------------------------------------------------------------------------------------------------------------- splits


def _tasks(options: Options, report: tables.Report) -> tuple[dict[Split, list[Task]], list[Passage]]:
    """The three splits, and the different paragraphs of every file in the order in which they came."""
    splits: dict[Split, list[Task]] = {}
    passages: dict[Passage, None] = {}
    articles: dict[str, str] = {}
    for split, name in FILES.items():
        file: Path | None = getattr(options, name)
        if file is not None:
            splits[split] = _read(file, options.sources, report, passages, articles)
    sizes: dict[Split, int | float | None] = {
        "test": options.test_size or (0.2 if options.test is None else None),
        "harness": options.dev_size,
        "weight": options.train_size,
    }
    for split in splits.keys() - {"weight"}:
        splits[split] = _at_most(splits[split], split, sizes.pop(split), options.seed)
    train = splits.pop("weight")
    try:
        if train and all(articles[task.key] for task in train):
            splits |= _by_article(train, articles, sizes, options.seed, report)
        else:
            splits |= tables.cut(train, sizes, options.seed)
    except DomainError as error:
        read = "; ".join(report.lines())
        raise DomainError(f"{options.train}: {error} ({read}); ask for fewer, or name more files") from error
    return tables.assemble(splits, report, allow_overlap=options.allow_overlap), list(passages)


def _read(
    file: Path, sources: list[str], report: tables.Report, passages: dict[Passage, None], articles: dict[str, str]
) -> list[Task]:
    """The distinct tasks of a file; its paragraphs go to `passages`, the article of each task to `articles`."""
    counts, found = report.of(file.name), []
    for questions, paragraphs in layouts.read(file, GET):
        passages.update((passage, None) for passage in paragraphs if passage[1])
        for question in questions:
            counts.read += 1
            try:
                if sources and question.source not in sources:
                    raise tables.Drop("of another data_source")
                found.append(question.task())
                articles.setdefault(found[-1].key, question.article)
            except tables.Drop as reason:
                counts.drop(str(reason), question.where)
    return tables.distinct(found, counts)


def _at_most(tasks: list[Task], split: Split, size: int | float | None, seed: int) -> list[Task]:
    if size is None or not tasks or (size >= 1 and size >= len(tasks)):
        return tasks
    return tables.cut(tasks, {split: size}, seed)[split]


def _by_article(
    tasks: list[Task],
    articles: Mapping[str, str],
    sizes: Mapping[Split, int | float | None],
    seed: int,
    report: tables.Report,
) -> dict[Split, list[Task]]:
    """Whole articles go to one split, so that no paragraph of a test question is trained on. Those of an article that a
    split does not need are left out. Raises DomainError when there are too few."""
    by_article: dict[str, list[Task]] = {}
    for task in tasks:
        by_article.setdefault(articles[task.key], []).append(task)
    waiting = sorted(by_article, key=lambda title: hashlib.sha256(f"{seed} {title}".encode()).digest())
    splits: dict[Split, list[Task]] = {}
    for split in sizes:
        size = sizes[split]
        wanted = round(size * len(tasks)) if size is not None and size < 1 else size
        taken: list[Task] = []
        while waiting and (wanted is None or len(taken) < wanted):
            taken += by_article[waiting.pop(0)]
        if not taken or (wanted is not None and len(taken) < wanted):
            raise DomainError(f"{len(by_article)} articles with {len(tasks)} questions are too few")
        splits[split] = _at_most(taken, split, wanted, seed)
        for task in taken[len(splits[split]) :]:
            report.of(split).drop("more than asked for", articles[task.key])
    return splits
