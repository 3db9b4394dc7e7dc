"""Several proposers that take turns, one an iteration. One that fails for good leaves its turn to the next."""

from __future__ import annotations

from collections.abc import Sequence

from whale_tui.proposers.base import Proposer, Request
from whale_tui.records import Proposal


class Turns:
    """A None stands for the person, whose turn the run itself waits for."""

    def __init__(self, members: Sequence[Proposer | None]) -> None:
        self.members = list(members)
        self.name = " and ".join(member.name if member else "person" for member in members)

    def order(self, turn: int) -> list[Proposer]:
        """Whose turn it is, then who steps in. No person is in it."""
        at = turn % len(self.members)
        return [member for member in self.members[at:] + self.members[:at] if member is not None]

    async def propose(self, request: Request) -> Sequence[Proposal]:
        """The first in order: for whoever takes turns as one proposer."""
        return await self.order(request.iteration)[0].propose(request)
