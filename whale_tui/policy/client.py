"""The transformers engine as the engine process sees it: a queue of calls in front of the policy worker. No torch here.

Sampling is pulled: `flush` hands the queue over, sorted by `order`; the worker samples until a call is finished and
then waits for the next `flush`. What is in a batch thus follows from the requests alone, never from timing.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path

from whale_tui.policy import wire
from whale_tui.policy.protocol import (
    PolicyFailure,
    PolicyInfo,
    Publication,
    Sampled,
    SampleRequest,
    Trained,
    TrainRequest,
)


class TransformersEngine:
    """PolicyEngine over a worker process of its own.

    device: "auto" (cuda, mps, cpu), or one by name. dtype: "auto" (bf16 where the processor has it), "float32",
    "bfloat16". max_rows: most calls sampled at once. pack_nodes: size of a training microbatch, in nodes of the token
    trie. log_path: where everything the worker prints goes. on_note: called with progress in words. sample: False
    where servers sample and this worker only trains; what these must prove is then in `probe`. full: all weights are
    trained, and versions hold them in the type `served`. optimizer, checkpointing, processes: as in the
    config.
    """

    info: PolicyInfo
    probe_ids: list[int]
    probe_base: list[float]
    """What the trainer gives the probe: at the base model, and at the version it is at."""
    probe: list[float]

    def __init__(
        self,
        model_path: str | Path,
        *,
        log_path: str | Path,
        device: str = "auto",
        dtype: str = "auto",
        lora_rank: int = 16,
        lora_alpha: int = 32,
        max_rows: int = 256,
        pack_nodes: int = 1024,
        seed: int = 0,
        fast: bool = True,
        sample: bool = True,
        full: bool = False,
        served: str = "",
        optimizer: str = "adamw",
        checkpointing: bool = False,
        processes: int = 1,
        on_note: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._load = wire.Load(
            number=0,
            model_path=str(model_path),
            device=device,
            dtype=dtype,
            lora_rank=lora_rank,
            lora_alpha=lora_alpha,
            max_rows=max_rows,
            pack_nodes=pack_nodes,
            seed=seed,
            fast=fast,
            sample=sample,
            full=full,
            served=served,
            optimizer=optimizer,
            checkpointing=checkpointing,
            processes=processes,
        )
        self._log_path = Path(log_path)
        self._on_note = on_note
        self._numbers = itertools.count(1)
        self._last = 0
        self._tickets = itertools.count(1)
        self._calls: dict[int, asyncio.Future[wire.Reply]] = {}
        self._queue: list[tuple[int, SampleRequest]] = []
        self._futures: dict[int, asyncio.Future[Sampled]] = {}
        self._sampling: asyncio.Task[None] | None = None
        self._flushed = False
        self._worker: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reader: asyncio.Task[None] | None = None
        self._dead: PolicyFailure | None = PolicyFailure("worker-died", "the policy worker has not been started")

    @property
    def pid(self) -> int | None:
        """Of the worker process, while there is one."""
        return self._worker.pid if self._worker is not None and self._dead is None else None

    # ------------------------------------------------------------------------------------------------------ lifetime

    async def start(self) -> PolicyInfo:
        """Start a worker (anew, where an earlier one died) and load the base model."""
        await self.close()
        ours, theirs = socket.socketpair()
        try:
            self._log_path.parent.mkdir(parents=True, exist_ok=True)
            with self._log_path.open("ab") as log:
                # A session of its own: Ctrl-C in the terminal stops the engine, which then ends the worker in good
                # order.
                self._worker = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", "whale_tui.policy.worker", "--fd", str(theirs.fileno())),
                    pass_fds=[theirs.fileno()],
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
        except OSError as error:
            ours.close()
            raise PolicyFailure("worker-died", f"the policy worker can't be started: {error}") from None
        finally:
            theirs.close()
        reader, self._writer = await asyncio.open_connection(sock=ours, limit=1 << 20)
        self._dead = None
        self._reader = asyncio.create_task(self._read(reader, self._worker))
        reply = await self._call(self._load)
        assert isinstance(reply, wire.Loaded)
        self.info, self.probe_ids, self.probe_base = reply.info, reply.probe, reply.base
        self.probe = self.probe_base
        return reply.info

    async def close(self) -> None:
        """End the worker. Calls in flight fail."""
        self._fail(PolicyFailure("worker-died", "the policy worker was closed"))
        if self._writer is not None:
            self._writer.close()
        if self._worker is not None:
            try:
                await asyncio.wait_for(self._worker.wait(), 5)
            except TimeoutError:
                self._worker.kill()
                await self._worker.wait()
        for task in (self._reader, self._sampling):
            if task is not None and task is not asyncio.current_task():
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
        self._worker = self._writer = self._reader = self._sampling = None

    # ------------------------------------------------------------------------------------------------------ sampling

    def submit(self, request: SampleRequest) -> asyncio.Future[Sampled]:
        future: asyncio.Future[Sampled] = asyncio.get_running_loop().create_future()
        if self._dead is not None:
            future.set_exception(self._dead)
        elif not request.prompt_ids or request.max_tokens < 1:
            future.set_exception(ValueError("a call needs a prompt and room for at least one token"))
        else:
            ticket = next(self._tickets)
            self._futures[ticket] = future
            self._queue.append((ticket, request))
        return future

    def flush(self) -> None:
        if self._dead is not None:
            return
        if self._sampling is not None and not self._sampling.done():
            self._flushed = True
        elif self._futures:
            self._sampling = asyncio.create_task(self._advance())

    async def _advance(self) -> None:
        """Hand the queue over and resolve what comes back."""
        again = True
        while again:
            self._flushed = False
            requests, self._queue = sorted(self._queue, key=lambda entry: entry[1].order), []
            try:
                reply = await self._call(wire.Advance(number=0, requests=requests))
            except PolicyFailure as failure:
                self._fail_samples(failure)
                return
            assert isinstance(reply, wire.Rows)
            for ticket, sampled in reply.rows:
                future = self._futures.pop(ticket, None)
                if future is not None and not future.done():
                    future.set_result(sampled)
            again = bool(self._futures) and (self._flushed or not reply.rows)

    async def drop(self) -> None:
        for future in self._futures.values():
            future.cancel()
        self._futures, self._queue, self._flushed = {}, [], False
        if self._dead is None:
            self._send(wire.Interrupt(number=self._last))
            await self._call(wire.Drop(number=0))
            if self._sampling is not None:
                await self._sampling

    # -------------------------------------------------------------------------------------------- training and versions

    async def train(self, request: TrainRequest) -> Trained:
        """As in the protocol. Cancelled: the worker stops at the next microbatch and goes back to the published
        version.
        """
        reply = await self._call(wire.Train(number=0, request=request))
        assert isinstance(reply, wire.TrainDone)
        return reply.trained

    async def publish(self, version: str, folder: str) -> Publication:
        """As in the protocol. Kinds of failure: "publish-unproved", "publish-unwritten"; `restore` is to follow
        either.
        """
        reply = await self._call(wire.Publish(number=0, version=version, folder=str(folder)))
        assert isinstance(reply, wire.Published)
        self.probe = reply.probe
        return reply.publication

    async def restore(self, version: str, folder: str | None, *, with_optimizer: bool) -> str:
        """As in the protocol. A file that is not what its manifest says: PolicyFailure("artifact-corrupt"), naming
        it.
        """
        ask = wire.Restore(number=0, version=version, folder=folder and str(folder), with_optimizer=with_optimizer)
        reply = await self._call(ask)
        assert isinstance(reply, wire.Restored)
        self.probe = reply.probe
        return reply.hash

    # ----------------------------------------------------------------------------------------------------- the channel

    async def _call(self, ask: wire.Ask) -> wire.Reply:
        """Send a call and wait for its reply. A caller that is cancelled leaves an interrupt for the worker."""
        if self._dead is not None:
            raise self._dead
        ask.number = self._last = next(self._numbers)
        future = self._calls[ask.number] = asyncio.get_running_loop().create_future()
        self._send(ask)
        try:
            reply = await future
        except asyncio.CancelledError:
            if self._dead is None:
                self._send(wire.Interrupt(number=ask.number))
            raise
        finally:
            self._calls.pop(ask.number, None)
        if isinstance(reply, wire.Failed):
            raise PolicyFailure(reply.kind, reply.detail)
        return reply

    def _send(self, ask: wire.Ask) -> None:
        assert self._writer is not None
        self._writer.write(wire.frame(ask))

    async def _read(self, reader: asyncio.StreamReader, worker: asyncio.subprocess.Process) -> None:
        try:
            while True:
                size = wire.HEADER.unpack(await reader.readexactly(wire.HEADER.size))[0]
                reply = wire.decode_reply(await reader.readexactly(size))
                if isinstance(reply, wire.Note):
                    self._on_note(reply.text)
                elif (future := self._calls.get(reply.number)) is not None and not future.done():
                    future.set_result(reply)
        except (asyncio.IncompleteReadError, ConnectionError):
            code = await worker.wait()
            self._fail(PolicyFailure("worker-died", _how_it_ended(code, self._log_path)))

    def _fail(self, failure: PolicyFailure) -> None:
        """The worker is gone: everything that waits for it fails, and so does all that follows until `start`."""
        if self._dead is None:
            self._dead = failure
        for call in self._calls.values():
            if not call.done():
                call.set_exception(self._dead)
        self._fail_samples(self._dead)

    def _fail_samples(self, failure: PolicyFailure) -> None:
        futures, self._futures, self._queue = self._futures, {}, []
        for future in futures.values():
            if not future.done():
                future.set_exception(failure)
                future.exception()  # seen: an episode that no longer waits for it is no error of ours


def _how_it_ended(code: int, log: Path) -> str:
    if code < 0:
        name = signal.Signals(-code).name
        why = " (the system's out-of-memory killer does this)" if -code == signal.SIGKILL else ""
        return f"the policy worker was ended by {name}{why}; see {log}"
    with contextlib.suppress(OSError):
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        if lines:
            return f"the policy worker ended with code {code}: {lines[-1][:300]}; see {log}"
    return f"the policy worker ended with code {code}; see {log}"
