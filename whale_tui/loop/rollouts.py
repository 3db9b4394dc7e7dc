"""Rollouts: episodes of harnesses on tasks, run together, recorded call by call.

Episodes run at once, each in the sealed worker of its harness. The policy samples when every one of them waits for a
reply, so that what shares a batch never depends on timing, and a run with the same seed is the same run.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from whale_tui.config import Rollout
from whale_tui.domains.base import Domain, judge
from whale_tui.harness.contract import BudgetExceeded, Reply, ToolError, use_tool
from whale_tui.harness.wire import EpisodeEnd, Limits
from whale_tui.harness.worker import HarnessRunner
from whale_tui.policy.chat import ChatTokenizer
from whale_tui.policy.protocol import CallLost, PolicyEngine, PolicyFailure, SampleRequest
from whale_tui.records import Call, Episode, Phase, Purpose, Sampling, Task, ToolUse, Verdict

RESULT_CHARS = 4000
"""Characters of a tool's result that the record keeps."""
DOMAIN_SECONDS = 1800.0
"""Wall time that an `async` tool or verifier may take, queues included, before the episode is `invalid`. A backstop."""

DROP_SECONDS = 60.0
"""Wall time in which the policy gives up what is in flight; past it its worker is started anew."""


class Subject(Struct, frozen=True):
    """The harness under test."""

    id: str
    hash: str
    source: str


class Where(Struct, frozen=True):
    """Where in the run a batch of episodes belongs: part of every record's identity, and of its random stream."""

    cycle: int
    phase: Phase | None
    step: int
    iteration: int
    purpose: Purpose
    policy: str
    policy_hash: str
    seed: int

    def episode_id(self, harness: str, task: str, sample: int) -> str:
        round_ = f"s{self.step}" if self.phase == "weight" else f"i{self.iteration}"
        return f"{self.cycle}.{round_}.{self.purpose}.{self.policy}.{harness}.{task}.{sample}"

    def call_seed(self, task: str, sample: int, call: int) -> int:
        """The same for every harness, so that candidates meet the same chances; on D_test for every pair, so that any
        two of them do, whenever they were measured."""
        where = () if self.purpose == "test" else (self.cycle, self.phase, self.step)
        key = (self.seed, *where, self.purpose, task, sample, call)
        return int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:8]) >> 1


class Job(Struct):
    """One episode to run."""

    task: Task
    subject: Subject
    sample: int


class Progress(Struct):
    """Counts while a batch runs, for the screen."""

    done: int
    total: int
    accepted: int
    output_tokens: int


class Rollouts:
    """Runs batches of episodes. One batch at a time."""

    def __init__(
        self, policy: PolicyEngine, chat: ChatTokenizer, domain: Domain, options: Rollout, sampling: Sampling
    ) -> None:
        self.policy, self.chat, self.domain, self.options, self.sampling = policy, chat, domain, options, sampling
        self._computing = 0
        self._beat = 0.0

    async def run(
        self, jobs: Sequence[Job], where: Where, report: Callable[[Progress], None] = lambda _: None
    ) -> list[Episode]:
        """Episodes in the order of the jobs. Raises PolicyFailure when the policy's machinery fails: nothing counts."""
        limits = Limits(memory_mb=self.options.worker_memory_mb, episode_seconds=self.options.episode_seconds)
        subjects = {job.subject.id: job.subject for job in jobs}
        room = asyncio.Semaphore(self.options.concurrency)
        progress = Progress(done=0, total=len(jobs), accepted=0, output_tokens=0)
        runners = {
            s.id: HarnessRunner(s.source, limits, allow_unsealed=self.options.allow_unsealed) for s in subjects.values()
        }
        self._computing = 0

        async def one(number: int, job: Job) -> Episode:
            async with room:
                self._computing += 1
                episode = await _Run(self, job, where, number, runners[job.subject.id]).finish()
                progress.done += 1
                progress.accepted += episode.verdict == "accept"
                progress.output_tokens += episode.output_tokens
                report(progress)
                self._moved()
                self._leave()
                return episode

        tasks = [asyncio.ensure_future(one(n, job)) for n, job in enumerate(jobs)]
        everything = asyncio.gather(*tasks)
        watch = asyncio.ensure_future(self._watch(everything))
        try:
            return list(await everything)
        except asyncio.CancelledError:
            if watch.done() and not watch.cancelled():
                silent = f"no call sampled and no episode ended for {self.options.stall_seconds:g} s"
                raise PolicyFailure("stalled", f"{silent} (rollout.stall_seconds)") from None
            raise
        finally:
            watch.cancel()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            try:
                async with asyncio.timeout(DROP_SECONDS):
                    await self.policy.drop()
            except TimeoutError:
                raise PolicyFailure("stalled", f"the policy did not let go within {DROP_SECONDS:g} s") from None
            finally:
                await asyncio.gather(*(runner.close() for runner in runners.values()))

    async def _watch(self, everything: asyncio.Future[Any]) -> None:
        """Cancel a batch in which nothing happens. Harnesses, tools and verifiers have limits of their own, so that
        only the policy can be what hangs."""
        clock = asyncio.get_running_loop().time
        self._beat = clock()
        while True:
            left = self._beat + self.options.stall_seconds - clock()
            if left <= 0:
                break
            await asyncio.sleep(left)
        everything.cancel()

    def _moved(self) -> None:
        self._beat = asyncio.get_running_loop().time()

    def _leave(self) -> None:
        """One episode stops computing. When none is left, all wait for the policy."""
        self._computing -= 1
        if self._computing == 0:
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        if self._computing == 0:  # a waiting episode may have been let in since
            self.policy.flush()


