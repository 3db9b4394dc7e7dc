"""Attention in parts: each part gives its output and the log of its softmax's sum, and parts are merged exactly.

Queries come scaled. Shapes: queries [batch, heads, q, d]; keys and values [batch, kv heads, k, d], heads a multiple of
kv heads.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROOM = 1 << 28
"""Scores that plain products hold at once: 1 GB in fp32, and about as much again beside it."""


def attend(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Output [batch, heads, q, d] and log-sum-exp fp32 [batch, heads, q]. mask: additive, [batch, 1, q, k]."""
    if q.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, attn_mask=mask, scale=1.0
        )
    return attend_plainly(q, k, v, causal=causal, mask=mask)


def attend_plainly(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, mask: Tensor | None = None, room: int = ROOM
) -> tuple[Tensor, Tensor]:
    """The same out of plain products, on any device: some queries at a time, so that a long prompt's scores fit."""
    batch, heads, n, d = q.shape
    kv, keys = k.shape[1:3]
    step = max(1, room // (batch * heads * keys))
    outs: list[Tensor] = []
    sums: list[Tensor] = []
    for start in range(0, n, step):
        some = q[:, :, start : start + step]
        count = some.shape[2]
        products = some.reshape(batch, kv, -1, d) @ k.transpose(-1, -2)
        scores = products.float().view(batch, kv, heads // kv, count, keys)
        if causal:
            later = torch.ones(count, keys, dtype=torch.bool, device=q.device).triu(1 + start)
            scores = scores.masked_fill(later, -torch.inf)
        if mask is not None:
            scores = scores + mask[:, :, None, start : start + step].float()
        lse = scores.logsumexp(-1)
        weights = (scores - lse[..., None]).exp().to(v.dtype)
        out = weights.view(batch, kv, -1, keys) @ v
        outs.append(out.view(batch, heads, count, d))
        sums.append(lse.view(batch, heads, count))
    return torch.cat(outs, 2), torch.cat(sums, 2)


def merge(a: Tensor, a_lse: Tensor, b: Tensor, b_lse: Tensor) -> Tensor:
    """What attention over both parts' keys together gives: outputs [..., d], log-sum-exps [...]."""
    share = torch.sigmoid(a_lse - b_lse)[..., None]
    return (b + (a - b) * share).to(a.dtype)


def by_head(x: Tensor) -> Tensor:
    """[n, heads, d] -> [1, heads, n, d]."""
    return x.transpose(0, 1)[None]
