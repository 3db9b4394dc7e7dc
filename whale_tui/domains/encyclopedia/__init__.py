"""Search QA over a made-up encyclopaedia: about 400 short articles, questions with one short answer, BM25 search."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, Struct

from whale_tui.domains import bm25
from whale_tui.domains.answers import exact_match
from whale_tui.domains.base import DomainError, Tool, read_brief, read_h0
from whale_tui.domains.bm25 import Passages
from whale_tui.domains.encyclopedia import world
from whale_tui.domains.encyclopedia.edits import RULES
from whale_tui.records import Demonstration, Episode, Split, Task, Verdict

ENTITIES = {"weight": 67, "harness": 10, "test": 18, "demonstrations": 5}
"""Entities of each of the four kinds: every question of a split is about an entity of that split alone."""


EXPORTED = '''\
"""search(query, k) over the encyclopaedia, for harness.py."""

import json
from pathlib import Path

from bm25 import Passages

ARTICLES = Passages(json.loads(Path(__file__).with_name("articles.json").read_text(encoding="utf-8")))


def tools(task):
    return {"search": ARTICLES.search}
'''


class Options(Struct, forbid_unknown_fields=True, frozen=True):
    """[domain.options] of the encyclopaedia."""

    seed: int = 0
    """Another seed is another world."""
    weight: Annotated[int, Meta(ge=1)] = 4096
    """Tasks of D_weight."""
    harness: Annotated[int, Meta(ge=1)] = 128
    """Tasks of D_harness."""
    test: Annotated[int, Meta(ge=1)] = 256
    """Tasks of D_test."""


class Encyclopedia:
    name = "encyclopedia"
    edits = RULES

    def __init__(self, options: Options) -> None:
        groups = world.entities(options.seed, ENTITIES, apart="demonstrations")
        self._articles = [entity for group in groups.values() for entity in group]
        self._index = _index(self._articles)
        sizes: dict[Split, int] = {"weight": options.weight, "harness": options.harness, "test": options.test}
        self._tasks = {split: _draw(groups[split], split, size, options.seed) for split, size in sizes.items()}
        self.h0 = read_h0(__file__)
        self.brief = read_brief(
            __file__,
            tools={"search": "search(query, k=1) -> [{'title', 'text'}, ...]: the k best articles by BM25, best first"},
            demonstrations=_demonstrations(groups["demonstrations"]),
        )

    def tasks(self, split: Split) -> Sequence[Task]:
        return self._tasks[split]

    def tools(self, task: Task) -> Mapping[str, Tool]:
        return {"search": self._index.search}

    def export(self, folder: Path) -> list[str]:
        """The articles and their index, for an exported pair."""
        shutil.copyfile(bm25.__file__, folder / "bm25.py")
        articles = [(entity.name, entity.text) for entity in self._articles]
        (folder / "articles.json").write_text(json.dumps(articles, indent=0), encoding="utf-8")
        (folder / "tools.py").write_text(EXPORTED, encoding="utf-8")
        return ["platformdirs>=4"]

    def verify(self, task: Task, answer: str, episode: Episode) -> Verdict:
        """Normalised exact match: lower case, no punctuation, no articles (the verifier of the study's search QA)."""
        return exact_match(answer, [task.private["answer"]])


def build(options: Options) -> Encyclopedia:
    return Encyclopedia(options)


def _draw(entities: Sequence[world.Entity], split: Split, size: int, seed: int) -> list[Task]:
    """`size` distinct questions. Every fact is asked once before any is asked in a second way."""
    rng = random.Random(f"{split} {seed}")
    facts = [(entity, relation) for entity in entities for relation in entity.facts]
    rounds = []
    ways = {fact: rng.sample(range(4), 4) for fact in range(len(facts))}
    for turn in range(4):
        order = rng.sample(range(len(facts)), len(facts))
        rounds += [(*facts[fact], ways[fact][turn]) for fact in order]
    if size > len(rounds):
        raise DomainError(
            f"domain.options.{split} = {size}: the world holds {len(rounds)} questions for it, ask for fewer"
        )
    return [_task(*chosen) for chosen in rng.sample(rounds[:size], size)]


def _task(entity: world.Entity, relation: str, way: int) -> Task:
    question = world.RELATIONS[relation].asked[way].format(s=entity.name)
    key = f"{entity.name.lower().replace(' ', '-')}/{relation}/{way}"
    private: dict[str, Any] = {"answer": entity.facts[relation]}
    return Task(key, {"question": question}, private)


def _demonstrations(entities: Sequence[world.Entity]) -> list[Demonstration]:
    """Worked questions, the kinds in turn. Their search sees articles of no split alone: no split's answer is shown."""
    index = _index(entities)
    by_kind = [[entity for entity in entities if entity.kind == kind] for kind in world.KINDS]
    shown = []
    for place, entity in enumerate(entity for group in zip(*by_kind, strict=True) for entity in group):
        told = list(entity.facts)
        relation = told[(2 * place + 1) % len(told)]
        question = world.RELATIONS[relation].asked[place // len(by_kind) % 4].format(s=entity.name)
        found = index.search(question, 3)
        if found[0]["title"] == entity.name:
            use = {"name": "search", "args": {"query": question, "k": 3}, "result": found}
            shown.append(Demonstration({"question": question}, [use], entity.facts[relation]))
    return shown


def _index(entities: Iterable[world.Entity]) -> Passages:
    return Passages((entity.name, entity.text) for entity in entities)