class _Run:
    """One episode on its way to a record."""

    def __init__(self, rollouts: Rollouts, job: Job, where: Where, number: int, runner: HarnessRunner) -> None:
        self.rollouts, self.job, self.where, self.number, self.runner = rollouts, job, where, number, runner
        self.calls: list[Call] = []
        self.sampled: list[str] = []
        self.uses: list[ToolUse] = []
        self.cut = False
        self.broken: Exception | None = None
        self.failure: PolicyFailure | None = None
        self.tools = rollouts.domain.tools(job.task)

    async def finish(self) -> Episode:
        start, task = time.perf_counter(), self.job.task
        end = await self.runner.run_episode(
            task.public,
            self._chat,
            self._tool,
            tools=list(self.tools),
            remaining_calls=self.rollouts.options.max_calls,
            remaining_tokens=self.rollouts.options.max_episode_tokens,
            restarted=self._forget,
        )
        if self.failure is not None:
            raise self.failure
        where, subject, sampled = self.where, self.job.subject, self.rollouts
        episode = Episode(
            id=where.episode_id(subject.id, task.key, self.job.sample), cycle=where.cycle, phase=where.phase,
            step=where.step, iteration=where.iteration, purpose=where.purpose, task=task.key, task_hash=task.hash,
            sample=self.job.sample, policy=where.policy, policy_hash=where.policy_hash, harness=subject.id,
            harness_hash=subject.hash, tokenizer_hash=sampled.chat.hash, sampling=sampled.sampling, calls=self.calls,
            tools=self.uses, answer=end.answer, verdict="reject", reason="", truncated=self.cut, reward=None, seconds=0,
        )  # fmt: skip
        verdict = await self._judge(end, episode)
        episode.verdict, episode.reason, episode.reward = verdict.decision, verdict.reason, verdict.reward
        episode.judge = verdict.usage
        episode.seconds = time.perf_counter() - start
        return episode

    def _forget(self) -> None:
        """A sibling's fault ended the worker and this episode starts again: what it did does not count."""
        self.calls, self.sampled, self.uses, self.cut, self.broken = [], [], [], False, None
        self.tools = self.rollouts.domain.tools(self.job.task)

    async def _judge(self, end: EpisodeEnd, episode: Episode) -> Verdict:
        """The verdict, from the returned answer and the environment. Nothing a harness says of itself counts."""
        if isinstance(self.broken, CallLost):
            return Verdict("invalid", f"policy call lost: {self.broken.detail}")
        if self.broken is not None:
            return Verdict("invalid", f"tool failed: {type(self.broken).__name__}: {self.broken}")
        if end.kind == "died":
            return Verdict("invalid", f"sealed worker: {end.detail}")
        if end.kind != "answer":
            return Verdict("reject", f"{end.kind}: {end.detail}")
        try:
            domain, task = self.rollouts.domain, self.job.task
            return await _waited_for(judge(domain, task, end.answer, episode, sampled=self.sampled, tools=self.tools))
        except Exception as error:  # a verifier's bug is the machinery's, whatever it raises
            return Verdict("invalid", f"verifier failed: {type(error).__name__}: {error}")

    async def _chat(
        self, messages: list[dict[str, Any]], max_tokens: int | None, stop: list[str], thinking: bool | None
    ) -> Reply:
        options, chat = self.rollouts.options, self.rollouts.chat
        spent = sum(len(c.output_ids) for c in self.calls)
        if len(self.calls) >= options.max_calls:
            raise self._over(f"call {len(self.calls) + 1} of at most {options.max_calls} (rollout.max_calls)")
        if spent >= options.max_episode_tokens:
            raise self._over(f"{spent} sampled tokens of at most {options.max_episode_tokens}")
        try:
            prompt = chat.render(messages, thinking=thinking)
        except ValueError as refused:
            raise TypeError(f"model.chat: {refused}") from None
        room = min(options.max_tokens, options.max_episode_tokens - spent, max_tokens or options.max_tokens)
        if len(prompt) + room > options.max_context:
            raise self._over(f"a prompt of {len(prompt)} tokens (rollout.max_context = {options.max_context})")
        request = SampleRequest(
            order=(self.number, len(self.calls)),
            prompt_ids=prompt,
            max_tokens=max(1, room),
            seed=self.where.call_seed(self.job.task.key, self.job.sample, len(self.calls)),
            sampling=self.rollouts.sampling,
            stop_ids=chat.stop_ids,
            stop_strings=stop,
        )
        future = self.rollouts.policy.submit(request)
        self.rollouts._leave()
        try:
            sampled = await future
        except CallLost as lost:
            self.broken = lost
            raise self._over("the call was lost") from lost
        except PolicyFailure as failure:
            self.failure = failure
            raise self._over("the policy failed") from failure
        finally:
            self.rollouts._computing += 1
        self.rollouts._moved()
        self.calls.append(
            Call(
                prompt_ids=prompt, output_ids=sampled.output_ids, logprobs=sampled.logprobs,
                finish_reason=sampled.finish_reason, seed=request.seed, max_tokens=request.max_tokens,
            )
        )  # fmt: skip
        self.sampled.append(chat.decode(_without_stop(sampled.output_ids, chat.stop_ids)))
        self.cut = sampled.finish_reason == "length"
        return Reply(
            text=_until_stop(self.sampled[-1], stop),
            finish_reason=sampled.finish_reason,
            prompt_tokens=len(prompt),
            completion_tokens=len(sampled.output_ids),
            remaining_calls=options.max_calls - len(self.calls),
            remaining_tokens=options.max_episode_tokens - spent - len(sampled.output_ids),
        )

    def _over(self, reason: str) -> BudgetExceeded:
        self.cut = True
        return BudgetExceeded(reason)

    async def _tool(self, name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        start, shown = time.perf_counter(), ", ".join([*map(repr, args), *(f"{k}={v!r}" for k, v in kwargs.items())])
        text = ""
        try:
            try:
                result = await _waited_for(use_tool(self.tools, name, args, kwargs))
            except ValueError as refusal:  # of an async tool; use_tool sees to the others
                raise ToolError(str(refusal)) from refusal
            text = result if isinstance(result, str) else msgspec.json.encode(result).decode()
            return result
        except ToolError as error:
            text = f"ToolError: {error}"
            raise
        except Exception as error:  # a tool's bug is the machinery's, whatever it raises: the episode is invalid
            self.broken, text = error, f"failed: {error}"
            raise ToolError(f"{name} is not available") from error
        finally:
            self.rollouts._moved()
            self.uses.append(
                ToolUse(
                    name=name[:100], args=shown[:RESULT_CHARS], result=text[:RESULT_CHARS],
                    seconds=time.perf_counter() - start, after_call=len(self.calls),
                )
            )  # fmt: skip


async def _waited_for(result: Any) -> Any:
    """A result, once it is there. TimeoutError after DOMAIN_SECONDS."""
    if not inspect.isawaitable(result):
        return result
    limit = asyncio.timeout(DOMAIN_SECONDS)
    try:
        async with limit:
            return await result
    except TimeoutError as late:
        if limit.expired():
            raise TimeoutError(f"no answer within {DOMAIN_SECONDS:g} s") from late
        raise


def _without_stop(ids: list[int], stop_ids: Sequence[int]) -> list[int]:
    return ids[:-1] if ids and ids[-1] in stop_ids else ids


def _until_stop(text: str, stop: Sequence[str]) -> str:
    cuts = [at for at in (text.find(s) for s in stop if s) if at >= 0]
    return text[: min(cuts)] if cuts else text
