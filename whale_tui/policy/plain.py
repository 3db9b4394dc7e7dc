"""The plain sampling path: transformers' own forward and cache, one left-padded batch at a time.

The fallback for architectures that the fast path does not know, and the reference that tests compare the fast path
with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from whale_tui.policy.draw import Drawer
from whale_tui.policy.protocol import Sampled
from whale_tui.policy.rows import Row, Stops
from whale_tui.policy.trainer import Interrupted


class PlainSampler:
    """Same interface as sampler.FastSampler."""

    def __init__(
        self,
        folder: Path,
        device: torch.device,
        dtype: torch.dtype,
        stops: Stops,
        max_rows: int,
        *,
        merges: bool = True,
    ) -> None:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
        model.requires_grad_(False)
        head = model.get_output_embeddings()
        modules = {name: m for name, m in model.named_modules() if isinstance(m, torch.nn.Linear) and m is not head}
        self.linears = {name: (m.in_features, m.out_features) for name, m in modules.items()}
        # Versions are merged from the fp32 base each time; where the served copy is fp32 on the CPU too, this is its
        # double.
        self._base = {name: m.weight.detach().clone() for name, m in modules.items()} if merges else {}
        self.model = model.to(device, dtype)
        self.device = device
        self.vocabulary = model.get_input_embeddings().weight.shape[0]
        self.parameters = sum(p.numel() for p in model.parameters())
        self._stops = stops
        self._max_rows = max_rows
        self._waiting: list[Row] = []

    @torch.no_grad()
    def load(self, deltas: Mapping[str, Callable[[], Tensor]]) -> None:
        """Serve base + delta, merged anew from the base."""
        for name, base in self._base.items():
            self.model.get_submodule(name).weight.copy_(base + deltas[name]() if name in deltas else base)
        self.clear()

    @torch.no_grad()
    def replace(self, folder: Path) -> None:
        """Serve the weights in a folder's files."""
        from transformers import AutoModelForCausalLM

        found = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
        for name, weight in self.weights().items():
            weight.copy_(found[name])
        self.clear()

    def weights(self) -> dict[str, Tensor]:
        return dict(self.model.named_parameters())

    def served(self, module: str) -> Tensor:
        return self.model.get_submodule(module).weight.float().cpu()

    def base(self, module: str) -> Tensor:
        return self._base[module]

    def submit(self, rows: Sequence[Row]) -> None:
        self._waiting += rows

    def clear(self) -> None:
        self._waiting = []

    @torch.inference_mode()
    def advance(self, interrupted: Callable[[], bool]) -> list[tuple[int, Sampled]]:
        """Sample the oldest waiting rows, at most `max_rows`, to their ends."""
        rows, self._waiting = self._waiting[: self._max_rows], self._waiting[self._max_rows :]
        if not rows:
            return []
        longest = max(len(row.request.prompt_ids) for row in rows)
        ids = torch.zeros(len(rows), longest, dtype=torch.long)
        seen = torch.zeros_like(ids)
        for i, row in enumerate(rows):
            prompt = row.request.prompt_ids
            ids[i, longest - len(prompt) :] = torch.tensor(prompt)
            seen[i, longest - len(prompt) :] = 1
        ids, seen = ids.to(self.device), seen.to(self.device)
        position = (seen.cumsum(-1) - 1).clamp(min=0)
        requests = [row.request for row in rows]
        drawer = Drawer([r.sampling for r in requests], [r.seed for r in requests], self.vocabulary, self.device)
        cache = None
        for step in range(max(r.max_tokens for r in requests)):
            if interrupted():
                raise Interrupted
            out = self.model(
                input_ids=ids,
                attention_mask=seen,
                position_ids=position,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            cache = out.past_key_values
            logits = out.logits[:, -1].float()
            values, candidates = logits.topk(drawer.candidates(), dim=-1)
            tokens, logprobs = drawer(values, candidates, np.full(len(rows), step))
            for row, token, logprob in zip(rows, tokens, logprobs, strict=True):
                if not row.finished:
                    row.take(token, logprob, self._stops)
            if all(row.finished for row in rows):
                break
            ids = torch.tensor(tokens, device=self.device)[:, None]
            seen = torch.cat([seen, seen.new_ones(len(rows), 1)], 1)
            position = position[:, -1:] + 1
        return [(row.ticket, row.sampled()) for row in rows]

    @torch.inference_mode()
    def probe(self, ids: Sequence[int]) -> Tensor:
        """Log-probability of each token of a sequence after its first: [len(ids) - 1] fp32."""
        tokens = torch.tensor(list(ids), device=self.device)
        logits = self.model(input_ids=tokens[None], use_cache=False).logits[0, :-1]
        return logits.float().log_softmax(-1).gather(-1, tokens[1:, None])[:, 0].cpu()
