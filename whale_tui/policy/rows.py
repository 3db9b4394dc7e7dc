"""A call while it is being sampled, and when it ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from whale_tui.policy.protocol import Sampled, SampleRequest


@dataclass
class Stops:
    """What is needed to see a stop string: the tokenizer's decoder."""

    decode: Callable[[Sequence[int]], str]

    def found(self, ids: list[int], strings: Sequence[str]) -> bool:
        """Whether one of `strings` is in the text of the last ids. An id holds a byte or more, which bounds the
        window.
        """
        window = max(len(text.encode()) for text in strings) + 4
        text = self.decode(ids[-window:])
        return any(string in text for string in strings)


@dataclass
class Row:
    """`order` sorts rows within a batch; `finished` says why it ended, once it has."""

    ticket: int
    request: SampleRequest
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finished: Literal["stop", "length", ""] = ""

    def take(self, token: int, logprob: float, stops: Stops) -> None:
        """Append a sampled token; ends the row where it should end."""
        self.ids.append(token)
        self.logprobs.append(logprob)
        request = self.request
        if token in request.stop_ids or (request.stop_strings and stops.found(self.ids, request.stop_strings)):
            self.finished = "stop"
        elif len(self.ids) >= request.max_tokens:
            self.finished = "length"

    def sampled(self) -> Sampled:
        return Sampled(output_ids=self.ids, logprobs=self.logprobs, finish_reason=self.finished or "length")
