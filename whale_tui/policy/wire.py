"""What engine and policy worker say to each other: length-prefixed msgpack over a socket pair. No torch here."""

from __future__ import annotations

import struct

import msgspec
from msgspec import Struct

from whale_tui.policy.protocol import PolicyInfo, Publication, Sampled, SampleRequest, Trained, TrainRequest

HEADER = struct.Struct("<Q")


# -------------------------------------------------------------------------------------------------- engine to worker


class Ask(Struct, tag_field="ask", kw_only=True):
    """Base of all calls. `number` rises by one per call; its reply carries the same number."""

    number: int


class Load(Ask, tag="load"):
    model_path: str
    device: str
    lora_rank: int
    lora_alpha: int
    max_rows: int
    seed: int
    dtype: str
    fast: bool
    pack_nodes: int
    sample: bool = True
    """False: servers sample, and no weights are held for it here; then `Advance` is refused."""
    full: bool = False
    """All weights are trained, and not an adapter."""
    served: str = ""
    """Type in which a full version is written: what servers compute in, "auto" for what the base model's files have.
    Empty: what this worker computes in."""
    optimizer: str = "adamw"
    checkpointing: bool = False
    processes: int = 1


class Advance(Ask, tag="advance"):
    """Take up new requests (ticket, request) and sample until at least one call in flight is finished."""

    requests: list[tuple[int, SampleRequest]]


class Drop(Ask, tag="drop"):
    """Forget the calls in flight and every kept prefix."""


class Train(Ask, tag="train"):
    request: TrainRequest


class Publish(Ask, tag="publish"):
    version: str
    folder: str


class Restore(Ask, tag="restore"):
    version: str
    folder: str | None
    with_optimizer: bool


class Interrupt(Ask, tag="interrupt"):
    """Abandon every call up to `number`, between two decode steps or microbatches. Read at once, never queued."""


# -------------------------------------------------------------------------------------------------- worker to engine


class Reply(Struct, tag_field="reply", kw_only=True):
    number: int


class Loaded(Reply, tag="loaded"):
    """`probe` is the text that proves a version, as ids; `base` what the trainer gives it (where servers sample)."""

    info: PolicyInfo
    probe: list[int] = []
    base: list[float] = []


class Rows(Reply, tag="rows"):
    """Finished calls by ticket, in the order of their requests."""

    rows: list[tuple[int, Sampled]]


class Dropped(Reply, tag="dropped"):
    pass


class TrainDone(Reply, tag="trained"):
    trained: Trained


class Published(Reply, tag="published"):
    """`probe`: the trainer's log-probabilities of the probe, where servers are still to prove theirs."""

    publication: Publication
    probe: list[float] = []


class Restored(Reply, tag="restored"):
    hash: str
    probe: list[float] = []


class Failed(Reply, tag="failed"):
    kind: str
    detail: str


class Note(Reply, tag="note"):
    """Progress in words. Not the reply itself: that still follows."""

    text: str


AnyAsk = Load | Advance | Drop | Train | Publish | Restore | Interrupt
AnyReply = Loaded | Rows | Dropped | TrainDone | Published | Restored | Failed | Note

_encode = msgspec.msgpack.Encoder().encode
decode_ask = msgspec.msgpack.Decoder(AnyAsk).decode
decode_reply = msgspec.msgpack.Decoder(AnyReply).decode


def frame(message: Struct) -> bytes:
    """A message as it goes over the socket: 8 bytes of length, then msgpack."""
    body = _encode(message)
    return HEADER.pack(len(body)) + body
