"""Checks in words, before a run and whenever something looks wrong: what is, and the mend.

A check is a small function of a Checkup that returns a Finding (checkup.py); its name is the finding's. QUICK and
`full` are the lists of them, in the order in which they are tried. A check that needs what an earlier one could not get
is "not tried". To add a check, write the function and put it into a list.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from whale_tui.config import Resolved
from whale_tui.doctor import quick, servers
from whale_tui.doctor.checkup import Check, Checkup, Finding, findings
from whale_tui.domains.base import Domain

QUICK: tuple[Check, ...] = (
    quick.data, quick.splits, quick.lengths, quick.learning_rate, quick.harness, quick.ready, quick.seal,
    quick.disk, servers.vllm,
)  # fmt: skip
"""What every start of a run goes through. Neither a model nor an episode."""


def full() -> tuple[Check, ...]:
    """Everything: the model, trials of verifier, tools and seal, and an episode from end to end."""
    from whale_tui.doctor import episode, forecast, model, trial

    return (
        *QUICK, trial.verifier, trial.tools, trial.escape, trial.proposer,
        model.model, model.memory, model.chat_template, servers.servers, episode.episode, forecast.length,
    )  # fmt: skip


class MayNotStart(Exception):
    """A quick check failed. The text names each failure and its mend."""


async def before_start(resolved: Resolved, domain: Domain, place: Path) -> Sequence[Finding]:
    """The quick checks for a run that is about to start. Raises MayNotStart."""
    found = [finding async for finding in findings(QUICK, Checkup(resolved, place, domain=domain))]
    failed = [f"{f.name}: {f.text}{f'; {f.mend}' if f.mend else ''}" for f in found if f.level == "fail"]
    if failed:
        raise MayNotStart("\n".join(failed))
    return found
