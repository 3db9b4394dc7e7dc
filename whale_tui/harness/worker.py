"""The workers of one harness: start them, send each episode to one, and run again what a sibling's fault ended.

An episode first shares one worker with all others. Ended by another's hang it simply runs again. Where it may have
caused a death itself (`suspect`) it runs again in one of a few smaller workers, then in one of its own; an episode that
ends even that has ended it itself, and is an `error`. A harness that goes on costing workers is condemned: what is left
of its episodes ends likewise, at once. Nothing here waits for another episode, so a caller may run them in step.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Literal

from whale_tui.harness.contract import BudgetExceeded, Reply, ToolError, use_tool
from whale_tui.harness.sealed import HarnessLoadError, SealedWorker, SealUnavailable, Stats, WorkerFailure, can_seal
from whale_tui.harness.wire import EpisodeEnd, Limits, OnChat, OnTool

__all__ = [
    "BudgetExceeded", "EpisodeEnd", "HarnessLoadError", "HarnessRunner", "Limits", "OnChat", "OnTool", "Reply",
    "SealUnavailable", "SealedWorker", "Stats", "ToolError", "WorkerFailure", "can_seal", "use_tool",
]  # fmt: skip

GROUPS = 8
"""Workers that the suspects of a death are spread over."""
FAULTS = 8
FAULT_SHARE = 0.05
"""A harness may cost this many workers, and this share of its episodes more, before it is condemned."""


class _GivenUp(Exception):
    """The harness is condemned."""


class HarnessRunner:
    """Runs episodes of one harness, any number at once; workers start when first needed. `close` it in the end."""

    def __init__(self, source: str, limits: Limits = Limits(), *, allow_unsealed: bool = False) -> None:  # noqa: B008
        self.source, self.limits, self.allow_unsealed = source, limits, allow_unsealed
        self.stats = Stats()
        self.log = ""
        """What the harness printed: the end of it, at most `limits.log_bytes` characters."""
        self._workers: dict[Any, SealedWorker] = {}
        self._lost: set[SealedWorker] = set()
        """Those that a hang, a death or a forged message cost."""
        self._locks: dict[Any, asyncio.Lock] = {}
        self._starting = asyncio.Semaphore(4)
        self._unloadable = ""
        self._last_fault: tuple[Literal["timeout", "error", "flood"], str] = ("error", "")
        self._numbers = 0
        self._closed = False

    async def __aenter__(self) -> HarnessRunner:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Load the harness now. Raises HarnessLoadError, SealUnavailable or WorkerFailure."""
        await self._worker("all")

    async def run_episode(
        self,
        task: dict[str, Any],
        on_chat: OnChat,
        on_tool: OnTool,
        *,
        tools: Sequence[str] | None = None,
        remaining_calls: int | None = None,
        remaining_tokens: int | None = None,
        restarted: Callable[[], None] = lambda: None,
    ) -> EpisodeEnd:
        """Run one episode to its end. `restarted` is called before it runs again from the beginning: what the engine
        recorded of it so far doesn't count. A harness that can't be loaded ends as `error`; `died` is left for failures
        of the machinery. Raises SealUnavailable, and whatever the callbacks raise."""
        self._numbers += 1
        number, suspected = self._numbers, 0
        while True:
            place: Any = "all" if suspected == 0 else number % GROUPS if suspected == 1 else ("alone", number)
            try:
                worker = await self._worker(place)
            except _GivenUp:
                kind, why = self._last_fault
                return EpisodeEnd(kind, detail=f"the harness cost {len(self._lost)} workers and was given up: {why}")
            except HarnessLoadError as problem:
                return EpisodeEnd("error", detail=f"the harness can't be loaded: {problem}")
            except WorkerFailure as failure:
                return EpisodeEnd("died", detail=str(failure))
            end = await worker.run_episode(
                task, on_chat, on_tool, tools=tools, remaining_calls=remaining_calls, remaining_tokens=remaining_tokens
            )
            if not worker.alive:
                self._count_loss(worker, end)
            if suspected == 2:
                await self._retire(place, worker)
                del self._locks[place]
            if end.kind != "died" or self._closed:
                return end
            if end.suspect and suspected == 2:
                end.kind, end.detail = "error", f"alone in its worker, and yet: {end.detail}"
                return end
            suspected += end.suspect
            restarted()

    async def close(self) -> None:
        """End every worker. Open episodes end as `died`."""
        self._closed = True
        await asyncio.gather(*(self._retire(place, worker) for place, worker in list(self._workers.items())))

    async def _worker(self, place: Any) -> SealedWorker:
        """The live worker of a place, started if need be."""
        async with self._locks.setdefault(place, asyncio.Lock()):
            worker = self._workers.get(place)
            if worker is not None and worker.alive and not self._condemned():
                return worker
            if worker is not None:
                await self._retire(place, worker)
            async with self._starting:
                if self._condemned():
                    raise _GivenUp
                if self._unloadable:
                    raise HarnessLoadError(self._unloadable)
                if self._closed:
                    raise WorkerFailure("the workers of this harness were closed")
                try:
                    worker = await SealedWorker.start(self.source, self.limits, allow_unsealed=self.allow_unsealed)
                except HarnessLoadError as problem:
                    self._unloadable = str(problem)
                    raise
            self._workers[place] = worker
            if self._closed:
                await self._retire(place, worker)
                raise WorkerFailure("the workers of this harness were closed")
            return worker

    async def _retire(self, place: Any, worker: SealedWorker) -> None:
        if self._workers.get(place) is worker:
            del self._workers[place]
        await worker.close()
        self.stats.add(worker.stats)
        self.log = (self.log + worker.log)[-self.limits.log_bytes :]

    def _count_loss(self, worker: SealedWorker, end: EpisodeEnd) -> None:
        if end.kind in ("timeout", "error", "flood"):
            self._last_fault = (end.kind, end.detail)
        self._lost.add(worker)

    def _condemned(self) -> bool:
        return len(self._lost) > FAULTS + FAULT_SHARE * self._numbers
