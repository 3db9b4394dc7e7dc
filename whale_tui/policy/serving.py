"""A version into the sampler, from its files, with the proof that its weights are what is served (proof.py)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from whale_tui.policy import artifact, proof
from whale_tui.policy.plain import PlainSampler
from whale_tui.policy.protocol import PolicyFailure
from whale_tui.policy.sampler import FastSampler

Sampler = FastSampler | PlainSampler
SEEN = 16
"""Modules, spread over the depth, whose weights an adapter is proved by."""


def take_adapter(sampler: Sampler, folder: Path, dtype: torch.dtype) -> tuple[float, float]:
    """Serve base + adapter. Returns the share of the weights it changes that differ from the base as served, and from
    what was served before. Raises PolicyFailure("publish-unproved").
    """
    deltas = artifact.deltas(folder)
    modules = list(deltas)[:: max(1, len(deltas) // SEEN)]
    before = {module: sampler.served(module).clone() for module in modules}  # in fp32 it is the weight itself
    sampler.load(deltas)
    return _prove(sampler, {module: deltas[module] for module in modules}, before, dtype)


def _prove(
    sampler: Sampler, deltas: Mapping[str, Callable[[], Tensor]], before: Mapping[str, Tensor], dtype: torch.dtype
) -> tuple[float, float]:
    """Compare what is served of some modules with base + delta."""
    moved = asked = 0.0
    from_base = from_before = total = 0
    for module, product in deltas.items():
        served, base, delta = sampler.served(module), sampler.base(module), product()
        moved += float(((served - base) * delta).sum(dtype=torch.float64))
        asked += float(delta.square().sum(dtype=torch.float64))
        from_base += int((served != base.to(dtype).float()).sum())
        from_before += int((served != before[module]).sum())
        total += served.numel()
    proof.prove_weights(moved, asked)
    return (from_base / total, from_before / total) if total else (0.0, 0.0)


def take_weights(sampler: Sampler, folder: Path) -> None:
    """Serve the weights of a version's files: each is then the file's, to the bit.

    Raises PolicyFailure("publish-unproved"). A few architectures have other names in their files; those are left to the
    probe.
    """
    sampler.replace(folder)
    served = sampler.weights()
    for name, tensor in artifact.each_weight(folder):
        if name in served and not torch.equal(served[name].cpu(), tensor.to(served[name].dtype)):
            raise PolicyFailure("publish-unproved", f"{name} is not served as {folder} has it")
