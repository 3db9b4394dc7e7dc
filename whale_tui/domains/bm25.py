"""BM25 over short passages: SQLite's full-text index, in memory, one per process and corpus."""

from __future__ import annotations

import re
import sqlite3
import threading
from collections.abc import Iterable
from functools import lru_cache

MAX_RESULTS = 20
MAX_QUERY_CHARS = 1000


class Passages:
    """An index of (title, text) rows. A word in the title counts twice as much as one in the text."""

    def __init__(self, rows: Iterable[tuple[str, str]]) -> None:
        self._db = sqlite3.connect(":memory:", check_same_thread=False)
        self._lock = threading.Lock()
        self._db.execute("CREATE VIRTUAL TABLE passages USING fts5(title, text, tokenize='unicode61')")
        self._db.executemany("INSERT INTO passages VALUES (?, ?)", rows)
        self._search = lru_cache(maxsize=20_000)(self._look_up)

    def search(self, query: str, k: int = 1) -> list[dict[str, str]]:
        """The `k` best passages as {"title", "text"}, best first; none when no word of the query occurs.

        Raises ValueError for a query that is no text, is empty or too long, and for `k` outside 1 to 20.
        """
        if not isinstance(query, str) or not query.strip():
            raise ValueError("search(query, k): query must be text, and not empty")
        if len(query) > MAX_QUERY_CHARS:
            raise ValueError(
                f"search(query, k): query has {len(query)} characters, at most {MAX_QUERY_CHARS} are allowed"
            )
        if not isinstance(k, int) or isinstance(k, bool) or not 1 <= k <= MAX_RESULTS:
            raise ValueError(f"search(query, k): k must be a whole number from 1 to {MAX_RESULTS}")
        words = sorted(set(re.findall(r"\w+", query.lower())))
        return [{"title": title, "text": text} for title, text in self._search(tuple(words), k)]

    def _look_up(self, words: tuple[str, ...], k: int) -> list[tuple[str, str]]:
        if not words:
            return []
        match = " OR ".join(f'"{word}"' for word in words)
        query = (
            "SELECT title, text FROM passages WHERE passages MATCH ? ORDER BY bm25(passages, 5.0, 1.0), rowid LIMIT ?"
        )
        with self._lock:
            return list(self._db.execute(query, (match, k)))
