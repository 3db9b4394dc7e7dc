"""A JSON service behind one or more URLs: spread over those that answer, tried again, given up in words."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import httpx2

from whale_tui.domains.base import DomainError

T = TypeVar("T")

REST = 5.0
"""Seconds for which a URL that failed is asked last."""
PAUSE = 0.25
"""Seconds before the second round; each further one waits twice as long."""
LONGEST_PAUSE = 30.0
FAILURES = (httpx2.HTTPError, httpx2.InvalidURL, ValueError, TimeoutError)


class Unavailable(Exception):
    """No URL gave an answer. A failure of the machinery: it makes an episode `invalid`, and never a rejected one."""


class Service:
    """POST of JSON. Each request takes the URLs in turn; one that fails gives way to the next, `tries` rounds of them.

    `seconds` is the time that one attempt may take, `at_once` the most requests in flight.
    """

    def __init__(
        self, urls: Sequence[str], *, seconds: float, tries: int, at_once: int, headers: Mapping[str, str] | None = None
    ) -> None:
        self.urls, self.seconds, self.tries, self.at_once = list(urls), seconds, tries, at_once
        self._headers = dict(headers or {})
        self._turn = itertools.count()
        self._rests: dict[str, float] = {}
        self._client: httpx2.AsyncClient | None = None
        self._room = asyncio.Semaphore(at_once)

    async def post(self, body: Any, read: Callable[[Any], T]) -> T:
        """What `read` makes of the answer; where it raises ValueError, that was none. Raises Unavailable."""
        said: dict[str, str] = {}
        for attempt in range(self.tries):
            pause, lasting = PAUSE * 2**attempt, True
            for url in self._order():
                try:
                    return await self._ask(url, body, read)
                except FAILURES as error:
                    self._rests[url] = time.monotonic() + REST
                    said[url] = _words(error, self.seconds)
                    pause = max(pause, _asked_to_wait(error))
                    lasting = lasting and _lasting(error)
            if lasting:
                break
            if attempt + 1 < self.tries:
                await asyncio.sleep(min(pause, LONGEST_PAUSE))
        raise Unavailable("; ".join(f"{url}: {words}" for url, words in said.items()))

    async def problems(self, body: Any, read: Callable[[Any], Any]) -> list[str]:
        """One attempt at every URL: what is wrong, each naming its URL. Empty where all answer."""

        async def one(url: str) -> str:
            try:
                await self._ask(url, body, read)
            except FAILURES as error:
                return f"{url}: {_words(error, self.seconds)}"
            return ""

        return [problem for problem in await asyncio.gather(*map(one, self.urls)) if problem]

    async def close(self) -> None:
        if self._client is not None:
            await self._client.aclose()
            self._client = None

    async def _ask(self, url: str, body: Any, read: Callable[[Any], T]) -> T:
        if self._client is None:  # made here, where the loop that it belongs to runs
            limits = httpx2.Limits(max_connections=self.at_once, max_keepalive_connections=self.at_once)
            self._client = httpx2.AsyncClient(limits=limits, timeout=None, headers=self._headers)
        async with self._room, asyncio.timeout(self.seconds):
            response = await self._client.post(url, json=body)
        response.raise_for_status()
        try:
            value = response.json()
        except ValueError:
            raise ValueError(f"not JSON: {response.text[:100]!r}") from None
        try:
            return read(value)
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise ValueError(f"not the answer expected ({type(error).__name__}: {error}): {str(value)[:200]}") from None

    def _order(self) -> list[str]:
        """The URLs from the next one on, those that failed lately last."""
        start, now = next(self._turn) % len(self.urls), time.monotonic()
        turned = self.urls[start:] + self.urls[:start]
        return sorted(turned, key=lambda url: self._rests.get(url, 0.0) > now)


def checked(key: str, urls: Sequence[str]) -> list[str]:
    """The URLs of an option, without a slash at their end. DomainError names the one that is none."""
    for url in urls:
        try:
            parsed = httpx2.URL(url)
        except httpx2.InvalidURL:
            parsed = httpx2.URL("")
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise DomainError(f"{key}: {url!r} is no URL; write it as http://host:port")
    return [url.rstrip("/") for url in urls]


def _words(error: Exception, seconds: float) -> str:
    if isinstance(error, httpx2.HTTPStatusError):
        return f"HTTP {error.response.status_code}: {error.response.text[:200].strip()}"
    if isinstance(error, TimeoutError | httpx2.TimeoutException):
        return f"no answer within {seconds:g} s"
    return str(error) or type(error).__name__


def _lasting(error: Exception) -> bool:
    """Whether the same request will fail again: the server says that it is the request's fault."""
    if not isinstance(error, httpx2.HTTPStatusError):
        return isinstance(error, httpx2.InvalidURL)
    return 400 <= error.response.status_code < 500 and error.response.status_code not in (408, 425, 429)


def _asked_to_wait(error: Exception) -> float:
    """Seconds that the server asks for (Retry-After), else 0."""
    after = error.response.headers.get("retry-after", "") if isinstance(error, httpx2.HTTPStatusError) else ""
    return float(after) if after.isdigit() else 0.0
