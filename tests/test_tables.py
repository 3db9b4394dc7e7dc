# ruff: noqa: E501 (tables, a few cases a line)
"""Tasks from tables of data: every kind of file, broken rows by file and line, duplicates, cuts and overlaps."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from whale_tui.domains.base import DomainError
from whale_tui.domains.tables import Counts, Drop, Report, Row, assemble, convert, cut, distinct, read_rows
from whale_tui.records import Split, Task, content_hash

ROWS = [{"question": 'a, "b"\nc', "answer": "1"}, {"question": "é", "answer": "2"}]
JSONL = '{"question": "a, \\"b\\"\\nc", "answer": "1"}\n\n{"question": "é", "answer": "2"}\n'
CSV = 'question,answer\n"a, ""b""\nc",1\né,2\n'


def written(folder: Path, name: str) -> Path:
    file = folder / name
    match name.removesuffix(".zst").rpartition(".")[2]:
        case "jsonl":
            data = JSONL.encode()
        case "json":
            data = (
                b'{"version": "1", "data": [' + b",".join(line.encode() for line in JSONL.splitlines() if line) + b"]}"
            )
        case "csv":
            data = CSV.encode()
        case _:
            parquet.write_table(pyarrow.Table.from_pylist(ROWS), file)
            return file
    file.write_bytes(zstandard.compress(data) if name.endswith(".zst") else data)
    return file


@pytest.mark.parametrize(
    ("name", "lines"),
    [("r.jsonl", [1, 3]), ("r.JSONL", [1, 3]), ("r.jsonl.zst", [1, 3]), ("r.json", [1, 2]), ("r.csv", [2, 4]), ("r.csv.zst", [2, 4]), ("r.parquet", [1, 2])],
)  # fmt: skip
def test_every_kind_of_file_gives_the_same_rows_with_their_lines(tmp_path: Path, name: str, lines: list[int]) -> None:
    file = written(tmp_path, name.lower()).rename(tmp_path / name)
    rows = list(read_rows(file))
    assert [row.values for row in rows] == ROWS
    assert [row.where for row in rows] == [f"{file}:{line}" for line in lines]


def test_marks_of_byte_order_and_parts_of_a_zst_are_read_over(tmp_path: Path) -> None:
    for name, text in (("a.jsonl", JSONL), ("a.json", '[{"question": 1}]'), ("a.csv", CSV)):
        (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + text.encode())
        assert "question" in next(iter(read_rows(tmp_path / name))).values
    frames = [zstandard.compress(part.encode()) for part in JSONL.splitlines(keepends=True)]
    (tmp_path / "a.jsonl.zst").write_bytes(b"".join(frames))
    assert len(list(read_rows(tmp_path / "a.jsonl.zst"))) == 2


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("r.jsonl", b'{"a": 1}\n{"a": \n{"a": 3}\n', r"r\.jsonl:2: not valid JSON"),
        ("r.jsonl", b'{"a": 1}\n\n[1, 2]\n', r"r\.jsonl:3: a row must be an object .* this is a list"),
        ("r.jsonl", b'{"a": 1}\n"x"\n', r"r\.jsonl:2: .* this is a text"),
        ("r.jsonl", b'{"a": "\xff"}\n', r"r\.jsonl:1: not valid JSON"),
        ("r.jsonl", b'{"a": NaN}\n', r"r\.jsonl:1: not valid JSON"),
        ("r.json", b'[\n{"a": 1},\n{"a": }\n]', r"r\.json:3: not valid JSON"),
        ("r.json", b'[{"a": 1}, 5]', r"r\.json:2: .* this is a number"),
        ("r.json", b'{"a": [], "b": []}', r"r\.json:1: .* one list; its lists: 'a', 'b'"),
        ("r.json", b'"text"', r"r\.json:1: expected a list"),
        ("r.csv", b"a,b\n1,2\n1,2,3\n", r"r\.csv:3: this row has 3 fields and the header 2"),
        ("r.csv", b'a,b\n1,2\n\n"x\ny",2\n1\n', r"r\.csv:6: this row has 1 fields"),
        ("r.csv", b'a,b\n1,"2\n', r"r\.csv:2: not valid CSV"),
        ("r.csv", b"a,b\n1,\xff\n", r"r\.csv:[12]: not UTF-8"),
        ("r.csv", b"a, a\n1,2\n", r"r\.csv:1: the header names a column twice"),
        ("r.csv.zst", b"no zstd at all", r"r\.csv\.zst: not a whole zstd file"),
        ("r.csv.zst", zstandard.compress(b"a,b\n" + random.Random(0).randbytes(9000).hex().encode())[:4000], r"r\.csv\.zst"),
        ("r.parquet", b"PAR1 not really", r"r\.parquet:1: not a whole Parquet file"),
        ("r.txt", b"", r"r\.txt: its kind is not known; the name must end in one of \.jsonl"),
    ],
)  # fmt: skip
def test_a_broken_row_is_named_with_file_and_line(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DomainError, match=message):
        list(read_rows(tmp_path / name))


def test_a_missing_file_says_how_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(DomainError, match=r"none\.jsonl: no such file; ask your aunt"):
        list(read_rows(tmp_path / "none.jsonl", "ask your aunt"))


@given(st.binary(max_size=300), st.sampled_from([".jsonl", ".json", ".csv", ".csv.zst", ".jsonl.zst", ".parquet"]))
def test_no_file_breaks_the_reader(tmp_path_factory: pytest.TempPathFactory, data: bytes, kind: str) -> None:
    file = tmp_path_factory.getbasetemp() / f"any{kind}"
    file.write_bytes(data)
    try:
        rows = list(read_rows(file))
    except DomainError as error:
        assert str(file) in str(error)
    else:
        assert all(isinstance(row.values, dict) and row.line >= 1 for row in rows)


# -------------------------------------------------------------------------------------------------------- rows to splits


def task(question: str, answer: str = "1") -> Task:
    return Task(content_hash(question), {"question": question}, {"answer": answer})


def tasks(start: int, stop: int) -> list[Task]:
    return [task(f"q{n}") for n in range(start, stop)]


def test_rows_that_are_no_tasks_are_counted_by_reason_with_the_first_place() -> None:
    def make(row: Row) -> Task:
        if row.line % 2:
            raise Drop("an odd line")
        return task(str(row.line % 4))

    report = Report()
    counts = report.of("file.csv")
    kept = distinct(convert((Row(Path("file.csv"), n, {}) for n in range(1, 11)), make, counts), counts)
    assert [t.public["question"] for t in kept] == ["2", "0"]
    assert (counts.read, counts.kept, counts.duplicates) == (10, 2, 3)
    assert report.lines() == [
        "file.csv: 2 tasks, from 10 rows, 3 duplicates dropped, 5 dropped: an odd line (first at file.csv:1)"
    ]


def test_two_answers_to_one_question_are_no_duplicate_and_the_first_stands() -> None:
    counts = Counts()
    kept = distinct([task("a", "1"), task("a", "2"), task("a", "1")], counts)
    assert [t.private["answer"] for t in kept] == ["1"] and counts.duplicates == 1
    assert counts.dropped["the same task as an earlier one with another answer"].count == 1


@given(st.lists(st.integers(0, 60), min_size=12, max_size=80), st.integers(0, 5), st.randoms())
def test_a_cut_shares_no_task_and_minds_neither_order_nor_repeats(
    numbers: list[int], seed: int, rng: random.Random
) -> None:
    given_ = [task(f"q{n}") for n in numbers]
    if len(set(numbers)) < 8:
        return
    sizes: dict[Split, Any] = {"test": 3, "harness": 0.25, "weight": None}
    splits = cut(given_, sizes, seed)
    held = [t.key for part in splits.values() for t in part]
    assert sorted(held) == sorted({t.key for t in given_})
    assert len(splits["test"]) == 3 and len(splits["harness"]) == round(len(set(numbers)) / 4)
    again = [*given_, *given_[:5]]
    rng.shuffle(again)
    other = cut(again, sizes, seed)
    assert {s: {t.key for t in part} for s, part in other.items()} == {
        s: {t.key for t in part} for s, part in splits.items()
    }


def test_another_seed_cuts_in_another_way() -> None:
    cuts = [{t.key for t in cut(tasks(0, 100), {"test": 30, "weight": None}, seed)["test"]} for seed in range(3)]
    assert cuts[0] != cuts[1] != cuts[2] and 4 < len(cuts[0] & cuts[1]) < 18


def test_too_few_tasks_are_said() -> None:
    with pytest.raises(
        DomainError, match="9 tasks are too few for 5 for D_test, 4 for D_harness and some for D_weight"
    ):
        cut(tasks(0, 9), {"test": 5, "harness": 4, "weight": None})


def test_splits_that_share_nothing_are_assembled_and_counted() -> None:
    report = Report()
    done = assemble({"weight": tasks(0, 6) + tasks(0, 2), "harness": tasks(6, 8), "test": tasks(8, 9)}, report)
    assert {split: len(part) for split, part in done.items()} == {"weight": 6, "harness": 2, "test": 1}
    assert report.counts["weight"].duplicates == 2 and not report.overlaps
    assert report.lines()[0] == "D_weight: 6 tasks, 2 duplicates dropped"


@pytest.mark.parametrize("other", ["weight", "harness"])
def test_a_test_on_training_tasks_is_refused_unless_allowed(other: Split) -> None:
    splits: dict[Split, list[Task]] = {"weight": tasks(0, 5), "harness": tasks(5, 9), "test": tasks(20, 23)}
    splits["test"] += splits[other][:2]
    with pytest.raises(DomainError, match=f"2 tasks are in both D_test and D_{other} .*allow_overlap = true"):
        assemble(splits, Report())
    report = Report()
    assert len(assemble(splits, report, allow_overlap=True)["test"]) == 5
    assert report.overlaps == {f"D_test and D_{other}": 2} and "overlap: 2 tasks are in both" in report.lines()[-1]


def test_training_and_search_may_share_tasks_and_the_report_says_so() -> None:
    report = Report()
    assemble({"weight": tasks(0, 5), "harness": tasks(3, 6), "test": tasks(9, 11)}, report)
    assert report.overlaps == {"D_harness and D_weight": 2}


def test_an_empty_split_and_a_key_used_twice_are_refused() -> None:
    with pytest.raises(DomainError, match="D_harness has no tasks"):
        assemble({"weight": tasks(0, 2), "test": tasks(2, 3)}, Report())
    same = [Task("1", {"question": q}, {"answer": "1"}) for q in "ab"]
    with pytest.raises(DomainError, match="two different tasks have the key '1'"):
        assemble({"weight": same, "harness": tasks(0, 1), "test": tasks(1, 2)}, Report())
