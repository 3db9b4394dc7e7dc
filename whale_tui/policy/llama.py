"""A dense Llama-like decoder for inference: fused projections, packed tokens, attention left to the caller.

Matrices are held once, in the compute dtype (bf16 or fp32); norms and the residual stream are fp32. A weight version
is merged into them in place, each time from the fp32 base in the model's files, so that nothing drifts; one of all
weights takes their place.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from whale_tui.policy.files import TensorFiles
from whale_tui.policy.rotary import frequencies, rotate

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, queries [n, kv heads, queries per kv head, d], keys [n, kv heads, d], values like keys) -> [n, heads * d].

Queries come scaled by 1/sqrt(d). Everything is in the compute dtype."""

FEW = 64
"""Rows up to which products are taken with the weights first, where that is faster."""

PART = 3072
"""Words of the vocabulary in one product of the head, where its weights come first."""

FUSED = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}


class Layer:
    """Tensors of one decoder layer, filled by Llama."""

    qkv: Tensor
    qkv_bias: Tensor | None
    o: Tensor
    o_bias: Tensor | None
    gate_up: Tensor
    down: Tensor
    attention_norm: Tensor
    mlp_norm: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None


class Llama:
    """merges: versions are adapters, merged from the base; False: they are weights of their own (`replace`)."""

    def __init__(self, folder: Path, device: torch.device, dtype: torch.dtype, *, merges: bool = True) -> None:
        config = json.loads((folder / "config.json").read_text())
        self.device, self.dtype = device, dtype
        # In fp32 MKL reads weights up to thrice as fast where they come first and rows are few.
        self._weights_first = device.type == "cpu" and dtype == torch.float32
        self.hidden = config["hidden_size"]
        self.heads = config["num_attention_heads"]
        self.kv_heads = config.get("num_key_value_heads") or self.heads
        self.head_dim = config.get("head_dim") or self.hidden // self.heads
        self.intermediate = config["intermediate_size"]
        self.eps = config.get("rms_norm_eps", 1e-6)
        self.depth = config["num_hidden_layers"]
        self._files = TensorFiles(folder)
        self.embedding = self._base("model.embed_tokens.weight").to(device, dtype)
        self.vocabulary = self.embedding.shape[0]
        tied = config.get("tie_word_embeddings", False) or "lm_head.weight" not in self._files
        self.head = self.embedding if tied else self._base("lm_head.weight").to(device, dtype)
        self.norm = self._base("model.norm.weight").to(device)
        self._kept: dict[str, Tensor] = {}
        self._shapes = {name.split(".", 3)[3]: shape for name, shape in self.linears().items()}
        if merges:
            self._keep_base()
        self.layers = [self._layer(i) for i in range(self.depth)]
        self._frequencies, self._rope_scale = frequencies(config, folder, self.head_dim)
        self._rope_table(1024)
        counted = [name for name in self._files if not (tied and name == "lm_head.weight")]
        self.parameters = sum(map(self._files.size, counted))

    # -------------------------------------------------------------------------------------------------------- weights

    def linears(self) -> dict[str, tuple[int, int]]:
        """Every linear module that an adapter may touch -> (in, out)."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        shapes = {
            "self_attn.q_proj": (self.hidden, q),
            "self_attn.k_proj": (self.hidden, kv),
            "self_attn.v_proj": (self.hidden, kv),
            "self_attn.o_proj": (q, self.hidden),
            "mlp.gate_proj": (self.hidden, self.intermediate),
            "mlp.up_proj": (self.hidden, self.intermediate),
            "mlp.down_proj": (self.intermediate, self.hidden),
        }
        return {f"model.layers.{i}.{name}": shape for i in range(self.depth) for name, shape in shapes.items()}

    @torch.no_grad()
    def load(self, deltas: Mapping[str, Callable[[], Tensor]]) -> None:
        """Make every matrix base + delta (fp32 sum, rounded once)."""
        unknown = set(deltas) - set(self.linears())
        if unknown:
            raise ValueError(f"the adapter changes {sorted(unknown)[0]}, which this model does not have")
        for module in self.linears():
            weight = self.base(module)
            if module in deltas:
                weight = weight + deltas[module]()
            self._view(module).copy_(weight)

    @torch.no_grad()
    def replace(self, folder: Path) -> None:
        """Take every weight from the files of another folder of the same model."""
        files = TensorFiles(folder)
        for name, weight in self.weights().items():
            weight.copy_(files.tensor(name))

    def weights(self) -> dict[str, Tensor]:
        """What is computed with, by the names that files give it. Views: they change what is served."""
        found = {"model.embed_tokens.weight": self.embedding, "model.norm.weight": self.norm}
        if self.head is not self.embedding:
            found["lm_head.weight"] = self.head
        for module in self.linears():
            found[f"{module}.weight"] = self._view(module)
        for i, layer in enumerate(self.layers):
            prefix = f"model.layers.{i}."
            found[f"{prefix}input_layernorm.weight"] = layer.attention_norm
            found[f"{prefix}post_attention_layernorm.weight"] = layer.mlp_norm
            if layer.q_norm is not None and layer.k_norm is not None:
                found[f"{prefix}self_attn.q_norm.weight"] = layer.q_norm
                found[f"{prefix}self_attn.k_norm.weight"] = layer.k_norm
            if layer.qkv_bias is not None:
                parts = layer.qkv_bias.split([self._shapes[part][1] for part in FUSED["qkv"]])
                found |= {f"{prefix}{part}.bias": bias for part, bias in zip(FUSED["qkv"], parts, strict=True)}
            if layer.o_bias is not None:
                found[f"{prefix}self_attn.o_proj.bias"] = layer.o_bias
        return found

    def base(self, module: str) -> Tensor:
        """A module's weight as the model's files have it: fp32 [out, in], on the CPU."""
        return self._kept[module] if module in self._kept else self._base(f"{module}.weight")

    def served(self, module: str) -> Tensor:
        """A module's weight as it is computed with, as fp32 on the CPU."""
        return self._view(module).float().cpu()

    def _view(self, module: str) -> Tensor:
        _, _, number, name = module.split(".", 3)
        for fused, parts in FUSED.items():
            if name in parts:
                sizes = [self._shapes[part][1] for part in parts]
                start = sum(sizes[: parts.index(name)])
                return getattr(self.layers[int(number)], fused)[start : start + sizes[parts.index(name)]]
        raise KeyError(module)

    def _keep_base(self) -> None:
        """Hold the fp32 base in memory where it is small beside it: a merge must not wait for a disk."""
        size = 4 * sum(a * b for a, b in self.linears().values())
        if size < memory_bytes(torch.device("cpu")) / 8:
            self._kept = {module: self._base(f"{module}.weight").clone() for module in self.linears()}

    def _layer(self, i: int) -> Layer:
        layer, prefix = Layer(), f"model.layers.{i}."
        for fused, parts in FUSED.items():
            matrix = torch.cat([self.base(prefix + part).to(self.device, self.dtype) for part in parts])
            setattr(layer, fused, matrix)
        layer.qkv_bias = self._bias([prefix + part for part in FUSED["qkv"]])
        layer.o_bias = self._bias([prefix + "self_attn.o_proj"])
        layer.attention_norm = self._base(prefix + "input_layernorm.weight").to(self.device)
        layer.mlp_norm = self._base(prefix + "post_attention_layernorm.weight").to(self.device)
        normed = prefix + "self_attn.q_norm.weight" in self._files
        layer.q_norm = self._base(prefix + "self_attn.q_norm.weight").to(self.device) if normed else None
        layer.k_norm = self._base(prefix + "self_attn.k_norm.weight").to(self.device) if normed else None
        return layer

    def _bias(self, modules: list[str]) -> Tensor | None:
        if f"{modules[0]}.bias" not in self._files:
            return None
        return torch.cat([self._base(f"{module}.bias") for module in modules]).to(self.device, self.dtype)

    def _base(self, name: str) -> Tensor:
        return self._files.tensor(name).float()

    # -------------------------------------------------------------------------------------------------------- forward

    def forward(self, ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """ids, positions: [n], tokens in any order. Returns the last layer's output after its norm: fp32 [n,
        hidden].
        """
        n, per = len(ids), self.heads // self.kv_heads
        q_size, kv_size = self.heads * self.head_dim, self.kv_heads * self.head_dim
        longest = int(positions.max()) + 1
        if longest > len(self._cos):
            self._rope_table(2 * longest)
        # Queries are scaled by 1/sqrt(d) as they are turned: one pass less over them.
        scale = torch.ones(self.heads + self.kv_heads, 1, device=self.device)
        scale[: self.heads] = self.head_dim**-0.5
        cos, sin = self._cos[positions][:, None] * scale, self._sin[positions][:, None] * scale
        x = F.embedding(ids, self.embedding).float()
        for i, layer in enumerate(self.layers):
            qkv = self._product(self._normed(x, layer.attention_norm), layer.qkv, layer.qkv_bias)
            qk = qkv[:, : q_size + kv_size].view(n, self.heads + self.kv_heads, self.head_dim)
            if layer.q_norm is not None and layer.k_norm is not None:
                q, k = qk[:, : self.heads].float(), qk[:, self.heads :].float()
                qk = torch.cat([self._normed(q, layer.q_norm), self._normed(k, layer.k_norm)], 1)
            qk = rotate(qk.float(), cos, sin).to(self.dtype)
            q = qk[:, : self.heads].view(n, self.kv_heads, per, self.head_dim)
            k = qk[:, self.heads :]
            v = qkv[:, q_size + kv_size :].view(n, self.kv_heads, self.head_dim)
            x += self._product(attend(i, q, k, v), layer.o, layer.o_bias)
            gate_up = self._product(self._normed(x, layer.mlp_norm), layer.gate_up)
            gate = F.silu(gate_up[:, : self.intermediate])
            x += self._product(gate.mul_(gate_up[:, self.intermediate :]), layer.down)
        return F.rms_norm(x, (self.hidden,), self.norm, self.eps)

    def candidates(self, hidden: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The `count` highest logits of each row, fp32 [n, count], and their ids.

        Found among logits in the compute dtype, then computed again with fp32 sums: bf16 alone would round a logit of
        20 to eighths and distort the distribution.
        """
        rough = self._logits(hidden.to(self.dtype))
        if count < self.vocabulary:
            highest, ids = rough.topk(count, dim=-1)
            if self.dtype == torch.float32:
                return highest, ids
            return torch.bmm(F.embedding(ids, self.head).float(), hidden[:, :, None])[:, :, 0], ids
        exact = rough if self.dtype == torch.float32 else hidden @ self.head.float().T
        return exact, torch.arange(self.vocabulary, device=self.device).expand(len(exact), -1)

    def logprobs(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Log-probability of one target a row, fp32 [n]."""
        logits = hidden @ self.head.float().T
        return logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0]

    def _logits(self, hidden: Tensor) -> Tensor:
        """[n, vocabulary], in the compute dtype."""
        if not self._weights_first:
            return F.linear(hidden, self.head)
        logits = hidden.new_empty(len(hidden), self.vocabulary)
        for start in range(0, self.vocabulary, PART):
            part = slice(start, start + PART)
            logits[:, part] = torch.mm(self.head[part], hidden.T).T
        return logits

    def _product(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x weight^T + bias: [n, out]."""
        if self._weights_first and len(x) <= FEW:
            out = torch.mm(weight, x.T).T.contiguous()
            return out if bias is None else out.add_(bias)
        return F.linear(x, weight, bias)

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self.eps).to(self.dtype)

    def _rope_table(self, length: int) -> None:
        angles = torch.arange(length)[:, None].float() * self._frequencies[None]
        self._cos = (angles.cos() * self._rope_scale).to(self.device)
        self._sin = (angles.sin() * self._rope_scale).to(self.device)


def memory_bytes(device: torch.device) -> int:
    """Memory of the machine, or what is free of the GPU's."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
