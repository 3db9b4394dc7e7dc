"""What only a trial shows: verdicts on known answers, tools that answer, ways out of the seal, a proposer at hand."""

from __future__ import annotations

import inspect
import json
import sys
from collections import Counter
from collections.abc import Mapping
from typing import Any

from whale_tui.config import ConfigError
from whale_tui.doctor.checkup import Checkup, Finding, fail, ok, told, warn
from whale_tui.domains.base import DomainError, Known, judge
from whale_tui.harness.contract import ToolError, use_tool
from whale_tui.harness.worker import SealedWorker, SealUnavailable
from whale_tui.records import Decision, Episode, Sampling, Task, ToolUse, Verdict

REFERENCES = ("answer", "answers", "golden_answers", "target", "solution", "reference")
"""Private fields that an answer is likely to stand in as it has to be given."""
WORDS = {"accept": "right answers", "reject": "wrong answers", "invalid": "answers that can't be judged"}


async def verifier(checkup: Checkup) -> Finding:
    """The domain's known answers get their verdicts; where it names none, references are right and nothing is wrong."""
    given = getattr(checkup.domain, "known_answers", None)
    try:
        known = [c if isinstance(c, Known) else Known(*c) for c in (given() if given else _derived(checkup))]
    except DomainError as error:
        return told(error)
    wrong: list[str] = []
    for case in known:
        try:
            verdict = await _judged(checkup, case)
        except Exception as error:
            verdict = Verdict("invalid", f"{type(error).__name__}: {error}")
        if verdict.decision != case.decision:
            said = f"{case.answer[:80]!r} should be {case.decision} and is {verdict.decision} ({verdict.reason})"
            wrong.append(f"{said}; task {short(case.task)}")
    counts = ", ".join(f"{n} {word}" for word, n in Counter(WORDS[case.decision] for case in known).items())
    if wrong:
        mend = "mend the verifier; or, if that is right, let the domain say so with known_answers() (docs/domains.md)"
        return fail(f"{len(wrong)} of {len(known)} known answers get another verdict: {wrong[0]}", mend, wrong[1:5])
    if not any(case.decision == "accept" for case in known):
        return warn(f"no right answer to try ({counts})", "let the domain give known_answers() (docs/domains.md)")
    return ok(f"verdicts as they should be on {counts}{'' if given else ', taken from the private fields'}")


async def _judged(checkup: Checkup, case: Known) -> Verdict:
    """The verdict on a known answer, after its tool uses, as on an episode in which it was sampled."""
    tools, done = checkup.domain.tools(case.task), []
    sampled = case.sampled or [f"{case.answer}\n<answer>{case.answer}</answer>\n\\boxed{{{case.answer}}}"]
    for name, args in case.uses:
        result = await _use(tools, name, args)
        done.append(ToolUse(name, repr(args), str(result), 0.0, len(sampled)))
    episode = _blank(case.task, case.answer, done)
    said = judge(checkup.domain, case.task, case.answer, episode, sampled=sampled, tools=tools)
    return await said if inspect.isawaitable(said) else said


def _derived(checkup: Checkup) -> list[tuple[Task, str, Decision]]:
    cases: list[tuple[Task, str, Decision]] = []
    for task in checkup.domain.tasks("weight")[:6]:
        value = next((task.private[name] for name in REFERENCES if name in task.private), None)
        first = value[0] if isinstance(value, list) and value else value
        if isinstance(first, str | int | float) and not isinstance(first, bool):
            cases.append((task, str(first), "accept"))
        cases.append((task, "", "reject"))
        cases.append((task, "qwxz this is no answer", "reject"))
    return cases


