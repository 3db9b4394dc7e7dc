"""One episode from end to end, as a run would sample it, and how fast a few together are."""

from __future__ import annotations

import time
from collections.abc import Iterator

from whale_tui.doctor.checkup import Checkup, Finding, Timed, fail, ok, warn
from whale_tui.doctor.servers import started
from whale_tui.doctor.trial import short
from whale_tui.harness.checks import source_hash
from whale_tui.loop.rollouts import Job, Rollouts, Subject, Where
from whale_tui.policy.chat import ChatTokenizer
from whale_tui.policy.protocol import PolicyFailure
from whale_tui.records import Episode, Task

TIMED = 8
"""Episodes that the speed of sampling is measured with."""
QUOTED = 1_200
"""Characters of a prompt or reply that are shown."""


async def episode(checkup: Checkup) -> Finding:
    """One episode from end to end with h0, shown; then a few together, to time them."""
    config, tasks, chat = checkup.config, checkup.domain.tasks("weight"), checkup.chat
    named = config.domain.harness
    source = (checkup.resolved.folder / named).read_text(encoding="utf-8") if named else checkup.domain.h0
    subject = Subject("h0000", source_hash(source), source)
    try:
        policy = await started(checkup)
        where = Where(0, "weight", 0, 0, "smoke", "theta-0000", policy.info.base_hash, config.run.seed)
        rollouts = Rollouts(policy, chat, checkup.domain, config.rollout, config.sampling())
        first = (await rollouts.run([Job(tasks[0], subject, 0)], where))[0]
        some = [Job(tasks[n % len(tasks)], subject, n) for n in range(min(TIMED, config.rollout.concurrency))]
        start = time.perf_counter()
        timed = await rollouts.run(some, where)
        checkup.timed = Timed(len(timed), time.perf_counter() - start, sum(e.output_tokens for e in timed))
    except PolicyFailure as failure:
        return fail(f"the policy failed: {failure.detail}", "see the checks of the model above")
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
    yield f"task    {short(task)}"
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
