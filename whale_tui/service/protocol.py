"""What terminal and engine say to each other: one JSON object a line over a private Unix socket.

A client says Hello once and then any number of CommandRequests. The engine answers Welcome, sends every event from
the one asked for on, Activity a few times a second while something runs, and one CommandReply for each request.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta, Raw, Struct

from whale_tui.policy.vllm.status import GpuStatus, ServerStatus

MAX_LINE = 16 * 1024 * 1024
"""Bytes of one line. The engine closes a connection that sends more."""


class Hello(Struct, tag="hello"):
    """`after`: the client has every event up to this sequence number. `follow` false: commands only."""

    who: str
    after: Annotated[int, Meta(ge=0)] = 0
    follow: bool = True


class CommandRequest(Struct, tag="command"):
    """`id` is the idempotency key: the same id twice has one effect. `dry_run` only says what would happen."""

    id: str
    who: str
    what: str
    args: dict[str, object] = {}
    dry_run: bool = False


class Welcome(Struct, tag="welcome"):
    run: str
    pid: int
    version: str
    seq: int


class Events(Struct, tag="events"):
    """Encoded events; the first has sequence number `first`."""

    first: int
    events: list[Raw]


class Activity(Struct, tag="activity"):
    """What the engine is doing now. Not a record: it is gone with the connection.

    `doing` is a short phrase ("sampling step 3", "loading the model"), `done` of `total` in `unit`s; total 0: unknown.
    """

    doing: str
    done: int = 0
    total: int = 0
    unit: str = "episodes"
    accepted: int = 0
    detail: str = ""
    since: float = 0.0
    tokens_per_second: float = 0.0
    tail: list[str] = []
    """The last lines of what runs (a proposer's session), newest last."""
    servers: list[ServerStatus] = []
    gpus: list[GpuStatus] = []
    """Under vLLM: the servers and this machine's GPUs."""


class CommandReply(Struct, tag="reply"):
    """What a command did, or will do and when. `repeated`: it had been taken before, and was not done again."""

    id: str
    ok: bool
    effect: str
    repeated: bool = False
    data: dict[str, object] = {}


FromClient = Hello | CommandRequest
FromEngine = Welcome | Events | Activity | CommandReply

client_decoder = msgspec.json.Decoder(FromClient)
engine_decoder = msgspec.json.Decoder(FromEngine)
_encoder = msgspec.json.Encoder()


def line(message: FromClient | FromEngine) -> bytes:
    return _encoder.encode(message) + b"\n"
