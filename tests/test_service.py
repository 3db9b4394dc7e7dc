"""Engine and client over a real socket and a real journal: every event once and in order, whatever either side does."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.simulator import Simulator, make_config
from whale_tui import records as r
from whale_tui.journal import Journal
from whale_tui.loop import control
from whale_tui.loop.state import RunState, reduce
from whale_tui.rundir import EngineInfo, RunDir, write_atomic
from whale_tui.service import client as client_module
from whale_tui.service import protocol as p
from whale_tui.service import server as server_module
from whale_tui.service.client import RunClient, Update
from whale_tui.service.server import Server, socket_path


class FakeRun:
    """What the server needs of a run: its state, and `command` as the real one takes it."""

    def __init__(self, journal: Journal, publish: Callable[[Any], None]) -> None:
        self.journal, self.publish, self.state = journal, publish, RunState()
        for event in journal.events():
            reduce(self.state, event)

    def record(self, *events: r.AnyEvent) -> None:
        self.journal.commit(events)
        for event in events:
            reduce(self.state, event)
        self.publish(list(events))

    def command(self, id: str, who: str, what: str, args: dict[str, Any], *, dry_run: bool = False) -> tuple[str, bool]:
        if id in self.state.commands:
            return self.state.commands[id], True
        planned = control.plan(self.state, what, args, who)
        if not dry_run:
            self.record(r.CommandTaken(id=id, who=who, what=what, args=planned.args, effect=planned.effect),
                        *planned.events)  # fmt: skip
        return planned.effect, False


class Engine:
    """Server, journal and run, as the engine process puts them together."""

    def __init__(self, rundir: RunDir) -> None:
        self.rundir = rundir
        self.journal = Journal(rundir.journal)
        self.journal.db.execute("PRAGMA synchronous=OFF")
        self.server = Server(rundir.name, socket_path(rundir))

    async def start(self, attach: bool = True) -> Engine:
        await self.server.start()
        info = EngineInfo(pid=os.getpid(), socket=str(self.server.path), version="0", started_at=0.0)
        write_atomic(self.rundir.engine, msgspec.json.encode(info))
        if attach:
            self.attach()
        return self

    def attach(self) -> None:
        self.run = FakeRun(self.journal, self.server.publish)
        self.server.attach(self.run, self.journal)  # type: ignore[arg-type]
        if not self.run.state.seq:
            self.run.record(*Simulator(make_config()).events)

    def warn(self, *numbers: int, size: int = 0) -> None:
        for number in numbers:
            self.run.record(r.Warned(text=f"{number}" + "x" * size))

    async def close(self) -> None:
        await self.server.close()
        self.journal.close()


@pytest.fixture
def rundir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(client_module, "RECONNECT_SECONDS", 0.02)
    made = RunDir(tmp_path / "one")
    made.create()
    return made


@pytest.fixture
async def engine(rundir: RunDir) -> AsyncIterator[Engine]:
    started = await Engine(rundir).start()
    yield started
    await started.close()


class Watcher:
    """A client that follows in the background and keeps everything it was told."""

    def __init__(self, rundir: RunDir) -> None:
        self.client = RunClient(rundir, "watcher")
        self.updates: list[Update] = []
        self._more = asyncio.Event()
        self.task = asyncio.create_task(self._follow())

    async def _follow(self) -> None:
        async for update in self.client.follow():
            self.updates.append(update)
            self._more.set()

    async def until(self, condition: Callable[[], Any]) -> None:
        async with asyncio.timeout(5):
            while not condition():
                self._more.clear()
                await self._more.wait()

    @property
    def warnings(self) -> list[str]:
        return [e.text for update in self.updates for e in update.events if isinstance(e, r.Warned)]

    async def close(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


async def raw(engine: Engine, *lines: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_unix_connection(engine.server.path, limit=p.MAX_LINE)
    writer.writelines(lines)
    return reader, writer


async def closed(reader: asyncio.StreamReader) -> bytes:
    """What came before the other side closed."""
    got = b""
    async with asyncio.timeout(5):
        try:
            while more := await reader.read(1 << 16):
                got += more
        except ConnectionError:
            pass
    return got


# ------------------------------------------------------------------------------------------------------------- events


async def test_journal_then_live_without_gap_or_repeat(engine: Engine) -> None:
    engine.warn(*range(30))
    watcher = Watcher(engine.rundir)
    for number in range(30, 60):
        engine.warn(number)
        await asyncio.sleep(0)
    await watcher.until(lambda: len(watcher.warnings) == 60)
    assert watcher.warnings == [str(n) for n in range(60)]
    assert watcher.client.state == engine.run.state and watcher.client.live
    assert not watcher.updates[0].live and watcher.updates[-1].live
    await watcher.close()


async def test_a_client_that_has_nothing_catches_up_in_lines_of_bounded_length(engine: Engine) -> None:
    """A long journal must not become one line over the limit."""
    many = server_module.LINE_EVENTS * 2 + 7
    engine.run.record(*(r.Warned(text=str(n)) for n in range(many)))
    reader, writer = await raw(engine, p.line(p.Hello(who="x", after=0)))
    welcome = p.engine_decoder.decode(await reader.readline())
    assert isinstance(welcome, p.Welcome) and welcome.seq == engine.run.state.seq and welcome.pid == os.getpid()
    state = RunState()
    while state.seq < welcome.seq:
        batch = p.engine_decoder.decode(await reader.readline())
        assert isinstance(batch, p.Events) and batch.first == state.seq + 1
        assert len(batch.events) <= server_module.LINE_EVENTS
        for event in batch.events:
            reduce(state, r.event_decoder.decode(event))
    assert state == engine.run.state
    writer.close()


async def test_commands_only_get_no_events(engine: Engine) -> None:
    reader, writer = await raw(engine, p.line(p.Hello(who="x", follow=False)))
    assert isinstance(p.engine_decoder.decode(await reader.readline()), p.Welcome)
    engine.warn(1)
    writer.write(p.line(p.CommandRequest(id="a", who="x", what="pause")))
    reply = p.engine_decoder.decode(await reader.readline())
    assert isinstance(reply, p.CommandReply) and reply.ok
    writer.close()


async def test_who_comes_before_the_run_is_up_gets_its_events(rundir: RunDir) -> None:
    engine = await Engine(rundir).start(attach=False)
    watcher = Watcher(rundir)
    await watcher.until(lambda: watcher.client.live)
    reply = await RunClient(rundir, "x").command("pause")
    assert not reply.ok and reply.effect == "the run is not up yet: starting"
    assert (await RunClient(rundir, "x").command("status")).ok
    engine.attach()
    engine.warn(1)
    await watcher.until(lambda: watcher.warnings == ["1"])
    assert watcher.client.state == engine.run.state
    await watcher.close()
    await engine.close()


async def test_activity_is_told_at_most_a_few_times_a_second_and_the_last_one_counts(engine: Engine) -> None:
    watcher = Watcher(engine.rundir)
    await watcher.until(lambda: watcher.client.live)
    for done in range(200):
        engine.server.publish(p.Activity(doing="sampling step 1", done=done + 1, total=200))
        await asyncio.sleep(0.001)
    await watcher.until(lambda: watcher.client.activity and watcher.client.activity.done == 200)
    told = [u for u in watcher.updates if u.activity and u.activity.done]
    assert len(told) <= 5
    await watcher.close()


async def test_the_engine_back_after_a_kill_is_followed_again_without_gap(rundir: RunDir) -> None:
    engine = await Engine(rundir).start()
    watcher = Watcher(rundir)
    engine.warn(1)
    await watcher.until(lambda: watcher.warnings == ["1"])
    await engine.close()
    await watcher.until(lambda: not watcher.client.live)
    offline = Journal(rundir.journal)
    offline.commit([r.Warned(text="2")])  # an engine that lived too shortly to be seen
    offline.close()
    engine = await Engine(rundir).start()
    engine.warn(3)
    await watcher.until(lambda: watcher.client.live and watcher.warnings == ["1", "2", "3"])
    assert watcher.client.state == engine.run.state
    await watcher.close()
    await engine.close()


async def test_a_reader_that_does_not_read_is_dropped_and_the_others_miss_nothing(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "BACKLOG", 200_000)
    reader, writer = await asyncio.open_unix_connection(engine.server.path, limit=1000)
    writer.write(p.line(p.Hello(who="asleep")))
    watcher = Watcher(engine.rundir)
    await watcher.until(lambda: watcher.client.live)
    assert len(engine.server._followers) == 2
    for number in range(200):
        engine.warn(number, size=10_000)
        await asyncio.sleep(0.0005)
    await watcher.until(lambda: len(watcher.warnings) == 200)
    assert len(engine.server._followers) == 1
    assert len(await closed(reader)) < 200 * 10_000
    writer.close()
    await watcher.close()


# ------------------------------------------------------------------------------------------------------------ garbage


@pytest.mark.parametrize(
    "line",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff\xfe\x00\n",
        b"{}\n",
        b'{"type":"hello"}\n',
        b'{"type":"hello","who":3}\n',
        b'{"type":"events","first":1,"events":[]}\n',
        b'{"type":"command","id":"a","who":"x","what":"set","args":' + b"[" * 100_000 + b"\n",
        b"\n",
        b'{"type":"hello","who":"x","after":-5}',
    ],
)
async def test_garbage_closes_its_own_connection_and_no_other(engine: Engine, line: bytes) -> None:
    watcher = Watcher(engine.rundir)
    await watcher.until(lambda: watcher.client.live)
    reader, writer = await raw(engine, line)
    writer.write_eof()
    assert await closed(reader) == b""
    engine.warn(1)
    await watcher.until(lambda: watcher.warnings == ["1"])
    assert sum(u.live and not u.events and not u.activity for u in watcher.updates) == 1  # connected once
    writer.close()
    await watcher.close()


async def test_a_line_without_end_closes_its_connection(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    await engine.server.close()
    monkeypatch.setattr(p, "MAX_LINE", 64 * 1024)
    await engine.server.start()
    reader, writer = await asyncio.open_unix_connection(engine.server.path)
    writer.write(b"x" * 300_000)
    assert await closed(reader) == b""
    assert (await RunClient(engine.rundir, "x").command("pause")).ok
    writer.close()


async def test_a_hello_from_the_future_is_told_where_the_run_is(engine: Engine) -> None:
    reader, writer = await raw(engine, p.line(p.Hello(who="x", after=10_000)))
    welcome = p.engine_decoder.decode(await reader.readline())
    assert isinstance(welcome, p.Welcome) and welcome.seq == engine.run.state.seq
    writer.close()


# ----------------------------------------------------------------------------------------------------------- commands


async def test_one_id_has_one_effect_from_two_terminals(engine: Engine) -> None:
    ann, bob = RunClient(engine.rundir, "ann"), RunClient(engine.rundir, "bob")
    replies = await asyncio.gather(*(c.command("pause", id="p1") for c in (ann, bob, ann)))
    assert [reply.ok for reply in replies] == [True] * 3
    assert sorted(reply.repeated for reply in replies) == [False, True, True]
    assert len({reply.effect for reply in replies}) == 1
    assert sum(isinstance(e, r.Paused) for e in engine.journal.events()) == 1
    again = await bob.command("resume", id="p1")  # an id is taken, whatever it comes with
    assert again.repeated and engine.run.state.status == "paused"


async def test_replies_come_in_the_order_of_requests_on_one_connection(engine: Engine) -> None:
    requests = [p.CommandRequest(id=f"r{n}", who="x", what="pause" if n % 2 else "resume") for n in range(20)]
    reader, writer = await raw(engine, *(p.line(request) for request in requests))
    got = [p.engine_decoder.decode(await reader.readline()) for _ in requests]
    assert [reply.id for reply in got if isinstance(reply, p.CommandReply)] == [f"r{n}" for n in range(20)]
    writer.close()


async def test_a_dry_run_says_and_changes_nothing(engine: Engine) -> None:
    before = engine.run.state.seq
    reply = await RunClient(engine.rundir, "ann").command("pause", dry_run=True)
    assert reply.ok and reply.effect == "pauses at the next safe point"
    assert engine.run.state.seq == before and engine.run.state.status == "running"


async def test_refusals_come_back_in_words(engine: Engine) -> None:
    ann = RunClient(engine.rundir, "ann")
    for what, args, words in [
        ("fly", {}, "no command 'fly'"),
        ("veto", {"harness": "h0099"}, "no harness h0099"),
        ("switch", {}, "no phase is running"),
        ("pause", {"now": True}, "pause takes nothing"),
    ]:
        reply = await ann.command(what, args)
        assert not reply.ok and words in reply.effect


async def test_a_journal_that_cannot_be_written_is_a_reply_not_a_broken_connection(engine: Engine) -> None:
    engine.journal.db.execute("PRAGMA query_only = 1")
    reply = await RunClient(engine.rundir, "ann").command("pause")
    assert not reply.ok and "nothing was lost" in reply.effect
    engine.journal.db.execute("PRAGMA query_only = 0")
    assert (await RunClient(engine.rundir, "ann").command("pause")).ok


async def test_without_an_engine_commands_fail_and_reading_works(rundir: RunDir) -> None:
    with pytest.raises(ConnectionError, match=r"no engine runs one \(it has never been started"):
        await RunClient(rundir, "ann").command("pause")
    engine = await Engine(rundir).start()
    engine.warn(1)
    state = engine.run.state
    await engine.close()
    with pytest.raises(ConnectionError, match="no engine runs one"):
        await RunClient(rundir, "ann").command("pause")
    client = RunClient(rundir, "ann")
    client.read_journal()
    assert client.state == state
    assert client.read_journal() == []


async def test_events_that_are_missing_are_read_from_the_journal(engine: Engine) -> None:
    client = RunClient(engine.rundir, "x")
    with pytest.raises(ValueError, match="missing"):
        client._fold(p.Events(first=9, events=[]))
    client.read_journal()
    seq = client.state.seq
    old = [msgspec.Raw(r.encode_event(e)) for e in engine.journal.events()]
    assert client._fold(p.Events(first=1, events=old)) == [] and client.state.seq == seq  # told before: not again
