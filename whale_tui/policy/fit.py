"""Which architectures the fast sampler and the token trie compute exactly: dense models of Llama's kind. No torch
here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
ROPE_TYPES = ("default", "linear", "llama3")


def why_not_fast(config: Mapping[str, Any], folder: Path) -> str:
    """Why a model needs the plain path, in words; "" where the fast path knows it."""
    kind = config.get("model_type")
    if kind not in MODEL_TYPES:
        return f"architecture {kind} is not one of {', '.join(MODEL_TYPES)}"
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        return f"activation {config['hidden_act']}"
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope_type = rope.get("rope_type") or rope.get("type") or "default"
    if rope_type not in ROPE_TYPES:
        return f"rotary embedding of type {rope_type}"
    if rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) != 1.0:
        return "partial rotary embedding"
    windows = config.get("use_sliding_window", True) and config.get("sliding_window")
    if windows or any(layer != "full_attention" for layer in config.get("layer_types") or ()):
        return "sliding-window attention"
    if config.get("mlp_bias"):
        return "biases in the feed-forward layers"
    if config.get("quantization_config"):
        return "quantised weights"
    missing = {
        "model.embed_tokens.weight",
        "model.norm.weight",
        "model.layers.0.self_attn.q_proj.weight",
    } - weight_names(folder)
    return f"weights without {sorted(missing)[0]}" if missing else ""


def weight_names(folder: Path) -> set[str]:
    """Names of all tensors in the folder's safetensors files, from their headers."""
    names: set[str] = set()
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        names.update(header.keys() - {"__metadata__"})
    return names
