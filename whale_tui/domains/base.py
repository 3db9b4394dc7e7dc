"""The one interface of a domain, and how a domain is found."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from whale_tui.records import Brief, Episode, Split, Task, Verdict

Tool = Callable[..., Any]
"""A tool runs in the engine, on the host's side. It takes and returns JSON values; ValueError is the harness's to see
(its text is raised inside the harness as ToolError), any other exception makes the episode `invalid`."""


class Domain(Protocol):
    """Tasks by split, tools, a verifier, h0 and a brief for the proposer."""

    name: str
    h0: str
    brief: Brief
    edits: Any
    """Edit rules of the domain's own for the `rules` proposer (proposers/edits.py), or None."""

    def tasks(self, split: Split) -> Sequence[Task]:
        """The tasks of a split, in a fixed order, deduplicated."""
        ...

    def tools(self, task: Task) -> Mapping[str, Tool]:
        """Fresh tools for one episode; state of an environment lives in them."""
        ...

    def verify(self, task: Task, answer: str, episode: Episode) -> Verdict:
        """Judge the returned answer (and the environment's state). Raising makes the episode `invalid`."""
        ...


class DomainError(Exception):
    """The domain can't be loaded; the text names the file or key and the mend."""
