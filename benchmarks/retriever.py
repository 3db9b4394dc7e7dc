"""The embedded retriever: building the index of a generated corpus, and one query.

    python -m benchmarks.retriever [--passages 100000] [--queries 500]

Words follow Zipf's law, so that the commonest are in nearly every passage, as in any language. A query is worded like
a question: half its words are from the passage that it is about, half are common ones. Nothing is cached beforehand.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from unittest import mock

import numpy as np

from whale_tui.domains import bm25

WORDS = 200_000
PASSAGE_WORDS = 100
QUERY_WORDS = 12


def main() -> None:
    options = argparse.ArgumentParser(description="Building and searching the embedded index.")
    options.add_argument("--passages", type=int, default=100_000)
    options.add_argument("--queries", type=int, default=500)
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as cache, mock.patch.dict(os.environ, XDG_CACHE_HOME=cache):
        measure(given.passages, given.queries)


def measure(passages: int, queries: int) -> None:
    start = time.perf_counter()
    texts = list(corpus(passages))
    print(f"{passages:,} passages of {PASSAGE_WORDS} words ({time.perf_counter() - start:.1f} s to generate)")
    start = time.perf_counter()
    index = bm25.Passages.kept("benchmark", texts)
    built = time.perf_counter() - start
    size = bm25.kept_file("benchmark").stat().st_size / 1e6
    start = time.perf_counter()
    bm25.Passages.kept("benchmark", ()).close()
    opened = time.perf_counter() - start
    times, found = [], 0
    for query, title in questions(texts, queries):
        start = time.perf_counter()
        best = index.search(query, 3)
        times.append((time.perf_counter() - start) * 1e3)
        found += title in [passage["title"] for passage in best]
    cuts = statistics.quantiles(times, n=100)
    print(f"build {built:.1f} s (target 60 s), {size:.0f} MB; open {opened * 1e3:.1f} ms")
    print(
        f"{queries} queries: mean {statistics.mean(times):.1f} ms (target 20 ms), median {cuts[49]:.1f}, "
        f"95% {cuts[94]:.1f}, most {max(times):.1f}; the passage meant is among 3 in {found / queries:.0%}"
    )


def corpus(passages: int) -> Iterator[tuple[str, str]]:
    words = [_word(n) for n in range(WORDS)]
    shares = np.cumsum(1 / (np.arange(WORDS) + 2.7))
    draws = np.random.default_rng(0)
    for number in range(passages):
        drawn = np.searchsorted(shares, draws.random(PASSAGE_WORDS) * shares[-1])
        yield f"Article {number}", " ".join([words[n] for n in drawn])


def questions(texts: list[tuple[str, str]], count: int) -> Iterator[tuple[str, str]]:
    rng = random.Random(1)
    common = [_word(n) for n in range(60)]
    for title, text in rng.sample(texts, count):
        own = rng.sample(text.split(), QUERY_WORDS // 2)
        yield " ".join(rng.sample([*own, *rng.sample(common, QUERY_WORDS // 2)], QUERY_WORDS)), title


def _word(number: int) -> str:
    """A different word for each number; short ones for small numbers."""
    letters = ""
    number += 26
    while number:
        number, letter = divmod(number, 26)
        letters += chr(ord("a") + letter)
    return letters + "q"


if __name__ == "__main__":
    main()
