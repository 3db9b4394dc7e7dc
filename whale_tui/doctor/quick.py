"""The quick part, which every start of a run goes through: no model, no episode, well under a second."""

from __future__ import annotations

import shutil
from pathlib import Path

from whale_tui.config import ConfigError
from whale_tui.doctor import weights
from whale_tui.doctor.checkup import Checkup, Finding, fail, ok, told, warn
from whale_tui.domains import base
from whale_tui.harness import checks
from whale_tui.harness.worker import can_seal
from whale_tui.loop import alternation, retention
from whale_tui.records import content_hash

LARGE_RATES = {"adamw": 1e-4, "adafactor": 1e-3}
"""Learning rates that are too large for all weights of a model."""

MOST_HASHED = 20_000
"""Tasks that are compared here one by one; larger tables were compared by their own import, which says so."""


def data(checkup: Checkup) -> Finding:
    """The domain loads; what its import read, kept and dropped."""
    if checkup.known_domain is None:
        try:
            checkup.known_domain = load_domain(checkup)
        except base.DomainError as error:
            return told(error)
    report = getattr(checkup.domain, "report", None)
    return ok(f"the domain {checkup.domain.name} is loaded", report.lines() if report is not None else ())


def load_domain(checkup: Checkup) -> base.Domain:
    options = checkup.config.domain
    return base.load_from(checkup.resolved.folder, options.name, options.options)


def splits(checkup: Checkup) -> Finding:
    """Three splits with tasks in them that share nothing, and demonstrations that are none of these tasks."""
    tasks = checkup.tasks()
    sizes = ", ".join(f"D_{split} {len(of):,}" for split, of in tasks.items())
    for split, of in tasks.items():
        if not of:
            return fail(f"D_{split} has no tasks ({sizes})", "give it some, see docs/domains.md")
    report = getattr(checkup.domain, "report", None)
    overlaps = dict(report.overlaps) if report is not None else {}
    shown = {content_hash(d.task) for d in checkup.domain.brief.demonstrations}
    if report is None and sum(map(len, tasks.values())) > MOST_HASHED:
        return warn(f"{sizes}; too many to compare here, and the domain gives no import report")
    if report is None or shown:
        held = {split: {content_hash(task.public) for task in of} for split, of in tasks.items()}
        for split, hashes in held.items():
            if shown & hashes:
                return fail(
                    f"a demonstration of the brief is a task of D_{split}", "show tasks that belong to no split"
                )
        for one, other in (("test", "weight"), ("test", "harness"), ("harness", "weight")):
            if report is None and (both := held[one] & held[other]):  # type: ignore[index]
                overlaps[f"D_{one} and D_{other}"] = len(both)
    if not overlaps:
        return ok(f"{sizes}; they share no task")
    found = "; ".join(f"{n:,} tasks are in both {pair}" for pair, n in overlaps.items())
    allowed = checkup.config.domain.options.get("allow_overlap") or not any("test" in pair for pair in overlaps)
    return (warn if allowed else fail)(
        f"{sizes}; {found}", "take other files: a test on training tasks measures nothing"
    )


def lengths(checkup: Checkup) -> Finding:
    """Steps, iterations and the budget fit the tasks."""
    config, sizes = checkup.config, {split: len(of) for split, of in checkup.tasks().items()}
    try:
        per_epoch = config.steps_per_epoch(sizes["weight"])
        settings = config.settings(per_epoch)
        alternation.refuse_small_budget(config, settings, sizes)  # type: ignore[arg-type]
    except ConfigError as error:
        return told(error)
    step, one = alternation.step_cost(config), "1 step" if per_epoch == 1 else f"{per_epoch:,} steps"
    return ok(f"an epoch is {one} of {step:,} episodes; budget {settings.budget_episodes:,} episodes")


def harness(checkup: Checkup) -> Finding:
    """h0 keeps to the contract and holds no reference answer."""
    named = checkup.config.domain.harness
    try:
        source = (checkup.resolved.folder / named).read_text(encoding="utf-8") if named else checkup.domain.h0
    except (OSError, UnicodeDecodeError) as error:
        return fail(f"h0, {named}, can't be read: {error}", "set domain.harness to a harness file, or leave it out")
    answers = [answer for task in checkup.domain.tasks("harness") for answer in task.answers]
    checked = checks.check(source, answers=answers, given=str(checkup.domain.brief))
    where = named or f"harness.py of the domain {checkup.domain.name}"
    if not checked.ok:
        return fail(f"{where}: {checked.reason}", "mend the file; docs/domains.md has the contract of a harness")
    if checked.warnings:
        return warn(f"{where}: {checked.warnings[0]}", "a harness should hold no answer of a task")
    return ok("h0 passes the checks of a candidate")


async def ready(checkup: Checkup) -> Finding | None:
    """What the domain needs beside its data: a server, an index, a binary."""
    if not hasattr(checkup.domain, "preflight"):
        return None
    problems = await base.problems(checkup.domain)
    if not problems:
        return ok("the domain has what it needs")
    first, _, mend = problems[0].partition("; ")
    return fail(first, mend, problems[1:])


def learning_rate(checkup: Checkup) -> Finding | None:
    """All weights are not trained at an adapter's rate."""
    weight = checkup.config.weight
    if checkup.config.model.adapt != "full" or weight.learning_rate < LARGE_RATES[weight.optimizer]:
        return None
    return warn(
        f"weight.learning_rate = {weight.learning_rate:g} is an adapter's: too much for all weights",
        "set weight.learning_rate to 1e-5 or less (docs/training.md)",
    )


def seal(checkup: Checkup) -> Finding:
    """A worker locks itself in, tried for real."""
    sealed, why = can_seal()
    if sealed:
        return ok("harnesses run sealed: no files, no network, no processes")
    if checkup.config.rollout.allow_unsealed:
        return warn(f"{why}; rollout.allow_unsealed is set, so code from a model runs with your rights")
    text, _, mend = why.partition("; ")
    without = "or set rollout.allow_unsealed = true, and code from a model runs with your rights"
    return fail(text, f"{mend}; {without}" if mend else without)


def disk(checkup: Checkup) -> Finding:
    """Room for what the run will keep."""
    config = checkup.config
    free = shutil.disk_usage(_existing(checkup.place)).free
    trained = weights.trained_parameters(config)
    version = retention.version_bytes(config, trained, weights.served_bytes(config))
    phases = config.run.cycles or 20
    need = retention.forecast_bytes(*version, config.retention.keep_versions, phases, config.run.budget_episodes)
    what = "the run" if trained else "the run's episodes"  # the model isn't here, so a version's size isn't known
    text = f"up to {need / 1e9:.1f} GB for {what}, {free / 1e9:.1f} GB free at {_existing(checkup.place)}"
    if free < config.retention.min_free_gb * 1e9:
        return fail(
            f"{text}; the run pauses under {config.retention.min_free_gb:g} GB (retention.min_free_gb)", "free some"
        )
    if need > free - config.retention.min_free_gb * 1e9:
        return warn(text, "free some, or lower run.budget_episodes or retention.keep_versions")
    return ok(text)


def _existing(place: Path) -> Path:
    return next(folder for folder in (place, *place.resolve().parents) if folder.is_dir())
