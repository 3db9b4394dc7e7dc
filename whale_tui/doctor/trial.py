"""What only a trial shows: verdicts on known answers, tools that answer, ways out of the seal, a whole episode."""

from __future__ import annotations

import inspect
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from whale_tui.config import ConfigError
from whale_tui.doctor.checkup import Checkup, Finding, Timed, fail, ok, told, warn
from whale_tui.domains.base import DomainError
from whale_tui.harness.checks import source_hash
from whale_tui.harness.contract import ToolError, use_tool
from whale_tui.harness.worker import SealedWorker, SealUnavailable
from whale_tui.loop.rollouts import Job, Rollouts, Subject, Where
from whale_tui.policy.chat import ChatTokenizer
from whale_tui.policy.client import TransformersEngine
from whale_tui.policy.protocol import PolicyFailure
from whale_tui.records import Decision, Episode, Sampling, Task

REFERENCES = ("answer", "answers", "golden_answers", "target", "solution", "reference")
"""Private fields that an answer is likely to stand in as it has to be given."""
TIMED = 8
"""Episodes that the speed of sampling is measured with."""
QUOTED = 1_200
"""Characters of a prompt or reply that are shown."""


async def verifier(checkup: Checkup) -> Finding:
    """The domain's known answers get their verdicts; where it names none, references are right and nothing is wrong."""
    domain = checkup.domain
    known = getattr(domain, "known_answers", None)
    try:
        cases: list[tuple[Task, str, Decision]] = list(known() if known is not None else _derived(checkup))
    except DomainError as error:
        return told(error)
    wrong: list[str] = []
    for task, answer, expected in cases:
        try:
            said = domain.verify(task, answer, _blank(task, answer))
            verdict = await said if inspect.isawaitable(said) else said
            got, reason = verdict.decision, verdict.reason
        except Exception as error:
            got, reason = "invalid", f"{type(error).__name__}: {error}"
        if got != expected:
            wrong.append(f"{answer[:80]!r} should be {expected} and is {got} ({reason}); task {_short(task)}")
    counts = ", ".join(f"{n} {word}" for word, n in _count(cases).items())
    if wrong:
        mend = "mend the verifier; or, if that is right, let the domain say so with known_answers() (docs/domains.md)"
        return fail(f"{len(wrong)} of {len(cases)} known answers get another verdict: {wrong[0]}", mend, wrong[1:5])
    if not any(expected == "accept" for _, _, expected in cases):
        return warn(f"no right answer to try ({counts})", "let the domain give known_answers() (docs/domains.md)")
    whose = "" if known is not None else ", taken from the private fields"
    return ok(f"verdicts as they should be on {counts}{whose}")


def _derived(checkup: Checkup) -> list[tuple[Task, str, Decision]]:
    cases: list[tuple[Task, str, Decision]] = []
    for task in checkup.domain.tasks("weight")[:8]:
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
        return fail(f"the tools of {_short(task)} can't be made: {type(error).__name__}: {error}", "mend the domain")
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


async def episode(checkup: Checkup) -> Finding:
    """One episode from end to end with h0, shown; then a few together, to time them."""
    config, tasks, chat = checkup.config, checkup.domain.tasks("weight"), checkup.chat
    named = config.domain.harness
    source = (checkup.resolved.folder / named).read_text(encoding="utf-8") if named else checkup.domain.h0
    subject = Subject("h0000", source_hash(source), source)
    with tempfile.TemporaryDirectory(prefix="whale-tui-doctor-") as scratch:
        policy = TransformersEngine(
            checkup.model, device=config.model.device, max_rows=config.rollout.max_rows, seed=config.run.seed,
            lora_rank=config.model.lora_rank, lora_alpha=config.model.lora_alpha,
            log_path=Path(scratch) / "worker.log",
        )  # fmt: skip
        try:
            info = await policy.start()
            where = Where(0, "weight", 0, 0, "smoke", "theta-0000", info.base_hash, config.run.seed)
            rollouts = Rollouts(policy, chat, checkup.domain, config.rollout, config.sampling())
            first = (await rollouts.run([Job(tasks[0], subject, 0)], where))[0]
            some = [Job(tasks[n % len(tasks)], subject, n) for n in range(min(TIMED, config.rollout.concurrency))]
            start = time.perf_counter()
            timed = await rollouts.run(some, where)
            checkup.timed = Timed(len(timed), time.perf_counter() - start, sum(e.output_tokens for e in timed))
        except PolicyFailure as failure:
            return fail(f"the policy failed: {failure.detail}", "see the checks of the model above")
        finally:
            await policy.close()
    shown = list(_told(first, tasks[0], chat))
    text = f"{len(first.calls)} calls, {first.output_tokens} tokens, verdict {first.verdict}: {first.reason[:300]}"
    invalid = [e for e in [first, *timed] if e.verdict == "invalid"]
    if invalid:
        return fail(f"{len(invalid)} of {1 + len(timed)} episodes are invalid: {invalid[0].reason}", "mend that", shown)
    if first.reason.startswith("error:"):
        return fail(f"h0 fails: {first.reason.splitlines()[-1]}", "mend the harness", shown)
    if all(e.truncated for e in [first, *timed]):
        return warn(f"{text}; every one was cut at a length limit", "raise rollout.max_tokens, or let h0 stop", shown)
    return ok(text, shown)


def _told(episode: Episode, task: Task, chat: ChatTokenizer) -> Iterator[str]:
    """An episode as lines: what the policy read and said, what the tools answered, and the verdict."""
    yield f"task    {_short(task)}"
    for number, call in enumerate(episode.calls):
        yield f"prompt  {_quoted(''.join(chat.decode_each(call.prompt_ids)))}"
        yield f"sampled {_quoted(''.join(chat.decode_each(call.output_ids)))}"
        for use in episode.tools:
            if use.after_call == number + 1:
                yield f"tool    {use.name}({use.args[:200]}) -> {_quoted(use.result, 300)}"
    yield f"answer  {_quoted(episode.answer, 300)}"
    yield f"verdict {episode.verdict}: {episode.reason[:300]}"


def _quoted(text: str, most: int = QUOTED) -> str:
    cut = len(text) - most
    return repr(text if cut <= 0 else f"{text[: most // 2]} ... {cut:,} characters ... {text[-most // 2 :]}")


def _short(task: Task) -> str:
    return repr(json.dumps(task.public, ensure_ascii=False, default=str)[:160])


def _count(cases: Sequence[tuple[Task, str, Decision]]) -> dict[str, int]:
    words = {"accept": "right", "reject": "wrong", "invalid": "that can't be judged"}
    return Counter(words[expected] + " answers" for _, _, expected in cases)


def _blank(task: Task, answer: str) -> Episode:
    """An episode in which nothing was sampled: a verifier that reads more than the answer needs known_answers()."""
    return Episode(
        id="known", cycle=0, phase=None, step=0, iteration=0, purpose="smoke", task=task.key, task_hash=task.hash,
        sample=0, policy="", policy_hash="", harness="", harness_hash="", tokenizer_hash="", sampling=Sampling(),
        calls=[], tools=[], answer=answer, verdict="reject", reason="", truncated=False, reward=None, seconds=0.0,
    )  # fmt: skip
