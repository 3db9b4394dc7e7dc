"""The `rules` proposer: edits chosen by what the archive shows, and crossover. Offline, seeded, the same every time.

It reads how the episodes of a harness failed, which kinds of edit paid before, and what a person vetoed; it writes
nothing that the archive holds already, and no task or answer but the brief's demonstrations.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

from msgspec import Struct

from whale_tui.harness import fst
from whale_tui.harness.checks import source_hash
from whale_tui.proposers.base import Request
from whale_tui.proposers.edits import (
    KINDS,
    DomainRules,
    Edit,
    Kit,
    Source,
    cross,
    generic,
    kinds_between,
)  # fmt: skip
from whale_tui.records import Archived, ArchivedEpisode, Proposal, content_hash

Key = TypeVar("Key", bound=Hashable)

WEAK = 0.05
"""Under this mean single edits show nothing: several are made at once."""
TRIES = 80
"""Draws for one candidate before every small combination is gone through instead."""
COOLING = 12
"""Archived harnesses for which a vetoed kind of edit is left alone."""
FAILED = ("vetoed", "invalid", "crash", "timeout", "infra")
NAMED = {
    "format": ("format", "parser", "tags", "wording"),
    "examples": ("example", "few-shot", "demonstration"),
    "system": ("system",),
    "search": ("passage", "search_k", "top-k"),
    "query": ("query",),
    "length": ("stop", "length", "token"),
    "retry": ("retry", "retries", "again"),
    "vote": ("vote", "voting", "majority"),
}
"""Words by which a person's reason names a kind of edit."""


class Evidence(Struct, frozen=True):
    """Shares of a harness's episodes by how they ended, as far as an edit can mend it."""

    accepted: float = 0.0
    none: float = 0.0
    """Nothing was parsed."""
    truncated: float = 0.0
    refused: float = 0.0
    """A tool refused, or the harness's own code raised."""
    wrong: float = 0.0
    """An answer was parsed, and was not the one."""
    unshown: float = 0.0
    """1 where the harness shows no example, less where it shows a single one."""
    unused: frozenset[str] = frozenset()
    """Tools of the brief that the code never calls."""
    signs: dict[str, float] = {}
    """Shares of the domain's own signs."""


class Measured(Struct):
    """An archived harness that edits can start from."""

    archived: Archived
    source: Source
    evidence: Evidence

    @property
    def mean(self) -> float:
        return self.archived.mean if self.archived.mean is not None else self.evidence.accepted


class Rules:
    """Implements proposers.base.Proposer with edit rules: the generic ones, and `rules` of the domain."""

    name = "rules"

    def __init__(self, rules: DomainRules | None = None) -> None:
        self._rules = rules or DomainRules()

    async def propose(self, request: Request) -> Sequence[Proposal]:
        return await asyncio.to_thread(lambda: _Search(self._rules, request).proposals())


