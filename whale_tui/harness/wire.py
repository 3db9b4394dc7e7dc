"""What goes over the pipes of a sealed worker, what an episode may use, and how it ends."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Raw, Struct

from whale_tui.harness.contract import Reply

OnChat = Callable[[list[dict[str, str]], int | None, list[str], bool | None], Awaitable[Reply]]
"""(messages, max_tokens, stop, thinking) -> Reply. BudgetExceeded ends the episode as `budget`; any other exception is
the machinery's and comes out of `run_episode`."""
OnTool = Callable[[str, list[Any], dict[str, Any]], Awaitable[Any]]
"""(name, args, kwargs) -> JSON value. ToolError is raised inside the harness; any other exception comes out."""


class Limits(Struct, frozen=True):
    """What a worker and each of its episodes may use."""

    memory_mb: int = 1024
    """Address space of a worker, beside the thread stacks of its open episodes."""
    cpu_seconds: int = 36_000
    """Processor time of a worker over its whole life; a backstop should the engine be gone."""
    load_seconds: float = 10.0
    """From start to loaded, the module body included."""
    episode_seconds: float = 120.0
    """Wall time that a harness may compute in one episode; waiting for the policy or a tool is free."""
    messages_per_episode: int = 1_000
    message_bytes: int = 1_000_000
    answer_chars: int = 100_000
    log_bytes: int = 200_000
    stack_kb: int = 2048
    """Thread stack of an episode: room for Python's 1,000 levels of recursion, through C code too. Mostly untouched."""


class EpisodeEnd(Struct):
    """How an episode ended. `died` is no fault of its own known so far; everything else is the harness's doing."""

    kind: Literal["answer", "error", "timeout", "budget", "flood", "died"]
    answer: str = ""
    detail: str = ""
    """The traceback of the harness's own frames, or the reason in words."""
    seconds: float = 0.0
    """Wall time in the harness itself."""
    messages: int = 0
    suspect: bool = False
    """Of a `died`: it was computing at that moment, so it may be the cause."""


# ----------------------------------------------------------------------------------------------- what a worker may say


Number = Annotated[int, Meta(ge=0, lt=1 << 31)]


class Message(Struct, tag_field="type", forbid_unknown_fields=True):
    pass


class Sealed(Message, tag="sealed"):
    pass


class Loaded(Message, tag="loaded"):
    pass


class Unloadable(Message, tag="unloadable"):
    detail: str


class Begin(Message, tag="begin"):
    ep: Number
    thread: Number


class Refuse(Message, tag="refuse"):
    ep: Number
    detail: str


class Chat(Message, tag="chat"):
    ep: Number
    messages: Raw
    max_tokens: Raw
    stop: Raw
    thinking: Raw


class Tool(Message, tag="tool"):
    ep: Number
    name: str
    args: list[Any]
    kwargs: dict[str, Any]


class Done(Message, tag="done"):
    ep: Number
    answer: str


class Fail(Message, tag="fail"):
    ep: Number
    detail: str


class Turn(Struct, forbid_unknown_fields=True):
    role: Literal["system", "user", "assistant", "tool"]
    content: str


decode = msgspec.json.Decoder(Sealed | Loaded | Unloadable | Begin | Refuse | Chat | Tool | Done | Fail).decode
encode = msgspec.json.Encoder().encode


def chat_fields(call: Chat) -> tuple[list[dict[str, str]], int | None, list[str], bool | None]:
    """The arguments of one `model.chat`, checked. Raises TypeError in words for the harness."""

    def read(name: str, raw: Raw, shape: Any) -> Any:
        try:
            return msgspec.json.decode(raw, type=shape)
        except (msgspec.MsgspecError, RecursionError) as wrong:
            raise TypeError(f"model.chat: {name}: {wrong}") from None

    turns = read("messages", call.messages, list[Turn])
    if not turns:
        raise TypeError("model.chat: messages: the list is empty")
    max_tokens = read("max_tokens", call.max_tokens, int | None)
    if max_tokens is not None and max_tokens < 1:
        raise TypeError(f"model.chat: max_tokens: {max_tokens} is less than 1")
    stop = read("stop", call.stop, str | list[str] | None)
    stops = [stop] if isinstance(stop, str) else stop or []
    if "" in stops or len(stops) > 16:
        raise TypeError("model.chat: stop: at most 16 strings, none of them empty")
    return (
        [{"role": turn.role, "content": turn.content} for turn in turns],
        max_tokens,
        stops,
        read("thinking", call.thinking, bool | None),
    )
