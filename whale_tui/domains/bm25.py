"""BM25 over short passages: SQLite's full-text index, in memory or built once and kept in the user's cache."""

from __future__ import annotations

import os
import queue
import re
import sqlite3
import tempfile
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

import platformdirs

MAX_RESULTS = 20
MAX_QUERY_CHARS = 1000
CONNECTIONS = 4
"""Threads that may search a kept index at once."""
MOST_RANKED = 10_000
"""Matches that one query may rank, a passage counted for each of its words: the rarest words come first. Words beyond
are in so many passages that they say next to nothing, and would take nearly all the time."""
VERSION = "1"
"""Of a kept index. Another tokenizer or layout is another version, so that an older index is not taken for it."""

Row = tuple[str, str]


class Passages:
    """An index of (title, text) rows. A word in the title counts five times as much as one in the text."""

    def __init__(self, rows: Iterable[Row]) -> None:
        db = sqlite3.connect(":memory:", check_same_thread=False)
        _fill(db, rows, "unicode61")
        self._serve(db)

    @classmethod
    def kept(cls, identity: str, rows: Iterable[Row]) -> Passages:
        """The index of the corpus with this hash, out of the user's cache; built from `rows` there when it is missing
        (100,000 passages take about ten seconds). English endings are stemmed.

        A build that is cut short leaves nothing behind that could be taken for an index. Raises OSError and
        sqlite3.Error where the cache can't be written or read, and what `rows` raises.
        """
        file = kept_file(identity)
        if not file.exists():
            _build(file, rows)
        address = f"{file.absolute().as_uri()}?mode=ro&immutable=1"
        made = cls.__new__(cls)
        made._serve(*(sqlite3.connect(address, uri=True, check_same_thread=False) for _ in range(CONNECTIONS)))
        return made

    def _serve(self, *connections: sqlite3.Connection) -> None:
        self._free: queue.SimpleQueue[sqlite3.Connection] = queue.SimpleQueue()
        for connection in connections:
            self._free.put(connection)
        self._connections = connections
        self._search = lru_cache(maxsize=20_000)(self._look_up)
        self._matches = lru_cache(maxsize=200_000)(self._count)
        self.size: int = connections[0].execute("SELECT count(*) FROM passages_docsize").fetchone()[0]
        """Passages in the index."""

    def close(self) -> None:
        for connection in self._connections:
            connection.close()

    def search(self, query: str, k: int = 1) -> list[dict[str, str]]:
        """The `k` best passages as {"title", "text"}, best first; none when no word of the query occurs. Any thread.

        Raises ValueError for a query that is no text, is empty or too long, and for `k` outside 1 to 20.
        """
        check(query, k)
        words = sorted(set(re.findall(r"\w+", query.lower())))
        return [{"title": title, "text": text} for title, text in self._search(tuple(words), k)]

    def _look_up(self, words: tuple[str, ...], k: int) -> list[Row]:
        match = " OR ".join(f'"{word}"' for word in self._telling(words))
        if not match:
            return []
        best = (
            "SELECT rowid AS id, bm25(passages, 5.0, 1.0) AS score FROM passages WHERE passages MATCH ? "
            "ORDER BY score, id LIMIT ?"
        )
        return self._ask(
            f"SELECT title, text FROM ({best}) JOIN passages ON passages.rowid = id ORDER BY score, id", (match, k)
        )

    def _telling(self, words: tuple[str, ...]) -> list[str]:
        """The words that occur, rarest first, as many as MOST_RANKED allows and at least one."""
        by_matches = sorted((self._matches(word), word) for word in words)
        telling: list[str] = []
        ranked = 0
        for matches, word in by_matches:
            ranked += matches
            if matches and (not telling or ranked <= MOST_RANKED):
                telling.append(word)
        return telling

    def _count(self, word: str) -> int:
        """Passages that hold a word, as far as MOST_RANKED."""
        query = "SELECT count(*) FROM (SELECT 1 FROM passages WHERE passages MATCH ? LIMIT ?)"
        return int(self._ask(query, (f'"{word}"', MOST_RANKED))[0][0])

    def _ask(self, query: str, values: tuple[object, ...]) -> list[tuple[Any, ...]]:
        connection = self._free.get()
        try:
            return connection.execute(query, values).fetchall()
        finally:
            self._free.put(connection)


def check(query: object, k: object) -> None:
    """ValueError in words for what `search(query, k)` does not take, whichever retriever is behind it."""
    if not isinstance(query, str) or not query.strip():
        raise ValueError("search(query, k): query must be text, and not empty")
    if len(query) > MAX_QUERY_CHARS:
        raise ValueError(f"search(query, k): query has {len(query)} characters, at most {MAX_QUERY_CHARS} are allowed")
    if not isinstance(k, int) or isinstance(k, bool) or not 1 <= k <= MAX_RESULTS:
        raise ValueError(f"search(query, k): k must be a whole number from 1 to {MAX_RESULTS}")


def kept_file(identity: str) -> Path:
    """Where the index of the corpus with this hash is kept."""
    return Path(platformdirs.user_cache_dir("whale-tui")) / "passages" / f"{identity}-{VERSION}.sqlite"


def _build(file: Path, rows: Iterable[Row]) -> None:
    """Written beside its place and put there when it is whole and on disk."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=file.parent, prefix="unfinished-") as scratch:
        made = Path(scratch) / "made.sqlite"
        db = sqlite3.connect(made)
        try:
            db.execute("PRAGMA journal_mode = OFF")
            db.execute("PRAGMA synchronous = OFF")
            _fill(db, rows, "porter unicode61")
            db.execute("INSERT INTO passages(passages) VALUES ('optimize')")
            db.commit()
        finally:
            db.close()
        with made.open("rb") as whole:
            os.fsync(whole.fileno())
        made.replace(file)


def _fill(db: sqlite3.Connection, rows: Iterable[Row], tokenizer: str) -> None:
    db.execute(f"CREATE VIRTUAL TABLE passages USING fts5(title, text, tokenize='{tokenizer}')")
    db.executemany("INSERT INTO passages VALUES (?, ?)", rows)
    db.commit()
