"""The one interface of a proposer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct

from whale_tui.records import Archived, Brief, Proposal


class Request(Struct):
    """Everything a proposer may know. `seed` fixes its choices; `fst` limits it to prompt text."""

    archive: Sequence[Archived]
    incumbent: str
    brief: Brief
    candidates: int
    iteration: int
    seed: int
    fst: bool
    notes: Sequence[str] = ()
    """Reasons of vetoes and failed checks that the next proposal should take up."""


class ProposerFailure(Exception):
    """A transient failure: retried with backoff, never an iteration used up."""


class Proposer(Protocol):
    name: str

    async def propose(self, request: Request) -> Sequence[Proposal]:
        """At most `request.candidates` proposals, none already in the archive. Fewer, or none, where ideas end."""
        ...
