"""Attention in parts: each part gives its output and the log of its softmax's sum, and parts are merged exactly.

Queries come scaled. Shapes: queries [batch, heads, q, d]; keys and values [batch, kv heads, k, d], heads a multiple of
kv heads.
"""

from __future__ import annotations

import torch
from torch import Tensor


def attend(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Output [batch, heads, q, d] and log-sum-exp fp32 [batch, heads, q]. mask: additive, [batch, 1, q, k]."""
    if q.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, attn_mask=mask, scale=1.0
        )
    batch, heads, n, d = q.shape
    grouped = q.reshape(batch, k.shape[1], heads // k.shape[1], n, d)
    scores = torch.matmul(grouped, k[:, :, None].transpose(-1, -2)).float()
    if causal:
        scores = scores.masked_fill(torch.ones(n, k.shape[2], dtype=torch.bool, device=q.device).triu(1), -torch.inf)
    if mask is not None:
        scores = scores + mask[:, :, None].float()
    lse = scores.logsumexp(-1)
    out = torch.matmul((scores - lse[..., None]).exp().to(v.dtype), v[:, :, None])
    return out.reshape(batch, heads, n, d), lse.reshape(batch, heads, n)


def merge(a: Tensor, a_lse: Tensor, b: Tensor, b_lse: Tensor) -> Tensor:
    """What attention over both parts' keys together gives: outputs [..., d], log-sum-exps [...]."""
    share = torch.sigmoid(a_lse - b_lse)[..., None]
    return (b + (a - b) * share).to(a.dtype)
