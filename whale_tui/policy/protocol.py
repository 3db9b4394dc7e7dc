"""What the engine asks of a policy, whatever serves it. No torch here: this side of the pipe never loads it."""

from __future__ import annotations

import asyncio
from typing import Literal, Protocol

from msgspec import Struct

from whale_tui.records import Sampling


class PolicyFailure(Exception):
    """The machinery under the policy failed (out of memory, killed, a bad publish). Episodes it ended are `invalid`.

    `kind` is one word for the event, e.g. "out-of-memory", "worker-died", "publish-unproved", "bad-model".
    """

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind = kind
        self.detail = detail


class CallLost(PolicyFailure):
    """One call was lost with the server that had it, and the policy goes on: its episode is `invalid`, no other."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, of a GPU or of the machine: torch has a class for the one and says the other in words."""
    text = str(error).lower()
    said = ("out of memory", "can't allocate memory", "not enough memory")
    return isinstance(error, MemoryError) or any(words in text for words in said)


class PolicyInfo(Struct):
    """What was loaded. `base_hash` is the hash of the base weights: it is also the hash of theta-0000."""

    model_path: str
    base_hash: str
    tokenizer_hash: str
    device: str
    compute_dtype: str
    parameters: int
    trained_parameters: int
    fast_path: bool
    note: str = ""
    """Said in the log: e.g. why the fast path is not used."""


class SampleRequest(Struct):
    """One call. `order` fixes the place of the request in a batch, so that a run is reproducible."""

    order: tuple[int, int]
    prompt_ids: list[int]
    max_tokens: int
    seed: int
    sampling: Sampling
    stop_ids: list[int]
    stop_strings: list[str] = []
    """Sampling ends once the decoded output holds one of them; the ids keep what was sampled."""


class Sampled(Struct):
    """Sampled ids with the log-probability of each under the distribution it was drawn from."""

    output_ids: list[int]
    logprobs: list[float]
    finish_reason: Literal["stop", "length"]


class TrainSample(Struct):
    """One call of an accepted episode: the sampled ids carry loss, the prompt ids never do."""

    prompt_ids: list[int]
    output_ids: list[int]


class TrainRequest(Struct):
    """One epoch over `minibatches`; each is one optimizer step, with a token mean over the whole minibatch."""

    minibatches: list[list[TrainSample]]
    learning_rate: float


class Trained(Struct):
    """`skipped` minibatches had a loss or gradient that was not finite; the weights did not move for them."""

    losses: list[float]
    grad_norms: list[float]
    tokens: int
    skipped: int
    seconds: float
    peak_bytes: int


class Publication(Struct):
    """Proof that the rollout side serves what was trained (records.md, invariant 5)."""

    version: str
    hash: str
    path: str
    manifest_hash: str
    probe_trainer: float
    probe_rollout: float
    changed: float | None = None
    """Share of the weights that differ, as served, from those of the version before; None where it isn't known."""


class PolicyEngine(Protocol):
    """A policy that samples and learns. One owner: calls other than `submit` are never concurrent."""

    info: PolicyInfo

    async def start(self) -> PolicyInfo:
        """Load the base model. Raises PolicyFailure with kind "bad-model" when it can't be found or read."""
        ...

    def submit(self, request: SampleRequest) -> asyncio.Future[Sampled]:
        """Queue one call. The future fails with PolicyFailure when the machinery does."""
        ...

    def flush(self) -> None:
        """Every episode now waits for a reply: sample what is queued (an engine that batches by itself ignores it)."""
        ...

    async def drop(self) -> None:
        """Forget every call in flight (their futures are cancelled) and whatever is kept of earlier ones.

        What is sampled next follows from weights and requests alone, so a batch of episodes that starts after a `drop`
        is the same batch whenever it is repeated. What was trained and not published is given up.
        """
        ...

    async def train(self, request: TrainRequest) -> Trained:
        """Update the trainer's weights. Nothing is served from them before `publish`."""
        ...

    async def publish(self, version: str, folder: str) -> Publication:
        """Write the trainer's weights into `folder` (which does not exist yet), serve them and prove it."""
        ...

    async def restore(self, version: str, folder: str | None, *, with_optimizer: bool) -> str:
        """Trainer and rollouts go to a published version (None: the base model). Returns its hash, proved."""
        ...

    async def close(self) -> None: ...
