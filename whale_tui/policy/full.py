"""All weights as what is trained: fp32 masters, and what is served of them, rounded, as a model in the hub's layout."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from whale_tui.policy import artifact, trie
from whale_tui.policy.protocol import PolicyFailure
from whale_tui.policy.shards import Shards, like

BESIDE = (".json", ".jinja", ".model", ".txt")
"""Endings of the base model's files that go along, so that a version's folder is a model of its own."""


class Weights:
    """served: the type that rollouts compute in, and so that of a version's files. Where it holds less than fp32 the
    masters are kept beside them, with the optimizer's state.
    """

    def __init__(
        self, folder: Path, device: torch.device, *, served: torch.dtype, packed: bool, shards: Shards | None = None
    ) -> None:
        self.folder, self.served = folder, served
        self.model: Any = _load(folder)
        self._described = {"dtype": _name(served), "use_cache": self.model.config.use_cache}
        self.model.config.use_cache = False
        self.causal = self.model
        if packed:
            trie.use(self.model)
        if shards:
            shards.split(self.model)
        else:
            self.model.to(device)
        self.model.train()
        self.parameters: dict[str, torch.nn.Parameter] = dict(self.model.named_parameters())

    def prepare(self) -> None:
        """Nothing is derived from the masters."""

    def tensors(self) -> dict[str, Tensor]:
        return {name: p.detach() for name, p in self.parameters.items()}

    @torch.no_grad()
    def reset(self) -> None:
        """Back to the base model."""
        self._take(_load(self.folder).state_dict())

    @torch.no_grad()
    def read(self, folder: Path, state: Mapping[str, Any]) -> None:
        """Take over a version: the masters where they are kept, else what was served."""
        self._take(state.get("masters") or _load(folder).state_dict())

    def _take(self, tensors: Mapping[str, Tensor]) -> None:
        for name, parameter in self.parameters.items():
            parameter.copy_(like(tensors[name], parameter))

    def beside(self, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        """What resuming needs beside a version's files."""
        return {} if self.served == torch.float32 else {"masters": {n: t.cpu() for n, t in tensors.items()}}

    @torch.no_grad()
    def write(self, folder: Path, base_hash: str, tensors: Mapping[str, Tensor]) -> str:
        """The files of a version, into a folder that is there. Returns the version's hash."""
        kept = {name: buffer for name, buffer in self.model.named_buffers() if name in self.model.state_dict()}
        rounded = {name: t.to(self.served) for name, t in tensors.items()}
        self.model.save_pretrained(folder, state_dict=kept | rounded)
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        (folder / "config.json").write_text(json.dumps(config | self._described, indent=2) + "\n", encoding="utf-8")
        for path in self.folder.iterdir():
            if path.suffix in BESIDE and path.name != "config.json" and not path.name.endswith(".index.json"):
                shutil.copyfile(path, folder / path.name)
        return artifact.hash_weights(folder, base_hash)

    @torch.no_grad()
    def prove_written(self, folder: Path, tensors: Mapping[str, Tensor]) -> None:
        """What a version's files hold is what is trained here, rounded. Raises PolicyFailure("publish-unproved").

        A few architectures have other names in their files; those are left to the probe.
        """
        for name, tensor in artifact.each_weight(folder):
            if name in tensors and not torch.equal(tensor, tensors[name].to(tensor.dtype).cpu()):
                raise PolicyFailure("publish-unproved", f"{folder}: {name} was not written as it was trained")


def _load(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
