"""LoRA layers as one product: the adapter is merged into a copy of the weight, its gradient taken at the merged weight.

x W' with W' = W + scale * B A, rounded to the compute dtype exactly as the sampler rounds what it serves, so gradients
are taken at the policy that was sampled from. The adapter's own gradients follow from those of W' without forming them:
dB = scale * dy^T (x A^T), dA = scale * (dy B)^T x.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, a: Tensor, b: Tensor, merged: Tensor, bias: Tensor | None, scale: float) -> Tensor:
        lean = x.to(merged.dtype)
        ctx.save_for_backward(lean, a, b, merged)
        ctx.scale, ctx.dtype = scale, x.dtype
        return F.linear(lean, merged, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, a, b, merged = ctx.saved_tensors
        dy = grads[0].to(merged.dtype)
        dx = (dy @ merged).to(ctx.dtype)
        dy, x = dy.flatten(0, -2), x.flatten(0, -2)
        db = dy.T @ (x @ a.to(x.dtype).T)
        da = (dy @ b.to(x.dtype)).T @ x
        return dx, da.to(a.dtype) * ctx.scale, db.to(b.dtype) * ctx.scale, None, None, None


class MergedLinear:
    """The forward of one of peft's LoRA layers (a linear one, with one active adapter and no dropout)."""

    def __init__(self, layer: Any, compute: torch.dtype) -> None:
        self.base: Tensor = layer.base_layer.weight
        self.bias: Tensor | None = layer.base_layer.bias
        if compute != torch.float32 and torch.equal(self.base.to(compute).float(), self.base):
            self.base.data = self.base.data.to(compute)  # nothing is lost, half the memory
        if self.bias is not None:
            self.bias.data = self.bias.data.to(compute)
        self.a: Tensor = layer.lora_A["default"].weight
        self.b: Tensor = layer.lora_B["default"].weight
        self.scale: float = layer.scaling["default"]
        self.merged = torch.empty_like(self.base, dtype=compute)

    @torch.no_grad()
    def merge(self) -> None:
        self.merged.copy_(torch.addmm(self.base.float(), self.b, self.a, alpha=self.scale))

    def __call__(self, x: Tensor) -> Tensor:
        return _Product.apply(x, self.a, self.b, self.merged, self.bias, self.scale)


def use(model: Any, compute: torch.dtype) -> list[MergedLinear]:
    """Give every LoRA layer of a peft model the merged forward. Each must be merged anew when the adapter changes."""
    from peft.tuners.lora import Linear

    made: list[MergedLinear] = []
    for module in model.modules():
        if isinstance(module, Linear):
            made.append(MergedLinear(module, compute))
            module.__dict__["forward"] = made[-1]  # an instance's own forward comes before its class's
    return made