class _Search:
    """One request: the readable archive, what it taught, and the candidates so far."""

    def __init__(self, rules: DomainRules, request: Request) -> None:
        self.request = request
        self.kit = Kit(rules, request.brief)
        self.sources = {a.id: source for a in request.archive if (source := _read(a.source)) is not None}
        self.seen = {source_hash(source.text) for source in self.sources.values()}
        key = [request.seed, [(a.id, a.source, a.outcome, a.mean) for a in request.archive]]
        self.random = random.Random(content_hash(key))
        self.pays = _what_pays(request.archive, self.sources)
        self.barred = _barred(request, self.sources)
        self.base = next((a.source for a in request.archive if not a.parent), request.archive[0].source)
        self.edits = generic(self.kit)
        self.applicable: dict[str, dict[str, list[Edit]]] = {}
        self.used: list[str] = []

    def proposals(self) -> list[Proposal]:
        parents = self._parents()
        found: list[Proposal] = []
        for slot in range(self.request.candidates if parents else 0):
            proposal = self._draw(parents, slot) or self._first_of_all(parents)
            if proposal is None:
                break
            self.seen.add(source_hash(proposal.source))
            found.append(proposal)
        return found

    def _parents(self) -> list[Measured]:
        """What edits start from, best first: measured under the current policy, or the incumbent while nothing is."""
        measured = [
            a for a in self.request.archive
            if a.id in self.sources
            and (a.id == self.request.incumbent or (a.mean is not None and a.outcome not in FAILED))
        ]  # fmt: skip
        parents = [Measured(a, self.sources[a.id], _evidence(a, self.sources[a.id], self.kit)) for a in measured]
        return sorted(parents, key=lambda p: (-p.mean, p.archived.calls, p.archived.tokens, p.archived.id))

    def _draw(self, parents: Sequence[Measured], slot: int) -> Proposal | None:
        """A candidate drawn by the evidence; None when draws keep giving what is known, barred or forbidden."""
        for _ in range(TRIES):
            # The first candidate starts from the best harness; later ones now and then from the next best.
            chosen = 0 if slot == 0 else min(int(self.random.expovariate(1.5)), len(parents) - 1)
            parent = parents[chosen]
            if slot and len(parents) > 1 and parents[1].mean >= WEAK and self.random.random() < 0.25:
                proposal = self._crossed(parents)
            else:
                proposal = self._edited(parent, self._plan(parent))
            if proposal is not None:
                return proposal
        return None

    def _plan(self, parent: Measured) -> list[Edit]:
        """Edits of different kinds: two or three for a harness that gets nothing right, else mostly one."""
        size = self.random.choice((2, 3, 3)) if parent.mean < WEAK else self.random.choice((1, 1, 2))
        by_kind = dict(self._applicable(parent))
        plan: list[Edit] = []
        while by_kind and len(plan) < size:
            pull = {kind: self._pull(kind, edits, parent) for kind, edits in by_kind.items()}
            kind = self._choose(pull)
            weights = {n: self._weight(edit, parent) for n, edit in enumerate(by_kind[kind])}
            plan.append(by_kind.pop(kind)[self._choose(weights)])
        return sorted(plan, key=lambda edit: list(KINDS).index(edit.kind))

    def _applicable(self, parent: Measured) -> dict[str, list[Edit]]:
        """By kind, the edits that change this harness and that nobody vetoed lately."""
        if parent.archived.id not in self.applicable:
            by_kind: dict[str, list[Edit]] = {}
            for edit in self.edits:
                new = edit.change(parent.source, self.kit) if self._may(edit) else None
                if new is not None and not (self.request.fst and fst.violation(self.base, new.text)):
                    by_kind.setdefault(edit.kind, []).append(edit)
            self.applicable[parent.archived.id] = by_kind
        return self.applicable[parent.archived.id]

    def _pull(self, kind: str, edits: Sequence[Edit], parent: Measured) -> float:
        """How much a kind promises for this harness: what its best edit could cure, times what the archive has seen."""
        base = max(edit.weight * (0.2 + 4.0 * self._ill(edit, parent)) for edit in edits)
        if kind == "vote":  # a majority helps where single answers are often right, and not always
            base *= 0.1 if parent.mean < 0.2 else 2.0 * (1.0 - parent.mean)
        if kind == "retry":  # an error means little to a policy that has not seen how it is done
            base *= 0.2 if parent.evidence.unshown else 1.0
        return base * self.pays.get(kind, 1.0)

    def _weight(self, edit: Edit, parent: Measured) -> float:
        """An edit's share within its kind: less for what another candidate of this request has."""
        return (0.2 + self._ill(edit, parent)) * edit.weight * 0.3 ** self.used.count(edit.words)

    def _ill(self, edit: Edit, parent: Measured) -> float:
        """The share of episodes that an edit is meant to mend."""
        evidence = parent.evidence
        if edit.tool in evidence.unused:
            return 1.0
        if edit.cures == "none":
            return max(evidence.none, evidence.refused)
        if edit.cures == "cost":
            return evidence.accepted**2
        return evidence.signs.get(edit.cures, getattr(evidence, edit.cures, 0.0))

    def _choose(self, weights: Mapping[Key, float]) -> Key:
        return self.random.choices(list(weights), list(weights.values()))[0]

    def _may(self, edit: Edit) -> bool:
        return frozenset({edit.kind}) not in self.barred

    def _edited(self, parent: Measured, plan: Sequence[Edit]) -> Proposal | None:
        source: Source | None = parent.source
        for edit in plan:
            source = edit.change(source, self.kit) if source is not None else None
        if not plan or source is None or not self._allowed(parent.source, source):
            return None
        self.used += [edit.words for edit in plan]
        hypothesis = f"{_join([edit.words for edit in plan])}: {_why(plan, parent, self.kit)}"
        return Proposal(source.text, parent.archived.id, hypothesis[0].upper() + hypothesis[1:])

    def _crossed(self, parents: Sequence[Measured]) -> Proposal | None:
        """One kind of thing of another harness, put into the better one."""
        better, other = parents[0], self.random.choice([p for p in parents[1:4] if p.mean >= WEAK])
        kind = self.random.choice(list(KINDS))
        source = cross(self.kit, better.source, other.source, kind)
        if source is None or not self._allowed(better.source, source):
            return None
        a, b = better.archived, other.archived
        hypothesis = f"{a.id} with the {kind} of {b.id}: both accept some ({better.mean:.0%} and {other.mean:.0%})"
        return Proposal(source.text, a.id, hypothesis, [b.id])

    def _allowed(self, old: Source, new: Source) -> bool:
        if source_hash(new.text) in self.seen or kinds_between(old, new) in self.barred:
            return False
        return not self.request.fst or fst.violation(self.base, new.text) is None

    def _first_of_all(self, parents: Sequence[Measured]) -> Proposal | None:
        """The first new single edit, then the first new pair, going through all of them in order."""
        edits = [edit for edit in self.edits if self._may(edit)]
        for parent in parents:
            for edit in edits:
                if (proposal := self._edited(parent, [edit])) is not None:
                    return proposal
        for parent in parents:
            for n, first in enumerate(edits):
                for second in edits[n + 1 :]:
                    if first.kind != second.kind and (proposal := self._edited(parent, [first, second])) is not None:
                        return proposal
        return None