async def tools(checkup: Checkup) -> Finding | None:
    """Every tool that a demonstration uses answers the way it is shown; the others are named."""
    task = checkup.domain.tasks("weight")[0]
    try:
        given = checkup.domain.tools(task)
    except Exception as error:
        return fail(f"the tools of {short(task)} can't be made: {type(error).__name__}: {error}", "mend the domain")
    if not given:
        return None
    untold = [name for name in given if name not in checkup.domain.brief.tools]
    shown = {use["name"]: use for d in checkup.domain.brief.demonstrations for use in d.tools}
    answered = []
    for name in given:
        if name in shown:
            try:
                result = await _use(given, name, shown[name]["args"])
                json.dumps(result)
            except ToolError as refusal:
                answered.append(f"{name} (refused: {refusal})")
            except Exception as error:
                return fail(f"the tool {name} fails: {type(error).__name__}: {error}", "mend it, or what it needs")
            else:
                answered.append(name)
    untried = [name for name in given if name not in shown]
    text = f"{', '.join(answered)} answer" if answered else "none tried"
    if untried:
        text += f"; no demonstration uses {', '.join(untried)}"
    if untold:
        return warn(text, f"say in the brief what {', '.join(untold)} does")
    return ok(text)


async def _use(given: Mapping[str, Any], name: str, args: Any) -> Any:
    keywords, places = (args, []) if isinstance(args, dict) else ({}, list(args))
    try:
        result = use_tool(given, name, places, keywords)
        return await result if inspect.isawaitable(result) else result
    except ValueError as refusal:
        raise ToolError(str(refusal)) from refusal


WAYS = {
    "read a file": "os.open('/etc/passwd', os.O_RDONLY)",
    "write a file": "os.open('/tmp/whale-tui-escaped', os.O_WRONLY | os.O_CREAT)",
    "list a folder": "os.listdir('/')",
    "open a socket": "socket.socket()",
    "start a process": "os.fork()",
    "run a program": "os.execv('/bin/true', ['true'])",
    "signal the engine": "os.kill(os.getppid(), 0)",
}
ATTACK = """
import os, socket
WAYS = {ways}

def run(task, model, tools):
    out = []
    for name, way in WAYS.items():
        try:
            eval(way)
            out.append(name)
        except OSError:
            pass
    return ", ".join(out)
"""
"""Given what no harness has: the system's own modules, imported before the seal."""


async def escape(checkup: Checkup) -> Finding:
    """Code behind the seal that has the system's modules in hand still gets nothing from the system."""

    async def nothing(*_: Any) -> Any:
        raise ToolError("there is nothing here")

    try:
        worker = await SealedWorker.start(ATTACK.format(ways=WAYS), modules=("os", "socket"), path=sys.path)
    except SealUnavailable as missing:
        return (warn if checkup.config.rollout.allow_unsealed else fail)(f"not tried, there is no seal: {missing}")
    try:
        end = await worker.run_episode({}, nothing, nothing)
    finally:
        await worker.close()
    if end.kind != "answer":
        return fail(f"the worker did not survive the attempt: {end.kind} {end.detail}", "report it with your kernel")
    if end.answer:
        return fail(f"code behind the seal could {end.answer}", "do not run models' code here; report it")
    return ok(f"{len(WAYS)} ways out tried behind the seal, none open")


async def proposer(checkup: Checkup) -> Finding:
    """Who writes candidates can be reached: a proposer may have `preflight() -> list[str]`, as a domain may."""
    from whale_tui.service.engine import _proposer

    try:
        built = _proposer(checkup.config, checkup.domain)
    except ConfigError as error:
        return told(error)
    ready = []
    for member in getattr(built, "members", [built]):
        preflight = getattr(member, "preflight", None)
        said = preflight() if preflight is not None else []
        problems = await said if inspect.isawaitable(said) else said
        if problems:
            first, _, mend = problems[0].partition("; ")
            return fail(f"{member.name}: {first}", mend, problems[1:])
        ready.append("a person" if member is None else member.name)
    return ok(f"candidates are written by {', '.join(ready)}")


def short(task: Task) -> str:
    """The public fields in one short line."""
    return repr(json.dumps(task.public, ensure_ascii=False, default=str)[:160])


def _blank(task: Task, answer: str, uses: list[ToolUse]) -> Episode:
    """The record of an episode that never was."""
    return Episode(
        id="known", cycle=0, phase=None, step=0, iteration=0, purpose="smoke", task=task.key, task_hash=task.hash,
        sample=0, policy="", policy_hash="", harness="", harness_hash="", tokenizer_hash="", sampling=Sampling(),
        calls=[], tools=uses, answer=answer, verdict="reject", reason="", truncated=False, reward=None, seconds=0.0,
    )  # fmt: skip
