"""`search(query, k)`: an index in this process, or Search-R1 servers."""

from __future__ import annotations

import asyncio
import hashlib
import sqlite3
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from whale_tui.domains import bm25
from whale_tui.domains.base import DomainError
from whale_tui.domains.http import Service, checked
from whale_tui.domains.searchqa.layouts import Passage, corpus, titled

AT_ONCE = 500
"""Passages up to which a query takes about a millisecond: it is answered in the engine's own thread."""
MOST_REQUESTS = 64
"""Queries on their way to the servers at once; the others wait."""


class Embedded:
    """BM25 over passages, from an index on disk that is made once for a corpus."""

    def __init__(self, identity: str, passages: Iterable[Passage]) -> None:
        """Raises DomainError where the index can't be kept or read, or where there is no passage."""
        try:
            self._index = bm25.Passages.kept(identity, passages)
        except (OSError, sqlite3.Error) as error:
            raise DomainError(
                f"the search index {bm25.kept_file(identity)} can't be made or read: {error}; delete it, make room, or "
                "set XDG_CACHE_HOME to another folder"
            ) from error
        self.size = self._index.size
        self.search = self._index.search if self.size <= AT_ONCE else self._elsewhere

    async def _elsewhere(self, query: str, k: int = 1) -> list[dict[str, str]]:
        return await asyncio.to_thread(self._index.search, query, k)

    async def problems(self) -> list[str]:
        try:
            self._index.search("the", 1)
        except sqlite3.Error as error:
            return [f"the search index can't be read: {error}"]
        return []

    async def close(self) -> None:
        self._index.close()


class Servers:
    """Search-R1's HTTP interface: one query a request, the servers in turn."""

    def __init__(self, urls: Sequence[str], seconds: float, tries: int) -> None:
        """URLs with or without the path /retrieve. Raises DomainError for what is none."""
        bare = [url.removesuffix("/retrieve") for url in checked("domain.options.servers", urls)]
        self._service = Service(
            [f"{url}/retrieve" for url in bare], seconds=seconds, tries=tries, at_once=MOST_REQUESTS
        )

    async def search(self, query: str, k: int = 1) -> list[dict[str, str]]:
        """The `k` best passages as {"title", "text"}. ValueError as the embedded one, http.Unavailable where no server
        answers: the episode is `invalid` then."""
        bm25.check(query, k)
        return await self._service.post(_request(query, k), lambda value: _passages(value)[:k])

    async def problems(self) -> list[str]:
        found = await self._service.problems(_request("health", 1), _passages)
        return [f"retriever {problem}; start it, or take it out of domain.options.servers" for problem in found]

    async def close(self) -> None:
        await self._service.close()


def embedded(file: Path | None, paragraphs: Sequence[Passage], get: str) -> Embedded:
    """The index of a corpus file, or of the paragraphs that came with the questions. Raises DomainError."""
    if file is not None:
        return _not_empty(Embedded(_hash_of(file, get), corpus(file, get)), str(file))
    digest = hashlib.sha256()
    for title, text in paragraphs:
        digest.update(f"{len(title)} {len(text)} {title}{text}".encode())
    return Embedded(digest.hexdigest()[:32], paragraphs)


def _not_empty(index: Embedded, file: str) -> Embedded:
    if not index.size:
        raise DomainError(f"{file}: it holds no passage; fetch it again")
    return index


def _hash_of(file: Path, get: str) -> str:
    try:
        with file.open("rb") as data:
            return hashlib.file_digest(data, "sha256").hexdigest()[:32]
    except FileNotFoundError:
        raise DomainError(f"{file}: no such file; {get}") from None
    except OSError as error:
        raise DomainError(f"{file}: can't be read: {error.strerror or error}") from error


def _request(query: str, k: int) -> dict[str, Any]:
    """`return_scores` is always true: the server fails without."""
    return {"queries": [query], "topk": k, "return_scores": True}


def _passages(value: Any) -> list[dict[str, str]]:
    """From {"result": [[{"document": {"id", "contents"}, "score"}, ...]]}, for one query."""
    found = [titled(each["document"]["contents"]) for each in value["result"][0]]
    return [{"title": title, "text": text} for title, text in found]
