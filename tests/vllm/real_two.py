"""Two real servers behind the router, both on this CPU: `make test-vllm`. Each takes some 2 GB beside the trainer's."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.letters import domain as letters
from tests.vllm.real_server import ASKED, Real, children, started, until
from whale_tui.config import Rollout
from whale_tui.loop.rollouts import Job, Rollouts, Subject, Where
from whale_tui.policy.vllm.status import read_metrics
from whale_tui.records import Sampling

pytestmark = pytest.mark.asyncio(loop_scope="module")

WORDY = """
def run(task, model, tools):
    return model.chat([{"role": "user", "content": task["ask"] + ", in a long sentence."}], max_tokens=48).text
"""
"""A harness whose calls last long enough for a server to die under them."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def two(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Real]:
    async with started(tmp_path_factory.mktemp("two"), devices=["", ""]) as real:
        yield real


async def sampled(real: Real) -> list[float]:
    """Tokens that each server has sampled so far, as it counts them itself."""
    return [read_metrics(await server.http.metrics())["tokens"] for server in real.servers()]


async def test_a_version_is_proved_on_both_and_calls_are_spread(two: Real) -> None:
    await two.base()
    made = await two.learn(ASKED[0], "Zebras.")
    assert abs(made.probe_rollout - made.probe_trainer) < 0.002
    for server in two.servers():
        assert (server.state, server.version) == ("serving", made.version) and abs(server.apart) < 0.002
        (loaded,) = [model for model in await server.http.models() if model.get("parent")]
        assert loaded["root"] == made.path
    assert two.servers()[0].http.url != two.servers()[1].http.url
    before = await sampled(two)
    calls = [two.engine.submit(two.call(ASKED[0], order=(n, 0), max_tokens=4)) for n in range(6)]
    answers = [two.tokenizer.decode(one.output_ids) for one in await asyncio.gather(*calls)]
    assert all(answer.startswith("Zebras") for answer in answers), answers
    assert all(now > was for was, now in zip(before, await sampled(two), strict=True)), "a server got no call"


async def test_one_killed_in_mid_run_costs_its_episodes_and_no_other(two: Real) -> None:
    made = await two.learn(ASKED[1], "Forty-two owls.")
    two.warnings.clear()
    domain = letters.build(letters.NoOptions())
    options = Rollout(max_context=1024, episode_seconds=600.0)
    rollouts = Rollouts(two.engine, two.tokenizer, domain, options, Sampling(temperature=1.0, top_k=20))
    subject = Subject("h0000", "hash", WORDY)
    where = Where(1, "weight", 1, 0, "train", made.version, made.hash, 0)
    jobs = [Job(task, subject, 0) for task in domain.tasks("harness")]
    running = asyncio.ensure_future(rollouts.run(jobs, where))
    first, second = two.servers()
    await until(lambda: first.in_flight and second.in_flight, 60)
    before = await sampled(two)
    await asyncio.sleep(1.0)
    held = first.in_flight
    assert held and not running.done()
    for pid in children(first.managed.process.pid):
        os.kill(pid, signal.SIGKILL)
    episodes = await running
    lost = [episode for episode in episodes if episode.verdict == "invalid"]
    assert len(lost) == held, [(episode.verdict, episode.reason) for episode in episodes]
    assert all("policy call lost" in episode.reason and episode.reward is None for episode in lost)
    assert all(len(episode.calls) == 1 and episode.verdict != "invalid" for episode in episodes if episode not in lost)
    assert len(episodes) == len(jobs) > held, "what the other server had, it finished"
    assert first.state == "down" and second.state == "serving"
    during = await two.engine.submit(two.call(ASKED[1], max_tokens=4))
    assert two.tokenizer.decode(during.output_ids).startswith("Forty"), "the other one goes on meanwhile"
    assert read_metrics(await second.http.metrics())["tokens"] > before[1]
    await until(lambda: first.state == "serving", 240)
    assert first.version == made.version and first.restarts == 1 and second.restarts == 0
    assert any(f"is back, and has proved {made.version}" in text for text in two.warnings), two.warnings
    again: Any = await first.http.sample(first.model, "after", two.call(ASKED[1], max_tokens=4))
    assert two.tokenizer.decode(again.output_ids).startswith("Forty"), "and serves it"
