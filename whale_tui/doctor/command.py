"""`whale-tui doctor`: the findings as they come, a line each, and whether a run may start."""

from __future__ import annotations

import asyncio
import json as stdlib_json  # escapes what an output may not be able to show
import sys
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import Parameter

from whale_tui import config, rundir
from whale_tui.doctor import QUICK, full
from whale_tui.doctor.checkup import Checkup, Finding, findings, told
from whale_tui.domains import base
from whale_tui.service import launch


def doctor(
    target: Path,
    *,
    quick: bool = False,
    fetch: bool = False,
    set: Annotated[list[str] | None, Parameter(name="--set", negative="")] = None,
    json: bool = False,
) -> int:
    """Check whether a run may start: TARGET is a config file, a folder that `init` wrote, or a run.

    Each check is one line, `ok`, `warn` or `fail`, with the mend below it. Ends with 0 where a run may start, else 1.
    quick: only what every run checks by itself when it starts; no model, no episode. fetch: download a model that isn't
    here. set: change a config value, as for run. json: one object with all findings.
    """
    return asyncio.run(_visit(target, set or [], quick=quick, fetch=fetch, json=json))


async def _visit(target: Path, overrides: list[str], *, quick: bool, fetch: bool, json: bool) -> int:
    found: list[Finding] = []

    def say(finding: Finding) -> None:
        found.append(finding)
        if not json:
            print("\n".join(lines(finding)), flush=True)

    checkup = None
    try:
        file = launch.config_file(target)
        resolved = config.load(file, overrides)
        launch.make_paths_absolute(resolved)
    except config.ConfigError as error:
        say(msgspec.structs.replace(told(error), name="config"))
    else:
        changed = sum(origin != "default" for origin in resolved.origins.values())
        say(
            Finding(
                "config", "ok", f"{file} is valid: {changed} keys set, {len(resolved.origins) - changed} by default"
            )
        )
        checkup = Checkup(resolved, rundir.runs_folder() / resolved.config.run.name, fetch=fetch)
        try:
            async for finding in findings(QUICK if quick else full(), checkup):
                say(finding)
        finally:
            if checkup.known_domain is not None:
                await base.close(checkup.known_domain)
    failed = [finding.name for finding in found if finding.level == "fail"]
    if json:
        print(stdlib_json.dumps({"may_start": not failed, "findings": msgspec.to_builtins(found)}))
    elif failed:
        print(f"\na run may not start: mend {', '.join(failed)}")
    else:
        warned = sum(finding.level == "warn" for finding in found)
        print(f"\na run may start{f', with {warned} warnings' if warned else ''}: whale-tui run {target}")
    return 1 if failed else 0


def lines(finding: Finding) -> list[str]:
    """A finding as printed: level, name and text in one line, then the mend and what there is to read."""
    out = [f"{finding.level:<4}  {finding.name:<13} {finding.text}"]
    if finding.mend and finding.level != "ok":
        out.append(f"      mend:         {finding.mend}")
    return [_printable(line) for line in (*out, *(f"        {line}" for line in finding.shown))]


def _printable(text: str) -> str:
    """One line that moves no cursor, in what the output can show."""
    encoding = sys.stdout.encoding or "ascii"
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return shown.encode(encoding, "backslashreplace").decode(encoding)
