"""Attention over a pack: every node to its ancestors, in two dense parts instead of one n x n mask.

The pack's trunk (nodes that all others stand on: the few-shot header) is attended by everyone; each branch above it, a
contiguous range of nodes, is attended by itself alone. Plain products under autograd: on a CPU their backward is
several times as fast as that of fused attention at these sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from whale_tui.policy.loss import Pack

NAME = "token-trie"


class Layout:
    """Which nodes are trunk, and how branches are padded to a batch. dtype: of the products; softmax is fp32."""

    def __init__(self, pack: Pack, device: torch.device, dtype: torch.dtype) -> None:
        nodes = len(pack.ids)
        trunk = next((i for i, end in enumerate(pack.ends) if end != nodes), nodes)
        if trunk == nodes:  # a single path: all branch
            trunk = 0
        starts = [trunk]
        while pack.ends[starts[-1]] < nodes:
            starts.append(pack.ends[starts[-1]])
        sizes = [pack.ends[start] - start for start in starts]
        if len(sizes) * max(sizes) > 2 * sum(sizes):  # branches too uneven to be padded to one size
            starts, sizes = [trunk], [nodes - trunk]
        self.trunk, self.branches, self.width = trunk, len(sizes), max(sizes)
        self.dtype = dtype

        steps = torch.arange(self.width)
        start = torch.tensor(starts)[:, None]
        inside = steps[None] < torch.tensor(sizes)[:, None]
        place = torch.where(inside, start + steps, trunk)
        ends = torch.tensor(pack.ends)[place]
        sees = (place[:, None, :] <= place[:, :, None]) & (place[:, :, None] < ends[:, None, :]) & inside[:, None, :]
        sees |= torch.eye(self.width, dtype=torch.bool) & ~inside[:, :, None]  # padding sees itself: no empty softmax
        self.place = place.flatten().to(device)
        self.back = inside.flatten().nonzero()[:, 0].to(device)
        self.branch_mask = torch.zeros(sees.shape).masked_fill_(~sees, -torch.inf).to(device)
        order = torch.ones(trunk, trunk, dtype=torch.bool).triu(1)
        self.trunk_mask = torch.zeros(trunk, trunk).masked_fill_(order, -torch.inf).to(device)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """q: [heads, nodes, d], k and v: [kv heads, nodes, d]. Returns [heads, nodes, d]."""
        kv, nodes, d = k.shape
        per, trunk, branches, width = q.shape[0] // kv, self.trunk, self.branches, self.width
        q, k, v = (q * scale).to(self.dtype).view(kv, per, nodes, d), k.to(self.dtype), v.to(self.dtype)
        trunk_k, trunk_v = k[:, :trunk], v[:, :trunk]

        padded = q[:, :, self.place].view(kv, per, branches, width, d)
        branch_k = k[:, self.place].view(kv, branches, width, d)
        branch_v = v[:, self.place].view(kv, branches, width, d)
        grouped = padded.transpose(1, 2).reshape(kv, branches, per * width, d)
        own = (grouped @ branch_k.transpose(2, 3)).view(kv, branches, per, width, width).float()
        own = own + self.branch_mask[None, :, None]
        to_trunk = grouped.reshape(kv, branches * per * width, d) @ trunk_k.transpose(1, 2)
        to_trunk = to_trunk.view(kv, branches, per, width, trunk).float()
        weights = torch.cat([to_trunk, own], -1).softmax(-1).to(self.dtype)
        out = weights[..., :trunk].reshape(kv, branches * per * width, trunk) @ trunk_v
        out = (
            out.view(kv, branches, per * width, d)
            + weights[..., trunk:].reshape(kv, branches, per * width, width) @ branch_v
        )
        out = out.view(kv, branches, per, width, d).transpose(1, 2).reshape(kv, per, branches * width, d)
        out = out[:, :, self.back]
        if trunk:
            scores = (q[:, :, :trunk].reshape(kv, per * trunk, d) @ trunk_k.transpose(1, 2)).float()
            scores = scores.view(kv, per, trunk, trunk) + self.trunk_mask
            first = scores.softmax(-1).to(self.dtype).view(kv, per * trunk, trunk) @ trunk_v
            out = torch.cat([first.view(kv, per, trunk, d), out], 2)
        return out.reshape(kv * per, nodes, d)


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
