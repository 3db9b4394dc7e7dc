# ruff: noqa: E501 (tables, a few cases a line)
"""Search QA: every layout and its broken rows, splits, the kept index, Search-R1 servers, both verifiers, h0."""

from __future__ import annotations

import ast
import asyncio
import csv
import json
import re
import sqlite3
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tiny import CHATML, _tokenizer
from whale_tui.config import Rollout
from whale_tui.domains import base, bm25
from whale_tui.domains.answers import exact_match, generated, normalise
from whale_tui.domains.http import Unavailable
from whale_tui.domains.searchqa import SearchQA, edits
from whale_tui.domains.searchqa.judge import verdict_in
from whale_tui.domains.searchqa.layouts import titled
from whale_tui.domains.searchqa.reading import telling, trimmed
from whale_tui.domains.searchqa.worked import WORKED
from whale_tui.harness import checks, fst
from whale_tui.harness.worker import can_seal
from whale_tui.loop.rollouts import Job, Rollouts, Subject, Where
from whale_tui.loop.state import RunState, Spend, reduce
from whale_tui.policy.chat import ChatTokenizer
from whale_tui.policy.protocol import Sampled, SampleRequest
from whale_tui.proposers.edits import Kit, Source, generic
from whale_tui.records import Batch, Episode, Looked, Sampling, Split, Task, Usage, Verdict, summarise

SPLITS: tuple[Split, ...] = ("weight", "harness", "test")
XQUAD = Path(__file__).parents[2] / "shared" / "data" / "xquad_en.json"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def write(path: Path, rows: Any) -> Path:
    """Rows in the format of the path's name."""
    match path.suffix:
        case ".jsonl":
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        case ".csv":
            with path.open("w", newline="") as file:
                table = csv.DictWriter(file, list(rows[0]))
                table.writeheader()
                table.writerows(rows)
        case ".parquet":
            pyarrow = pytest.importorskip("pyarrow")
            from pyarrow import parquet

            parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        case _:
            path.write_text(json.dumps(rows))
    return path


def load(train: Path, **options: Any) -> SearchQA:
    sizes = {} if {"dev", "test"} <= options.keys() else {"dev_size": 1, "test_size": 1}
    found = base.load("searchqa", {"train": str(train)} | sizes | options)
    assert isinstance(found, SearchQA)
    return found


def tasks_of(domain: SearchQA) -> dict[str, list[str]]:
    """Question -> answers, over all splits."""
    return {
        task.public["question"]: task.private["answers"] for split in SPLITS for task in domain.tasks(split)
    }  # fmt: skip


def plain(count: int, prefix: str = "q") -> list[dict[str, Any]]:
    return [{"question": f"{prefix} {n}?", "answer": f"a {n}"} for n in range(count)]


def corpus_of(path: Path, texts: Mapping[str, str]) -> Path:
    rows = [{"id": str(n), "contents": f'"{t}"\n{x}'} for n, (t, x) in enumerate(texts.items())]
    return write(path / "corpus.jsonl", rows)


# ------------------------------------------------------------------------------------------------------------ layouts

HOTPOT_HUB = [
    {"id": f"h{n}", "question": f"Who made the {thing}?", "answer": f"Maker {n}", "type": "bridge", "level": "hard",
     "supporting_facts": {"title": [thing], "sent_id": [0]},
     "context": {"title": [thing, "Hill"], "sentences": [[f"The {thing} is old.", f" Maker {n} made it."], ["A hill."]]}}
    for n, thing in enumerate(("organ", "bell", "gate", "clock"))
]  # fmt: skip
HOTPOT_JSON = [
    {"_id": row["id"], "question": row["question"], "answer": row["answer"],
     "context": [[t, s] for t, s in zip(row["context"]["title"], row["context"]["sentences"], strict=True)]}
    for row in HOTPOT_HUB
]  # fmt: skip
SEARCH_R1 = [
    {"question": f"who made number {n}", "golden_answers": [f"Maker {n}", f"M. {n}"], "data_source": "nq",
     "prompt": [{"role": "user", "content": f"Answer. Question: who made number {n}"}], "ability": "fact-reasoning",
     "reward_model": {"style": "rule", "ground_truth": {"target": [f"Maker {n}", f"M. {n}"]}},
     "extra_info": {"split": "train", "index": n}}
    for n in range(4)
]  # fmt: skip
VERL = [
    {key: value for key, value in row.items() if key not in ("question", "golden_answers")}
    | {"extra_info": {"split": "train", "index": n, "question": row["question"]}}
    for n, row in enumerate(SEARCH_R1)
]
SQUAD = {
    "version": "1.1",
    "data": [
        {"title": f"Old_Town_{n}", "paragraphs": [
            {"context": f"Old Town {n} has a mill of 18{n}0.", "qas": [
                {"id": f"{n}a", "question": f"When was the mill of {n} built?", "answers": [{"text": f"18{n}0", "answer_start": 1}]},
                {"id": f"{n}b", "question": f"What does town {n} have?", "answers": [{"text": "a mill"}, {"text": "mill"}]},
            ]}]}
        for n in range(4)
    ],
}  # fmt: skip
SQUAD_ROWS = [
    {"id": q["id"], "title": article["title"], "context": p["context"], "question": q["question"],
     "answers": {"text": [a["text"] for a in q["answers"]], "answer_start": [0] * len(q["answers"])}}
    for article in SQUAD["data"] for p in article["paragraphs"] for q in p["qas"]
]  # fmt: skip


@pytest.mark.parametrize("name", ["hub.jsonl", "hub.json", "hub.parquet", "published.json"])
def test_hotpotqa_brings_its_paragraphs_along(tmp_path: Path, name: str) -> None:
    domain = load(write(tmp_path / name, HOTPOT_JSON if name.startswith("published") else HOTPOT_HUB))
    assert tasks_of(domain)["Who made the bell?"] == ["Maker 1"] and len(tasks_of(domain)) == 4
    search = domain.tools(domain.tasks("test")[0])["search"]
    assert search("who made the bell", 1) == [{"title": "bell", "text": "The bell is old. Maker 1 made it."}]
    assert len(search("hill", 20)) == 1, "a paragraph of many questions is one passage"


