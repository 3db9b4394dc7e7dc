"""Tasks from tables of data: rows of a file, what became of each, and three splits that share no task.

A domain turns rows into tasks with `convert`, cuts one file into splits with `cut`, and passes what it has through
`assemble`, which is where duplicates go and where an overlap between training and test stops the run.
"""

from __future__ import annotations

import contextlib
import csv
import hashlib
import io
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import msgspec
from msgspec import Struct, field

from whale_tui.domains.base import DomainError
from whale_tui.records import Split, Task, content_hash

SPLITS: tuple[Split, ...] = ("weight", "harness", "test")
KINDS = (".jsonl", ".jsonl.zst", ".json", ".csv", ".csv.zst", ".parquet")

# ---------------------------------------------------------------------------------------------------------------- rows


class Row(Struct, frozen=True):
    """One row of a file. `line` is the line it begins on (JSONL, CSV) or its number from 1 (JSON, Parquet)."""

    file: Path
    line: int
    values: dict[str, Any]

    @property
    def where(self) -> str:
        return f"{self.file}:{self.line}"


def read_rows(path: Path, get: str = "") -> Iterator[Row]:
    """The rows of a file, its kind told by its name (one of KINDS): JSON is a list of objects, or an object with one
    list of them; CSV has a header. `get` says where the data come from, should the file be missing.

    Raises DomainError naming the file and the line, and the mend.
    """
    kind = next((k for k in sorted(KINDS, key=len, reverse=True) if path.name.lower().endswith(k)), "")
    if not path.is_file():
        raise DomainError(f"{path}: no such file" + (f"; {get}" if get else ""))
    if not kind:
        raise DomainError(f"{path}: its kind is not known; the name must end in one of {', '.join(KINDS)}")
    read = {".jsonl": _jsonl, ".json": _json, ".csv": _csv, ".parquet": _parquet}[kind.removesuffix(".zst")]
    try:
        with _open(path, packed=kind.endswith(".zst")) as file:
            yield from read(path, file)
    except OSError as error:
        raise DomainError(f"{path}: can't be read: {error.strerror or error}") from error


@contextlib.contextmanager
def _open(path: Path, *, packed: bool) -> Iterator[IO[bytes]]:
    with path.open("rb") as file:
        yield io.BufferedReader(_Unpacked(path, file)) if packed else file


class _Unpacked(io.RawIOBase):
    """The content of a zstd file. DomainError where it is none, or ends in the middle: zstandard's own reader takes
    such an end for the end of the data."""

    def __init__(self, path: Path, file: IO[bytes]) -> None:
        import zstandard

        self._path, self._file, self._zstd = path, file, zstandard
        self._frame: Any = None
        self._ready = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            between = self._frame is None or self._frame.eof
            left = self._frame.unused_data if self._frame is not None and between else b""
            packed = left or self._file.read(1 << 16)
            if not packed:
                if between:
                    return 0
                raise self._broken("it ends in the middle")
            if between:
                self._frame = self._zstd.ZstdDecompressor().decompressobj()
            try:
                self._ready = self._frame.decompress(packed)
            except self._zstd.ZstdError as error:
                raise self._broken(str(error)) from error
        count = min(len(buffer), len(self._ready))
        buffer[:count], self._ready = self._ready[:count], self._ready[count:]
        return count

    def _broken(self, why: str) -> DomainError:
        return DomainError(f"{self._path}: not a whole zstd file ({why}); fetch it again")


def _jsonl(path: Path, file: IO[bytes]) -> Iterator[Row]:
    for number, line in enumerate(file, 1):
        text = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
        if text.strip():
            yield Row(path, number, _object(path, number, _decoded(path, number, text)))


def _json(path: Path, file: IO[bytes]) -> Iterator[Row]:
    text = file.read().removeprefix(b"\xef\xbb\xbf")
    value = _decoded(path, 1, text)
    if isinstance(value, dict):
        lists = [key for key, item in value.items() if isinstance(item, list)]
        if len(lists) != 1:
            held = ", ".join(map(repr, lists)) or "none"
            raise DomainError(f"{path}:1: expected a list of rows, or an object with one list; its lists: {held}")
        value = value[lists[0]]
    if not isinstance(value, list):
        raise DomainError(f"{path}:1: expected a list of rows, or an object with one list")
    for number, item in enumerate(value, 1):
        yield Row(path, number, _object(path, number, item))


