"""The one interface of a proposer."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from msgspec import Struct, field

from whale_tui.records import Archived, Brief, Proposal


class Spending(Struct):
    """What a proposer's session has spent so far. `prompt_tokens` counts cached ones too."""

    prompt_tokens: int = 0
    output_tokens: int = 0
    dollars: float = 0.0

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens


class Allowance(Struct, frozen=True):
    """The most that one session may spend: the session's own caps, or what the run's caps leave, if that is less."""

    tokens: float = math.inf
    dollars: float = math.inf

    def passed(self, usage: Spending) -> str:
        """The cap that was reached, in words; empty while none is."""
        if usage.dollars >= self.dollars:
            return f"${usage.dollars:.2f} of ${self.dollars:.2f} spent"
        if usage.tokens >= self.tokens:
            return f"{usage.tokens:,} of {self.tokens:,.0f} tokens spent"
        return ""


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
    answers: Mapping[str, Sequence[str]] = {}
    """Task key -> reference answers. Empty unless the config shows them (proposer.show_answers)."""
    folder: Path | None = None
    """Where a session keeps its transcript and its scratch folder; not made yet. None: it keeps nothing."""
    allowance: Allowance = Allowance()
    usage: Spending = field(default_factory=Spending)
    """The proposer adds what it spends as it spends it, so that a failed or cancelled session is counted too."""
    report: Callable[[str], None] = lambda _: None
    """Say on screen, in one plain line, what the session does now."""


class ProposerFailure(Exception):
    """A session that came to nothing: never an iteration used up. What it spent stands in the request's `usage`.

    `transient`: trying again may help (the network, a rate limit, a stream that went silent); it is done with backoff.
    """

    def __init__(self, reason: str, *, transient: bool = True) -> None:
        super().__init__(reason)
        self.transient = transient


class Proposer(Protocol):
    name: str

    async def propose(self, request: Request) -> Sequence[Proposal]:
        """At most `request.candidates` proposals, none already in the archive. Fewer, or none, where ideas end.

        Raises ProposerFailure. Cancelling ends the session, whatever runs in it.
        """
        ...
