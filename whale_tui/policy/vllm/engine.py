"""The PolicyEngine over vLLM: the policy worker trains and writes versions, servers prove and sample them."""

from __future__ import annotations

import asyncio
import os
import resource
from collections.abc import Callable
from pathlib import Path

import msgspec

from whale_tui.config import Config
from whale_tui.policy.client import TransformersEngine
from whale_tui.policy.protocol import (
    CallLost,
    PolicyFailure,
    PolicyInfo,
    Publication,
    Sampled,
    SampleRequest,
    Trained,
    TrainRequest,
)
from whale_tui.policy.vllm import status
from whale_tui.policy.vllm.client import Client
from whale_tui.policy.vllm.managed import ManagedServer
from whale_tui.policy.vllm.servers import Servers, Version, log_path


class VllmEngine:
    """Calls go out as they are submitted; how many are sampled at once is the servers' business.

    trainer: the policy worker, with `sample=False`. model: folder of the base model. logs: folder for the servers'
    logs. on_note: progress in words. on_warning: what a person should find in the journal. on_status: servers or GPUs
    have news for the screen.
    """

    info: PolicyInfo

    def __init__(
        self,
        trainer: TransformersEngine,
        config: Config,
        model: str | Path,
        logs: Path,
        *,
        on_note: Callable[[str], None] = lambda text: None,
        on_warning: Callable[[str], None] = lambda text: None,
        on_status: Callable[[], None] = lambda: None,
    ) -> None:
        self.trainer, self.config, self.model, self.logs = trainer, config, str(model), logs
        self._note, self._warn, self._status = on_note, on_warning, on_status
        self.servers: Servers | None = None
        self._calls: dict[asyncio.Task[None], asyncio.Future[Sampled]] = {}

    # ------------------------------------------------------------------------------------------------------- lifetime

    async def start(self) -> PolicyInfo:
        """Servers and trainer, then the base model on each. Raises PolicyFailure where either can't start."""
        await self.close()
        options, config = self.config.vllm, self.config
        full = config.model.adapt == "full"
        managed = [
            ManagedServer(
                number, options, self.model, log_path(self.logs, number), rank=0 if full else config.model.lora_rank,
                context=config.rollout.max_context, devices=devices,
            )
            for number, devices in enumerate(options.devices or [""], 1)
            if options.mode == "managed"
        ]  # fmt: skip
        self.info = await self.trainer.start()
        self.servers = Servers(
            options, managed, context=config.rollout.max_context, connect=self._connect, say=self._note,
            warn=self._warn, changed=self._status, full=full,
        )  # fmt: skip
        _allow_files(2048 + len(self.servers.all) * (options.concurrency + 16))
        try:
            await self.servers.start(self.trainer.probe_ids, self.trainer.probe_base, self._dtype())
        except BaseException:
            await self.close()
            raise
        note = f"sampled by {len(self.servers.all)} vLLM servers"
        self.info = msgspec.structs.replace(self.info, note=note)
        return self.info

    async def close(self) -> None:
        await self._forget_calls()
        servers, self.servers = self.servers, None
        if servers is not None:
            await servers.close()
        await self.trainer.close()

    def _connect(self, url: str) -> Client:
        options = self.config.vllm
        key = os.environ.get(options.api_key_env, "") if options.api_key_env else ""
        return Client(url, seconds=options.request_seconds, key=key, connections=options.concurrency)

    def _dtype(self) -> str:
        """What the proof may expect: fp32 only where both sides compute in it."""
        both = (self.config.vllm.dtype, self.info.compute_dtype)
        return "float32" if both == ("float32", "float32") else "bfloat16"

    # ------------------------------------------------------------------------------------------------------- sampling

    def submit(self, request: SampleRequest) -> asyncio.Future[Sampled]:
        future: asyncio.Future[Sampled] = asyncio.get_running_loop().create_future()
        if self.servers is None:
            _fail(future, PolicyFailure("servers-lost", "the vLLM servers have not been started"))
        elif not request.prompt_ids or request.max_tokens < 1:
            future.set_exception(ValueError("a call needs a prompt and room for at least one token"))
        else:
            task = asyncio.ensure_future(self._sample(self.servers, request, future))
            self._calls[task] = future
            task.add_done_callback(lambda done: self._calls.pop(done, None))
        return future

    async def _sample(self, servers: Servers, request: SampleRequest, future: asyncio.Future[Sampled]) -> None:
        try:
            sampled = await servers.sample(request)
        except (PolicyFailure, CallLost) as failure:
            _fail(future, failure)
        except Exception as error:  # a bug here must not leave an episode waiting for ever
            _fail(future, PolicyFailure("server-unfit", f"{type(error).__name__}: {error}"))
        else:
            if not future.done():
                future.set_result(sampled)

    def flush(self) -> None:
        """The servers batch by themselves."""

    async def drop(self) -> None:
        """The servers abort a call whose connection closes; cached prefixes are of one version alone."""
        await self._forget_calls()
        if self.servers is not None:
            self.servers.drop()
        await self.trainer.drop()

    async def _forget_calls(self) -> None:
        calls, self._calls = self._calls, {}
        for task, future in calls.items():
            task.cancel()
            future.cancel()
        await asyncio.gather(*calls, return_exceptions=True)

    # ---------------------------------------------------------------------------------------------- training, versions

    async def train(self, request: TrainRequest) -> Trained:
        """As in the protocol. With `vllm.share_gpu` the servers sleep until the next version is served."""
        servers = self._up()
        if not self.config.vllm.share_gpu:
            return await self.trainer.train(request)
        await servers.rest()
        trained = False
        try:
            done = await self.trainer.train(request)
            trained = done.skipped < len(request.minibatches)
            return done
        finally:
            if not trained:  # nothing is going to be published
                await servers.wake()

    async def publish(self, version: str, folder: str) -> Publication:
        """As in the protocol: the worker writes and reads back, then every server loads and proves."""
        made = await self.trainer.publish(version, folder)
        served = await self._up().serve(Version(version, made.hash, folder, self.trainer.probe))
        return msgspec.structs.replace(made, probe_rollout=served)

    async def restore(self, version: str, folder: str | None, *, with_optimizer: bool) -> str:
        hash = await self.trainer.restore(version, folder, with_optimizer=with_optimizer)
        await self._up().serve(Version(version, hash, folder, self.trainer.probe))
        return hash

    def _up(self) -> Servers:
        if self.servers is None:
            raise PolicyFailure("servers-lost", "the vLLM servers have not been started")
        return self.servers

    # --------------------------------------------------------------------------------------------------------- watching

    def status(self) -> list[status.ServerStatus]:
        return [server.status() for server in self.servers.all] if self.servers is not None else []


def _allow_files(wanted: int) -> None:
    """A call in flight is a connection, and many systems allow a process 1,024 files at first."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _fail(future: asyncio.Future[Sampled], failure: Exception) -> None:
    if not future.done():
        future.set_exception(failure)
        future.exception()  # seen: an episode that no longer waits for it is no error of ours
