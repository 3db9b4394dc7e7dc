"""A LoRA adapter as what is trained, and its layers as one product: it is merged into a copy of the weight, its
gradient taken at the merged weight.

x W' with W' = W + scale * B A, rounded to the compute dtype exactly as the sampler rounds what it serves, so gradients
are taken at the policy that was sampled from. The adapter's own gradients follow from those of W' without forming them:
dB = scale * dy^T (x A^T), dA = scale * (dy B)^T x.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from whale_tui.policy import artifact, trie
from whale_tui.policy.shards import Shards, like


class Adapter:
    """LoRA over frozen weights. Its state is fully described by `tensors()`; what is served of it is merged, so there
    is nothing to keep beside its files.
    """

    def __init__(
        self,
        folder: Path,
        device: torch.device,
        *,
        rank: int,
        alpha: int,
        seed: int,
        compute: torch.dtype,
        packed: bool,
        shards: Shards | None = None,
    ) -> None:
        from peft import LoraConfig, get_peft_model
        from transformers import AutoModelForCausalLM

        self.causal: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
        self.causal.config.use_cache = False
        torch.manual_seed(seed)
        config = LoraConfig(
            r=rank, lora_alpha=alpha, lora_dropout=0.0, bias="none", target_modules="all-linear", task_type="CAUSAL_LM"
        )
        self.model: Any = get_peft_model(self.causal, config)
        self.model.peft_config["default"].base_model_name_or_path = str(folder)
        if packed:
            trie.use(self.causal)
        self._initial = {name: p.detach().clone() for name, p in self.model.named_parameters() if p.requires_grad}
        if shards:  # what is sharded can't be merged into: peft's own layers compute
            shards.split(self.causal)
            self._merged: list[MergedLinear] = []
        else:
            self._merged = use(self.model.to(device), compute)
        self.model.train()
        self.parameters = {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def prepare(self) -> None:
        """The adapter may have changed since: a product of rank r a layer, nothing beside a forward."""
        for layer in self._merged:
            layer.merge()

    def tensors(self) -> dict[str, Tensor]:
        """Under the names that peft (and so vLLM) gives them in a file."""
        return {_file_name(name): p.detach() for name, p in self.parameters.items()}

    @torch.no_grad()
    def reset(self) -> None:
        """Back to the base model: the adapter as it was first drawn."""
        for name, parameter in self.parameters.items():
            parameter.copy_(like(self._initial[name], parameter))

    @torch.no_grad()
    def read(self, folder: Path, state: Mapping[str, Any]) -> None:
        """Take over a version's adapter."""
        adapter = artifact.read_adapter(folder)
        expected = {_file_name(name): p for name, p in self.parameters.items()}
        if set(expected) != set(adapter) or any(expected[n].shape != t.shape for n, t in adapter.items()):
            raise ValueError("the adapter has other layers or another rank than this run's")
        for name, parameter in expected.items():
            parameter.copy_(like(adapter[name], parameter))

    def beside(self, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        return {}

    def write(self, folder: Path, base_hash: str, tensors: Mapping[str, Tensor]) -> str:
        """The files of a version, into a folder that is there. Returns the version's hash."""
        save_file({name: t.cpu().contiguous() for name, t in tensors.items()}, folder / artifact.ADAPTER)
        config = {**self.model.peft_config["default"].to_dict(), "inference_mode": True}
        config = {key: sorted(value) if isinstance(value, set) else value for key, value in config.items()}
        (folder / artifact.ADAPTER_CONFIG).write_bytes(msgspec.json.format(msgspec.json.encode(config), indent=2))
        return artifact.hash_tensors(tensors, base_hash)

    def prove_written(self, folder: Path, tensors: Mapping[str, Tensor]) -> None:
        """The hash is that of what is trained."""


def _file_name(parameter: str) -> str:
    return parameter.replace(".default.weight", ".weight")


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