@pytest.mark.parametrize("rows", [SEARCH_R1, VERL], ids=["search-r1", "verl"])
@pytest.mark.parametrize("name", ["train.parquet", "train.jsonl"])
def test_search_r1_in_both_builders_columns(tmp_path: Path, name: str, rows: list[dict[str, Any]]) -> None:
    corpus = corpus_of(tmp_path, {"Mill": "The mill stands."})
    domain = load(write(tmp_path / name, rows), corpus=str(corpus))
    assert tasks_of(domain)["who made number 2"] == ["Maker 2", "M. 2"]
    task = next(t for s in SPLITS for t in domain.tasks(s) if "2" in t.public["question"])
    for answer in ("maker 2", "The M. 2!"):
        assert verdict(domain, task, answer).decision == "accept"


def test_rows_of_other_sources_are_left_out_and_counted(tmp_path: Path) -> None:
    rows = [row | {"data_source": "popqa" if n == 0 else "nq"} for n, row in enumerate(SEARCH_R1)]
    domain = load(write(tmp_path / "train.jsonl", rows), servers=["http://127.0.0.1:1"], sources=["nq"])
    assert "who made number 0" not in tasks_of(domain) and len(tasks_of(domain)) == 3
    assert "1 dropped: of another data_source (first at" in "\n".join(domain.report.lines())


@pytest.mark.parametrize("name", ["squad.json", "rows.parquet", "rows.jsonl"])
def test_squad_nested_and_a_question_a_row(tmp_path: Path, name: str) -> None:
    domain = load(write(tmp_path / name, SQUAD if name == "squad.json" else SQUAD_ROWS))
    assert tasks_of(domain)["What does town 3 have?"] == ["a mill", "mill"]
    search = domain.tools(domain.tasks("test")[0])["search"]
    assert search("town 2 mill", 1) == [{"title": "Old Town 2", "text": "Old Town 2 has a mill of 1820."}]
    assert len(search("mill", 20)) == 4


@pytest.mark.parametrize(
    ("name", "answer", "read"),
    [
        ("t.jsonl", {"answers": ["a", "b", "a", ""]}, ["a", "b"]), ("t.jsonl", {"answer": "ab"}, ["ab"]),
        ("t.jsonl", {"answer": 42}, ["42"]), ("t.jsonl", {"answers": {"text": ["x"]}}, ["x"]), ("t.csv", {"answer": "a, b"}, ["a, b"]),
        ("t.csv", {"answers": '["a", "b"]'}, ["a", "b"]), ("t.csv", {"answer": "[sic] a"}, ["[sic] a"]),
        ("t.jsonl", {"answers": [], "answer": "ab"}, ["ab"]), ("t.jsonl", {"golden_answers": [" a \n b "]}, ["a b"]),
    ],
)  # fmt: skip
def test_plain_rows(tmp_path: Path, name: str, answer: dict[str, Any], read: list[str]) -> None:
    rows = [{"question": f"Number {n}?"} | answer for n in range(4)]
    domain = load(write(tmp_path / name, rows), servers=["http://127.0.0.1:1"])
    assert set(map(tuple, tasks_of(domain).values())) == {tuple(read)}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"question": "x"', r"train.jsonl:3: not valid JSON"),
        ("[1, 2]", r"train.jsonl:3: a row must be an object"),
        ('{"q": "x", "answer": "y"}', r"train.jsonl:3: no question in its columns \(q, answer\)"),
        ('{"question": "x"}', r"train.jsonl:3: no answer in its columns \(question\); expected question with answer"),
        ('{"question": ["x"], "answer": "y"}', r"train.jsonl:3: this row is broken: expected text, got"),
        ('{"question": "x", "answer": true}', r"train.jsonl:3: this row is broken: expected text, got 'True'"),
        ('{"question": "x", "answers": [{"tekst": "y"}]}', r"train.jsonl:3: this row is broken: KeyError: 'text'"),
        ('{"question": "x", "answer": "y", "context": 5}', r"train.jsonl:3: this row is broken"),
        ('{"question": "x", "answer": "y", "context": {"title": ["a"], "sentences": []}}', r"another number of titles"),
        ('{"title": "x", "paragraphs": [{"qas": []}]}', r"train.jsonl:3: this row is broken: KeyError: 'context'"),
        ('{"title": "x", "paragraphs": null}', r"train.jsonl:3: this row is broken.*mend the row or delete it"),
    ],
)
def test_a_broken_row_names_its_file_and_line(tmp_path: Path, line: str, message: str) -> None:
    good = "".join(json.dumps(row) + "\n" for row in plain(2))
    (tmp_path / "train.jsonl").write_text(good + line + "\n")
    with pytest.raises(base.DomainError, match=message):
        load(tmp_path / "train.jsonl", servers=["http://127.0.0.1:1"])


