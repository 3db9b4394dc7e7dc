# ruff: noqa: E501, SIM905 (a table of texts, a few lines a row)
"""The made-up world: who and what exists, what is true of it, how an article tells it and how a question asks for it.

Every name is invented, so nothing can be known beforehand: an answer can only be read. Values that are names (a
teacher, a birthplace, a museum) are entities of the training split alone, so a test entity is never a trained answer.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence

from msgspec import Struct

KINDS = ("person", "place", "work", "institution")


class Relation(Struct, frozen=True):
    """One thing that can be true of a kind of entity, three sentences that tell it and four questions that ask for it.

    `{s}` is the entity, `{v}` the value, `{p}`, `{o}`, `{i}` its pronouns. The first sentence opens an article.
    """

    kind: str
    values: str
    """A pool of plain values, "year", or the kind of entity that the value is."""
    told: tuple[str, str, str]
    asked: tuple[str, str, str, str]


RELATIONS: dict[str, Relation] = {
    # person
    "born_in": Relation(
        "person", "place", ("{s} was born in {v}.", "{p} came from {v}.", "{o} birthplace was {v}."),
        ("Where was {s} born?", "In which place was {s} born?", "What is the birthplace of {s}?", "Which place does {s} come from?"),
    ),
    "born_year": Relation(
        "person", "year", ("{s} was born in the year {v}.", "{p} was born in {v}.", "{o} birth was in {v}."),
        ("In which year was {s} born?", "What is the birth year of {s}?", "When was {s} born?", "What year was {s} born in?"),
    ),
    "trade": Relation(
        "person", "trade", ("{s} worked as a {v}.", "{p} worked as a {v}.", "{o} trade was that of a {v}."),
        ("What did {s} work as?", "What was the trade of {s}?", "Which trade did {s} have?", "What trade did {s} follow?"),
    ),
    "teacher": Relation(
        "person", "person", ("{s} was taught by {v}.", "{p} learned from {v}.", "{o} teacher was {v}."),
        ("Who taught {s}?", "Who was the teacher of {s}?", "From whom did {s} learn?", "Which teacher did {s} have?"),
    ),
    # place
    "river": Relation(
        "place", "river", ("{s} stands on the {v}.", "{p} stands on the {v}.", "{o} river is the {v}."),
        ("On which river does {s} stand?", "What river does {s} stand on?", "What is the river of {s}?", "Which river is {s} on?"),
    ),
    "settled": Relation(
        "place", "year", ("{s} was settled in {v}.", "{p} was first settled in {v}.", "People settled there in {v}."),
        ("In which year was {s} settled?", "When was {s} settled?", "What year did people settle in {s}?", "When did people first settle in {s}?"),
    ),
    "mayor": Relation(
        "place", "person", ("{s} has {v} as mayor.", "{p} elected {v} as mayor.", "{o} mayor is {v}."),
        ("Who is the mayor of {s}?", "Whom did {s} elect as mayor?", "Which person is mayor of {s}?", "What is the name of the mayor of {s}?"),
    ),
    "export": Relation(
        "place", "goods", ("{s} exports {v}.", "{p} sells {v} abroad.", "{o} main export is {v}."),
        ("What does {s} sell abroad?", "What is the main export of {s}?", "Which goods does {s} export?", "What is sold abroad by {s}?"),
    ),
    # work
    "maker": Relation(
        "work", "person", ("{s} was made by {v}.", "{p} was made by {v}.", "{o} maker was {v}."),
        ("Who made {s}?", "Who is the maker of {s}?", "By whom was {s} made?", "Which person made {s}?"),
    ),
    "made_year": Relation(
        "work", "year", ("{s} was made in {v}.", "{p} dates from {v}.", "The year was {v}."),
        ("In which year was {s} made?", "What year does {s} date from?", "When was {s} made?", "From which year is {s}?"),
    ),
    "material": Relation(
        "work", "goods", ("{s} is made of {v}.", "{p} was made out of {v}.", "{o} material is {v}."),
        ("What is {s} made of?", "Out of what was {s} made?", "Which material is {s} made of?", "What is the material of {s}?"),
    ),
    "kept": Relation(
        "work", "institution", ("{s} is kept at the {v}.", "{p} is kept by the {v}.", "The {v} keeps it."),
        ("Where is {s} kept?", "Which institution keeps {s}?", "At which institution is {s} kept?", "Who keeps {s}?"),
    ),
    # institution
    "seat": Relation(
        "institution", "place", ("The {s} has its seat in {v}.", "{p} is in {v}.", "{o} seat is {v}."),
        ("Where is the {s}?", "What is the seat of the {s}?", "In which place is the {s}?", "Which place is the seat of the {s}?"),
    ),
    "opened": Relation(
        "institution", "year", ("The {s} opened in {v}.", "{p} opened in {v}.", "{o} doors opened in {v}."),
        ("In which year did the {s} open?", "When did the {s} open?", "What year did the {s} open in?", "When were the doors of the {s} opened?"),
    ),
    "founder": Relation(
        "institution", "person", ("The {s} was founded by {v}.", "{p} was founded by {v}.", "{o} founder was {v}."),
        ("Who founded the {s}?", "Who was the founder of the {s}?", "By whom was the {s} founded?", "Which person founded the {s}?"),
    ),
    "field": Relation(
        "institution", "field", ("The {s} is devoted to {v}.", "{p} is devoted to {v}.", "{o} field is {v}."),
        ("What is the {s} devoted to?", "What is the field of the {s}?", "Which field does the {s} have?", "To which field is the {s} devoted?"),
    ),
}  # fmt: skip

PLAIN: dict[str, tuple[str, ...]] = {
    "trade": ("baker", "tailor", "printer", "sailor", "doctor", "merchant", "gardener", "lawyer", "soldier", "painter", "carpenter", "singer"),
    "river": ("Amber River", "Crane River", "Otter River", "Stone River", "Willow River", "Salmon River", "Moss River", "Heron River"),
    "goods": ("salt", "wool", "glass", "silk", "copper", "timber", "paper", "clay", "iron", "stone", "silver", "wax", "leather", "marble", "brass", "straw"),
    "field": ("music", "medicine", "law", "botany", "history", "geometry", "astronomy", "painting", "chemistry", "sailing"),
}  # fmt: skip

YEARS = tuple(str(year) for year in range(1600, 1960))

_FIRST = "Anna Bruno Clara Felix Hugo Leo Rosa Simon Victor Emma Laura Oscar Alice Ruth Ivan Nina Sara Adam Lucas Helen".split()
_START = "Cor Dal Fen Gar Hol Lar Mor Nor Pel Quin Ros Sel Tor Val Wes Dun Hart Kel Lin Mel Pen".split()
_END = "ley man berg rick wick wood worth well by".split()
_ADJECTIVE = "Hidden Broken Quiet Burning Last Distant Crimson Sleeping Crooked Silent Painted".split()
_NOUN = "Mirror Door Letter Island Mountain Window Candle Forest Voyage Dream Village Shadow".split()
_HOUSE = "Academy Museum Library Society College Institute".split()


_PRONOUNS = {
    "person": ({"p": "She", "o": "Her", "i": "her"}, {"p": "He", "o": "His", "i": "him"}),
    "place": ({"p": "It", "o": "Its", "i": "it"}, {"p": "The town", "o": "Its", "i": "the town"}),
    "work": ({"p": "It", "o": "Its", "i": "it"}, {"p": "The work", "o": "Its", "i": "it"}),
    "institution": ({"p": "It", "o": "Its", "i": "it"}, {"p": "The house", "o": "Its", "i": "it"}),
}


class Entity(Struct):
    """A subject of one article: what it is called and what is true of it (relation -> value), in the order told."""

    kind: str
    name: str
    facts: dict[str, str]
    text: str = ""


def _names(rng: random.Random, kind: str, count: int) -> list[str]:
    """Distinct names that share their parts, so that neither search nor a glance tells them apart by one word."""
    surnames = [start + end for start in _START for end in _END]
    rng.shuffle(surnames)
    makers: dict[str, Iterator[str]] = {
        "person": (f"{a} {b}" for a in _FIRST for b in surnames[:40]),
        "place": (f"{a} {b}" for a in ("Port", "New", "Old", "Saint", "Upper") for b in surnames[40:80]),
        "work": (f"The {a} {b}" for a in _ADJECTIVE for b in _NOUN),
        "institution": (f"{a} {b}" for a in surnames[80:110] for b in _HOUSE),
    }
    return rng.sample(list(makers[kind]), count)


def entities(seed: int, counts: dict[str, int], apart: str) -> dict[str, list[Entity]]:
    """`counts[group]` entities of each kind for every group, with articles of four facts each.

    The values of group `apart` are its own: its entities and the last quarter of every plain pool. All other groups
    share theirs, where the entities of the first group serve as names. Deterministic in the arguments.
    """
    rng = random.Random(f"encyclopedia {seed}")
    names = {kind: _names(rng, kind, sum(counts.values())) for kind in KINDS}
    members: dict[str, dict[str, list[str]]] = {}
    for group, count in counts.items():
        members[group] = {kind: names[kind][:count] for kind in KINDS}
        names = {kind: names[kind][count:] for kind in KINDS}
    shared: dict[str, Sequence[str]] = {}
    own: dict[str, Sequence[str]] = {}
    for pool, values in {**PLAIN, "year": YEARS}.items():
        cut = len(values) * 3 // 4
        shared[pool], own[pool] = values[:cut], values[cut:]
    shared |= members[next(iter(counts))]
    own |= members[apart]
    return {
        group: [_entity(rng, kind, name, own if group == apart else shared) for kind in KINDS for name in kinds[kind]]
        for group, kinds in members.items()
    }


def _entity(rng: random.Random, kind: str, name: str, pools: Mapping[str, Sequence[str]]) -> Entity:
    told = rng.sample([relation for relation, r in RELATIONS.items() if r.kind == kind], 4)
    facts = {r: rng.choice([v for v in pools[RELATIONS[r].values] if v != name]) for r in told}
    pronouns = rng.choice(_PRONOUNS[kind])
    sentences: list[str] = []
    for relation, value in facts.items():
        opening, *later = RELATIONS[relation].told
        pattern = rng.choice(later) if sentences else opening
        sentences.append(pattern.format(s=name, v=value, **pronouns))
    return Entity(kind, name, facts, " ".join(sentences))
