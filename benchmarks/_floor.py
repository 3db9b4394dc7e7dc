"""What a run's episodes and updates can't do without, in seconds of this machine's matrix products."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from msgspec import Struct
from torch.nn import functional as F

from whale_tui import records as r
from whale_tui.config import Weight
from whale_tui.journal import Journal
from whale_tui.loop.accepted import accepted_set, minibatches
from whale_tui.policy import loss
from whale_tui.policy.held import pick_dtype
from whale_tui.policy.prefixes import new_tokens
from whale_tui.policy.protocol import TrainSample
from whale_tui.records import Episode


class Size(Struct):
    """Weights of a model: those of its layers, and of the head."""

    body: int
    head: int


def size_of(folder: Path) -> Size:
    c = json.loads((folder / "config.json").read_text())
    hidden, heads = c["hidden_size"], c["num_attention_heads"]
    width = c.get("head_dim") or hidden // heads
    kv = c.get("num_key_value_heads") or heads
    layer = hidden * width * (2 * heads + 2 * kv) + 3 * hidden * c["intermediate_size"]
    return Size(c["num_hidden_layers"] * layer, c["vocab_size"] * hidden)


def flops(dtype: torch.dtype | None = None) -> float:
    """Operations a second of a product of 2,048 rows, in the type that the policy computes in here or another one."""
    dtype = dtype or pick_dtype(torch.device("cpu"))
    x, w = torch.randn(2048, 576).to(dtype), torch.randn(3072, 576).to(dtype)
    best = float("inf")
    with torch.inference_mode():
        for _ in range(30):
            started = time.perf_counter()
            F.linear(x, w)
            best = min(best, time.perf_counter() - started)
    return 2 * 2048 * w.numel() / best


def of_episodes(episodes: Iterable[Episode], size: Size) -> float:
    """Operations: each token that no other prompt before it shares once, each sampled one and its logits once."""
    calls = [call for episode in episodes for call in episode.calls]
    sampled = sum(len(call.output_ids) for call in calls)
    return 2.0 * size.body * (new_tokens(sorted(c.prompt_ids for c in calls)) + sampled) + 2.0 * size.head * sampled


def of_update(batches: Sequence[Sequence[TrainSample]], size: Size) -> float:
    """Operations: a product forward and one back to the input for each node of the trie, and for each trained place
    the head's.
    """
    packs = [pack for batch in batches for pack in loss.packs(batch, 1 << 30)]
    return 4.0 * sum(size.body * len(pack.ids) + size.head * len(set(pack.nodes)) for pack in packs)


class Work:
    """Operations that came to a run's events, asked in their order."""

    def __init__(self, journal: Journal, options: Weight, size: Size) -> None:
        self._journal, self._options, self._size = journal, options, size
        self._step: list[Episode] = []

    def of(self, events: Iterable[r.AnyEvent]) -> float:
        """Of these together: candidates evaluated in one batch share what their prompts share."""
        episodes: list[Episode] = []
        updates = 0.0
        for event in events:
            name = getattr(event, "segment", "") or getattr(getattr(event, "score", None), "segment", "")
            if name:
                found = self._journal.segment(name)
                episodes += found
                if isinstance(event, r.StepSampled):
                    self._step = found
            elif isinstance(event, r.StepFinished) and event.trained:
                kept = accepted_set(self._step, self._step[0].policy_hash, self._options)
                updates += of_update(minibatches(kept, self._options.minibatch, ""), self._size)
        return of_episodes(episodes, self._size) + updates