def test_what_is_no_task_is_dropped_and_counted(tmp_path: Path) -> None:
    rows = [*plain(4), *plain(1), {"question": " ", "answer": "a"}, {"question": "Why?", "answers": []},
            {"question": "What?", "answer": "The."}, {"question": "q 1?", "answer": "other"}]  # fmt: skip
    domain = load(write(tmp_path / "train.jsonl", rows), servers=["http://127.0.0.1:1"])
    assert tasks_of(domain) == {f"q {n}?": [f"a {n}"] for n in range(4)}
    said = "\n".join(domain.report.lines())
    for part in ("4 tasks, from 9 rows, 1 duplicates", "1 dropped: no question", f"no answer (first at {tmp_path}/train.jsonl:7)",
                 "1 dropped: an answer of nothing but punctuation", "1 dropped: the same task"):  # fmt: skip
        assert part in said
    unanswerable = json.loads(json.dumps(SQUAD))
    unanswerable["data"][0]["paragraphs"][0]["qas"][0]["is_impossible"] = True
    said = "\n".join(load(write(tmp_path / "squad.json", unanswerable)).report.lines())
    assert "squad.json:1: paragraph 1, question 1" in said


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train": "none.parquet"}, r"none.parquet: no such file; fetch questions in a layout .* Hugging Face"),
        ({}, "there is nothing to search: .*train.jsonl holds no paragraphs; name a corpus in domain.options.corpus"),
        ({"corpus": "none.jsonl"}, r"none.jsonl: no such file; fetch wiki-18.jsonl.gz"),
        ({"corpus": "empty.jsonl"}, r"empty.jsonl: it holds no passage"),
        ({"corpus": "train.jsonl"}, r"train.jsonl:1: expected text in contents, or in title and text; its columns: que"),
        ({"servers": ["localhost:80"]}, r"domain.options.servers: 'localhost:80' is no URL; write it as http://host"),
        ({"servers": ["http://x"], "dev_size": 11}, r"12 tasks are too few for .* 11 for D_harness"),
        ({"servers": ["http://x"], "test": "train.jsonl"}, "12 tasks are in both D_test|tasks are in both D_test"),
        ({"servers": ["http://x"], "verifier": "judge"}, r"needs \[domain.options.judge\] with url and model"),
        ({"servers": ["http://x"], "verifer": "judge"}, "did you mean verifier?"),
        ({"servers": ["http://x"], "verifier": "judge", "judge": {"url": "h", "model": "m"}}, "judge.url: 'h' is no URL"),
        ({"servers": ["http://x"], "verifier": "judge", "judge": {"url": "http://h", "model": "m", "prompt": "{answer}"}},
         r"must hold {answer}, {question}, {references} and no other field"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_with_its_mend(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    write(tmp_path / "train.jsonl", plain(12))
    (tmp_path / "empty.jsonl").touch()
    given = {"train": "train.jsonl", "dev_size": 1, "test_size": 1} | options
    with pytest.raises(base.DomainError, match=message.replace("?", r"\?")):
        base.load("searchqa", given, relative_to=tmp_path)


@pytest.mark.parametrize(
    ("contents", "passage"),
    [('"Mill"\nIt stands.\nStill.', ("Mill", "It stands.\nStill.")), ("Mill\nIt stands.", ("Mill", "It stands.")),
     ("It stands.", ("", "It stands.")), ('"A "B" C"\n', ('A "B" C', "")), ("", ("", ""))],
)  # fmt: skip
def test_wiki_18_contents(contents: str, passage: tuple[str, str]) -> None:
    assert titled(contents) == passage


# ------------------------------------------------------------------------------------------------------------- splits


def test_one_file_is_cut_the_same_way_each_time_and_another_seed_is_another_cut(tmp_path: Path) -> None:
    train = write(tmp_path / "train.jsonl", plain(40))
    sizes = {"servers": ["http://x"], "dev_size": 0.25, "test_size": 12, "train_size": 8}
    one, again, other = load(train, **sizes), load(train, **sizes), load(train, **sizes, seed=1)
    assert [len(one.tasks(split)) for split in SPLITS] == [8, 10, 12]
    assert all(one.tasks(split) == again.tasks(split) for split in SPLITS)
    assert one.tasks("test") != other.tasks("test")


def test_files_of_their_own_are_splits_of_their_own(tmp_path: Path) -> None:
    files = {name: str(write(tmp_path / f"{name}.jsonl", plain(6, name))) for name in ("dev", "test")}
    train = write(tmp_path / "train.jsonl", plain(9, "train"))
    whole = load(train, **files, servers=["http://x"], dev_size=4)
    assert [len(whole.tasks(split)) for split in SPLITS] == [9, 4, 6]
    assert all(t.public["question"].startswith("test") for t in whole.tasks("test"))
    mixed = load(train, test=files["test"], servers=["http://x"], dev_size=2, test_size=3)
    assert [len(mixed.tasks(split)) for split in SPLITS] == [7, 2, 3]
    write(tmp_path / "test.jsonl", [*plain(6, "test"), *plain(1, "train")])
    with pytest.raises(base.DomainError, match="1 tasks are in both D_test and D_"):
        load(train, **files, servers=["http://x"])
    assert load(train, **files, servers=["http://x"], allow_overlap=True).report.overlaps


@pytest.mark.parametrize("seed", range(5))
def test_squad_is_cut_by_article(tmp_path: Path, seed: int) -> None:
    domain = load(write(tmp_path / "squad.json", SQUAD), seed=seed)
    articles = {split: {re.search(r"\d", t.public["question"])[0] for t in domain.tasks(split)} for split in SPLITS}  # type: ignore[index]
    assert [len(domain.tasks(split)) for split in SPLITS] == [4, 1, 1]
    assert not articles["test"] & articles["weight"] and not articles["test"] & articles["harness"]
    assert "1 dropped: more than asked for (first at Old Town" in "\n".join(domain.report.lines())


@pytest.mark.skipif(not XQUAD.is_file(), reason=f"{XQUAD} is not here")
def test_xquad_as_it_is() -> None:
    domain = load(XQUAD, dev_size=128, test_size=256)
    assert [len(domain.tasks(split)) for split in SPLITS][1:] == [128, 256]
    assert sum("1,190 rows" in line for line in domain.report.lines()) == 1
    hits = 0
    for task in domain.tasks("test"):
        search, answers = domain.tools(task)["search"], task.private["answers"]
        best = search(task.public["question"], 1)
        hits += any(generated(answer, [best[0]["text"]]) for answer in answers)
        assert verdict(domain, task, answers[0]).decision == "accept"
        assert verdict(domain, task, f"It is {answers[0]}").decision == "reject"
    assert hits / 256 > 0.9
    given = "\n".join(str(shown) for shown in domain.brief.demonstrations)
    questions = [task.public["question"] for split in SPLITS for task in domain.tasks(split)]
    assert not [question for question in questions if question in given]


# ---------------------------------------------------------------------------------------------------------- the index


def test_an_index_is_built_once_and_opened_afterwards() -> None:
    rows = [
        ("Mill", "The old mill grinds."),
        ("Quay", "Boats are moored at the quay."),
        ("", "It is said that grinding a whole sack of corn there took all night."),
    ]
    first = bm25.Passages.kept("abc", iter(rows))

    def refuse() -> Any:
        raise AssertionError("built again")
        yield

    again = bm25.Passages.kept("abc", refuse())
    assert first.size == again.size == 3
    for index in (first, again):
        assert [p["title"] for p in index.search("who grinds?", 3)] == ["Mill", ""], "English endings are stemmed"
        assert index.search("zebra", 1) == [] and index.search("?!", 1) == []
        index.close()


def test_a_build_that_is_cut_short_leaves_nothing_behind() -> None:
    def broken() -> Any:
        yield ("Mill", "The old mill.")
        raise RuntimeError("power cut")

    file = bm25.kept_file("abc")
    with pytest.raises(RuntimeError):
        bm25.Passages.kept("abc", broken())
    assert not file.exists() and list(file.parent.iterdir()) == []
    assert bm25.Passages.kept("abc", [("Mill", "The old mill.")]).size == 1


def test_another_corpus_is_another_index(tmp_path: Path) -> None:
    train = write(tmp_path / "train.jsonl", plain(6))
    for text in ("It is red.", "It is blue."):
        domain = load(train, corpus=str(corpus_of(tmp_path, {"Mill": text})))
        assert domain.tools(domain.tasks("test")[0])["search"]("mill") == [{"title": "Mill", "text": text}]
    assert len(list(bm25.kept_file("x").parent.iterdir())) == 2


def test_a_damaged_index_is_said_with_its_mend(tmp_path: Path) -> None:
    train = write(tmp_path / "squad.json", SQUAD)
    load(train)
    (file,) = bm25.kept_file("x").parent.iterdir()
    file.write_bytes(b"not a database")
    with pytest.raises(base.DomainError, match=rf"{file}.*; delete it"):
        load(train)


def test_many_threads_search_one_index() -> None:
    index = bm25.Passages.kept("abc", [(f"T{n}", f"word{n} common text") for n in range(1000)])
    wrong: list[str] = []

    def look(start: int) -> None:
        for n in range(start, 1000, 40):
            found = index.search(f"common word{n}", 1)[0]["title"]
            if found != f"T{n}":
                wrong.append(found)

    threads = [threading.Thread(target=look, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


async def test_a_large_index_is_searched_beside_the_engine_s_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = {f"Title{n}": f"word{n} common" for n in range(600)}
    domain = load(write(tmp_path / "train.jsonl", plain(6)), corpus=str(corpus_of(tmp_path, texts)))
    here, used = threading.get_ident(), []
    look_up = domain._retriever._index.search  # type: ignore[union-attr]
    monkeypatch.setattr(
        domain._retriever._index, "search", lambda *a: (used.append(threading.get_ident()), look_up(*a))[1]  # type: ignore[union-attr]
    )  # fmt: skip
    search = domain.tools(domain.tasks("test")[0])["search"]
    assert await search("word77", 1) == [{"title": "Title77", "text": "word77 common"}]
    assert used and here not in used
    with pytest.raises(ValueError, match="not empty"):
        await search("", 1)
    await base.close(domain)


def test_words_in_nearly_every_passage_do_not_slow_a_query_down() -> None:
    index = bm25.Passages.kept("abc", [("", f"the of and is word{n % 5000} x{n}") for n in range(15_000)])
    assert index._telling(("and", "is", "of", "the", "word7", "x4")) == ["x4", "word7"]
    assert len(index._telling(("and", "of", "the"))) == 1, "one at least, so that something is found"
    assert index.search("the of and is x7", 1)[0]["text"].endswith("x7")


@given(st.text(min_size=1, max_size=80))
def test_a_kept_index_bears_any_query(query: str) -> None:
    index = bm25.Passages.kept("any", [("Mill", "The old mill, d'or et d'argent."), ("x", "naïve café 12.5")])
    if query.strip():
        assert len(index.search(query, 2)) <= 2
    index.close()


# ----------------------------------------------------------------------------------------------------- a scripted HTTP


class Scripted:
    """A local HTTP server that answers as told. `requests` holds the bodies it was sent, `headers` their headers."""

    def __init__(self, answer: Callable[[dict[str, Any]], Any]) -> None:
        self.answer, self.requests, self.headers, self.url = answer, [], [], ""  # type: ignore[var-annotated]

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                path = line.split()[1].decode()
                headers = {}
                while (header := (await reader.readline()).decode().strip()) != "":
                    name, _, value = header.partition(":")
                    headers[name.lower()] = value.strip()
                body = json.loads(await reader.readexactly(int(headers.get("content-length", 0))))
                self.requests.append(body | {"path": path})
                self.headers.append(headers)
                said = self.answer(body)
                if asyncio.iscoroutine(said):
                    said = await said
                status, value = said if isinstance(said, tuple) else (200, said)
                data = value.encode() if isinstance(value, str) else json.dumps(value).encode()
                writer.write(f"HTTP/1.1 {status} X\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def serving(answer: Callable[[dict[str, Any]], Any]) -> AsyncIterator[Scripted]:
    scripted = Scripted(answer)
    server = await asyncio.start_server(scripted.handle, "127.0.0.1", 0)
    scripted.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield scripted
    finally:
        server.close()


def passages(body: dict[str, Any]) -> Any:
    """As Search-R1's server does, which fails unless scores are asked for."""
    if body["return_scores"] is not True:
        return 500, "Internal Server Error"
    found = [{"document": {"id": "1", "contents": f'"{q}"\nfound {n}'}, "score": 1.0} for q in body["queries"]
             for n in range(body["topk"])]  # fmt: skip
    return {"result": [found]}


def with_servers(tmp_path: Path, *urls: str, **options: Any) -> tuple[SearchQA, Callable[..., Any]]:
    domain = load(write(tmp_path / "train.jsonl", plain(6)), servers=list(urls), **options)
    return domain, domain.tools(domain.tasks("test")[0])["search"]


async def nowhere() -> str:
    """A URL at which nothing listens."""
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    server.close()
    await server.wait_closed()
    return url


async def test_a_search_r1_server_is_asked_as_it_wants_to_be(tmp_path: Path) -> None:
    async with serving(passages) as server:
        domain, search = with_servers(tmp_path, server.url + "/retrieve/")
        assert await search("old mill", 2) == [{"title": "old mill", "text": f"found {n}"} for n in range(2)]
        assert server.requests == [{"queries": ["old mill"], "topk": 2, "return_scores": True, "path": "/retrieve"}]
        for wrong in ((" ", 1), ("x", 0), (None, 1)):
            with pytest.raises(ValueError, match=r"search\(query, k\)"):
                await search(*wrong)
        assert len(server.requests) == 1 and await base.problems(domain) == []
        await base.close(domain)


async def test_servers_share_the_queries(tmp_path: Path) -> None:
    async with serving(passages) as one, serving(passages) as two:
        domain, search = with_servers(tmp_path, one.url, two.url)
        await asyncio.gather(*(search(f"query {n}") for n in range(20)))
        assert len(one.requests) == len(two.requests) == 10
        await base.close(domain)


async def late(body: dict[str, Any]) -> Any:
    await asyncio.sleep(5)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda _: (500, "out of memory"), "HTTP 500: out of memory"), (late, "no answer within 0.3 s"),
        (lambda _: "<html>", "not JSON: '<html>'"), (lambda _: {"detail": "no"}, "not the answer expected"),
        (lambda _: {"result": []}, "not the answer expected"), (None, ""),
    ],
    ids=["500", "late", "html", "other json", "empty", "refused"],
)  # fmt: skip
async def test_another_server_takes_over_and_alone_the_failure_is_the_machinery_s(
    tmp_path: Path, answer: Any, words: str
) -> None:
    async with serving(answer or passages) as broken, serving(passages) as good:
        url = broken.url if answer else await nowhere()
        domain, search = with_servers(tmp_path, url, good.url, server_seconds=0.3, server_tries=1)
        for n in range(6):
            assert (await search(f"query {n}"))[0]["title"] == f"query {n}"
        assert len(good.requests) == 6 and len(broken.requests) <= 1, "one that failed is asked last for a while"
        (problem,) = await base.problems(domain)
        assert url in problem and words in problem and "start it" in problem
        alone, search = with_servers(tmp_path, url, server_seconds=0.3, server_tries=1)
        with pytest.raises(Unavailable, match=re.escape(words or url)) as failed:
            await search("query")
        assert not isinstance(failed.value, ValueError), "which would be the harness's to see"
        await base.close(domain)
        await base.close(alone)


async def test_a_server_that_recovers_is_tried_again_and_a_refused_request_is_not(tmp_path: Path) -> None:
    said = iter([(503, "loading"), (503, "loading")])
    async with serving(lambda body: next(said, None) or passages(body)) as server:
        domain, search = with_servers(tmp_path, server.url)
        assert (await search("mill"))[0]["title"] == "mill" and len(server.requests) == 3
        await base.close(domain)
    async with serving(lambda _: (422, "field required")) as server:
        domain, search = with_servers(tmp_path, server.url)
        with pytest.raises(Exception, match="HTTP 422: field required"):
            await search("mill")
        assert len(server.requests) == 1
        await base.close(domain)


# ---------------------------------------------------------------------------------------------------------- verdicts


def verdict(domain: SearchQA, task: Task, answer: str, sampled: Sequence[str] | None = None) -> Verdict:
    found = domain.verify(task, answer, None, sampled=sampled)  # type: ignore[arg-type]
    assert isinstance(found, Verdict)
    return found


@pytest.mark.parametrize(
    ("answer", "references", "decision"),
    [
        ("Luke Kuechly", ["Luke Kuechly."], "accept"), ("the U.S.", ["US"], "accept"), ("U.S.A.", ["US", "USA"], "accept"),
        ("6½ sacks", ["6½ sacks"], "accept"), ("Ａ Mill", ["mill"], "accept"), ("STRASSE", ["Straße"], "accept"),
        ("café", ["cafe\u0301"], "accept"), ("cafe", ["café"], "reject"), ("“in 1912”", ["in 1912"], "accept"),
        ("1912", ["in 1912"], "reject"), ("rock-and-roll", ["rock and roll"], "accept"), ("rock’n’roll", ["rock'n'roll"], "accept"),
        ("an apple a day", ["apple day"], "accept"), ("theatre", ["atre"], "reject"), ("Anna", ["nn"], "reject"),
        ("12,000", ["12000"], "accept"), ("12.5", ["125"], "accept"), ("-5", ["5"], "accept"), ("yes", ["no"], "reject"),
        ("Dunmarl\tsmiths", ["Dunmarl smiths"], "accept"), ("", ["x"], "reject"), ("the", ["the"], "reject"), ("!", ["!"], "reject"),
        ("东京。", ["东京"], "accept"), ("x; y", ["x", "y"], "reject"), ("x\u200by", ["x y"], "reject"), ("a" * 10_000, ["a"], "reject"),
    ],
)  # fmt: skip
def test_normalised_exact_match(answer: str, references: list[str], decision: str) -> None:
    assert exact_match(answer, references).decision == decision


@pytest.mark.parametrize(
    ("answer", "sampled", "stands"),
    [
        ("1912", ["It was <answer>1912</answer>"], True), ("the U.S.", ["Answer:U.S."], True), ("US", ["the U.S. of"], True),
        ("Otter River", ["<search>otter</search>", "the otter\nriver!"], True), ("Otter River", ["otter", "river"], False),
        ("191", ["1912"], False), ("1912", [], False), ("1912", [""], False), ("mill", ["the windmill"], False),
        ("a mill", ["Mill."], True), ("café", ["cafe\u0301"], True),
    ],
)  # fmt: skip
def test_an_answer_must_stand_in_what_the_policy_wrote(answer: str, sampled: list[str], stands: bool) -> None:
    assert generated(answer, sampled) is stands


@given(st.text(max_size=60))
def test_every_answer_matches_itself_and_stands_in_the_text_that_gave_it(text: str) -> None:
    if normalise(text):
        assert generated(text, ["Well.", f"I say: {text}"]) and exact_match(text, ["x", text]).decision == "accept"
    else:
        assert exact_match(text, [text]).decision == "reject"


def test_a_right_answer_that_the_harness_took_from_a_passage_is_rejected(tmp_path: Path) -> None:
    domain = load(write(tmp_path / "squad.json", SQUAD))
    task = domain.tasks("weight")[0]
    right = task.private["answers"][0]
    assert verdict(domain, task, right, [f"<answer>{right}</answer>"]).decision == "accept"
    found = verdict(domain, task, right, ["<search>mill</search>", "no idea"])
    assert found == Verdict("reject", "the answer stands in nothing that the policy wrote")
    assert verdict(domain, task, right).decision == "accept", "outside of an episode there is nothing to ask"


def test_known_answers_get_their_verdicts(tmp_path: Path) -> None:
    domain = load(write(tmp_path / "squad.json", SQUAD))
    known = domain.known_answers()
    assert {decision for *_, decision in known} == {"accept", "reject"} and len(known) == 4 * len(
        domain.tasks("weight")
    )
    assert all(verdict(domain, task, answer).decision == decision for task, answer, decision in known)


def says(reply: str | None, **usage: Any) -> Callable[[dict[str, Any]], Any]:
    value: dict[str, Any] = {"choices": [{"message": {"role": "assistant", "content": reply}}]}
    return lambda _: value | ({"usage": usage} if usage else {})


def judged(tmp_path: Path, url: str, **judge: Any) -> tuple[SearchQA, Task]:
    options = {"url": url + "/v1", "model": "m", "tries": 2} | judge
    domain = load(write(tmp_path / "squad.json", SQUAD), verifier="judge", judge=options)
    return domain, next(t for t in domain.tasks("weight") if "a mill" in t.private["answers"])


@pytest.mark.parametrize(
    ("reply", "decision"),
    [("CORRECT", "accept"), ("incorrect.", "reject"), ("Well... it is not correct", "reject"), ("INCORRECT? No: CORRECT", "accept"),
     ("maybe", "invalid"), ("", "invalid"), (None, "invalid"), ("uncorrectable", "invalid")],
)  # fmt: skip
async def test_the_judge_s_word(
    tmp_path: Path, reply: str | None, decision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("whale_tui.domains.http.PAUSE", 0.01)
    async with serving(says(reply, prompt_tokens=100, completion_tokens=2)) as server:
        domain, task = judged(tmp_path, server.url, dollars_per_million_prompt=2.0, dollars_per_million_output=10.0)
        found = await domain.verify(task, "one windmill", None, sampled=["one windmill"])  # type: ignore[misc, arg-type]
        asked = 2 if decision == "invalid" else 1
        assert found.decision == decision and len(server.requests) == asked
        assert found.usage == Usage(asked, 100 * asked, 2 * asked, pytest.approx(asked * (200 + 20) / 1e6))
        body = server.requests[0]
        assert body["path"] == "/v1/chat/completions" and body["model"] == "m" and body["temperature"] == 0.0
        for part in (json.dumps(task.public["question"]), '["a mill", "mill"]', '"one windmill"'):
            assert part in body["messages"][0]["content"]
        await base.close(domain)


async def test_the_judge_is_paid_once_for_an_answer_and_not_for_the_obvious(tmp_path: Path) -> None:
    async with serving(says("CORRECT", prompt_tokens=10, completion_tokens=1, cost=0.25)) as server:
        domain, task = judged(tmp_path, server.url, more={"temperature": 0.5, "reasoning_effort": "low"})

        async def ask(answer: str, sampled: str) -> Verdict:
            found = domain.verify(task, answer, None, sampled=[sampled])  # type: ignore[arg-type]
            return found if isinstance(found, Verdict) else await found

        for answer, sampled, decision in (
            ("A mill!", "a mill", "accept"), ("", "", "reject"), ("the", "the", "reject"), ("windmill", "no idea", "reject"),
            ("w" * 301, "w" * 301, "reject"),
        ):  # fmt: skip
            assert (await ask(answer, sampled)).decision == decision
        assert server.requests == []
        found = await asyncio.gather(*(ask("windmill", "windmill") for _ in range(8)))
        assert {f.decision for f in found} == {"accept"} and len(server.requests) == 1
        assert [f.usage for f in found if f.usage] == [Usage(1, 10, 1, 0.25)]
        assert server.requests[0]["temperature"] == 0.5 and server.requests[0]["reasoning_effort"] == "low"
        await base.close(domain)


async def test_a_judge_that_is_down_makes_the_episode_invalid_and_is_asked_anew(tmp_path: Path) -> None:
    said = iter([(500, "x"), (500, "x")])
    async with serving(lambda body: next(said, None) or says("CORRECT")(body)) as server:
        domain, task = judged(tmp_path, server.url, tries=2)
        first = await domain.verify(task, "windmill", None)  # type: ignore[misc, arg-type]
        assert first.decision == "invalid" and "HTTP 500" in first.reason and first.reward is None
        second = await domain.verify(task, "windmill", None)  # type: ignore[misc, arg-type]
        assert second.decision == "accept"
        await base.close(domain)


async def test_the_judge_s_preflight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    async with serving(lambda b: says("CORRECT" if "Twelve" in str(b) else "INCORRECT")(b)) as server:
        domain, _ = judged(tmp_path, server.url, api_key_env="JUDGE_KEY")
        assert await base.problems(domain) == []
        assert {h["authorization"] for h in server.headers} == {"Bearer secret"}
        await base.close(domain)
        monkeypatch.delenv("JUDGE_KEY")
        domain, _ = judged(tmp_path, server.url, api_key_env="JUDGE_KEY")
        assert await base.problems(domain) == [
            "the environment variable JUDGE_KEY (domain.options.judge.api_key_env) is not set; set it"
        ]
    async with serving(says("CORRECT")) as server:
        domain, _ = judged(tmp_path, server.url)
        assert "'The colour blue' right" in (await base.problems(domain))[0]
        await base.close(domain)
    domain, _ = judged(tmp_path, await nowhere(), tries=1)
    assert "the judge gives no verdict" in (await base.problems(domain))[0]
    await base.close(domain)


def test_verdicts_in_replies() -> None:
    assert verdict_in("Correct.") is True and verdict_in("**INCORRECT**") is False
    with pytest.raises(ValueError, match="neither CORRECT nor INCORRECT"):
        verdict_in("yes")


# ----------------------------------------------------------------------------------------------- in real episodes


class Says:
    """A policy that gives the n-th call of every episode the n-th text."""

    def __init__(self, chat: ChatTokenizer, texts: Sequence[str]) -> None:
        self.ids = [[*chat.encode(text), chat.stop_ids[0]] for text in texts]

    def submit(self, request: SampleRequest) -> asyncio.Future[Sampled]:
        ids = self.ids[request.order[1]]
        future: asyncio.Future[Sampled] = asyncio.get_running_loop().create_future()
        future.set_result(Sampled(ids, [0.0] * len(ids), "stop"))
        return future

    def flush(self) -> None: ...

    async def drop(self) -> None: ...


async def episode_of(tmp_path: Path, domain: SearchQA, task: Task, source: str, *texts: str) -> tuple[Episode, str]:
    """One episode behind the seal, and the last prompt that the policy was given."""
    folder = tmp_path / "tokenizer"
    folder.mkdir(exist_ok=True)
    _tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", "chat_template": CHATML}))
    chat = ChatTokenizer(folder)
    rollouts = Rollouts(Says(chat, texts), chat, domain, Rollout(), Sampling())  # type: ignore[arg-type]
    where = Where(0, None, 0, 0, "test", "theta-0000", "", 0)
    (episode,) = await rollouts.run([Job(task, Subject("h0000", "h", source), 0)], where)
    return episode, chat.decode(episode.calls[-1].prompt_ids) if episode.calls else ""


sealed = pytest.mark.skipif(not can_seal()[0], reason="no seal here")


@sealed
async def test_h0_searches_for_the_policy_s_query_and_reads_one_passage_cut_short(tmp_path: Path) -> None:
    squad = json.loads(json.dumps(SQUAD))
    squad["data"][1]["paragraphs"][0]["context"] += " long" * 300
    domain = load(write(tmp_path / "squad.json", squad), dev_size=1, test_size=1, seed=1)
    task = next(t for split in SPLITS for t in domain.tasks(split) if t.public["question"].startswith("When"))
    right = task.private["answers"][0]
    episode, prompt = await episode_of(
        tmp_path, domain, task, domain.h0, "<search> Mill of  Town 1 </search>", f"<answer>0</answer> <answer>{right}</answer>"
    )  # fmt: skip
    assert (episode.verdict, episode.answer) == ("accept", right), episode.reason
    assert [(use.name, use.args) for use in episode.tools] == [("search", "'Mill of  Town 1', 1")]
    assert (
        task.public["question"] in prompt
        and "Old Town 1 has a mill" in prompt
        and 750 < prompt.count(" long") * 5 < 800
    )
    for texts, calls in (
        (("<answer>x</answer>",), 1),
        (("no tags",), 1),
        (("<search> </search>",), 1),
        (("<search>z</search>", "no"), 2),
    ):
        episode, _ = await episode_of(tmp_path, domain, task, domain.h0, *texts)
        assert (episode.verdict, len(episode.calls)) == ("reject", calls), episode.reason


@sealed
async def test_servers_that_are_down_make_an_episode_invalid_and_never_rejected(tmp_path: Path) -> None:
    domain, _ = with_servers(tmp_path, await nowhere(), await nowhere(), server_tries=1)
    task = domain.tasks("test")[0]
    source = "def run(task, model, tools):\n    try:\n        tools.search('x')\n    except ToolError:\n        pass\n    return 'y'"
    episode, _ = await episode_of(tmp_path, domain, task, source)
    assert episode.verdict == "invalid" and "Unavailable" in episode.reason and episode.reward is None
    refused = "def run(task, model, tools):\n    tools.search('')"
    episode, _ = await episode_of(tmp_path, domain, task, refused)
    assert episode.verdict == "reject" and "query must be text" in episode.reason
    await base.close(domain)


@sealed
async def test_a_slow_server_holds_up_no_other_episode(tmp_path: Path) -> None:
    async def slow(body: dict[str, Any]) -> Any:
        await asyncio.sleep(0.3)
        return passages(body)

    async with serving(slow) as server:
        _, search = with_servers(tmp_path, server.url)
        start, ticks = time.perf_counter(), 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0.01)
                ticks += 1

        ticking = asyncio.create_task(tick())
        await asyncio.gather(*(search(f"q{n}") for n in range(30)))
        ticking.cancel()
        assert time.perf_counter() - start < 3 and ticks >= 10


@sealed
async def test_what_a_judge_cost_reaches_the_ledger(tmp_path: Path) -> None:
    source = "def run(task, model, tools):\n    return model.chat([{'role': 'user', 'content': 'x'}]).text"
    async with serving(says("CORRECT", prompt_tokens=50, completion_tokens=3, cost=0.5)) as server:
        domain, task = judged(tmp_path, server.url)
        episode, _ = await episode_of(tmp_path, domain, task, source, "a windmill")
        assert episode.verdict == "accept" and episode.judge == Usage(1, 50, 3, 0.5)
        await base.close(domain)
    batch = summarise([episode, episode], 1.0)
    assert batch.judge == Usage(2, 100, 6, 1.0) and batch.output_tokens == 2 * episode.output_tokens
    state = reduce(RunState(phase="weight"), Looked(batch=batch, first="weight", reason="", segment=""))
    assert state.ledger["weight/look"].episodes == 2 and state.ledger["weight/look"].dollars == 0
    assert state.ledger["weight/judge"] == Spend(calls=2, prompt_tokens=100, output_tokens=6, dollars=1.0)
    assert state.episodes == 2 and state.budget_used == 2
    reduce(state, Looked(batch=Batch(episodes=1), first="weight", reason="", segment=""))
    assert state.ledger["weight/judge"].calls == 2


# ----------------------------------------------------------------------------------------------- h0, brief, edit rules


def test_h0_passes_the_checks_and_the_brief_documents_its_names(tmp_path: Path) -> None:
    domain = load(write(tmp_path / "squad.json", SQUAD))
    checked = checks.check(domain.h0, answers=[a for task in domain.tasks("harness") for a in task.answers])
    assert checked.ok and not checked.warnings
    tree = ast.parse(domain.h0)
    assert {"SYSTEM", "TURN", "FOUND", "PASSAGE", "EXAMPLES"} <= fst.prompts(tree).keys()
    documented = set(re.findall(r"`([A-Z_]+|[a-z]+)[(`]", domain.brief.text))
    for source in (domain.h0, edits.READ_FIRST):
        body = ast.parse(source).body
        names = {node.name for node in body if isinstance(node, ast.FunctionDef)}
        names |= {
            t.id for node in body if isinstance(node, ast.Assign) for t in node.targets if isinstance(t, ast.Name)
        }
        assert names <= documented


def test_worked_questions_are_answered_by_their_passages(tmp_path: Path) -> None:
    domain = load(write(tmp_path / "squad.json", SQUAD))
    assert len(domain.brief.demonstrations) == len(WORKED) >= 12
    for shown, (title, text, question, answer) in zip(domain.brief.demonstrations, WORKED, strict=True):
        best = shown.tools[0]["result"][0]
        assert (best["title"], best["text"], shown.task["question"]) == (title, text, question)
        assert shown.answer == answer and answer in text and text.count(answer) == 1 and len(text) < 400


@sealed
async def test_every_edit_of_h0_and_of_what_comes_of_it_is_a_working_harness(tmp_path: Path) -> None:
    domain = load(write(tmp_path / "squad.json", SQUAD))
    kit, task = Kit(domain.edits, domain.brief), domain.tasks("harness")[0]
    made: dict[str, str] = {}
    for edit in generic(kit):
        new = edit.change(Source(domain.h0), kit)
        if new is not None:
            made[edit.words] = new.text
    first = {words for words in made if "read before asking" in words}
    assert len(first) == 15 and len(made) > 15
    parent = made[next(words for words in first if "most telling" in words and "first line, 3" in words)]
    for edit in generic(kit):
        new = edit.change(Source(parent), kit)
        if new is not None:
            made["then " + edit.words] = new.text
    assert len(made) > 50 and not any("read before asking" in words for words in made if words.startswith("then"))
    for words, source in made.items():
        assert checks.check(source).ok, words
    right = task.private["answers"][0]
    for words in first:
        said = {"tags": f"<answer>{right}</answer>", "label": f"Answer: {right}"}
        text = next((said[key] for key in said if key in words), right)
        episode, prompt = await episode_of(tmp_path, domain, task, made[words], text)
        assert episode.verdict == "accept" and len(episode.calls) == 1, (words, episode.reason)
        assert task.public["question"] in prompt and "has a mill" in prompt
        assert prompt.count("Question:") == 1 + int((re.findall(r"(\d) worked", words) or "0")[0])


def test_an_index_of_another_sqlite_schema_is_no_index() -> None:
    """The version is part of the name, so that what an older release kept is left alone."""
    file = bm25.kept_file("abc")
    assert file.name.endswith(f"-{bm25.VERSION}.sqlite")
    file.parent.mkdir(parents=True)
    sqlite3.connect(file.with_name("abc-0.sqlite")).close()
    assert bm25.Passages.kept("abc", [("Mill", "old")]).size == 1


def test_telling_sentences_are_those_that_share_most_with_the_question() -> None:
    text = "Old Town has a mill. The mill was built in 1830 by Ann Lee. It burned twice! In 1902 a dam was added."
    assert telling(text, "Who built the mill?", 1) == "The mill was built in 1830 by Ann Lee."
    assert telling(text, "What was added, and what burned?", 2) == "It burned twice! In 1902 a dam was added."
    assert telling(text, "Zebra?", 1) == "Old Town has a mill." and telling("", "Why?", 2) == ""
    assert telling("No sentence at all", "What?", 3) == "No sentence at all"


def test_examples_show_what_a_harness_of_telling_sentences_reads(tmp_path: Path) -> None:
    domain = load(write(tmp_path / "squad.json", SQUAD))
    kit = Kit(domain.edits, domain.brief)
    change = {edit.words: edit.change for edit in generic(kit)}
    words = next(words for words in change if "most telling" in words and "first line, 3" in words)
    one = change[words](Source(domain.h0), kit)
    assert one is not None and one.constants()["SENTENCES"] == 1
    for user, answer in one.constants()["EXAMPLES"]:
        assert answer in user and user.count(".") == 1
    two = change["of each passage the two sentences that share most with the question"](one, kit)
    assert two is not None and all(user.count(".") == 2 for user, _ in two.constants()["EXAMPLES"])
    assert all(telling(text, question, 1).count(answer) == 1 for _, text, question, answer in WORKED)


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        ("The mill was built by Ann Lee in 1830.", "Ann Lee in 1830"), ("Ann Lee.", "Ann Lee"), ("It was Ann Lee, who lived long", "Ann Lee"),
        ("Who built it? The Lees of Old Town", "Old Town"), ("Nobody knows", "Nobody knows"), ("", ""), ("the", "the"),
        ("lee", "lee"), ("in 1830 the mill burned", "1830"), ("a dam", "dam"), ("the dam of the mill", "dam"), ("$5 (five)", "$5"),
    ],
)  # fmt: skip
def test_a_reply_is_trimmed_to_what_was_read_and_not_asked(reply: str, answer: str) -> None:
    turn = "Old Town\nThe mill was built by Ann Lee in 1830. A dam cost $5 then.\nQuestion: Who built the mill?"
    assert trimmed(reply, turn) == answer


@given(st.text(max_size=80), st.text(max_size=80))
def test_trimming_bears_any_text_and_adds_nothing_to_it(reply: str, turn: str) -> None:
    assert trimmed(reply, turn) in " ".join(reply.split()) or trimmed(reply, turn) == reply
