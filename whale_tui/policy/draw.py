"""Drawing tokens from logits: the one place where a distribution is processed and a random number is used.

Order of processing: temperature, then top-k, then top-p. A draw depends on (seed, position) and on its row's logits
alone, never on the rows beside it, so that a call can be repeated in any batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from whale_tui.records import Sampling

MARGIN = 12
"""Candidates taken beyond top-k from rounded logits before they are ranked again by exact ones."""


def uniforms(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Counter-based random numbers in (0, 1) with 53 bits: splitmix64's mixer over (seed, position)."""
    with np.errstate(over="ignore"):
        x = _mix(seeds.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15))
        x = _mix(x ^ (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(0xD1B54A32D192ED03))
    return ((x >> np.uint64(11)).astype(np.float64) + 0.5) / 2.0**53


def _mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class Drawer:
    """The sampling settings of a batch of rows, as columns. Rebuilt only when rows come or go."""

    def __init__(
        self, samplings: Sequence[Sampling], seeds: Sequence[int], vocabulary: int, device: torch.device
    ) -> None:
        if device.type == "mps":  # it has no fp64, and what is drawn from is small
            device = torch.device("cpu")
        self.seeds = np.array([seed & 0xFFFFFFFFFFFFFFFF for seed in seeds], dtype=np.uint64)
        limits = [s.top_k if 0 < s.top_k < vocabulary else vocabulary for s in samplings]
        limits = [1 if s.temperature == 0 else k for s, k in zip(samplings, limits, strict=True)]
        self.width = max(limits)

        def column(values: list, dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)[:, None]

        self.temperature = column([s.temperature or 1.0 for s in samplings], torch.float64)
        self.top_p = column([s.top_p for s in samplings], torch.float64)
        self.cut = torch.arange(self.width, device=device)[None] >= column(limits, torch.long)
        self.device = device
        self.vocabulary = vocabulary

    def candidates(self) -> int:
        """How many of the highest logits must be looked at."""
        return min(self.width + MARGIN, self.vocabulary)

    def __call__(self, logits: Tensor, ids: Tensor, positions: np.ndarray) -> tuple[list[int], list[float]]:
        """Draw one token a row.

        logits: [rows, candidates], ids: their token ids, both in any order; positions: [rows], tokens drawn so far.
        Returns ids and log-probabilities under the processed distribution (temperature 0 is a point mass: 0.0).
        """
        values, rank = logits.to(self.device).double().topk(self.width, dim=-1)
        ids = ids.to(self.device).gather(-1, rank)
        scaled = (values / self.temperature).masked_fill(self.cut, -torch.inf)
        probability = scaled.softmax(-1)
        before = probability.cumsum(-1) - probability
        probability = probability.masked_fill(before >= self.top_p, 0.0)  # the token that crosses top_p stays
        cumulative = probability.cumsum(-1)
        total = cumulative[:, -1:]
        u = torch.from_numpy(uniforms(self.seeds, positions)).to(self.device)[:, None] * total
        choice = (cumulative <= u).sum(-1, keepdim=True).clamp(max=self.width - 1)
        # Rounding may leave u at the very end, past the last token with any probability.
        last = (probability > 0).sum(-1, keepdim=True) - 1
        choice = torch.minimum(choice, last)
        logprob = (probability.gather(-1, choice) / total).log()
        return ids.gather(-1, choice)[:, 0].tolist(), logprob[:, 0].tolist()