# --------------------------------------------------------------------------------------------- reading the archive


def _read(text: str) -> Source | None:
    try:
        source_hash(text)
        return Source(text)
    except (SyntaxError, ValueError):
        return None


def _evidence(archived: Archived, source: Source, kit: Kit) -> Evidence:
    """What the episodes that a proposer is shown say of a harness."""
    valid = [e for e in archived.episodes if e.verdict != "invalid"]
    constants = source.constants()
    examples = constants.get("EXAMPLES")
    unshown = {0: 1.0, 1: 0.4}.get(len(examples), 0.0) if isinstance(examples, list) else 0.0
    unused = frozenset(tool for tool in kit.brief.tools if f"tools.{tool}" not in archived.source)
    if not valid:
        return Evidence(none=1.0, wrong=1.0, unshown=unshown, unused=unused)

    def share(of: Sequence[ArchivedEpisode]) -> float:
        return len(of) / len(valid)

    rejected = [e for e in valid if e.verdict == "reject"]
    return Evidence(
        accepted=share([e for e in valid if e.verdict == "accept"]),
        none=share([e for e in rejected if not e.answer.strip()]),
        truncated=share([e for e in rejected if e.truncated]),
        refused=share([e for e in rejected if e.reason.startswith("error:") or _refused(e)]),
        wrong=share([e for e in rejected if e.answer.strip()]),
        unshown=unshown,
        unused=unused,
        signs={name: share([e for e in valid if sign.shows(e, constants)]) for name, sign in kit.rules.signs.items()},
    )


def _refused(episode: ArchivedEpisode) -> bool:
    return any(use.result.lower().startswith("toolerror") for use in episode.tools)


def _what_pays(archive: Sequence[Archived], sources: Mapping[str, Source]) -> dict[str, float]:
    """Per kind of edit a factor from 0.3 to 3: how children that changed it did against their parents, same policy."""
    by_id = {a.id: a for a in archive}
    gains: dict[str, list[float]] = {}
    for child in archive:
        parent = by_id.get(child.parent)
        if parent is None or child.id not in sources or parent.id not in sources:
            continue
        gain = _gain(parent, child)
        if gain is None:
            continue
        for kind in kinds_between(sources[parent.id], sources[child.id]):
            gains.setdefault(kind, []).append(gain)
    return {kind: math.exp(max(-1.2, min(1.1, 4.0 * sum(g) / len(g)))) for kind, g in gains.items()}


def _gain(parent: Archived, child: Archived) -> float | None:
    if child.outcome in ("invalid", "crash", "timeout"):
        return -0.25
    if child.outcome == "rejected":  # far enough behind the leader to be stopped early; it has no score
        return -0.1
    if parent.mean is not None and child.mean is not None:
        return child.mean - parent.mean
    return None


def _barred(request: Request, sources: Mapping[str, Source]) -> set[frozenset[str]]:
    """Kinds, or sets of kinds, that a person vetoed lately: those that the reason names, else the whole combination."""
    by_id = {a.id: a for a in request.archive}
    barred: set[frozenset[str]] = set()
    for vetoed in list(request.archive)[-COOLING:]:
        if vetoed.outcome != "vetoed" or vetoed.id not in sources or vetoed.parent not in sources:
            continue
        kinds = kinds_between(sources[vetoed.parent], sources[vetoed.id])
        named = _named(vetoed.reason) & kinds
        barred |= {frozenset({kind}) for kind in named} if named else {kinds}
    for note in request.notes:
        if note.split(" ", 1)[0] not in by_id:  # what the archive holds was read above, with its source
            barred |= {frozenset({kind}) for kind in _named(note)}
    return barred


def _named(reason: str) -> frozenset[str]:
    return frozenset(kind for kind, words in NAMED.items() if any(word in reason.lower() for word in words))


# ----------------------------------------------------------------------------------------------------------- in words


def _why(plan: Sequence[Edit], parent: Measured, kit: Kit) -> str:
    """What the edits are meant to mend, from the worst share of the parent's episodes."""
    name, evidence = parent.archived.id, parent.evidence
    shares = {
        "none": (evidence.none, f"{evidence.none:.0%} of {name}'s episodes came to no answer"),
        "truncated": (0.9 * evidence.truncated, f"{evidence.truncated:.0%} of {name}'s rejected episodes were cut off"),
        "wrong": (evidence.wrong, f"{evidence.wrong:.0%} of {name}'s episodes gave another answer"),
        "unshown": (0.5 * evidence.unshown, f"{name} shows {'no' if evidence.unshown == 1 else 'one'} example"),
        "cost": (0.3 * evidence.accepted, f"{name} accepts {evidence.accepted:.0%} and may do so with less"),
    }
    for sign, of in evidence.signs.items():
        shares[sign] = (0.9 * of, f"{of:.0%} of {name}'s episodes {kit.rules.signs[sign].words}")
    share, words = max(shares.get(edit.cures, (0.0, "")) for edit in plan)
    return words if share else f"{name} accepts {parent.mean:.0%} and this has not been tried on it"


def _join(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
