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
        "person", "trade", ("{s} worked as a {v}.", "{p} was a {v} by trade.", "{o} trade was that of a {v}."),
        ("What did {s} work as?", "What was the trade of {s}?", "What was the job of {s}?", "Which trade did {s} have?"),
    ),
    "teacher": Relation(
        "person", "person", ("{s} was taught by {v}.", "{p} learned from {v}.", "{o} teacher was {v}."),
        ("Who taught {s}?", "Who was the teacher of {s}?", "From whom did {s} learn?", "Which teacher did {s} have?"),
    ),
    "employer": Relation(
        "person", "institution", ("{s} was employed by the {v}.", "{p} had a post at the {v}.", "{o} employer was the {v}."),
        ("Who employed {s}?", "Where did {s} have a post?", "Which institution employed {s}?", "At which institution was {s} employed?"),
    ),
    "prize": Relation(
        "person", "prize", ("{s} won the {v}.", "{p} was given the {v}.", "The {v} went to {i}."),
        ("Which prize did {s} win?", "What did {s} win?", "Which award went to {s}?", "What prize was {s} given?"),
    ),
    # place
    "region": Relation(
        "place", "region", ("{s} lies in {v}.", "{p} belongs to {v}.", "{o} region is {v}."),
        ("In which region is {s}?", "Where does {s} lie?", "Which region does {s} belong to?", "What is the region of {s}?"),
    ),
    "river": Relation(
        "place", "river", ("{s} stands on the {v}.", "{p} was built on the {v}.", "The {v} flows through {i}."),
        ("On which river does {s} stand?", "Which river flows through {s}?", "What is the river of {s}?", "What river is {s} on?"),
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
    "landmark": Relation(
        "place", "landmark", ("{s} is known for its {v}.", "{p} has a famous {v}.", "Visitors come for the {v}."),
        ("What is {s} known for?", "What do visitors to {s} come for?", "Which landmark does {s} have?", "What is the landmark of {s}?"),
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
    "form": Relation(
        "work", "form", ("{s} is a {v}.", "{p} is a {v}.", "{o} form is that of a {v}."),
        ("What form does {s} have?", "What kind of work is {s}?", "What is {s}?", "Which form of work is {s}?"),
    ),
    "about": Relation(
        "work", "theme", ("{s} tells of a {v}.", "{p} deals with a {v}.", "{o} theme is a {v}."),
        ("What is {s} about?", "What is the theme of {s}?", "Which theme does {s} have?", "What does {s} tell of?"),
    ),
    "kept": Relation(
        "work", "institution", ("{s} is kept at the {v}.", "{p} is held by the {v}.", "The {v} holds it."),
        ("Where is {s} kept?", "Which institution holds {s}?", "What institution is {s} kept at?", "Who holds {s}?"),
    ),
    "shown": Relation(
        "work", "place", ("{s} was first shown in {v}.", "{p} was first shown in {v}.", "The people of {v} saw it first."),
        ("Where was {s} first shown?", "In which place was {s} first shown?", "Which place was the first to see {s}?", "What place saw {s} first?"),
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
    "emblem": Relation(
        "institution", "emblem", ("The {s} has a {v} as its emblem.", "{p} has a {v} as its emblem.", "{o} emblem is a {v}."),
        ("What is the emblem of the {s}?", "Which emblem does the {s} have?", "What does the {s} have as its emblem?", "What emblem stands for the {s}?"),
    ),
    "funds": Relation(
        "institution", "goods", ("The {s} lives on the trade in {v}.", "{p} lives on the trade in {v}.", "Trade in {v} pays for it."),
        ("What pays for the {s}?", "Which trade does the {s} live on?", "What does the {s} live on?", "The trade in what pays for the {s}?"),
    ),
}  # fmt: skip

PLAIN: dict[str, tuple[str, ...]] = {
    "trade": ("baker", "potter", "weaver", "tailor", "printer", "painter", "sailor", "miller", "surgeon", "carpenter", "mason", "singer"),
    "prize": ("Silver Pen", "Golden Oar", "Iron Crown", "Blue Lamp", "Red Star", "White Rose", "Green Cup", "Black Pearl"),
    "region": ("North Hollow", "South Hollow", "East March", "West March", "Upper Fells", "Lower Fells", "Grey Coast", "Long Shore"),
    "river": ("Amber River", "Crane River", "Otter River", "Stone River", "Willow River", "Salmon River", "Moss River", "Heron River"),
    "goods": ("salt", "wool", "honey", "glass", "silk", "copper", "timber", "paper", "pepper", "cheese", "leather", "marble"),
    "landmark": ("old lighthouse", "stone bridge", "clock tower", "town gate", "round market", "white castle", "rose garden", "deep harbor"),
    "form": ("novel", "poem", "opera", "statue", "painting", "ballad", "play", "tapestry", "mosaic", "symphony"),
    "theme": ("flood", "wedding", "shipwreck", "harvest", "duel", "long winter", "lost child", "great fire"),
    "field": ("music", "medicine", "law", "botany", "history", "geometry", "astronomy", "painting", "chemistry", "sailing"),
    "emblem": ("lion", "falcon", "tower", "ship", "wheel", "lantern", "horse", "key", "crown", "swan"),
}  # fmt: skip

YEARS = tuple(str(year) for year in range(1600, 1960))

_FIRST = "Anna Bruno Clara Dario Elsa Felix Greta Hugo Irma Jonas Karin Leo Marta Nils Olga Pavel Rosa Simon Tilda Victor".split()
_START = "Bel Cor Dal Fen Gar Hol Kes Lar Mor Nor Pel Quin Ros Sel Tor Val Wes Zan".split()
_END = "by den ford gate ham ley mark mere rick stad ton ville wick wood worth".split()
_ADJECTIVE = "Silver Broken Quiet Hidden Burning Last Distant Golden Sleeping Crooked Silent Painted".split()
_NOUN = "Bridge Mirror River Garden Door Letter Island Mountain Window Candle Forest Voyage".split()
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
        "person": (f"{a} {b}" for a in _FIRST for b in surnames[:30]),
        "place": (f"{a}{b}" for a in ("Port ", "New ", "Old ", "Saint ", "") for b in surnames[30:75]),
        "work": (f"The {a} {b}" for a in _ADJECTIVE for b in _NOUN),
        "institution": (f"{a} {b}" for a in surnames[75:105] for b in _HOUSE),
    }
    return rng.sample(list(makers[kind]), count)


def entities(seed: int, counts: dict[str, int], apart: str) -> dict[str, list[Entity]]:
    """`counts[group]` entities of each kind for every group, with articles of five facts each.

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
    told = rng.sample([relation for relation, r in RELATIONS.items() if r.kind == kind], 5)
    facts = {r: rng.choice([v for v in pools[RELATIONS[r].values] if v != name]) for r in told}
    pronouns = rng.choice(_PRONOUNS[kind])
    sentences = []
    for relation, value in facts.items():
        opening, *later = RELATIONS[relation].told
        pattern = rng.choice(later) if sentences else opening
        sentences.append(pattern.format(s=name, v=value, **pronouns))
    return Entity(kind, name, facts, " ".join(sentences))
