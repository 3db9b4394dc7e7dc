"""Attention over a pack: every node to its ancestors, in dense parts instead of one n x n mask.

The pack's trunk (nodes that all others stand on: the few-shot header) is attended by everyone; each branch above it, a
contiguous range of nodes, is attended by itself alone. Branches of about one size are padded to a batch. Plain products
under autograd: on a CPU their backward is several times as fast as that of fused attention at these sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from whale_tui.policy.loss import Pack

NAME = "token-trie"

UNEVEN = 1.5
"""The longest branch of a batch is at most this many times as long as its shortest."""


class Layout:
    """Which nodes are trunk, and how branches are batched. dtype: of the products; softmax is fp32."""

    def __init__(self, pack: Pack, device: torch.device, dtype: torch.dtype) -> None:
        nodes = len(pack.ids)
        trunk = next((i for i, end in enumerate(pack.ends) if end != nodes), nodes)
        self.trunk = trunk = 0 if trunk == nodes else trunk  # a single path: all branch
        self.dtype = dtype
        order = torch.ones(trunk, trunk, dtype=torch.bool).triu(1)
        self.trunk_mask = torch.zeros(trunk, trunk).masked_fill_(order, -torch.inf).to(device)

        starts = [trunk]
        while pack.ends[starts[-1]] < nodes:
            starts.append(pack.ends[starts[-1]])
        ends = torch.tensor(pack.ends)
        self.batches = [Branches(group, ends, device) for group in _of_one_size([(s, pack.ends[s]) for s in starts])]
        row_of = torch.empty(nodes, dtype=torch.long)
        row_of[:trunk] = torch.arange(trunk)
        first = trunk
        for batch in self.batches:
            inside = batch.inside.flatten().nonzero()[:, 0]
            row_of[batch.place.cpu()[inside]] = first + inside
            first += len(batch.place)
        self.row_of = row_of.to(device)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """q: [heads, nodes, d], k and v: [kv heads, nodes, d]. Returns [heads, nodes, d]."""
        kv, nodes, d = k.shape
        per, trunk = q.shape[0] // kv, self.trunk
        q, k, v = (q * scale).to(self.dtype).view(kv, per, nodes, d), k.to(self.dtype), v.to(self.dtype)
        parts = [self._attend_branches(batch, q, k, v) for batch in self.batches]
        if trunk:
            scores = (q[:, :, :trunk].reshape(kv, per * trunk, d) @ k[:, :trunk].transpose(1, 2)).float()
            scores = scores.view(kv, per, trunk, trunk) + self.trunk_mask
            first = scores.softmax(-1).to(self.dtype).view(kv, per * trunk, trunk) @ v[:, :trunk]
            parts.insert(0, first.view(kv, per, trunk, d))
        return torch.cat(parts, 2)[:, :, self.row_of].reshape(kv * per, nodes, d)

    def _attend_branches(self, batch: Branches, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Output of every place of a batch, padding included: [kv heads, per, count * width, d]."""
        kv, per, _, d = q.shape
        trunk, count, width = self.trunk, batch.count, batch.width
        grouped = q[:, :, batch.place].view(kv, per, count, width, d).transpose(1, 2).reshape(kv, count, per * width, d)
        own_k, own_v = (x[:, batch.place].view(kv, count, width, d) for x in (k, v))
        scores = (grouped @ own_k.transpose(2, 3)).float().view(kv, count, per, width, width) + batch.mask
        scores = scores.view(kv, count, per * width, width)
        if trunk:
            to_trunk = grouped.reshape(kv, count * per * width, d) @ k[:, :trunk].transpose(1, 2)
            scores = torch.cat([to_trunk.view(kv, count, per * width, trunk).float(), scores], -1)
        weights = scores.softmax(-1).to(self.dtype)
        out = weights[..., trunk:] @ own_v
        if trunk:
            shared = weights[..., :trunk].reshape(kv, count * per * width, trunk) @ v[:, :trunk]
            out = out + shared.view(kv, count, per * width, d)
        return out.view(kv, count, per, width, d).transpose(1, 2).reshape(kv, per, count * width, d)


class Branches:
    """Branches padded to one width. place: [count * width] nodes; inside: [count, width], which are no padding;
    mask: additive, [count, 1, width, width].
    """

    def __init__(self, spans: list[tuple[int, int]], ends: Tensor, device: torch.device) -> None:
        self.count, self.width = len(spans), max(end - start for start, end in spans)
        steps = torch.arange(self.width)
        starts = torch.tensor([start for start, _ in spans])[:, None]
        self.inside = steps[None] < torch.tensor([end - start for start, end in spans])[:, None]
        place = torch.where(self.inside, starts + steps, starts)
        until = ends[place]
        before = (place[:, None, :] <= place[:, :, None]) & (place[:, :, None] < until[:, None, :])
        sees = before & self.inside[:, None, :] & self.inside[:, :, None]
        sees |= torch.eye(self.width, dtype=torch.bool) & ~self.inside[:, :, None]  # padding: no empty softmax
        self.place = place.flatten().to(device)
        self.mask = torch.zeros(sees.shape).masked_fill_(~sees, -torch.inf).to(device)[:, None]


def _of_one_size(spans: list[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    """Group branches, longest first, so that little of a batch is padding."""
    group: list[tuple[int, int]] = []
    for start, end in sorted(spans, key=lambda span: span[0] - span[1]):
        if group and group[0][1] - group[0][0] > UNEVEN * (end - start):
            yield group
            group = []
        group.append((start, end))
    yield group


def use(model: Any) -> Any:
    """Make a transformers model attend by the Layout its forward is given as `trie_layout`, as ever where there is
    none.
    """
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    AttentionInterface.register(NAME, partial(_attention, sdpa_attention_forward))
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model.set_attn_implementation(NAME)


def _attention(
    usual: Callable[..., Any], module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    layout: Layout | None = kwargs.pop("trie_layout", None)
    if layout is None:
        return usual(module, query, key, value, mask, **kwargs)
    scaling = kwargs.get("scaling") or query.shape[-1] ** -0.5
    return layout.attend(query[0], key[0], value[0], scaling).transpose(0, 1)[None], None
