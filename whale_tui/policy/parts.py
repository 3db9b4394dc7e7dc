"""What a minibatch is computed in: packs of the token trie or padded rows, of a size that memory holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import torch
from torch import Tensor

from whale_tui.policy import loss, trie
from whale_tui.policy.full import Weights
from whale_tui.policy.lora import Adapter
from whale_tui.policy.protocol import PolicyFailure, TrainSample
from whale_tui.policy.shards import Shards

PADDED_ROWS = 8
T = TypeVar("T")


class Parts:
    """pack_nodes, padded_rows: the size of a part; `alone`: tokens of the one in work, where it is a single sample."""

    def __init__(
        self,
        held: Adapter | Weights,
        device: torch.device,
        compute: torch.dtype,
        *,
        packed: bool,
        shards: Shards | None,
    ) -> None:
        self.held, self.device, self.compute = held, device, compute
        self.packed, self.shards = packed, shards
        self.pack_nodes, self.padded_rows = 1024, PADDED_ROWS
        self.alone = 0

    def parts(self, minibatch: Sequence[TrainSample], tokens: int) -> Iterator[Tensor]:
        """The loss of one part after the other, over the tokens of the whole minibatch."""
        return self._packed(minibatch, tokens) if self.packed else self._padded(minibatch, tokens)

    def smaller(self, said: str, note: Callable[[str], None]) -> None:
        """Half the size of a part, from now on. Raises PolicyFailure where the part was a single sample."""
        if self.alone:
            raise PolicyFailure("out-of-memory", too_large(self.alone, said))
        if self.packed:
            self.pack_nodes //= 2
        else:
            self.padded_rows //= 2
        size = f"{self.pack_nodes} nodes" if self.packed else f"{self.padded_rows} rows"
        note(f"training: out of memory ({said}); the minibatch is begun anew in parts of {size}")
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _packed(self, minibatch: Sequence[TrainSample], tokens: int) -> Iterator[Tensor]:
        for pack, factor in self._mine(list(loss.packs(minibatch, self.pack_nodes))):
            self.alone = len(pack.ids) if pack.is_path() else 0
            rows = sorted(set(pack.nodes))
            with self._autocast():
                logits = self.held.causal(
                    input_ids=self._column(pack.ids),
                    position_ids=self._column(pack.positions),
                    use_cache=False,
                    logits_to_keep=torch.tensor(rows, device=self.device),
                    trie_layout=trie.Layout(pack, self.device, self.compute),
                ).logits[0]
            yield factor * loss.trie_loss(logits.float().log_softmax(-1), pack, rows, tokens)

    def _padded(self, minibatch: Sequence[TrainSample], tokens: int) -> Iterator[Tensor]:
        """The plain computation: right-padded rows, a mask from lengths. Reference in tests, fallback for any
        architecture.
        """
        ordered = sorted((s for s in minibatch if s.output_ids), key=lambda s: len(s.prompt_ids) + len(s.output_ids))
        groups = [ordered[i : i + self.padded_rows] for i in range(0, len(ordered), self.padded_rows)]
        for group, factor in self._mine(groups):
            self.alone = len(group[0].prompt_ids) + len(group[0].output_ids) if len(group) == 1 else 0
            rows = loss.padded(group)
            ids, seen, sampled = (x.to(self.device) for x in (rows.ids, rows.seen, rows.sampled))
            with self._autocast():
                logits = self.held.causal(input_ids=ids, attention_mask=seen, use_cache=False).logits
            yield factor * loss.row_loss(logits, ids, sampled, tokens)

    def _mine(self, parts: Sequence[T]) -> Iterator[tuple[T, float]]:
        """The parts that this process computes, each with a factor for its loss."""
        return self.shards.deal(parts) if self.shards else ((part, 1.0) for part in parts)

    @torch.no_grad()
    def probe(self, ids: Sequence[int]) -> Tensor:
        """Log-probability of each token of a sequence after its first: [len(ids) - 1] fp32."""
        self.held.prepare()
        with self._autocast():
            logits = self.held.causal(input_ids=self._column(ids), use_cache=False).logits[0, :-1]
        if self.shards:
            self.shards.fold(self.held.causal)
        target = torch.tensor(list(ids[1:]), device=self.device)
        return logits.float().log_softmax(-1).gather(-1, target[:, None])[:, 0].cpu()

    def _column(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(list(values), device=self.device)[None]

    def _autocast(self) -> AbstractContextManager:
        if self.compute == torch.float32:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.compute)


def too_large(tokens: int, said: str) -> str:
    return (
        f"training one sample of {tokens} tokens takes more memory than there is ({said}); "
        "set model.checkpointing = true, or lower rollout.max_context"
    )
