"""What checks share: the finding each returns, and what earlier ones found out."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Literal

from msgspec import Struct, field

from whale_tui.config import Config, Resolved
from whale_tui.domains.base import Domain
from whale_tui.policy.chat import ChatTokenizer
from whale_tui.policy.protocol import PolicyEngine, PolicyFailure
from whale_tui.records import Split, Task

Level = Literal["ok", "warn", "fail"]


class Finding(Struct):
    """What one check found. `fail` keeps a run from starting; `mend` says what to do, empty where all is well."""

    name: str
    level: Level
    text: str
    mend: str = ""
    shown: list[str] = field(default_factory=list)
    """More lines to read, e.g. an episode."""


class Timed(Struct):
    """Episodes sampled together, as far as the trial measured it."""

    episodes: int
    seconds: float
    tokens: int


class NotTried(Exception):
    """What a check needs is not there; an earlier check has said why. The text completes "not tried: ..."."""


class Checkup:
    """One visit: the config, and what the checks found out for those after them.

    `place` is where the run's directory is or will be. `fetch`: a model that isn't here may be downloaded.
    """

    def __init__(self, resolved: Resolved, place: Path, *, domain: Domain | None = None, fetch: bool = False) -> None:
        self.resolved, self.place, self.fetch = resolved, place, fetch
        self.known_domain = domain
        self.known_model: Path | None = None
        self.known_chat: ChatTokenizer | None = None
        self.timed: Timed | None = None
        self.policy: PolicyEngine | None = None
        self.broken: PolicyFailure | None = None
        self.closing = AsyncExitStack()
        """What is started for the visit, and ended with it."""

    @property
    def config(self) -> Config:
        return self.resolved.config

    @property
    def domain(self) -> Domain:
        if self.known_domain is None:
            raise NotTried("the domain could not be loaded")
        return self.known_domain

    @property
    def model(self) -> Path:
        if self.known_model is None:
            raise NotTried("the model is not here")
        return self.known_model

    @property
    def chat(self) -> ChatTokenizer:
        if self.known_chat is None:
            raise NotTried("the model's chat template could not be read")
        return self.known_chat

    def tasks(self) -> dict[Split, Sequence[Task]]:
        return {split: self.domain.tasks(split) for split in ("weight", "harness", "test")}


Check = Callable[[Checkup], Finding | Awaitable[Finding | None] | None]
"""None: there is nothing of this kind to check."""


def ok(text: str, shown: Sequence[str] = ()) -> Finding:
    return Finding("", "ok", text, shown=list(shown))


def warn(text: str, mend: str = "", shown: Sequence[str] = ()) -> Finding:
    return Finding("", "warn", text, mend, list(shown))


def fail(text: str, mend: str = "", shown: Sequence[str] = ()) -> Finding:
    return Finding("", "fail", text, mend, list(shown))


def told(error: Exception) -> Finding:
    """A failure from an error whose text ends with its mend after a semicolon, as this program writes them."""
    text, _, mend = str(error).partition("; ")
    return fail(text, mend)


async def findings(checks: Sequence[Check], checkup: Checkup) -> AsyncIterator[Finding]:
    """Try the checks in their order. A check that breaks is a failure with its name, and the others go on."""
    async with checkup.closing:
        for check in checks:
            try:
                found = check(checkup)
                finding = await found if inspect.isawaitable(found) else found
            except NotTried as reason:
                finding = warn(f"not tried: {reason}")
            except Exception as error:
                finding = fail(f"the check itself broke: {type(error).__name__}: {error}", "report it with this config")
            if finding is not None:
                finding.name = check.__name__.replace("_", " ")
                yield finding