def _decoded(path: Path, line: int, text: bytes) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        at = str(error).rpartition("(byte ")[2].rstrip(")")
        line += text[: int(at)].count(b"\n") if at.isdigit() else 0
        raise DomainError(f"{path}:{line}: not valid JSON: {error}; mend the row or delete it") from error


def _object(path: Path, line: int, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise DomainError(f"{path}:{line}: a row must be an object with named fields, this is {_kind(value)}")
    return value


def _csv(path: Path, file: IO[bytes]) -> Iterator[Row]:
    reader = csv.reader(io.TextIOWrapper(file, encoding="utf-8-sig", newline=""), strict=True)
    header: list[str] = []
    end = 0
    try:
        for values in reader:
            line, end = end + 1, reader.line_num
            if not header:
                header = [name.strip() for name in values]
                if len(set(header)) < len(header):
                    raise DomainError(f"{path}:{line}: the header names a column twice")
            elif values:
                if len(values) != len(header):
                    many = f"{len(values)} fields and the header {len(header)}"
                    raise DomainError(f"{path}:{line}: this row has {many}; mend the row or delete it")
                yield Row(path, line, dict(zip(header, values, strict=True)))
    except csv.Error as error:
        raise DomainError(f"{path}:{end + 1}: not valid CSV: {error}; mend the row or delete it") from error
    except UnicodeDecodeError as error:
        raise DomainError(f"{path}:{end + 1}: not UTF-8 ({error.reason}); convert the file to UTF-8") from error


def _parquet(path: Path, file: IO[bytes]) -> Iterator[Row]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise DomainError(f"{path}: Parquet needs the package pyarrow ({error})") from error
    number = 0
    try:
        for batch in parquet.ParquetFile(file).iter_batches(1024):
            for values in batch.to_pylist():
                number += 1
                yield Row(path, number, values)
    except pyarrow.ArrowException as error:
        raise DomainError(f"{path}:{number + 1}: not a whole Parquet file: {error}; fetch it again") from error


def _kind(value: Any) -> str:
    names = {
        str: "a text",
        list: "a list",
        bool: "true or false",
        type(None): "null",
        int: "a number",
        float: "a number",
    }
    return names.get(type(value), type(value).__name__)


# --------------------------------------------------------------------------------------------------------- the report


class Dropped(Struct):
    """Rows dropped for one reason; `first` is where the first of them stands."""

    count: int
    first: str


class Counts(Struct):
    """What became of the rows of one split, or of one file that is cut into splits."""

    read: int = 0
    kept: int = 0
    duplicates: int = 0
    dropped: dict[str, Dropped] = field(default_factory=dict)

    def drop(self, reason: str, where: str) -> None:
        self.dropped.setdefault(reason, Dropped(0, where)).count += 1


class Report(Struct):
    """What an import read, kept and dropped, and why. `of` is filled by name: a split, or a word for a file."""

    counts: dict[str, Counts] = field(default_factory=dict)
    overlaps: dict[str, int] = field(default_factory=dict)
    """"test and weight" -> tasks that both hold."""

    def of(self, name: str) -> Counts:
        return self.counts.setdefault(name, Counts())

    def lines(self) -> list[str]:
        """The report in plain words, a line for each source and each overlap."""
        said = []
        for name, c in self.counts.items():
            parts = [f"{c.kept:,} tasks"]
            if c.read:
                parts.append(f"from {c.read:,} rows")
            if c.duplicates:
                parts.append(f"{c.duplicates:,} duplicates dropped")
            parts += [f"{d.count:,} dropped: {why} (first at {d.first})" for why, d in c.dropped.items()]
            said.append(f"{_title(name)}: {', '.join(parts)}")
        return said + [f"overlap: {n:,} tasks are in both {pair}" for pair, n in self.overlaps.items()]


def _title(name: str) -> str:
    return f"D_{name}" if name in SPLITS else name


# ------------------------------------------------------------------------------------------------ rows to three splits


class Drop(Exception):
    """Raised for a row that is whole but no task of this domain; the text is the reason, the same for all its kind."""


def convert(rows: Iterable[Row], make: Callable[[Row], Task], counts: Counts) -> Iterator[Task]:
    """Each row as a task. A row for which `make` raises Drop is counted; DomainError is for a broken one."""
    for row in rows:
        counts.read += 1
        try:
            yield make(row)
        except Drop as reason:
            counts.drop(str(reason), row.where)


def distinct(tasks: Iterable[Task], counts: Counts) -> list[Task]:
    """The tasks without those whose public part came before. Where two answers are given for one public part, the
    first stands, and the report says so."""
    seen: dict[str, str] = {}
    kept = []
    for task in tasks:
        public = content_hash(task.public)
        if public not in seen:
            seen[public] = task.hash
            kept.append(task)
        elif seen[public] == task.hash:
            counts.duplicates += 1
        else:
            counts.drop("the same task as an earlier one with another answer", task.key)
    counts.kept = len(kept)
    return kept


def cut(tasks: Iterable[Task], sizes: Mapping[Split, int | float | None], seed: int = 0) -> dict[Split, list[Task]]:
    """One file as several splits: a whole number is that many tasks, a number below 1 a share, None what is left.

    A task's place is decided by a seeded hash of its public part, so neither the order of the file nor repeated rows
    matter. Tasks keep the order in which they came. Raises DomainError when there are too few.
    """
    tasks = distinct(tasks, Counts())
    order = sorted(range(len(tasks)), key=lambda n: hashlib.sha256(_place(seed, tasks[n])).digest())
    wanted = {
        split: round(size * len(tasks)) if isinstance(size, float) and size < 1 else int(size)
        for split, size in sizes.items()
        if size is not None
    }
    rest = [split for split, size in sizes.items() if size is None]
    need = sum(wanted.values()) + len(rest)
    if need > len(tasks) or min(wanted.values(), default=1) < 1:
        asked = ", ".join(f"{size} for D_{split}" for split, size in wanted.items())
        raise DomainError(
            f"{len(tasks)} tasks are too few for {asked}" + (f" and some for D_{rest[0]}" if rest else "")
        )
    splits: dict[Split, list[Task]] = {}
    start = 0
    for split in sizes:
        if split in wanted:
            splits[split] = [tasks[n] for n in sorted(order[start : start + wanted[split]])]
            start += wanted[split]
    for split in rest[:1]:
        splits[split] = [tasks[n] for n in sorted(order[start:])]
    return splits


def _place(seed: int, task: Task) -> bytes:
    return f"{seed} {content_hash(task.public)}".encode()


def assemble(
    splits: Mapping[Split, Iterable[Task]], report: Report, *, allow_overlap: bool = False
) -> dict[Split, list[Task]]:
    """The three splits without duplicates, with their overlaps reported.

    Raises DomainError where a split is empty, where two different tasks have one key, and, unless `allow_overlap`,
    where a task of D_test is also in D_weight or D_harness.
    """
    done = {split: distinct(splits.get(split, ()), report.of(split)) for split in SPLITS}
    for split, tasks in done.items():
        if not tasks:
            dropped = "; ".join(report.lines())
            raise DomainError(f"D_{split} has no tasks ({dropped})")
    keys: dict[str, str] = {}
    for task in (task for tasks in done.values() for task in tasks):
        if keys.setdefault(task.key, task.hash) != task.hash:
            raise DomainError(f"two different tasks have the key {task.key!r}; give each row an id of its own")
    held = {split: {content_hash(task.public) for task in tasks} for split, tasks in done.items()}
    pairs: tuple[tuple[Split, Split], ...] = (("test", "weight"), ("test", "harness"), ("harness", "weight"))
    for one, other in pairs:
        both = held[one] & held[other]
        if both:
            report.overlaps[f"D_{one} and D_{other}"] = len(both)
            if one == "test" and not allow_overlap:
                first = next(task.key for task in done[one] if content_hash(task.public) in both)
                raise DomainError(
                    f"{len(both)} tasks are in both D_{one} and D_{other} (the first is {first}): a test on training "
                    "tasks measures nothing; take other files, or set domain.options.allow_overlap = true"
                )
    return done
