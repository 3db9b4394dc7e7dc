"""Rotary positions of a Llama-like model."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    turned = torch.empty_like(x)
    torch.mul(first, cos, out=turned[..., :half]).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=turned[..., half:]).addcmul_(first, sin)
    return turned


def frequencies(config: dict, folder: Path, head_dim: int) -> tuple[Tensor, float]:
    """Inverse frequencies [head_dim / 2] and the attention scale; scaled kinds as transformers computes them."""
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind == "default":
        theta = parameters.get("rope_theta") or config.get("rope_theta") or 10000.0
        return 1.0 / theta ** (torch.arange(0, head_dim, 2).float() / head_dim), 1.0
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    frequencies, scale = ROPE_INIT_FUNCTIONS[kind](AutoConfig.from_pretrained(folder), torch.device("cpu"))
    return frequencies.float(), float(scale)
