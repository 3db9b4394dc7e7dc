"""One process's part in training with several: parameters split over them by FSDP2, through accelerate."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed

T = TypeVar("T")
MEET_SECONDS = 600.0
"""Longest wait for the other processes, of which the slowest may still be loading."""


class Shards:
    """rank: this process's number of `size`. meeting: a file that does not exist yet, the same for all.

    Every method is called by all processes, in one order.
    """

    def __init__(self, rank: int, size: int, device: torch.device, meeting: Path) -> None:
        from accelerate import Accelerator
        from accelerate.utils import FullyShardedDataParallelPlugin

        self.rank, self.size, self.device = rank, size, device
        if device.type == "cuda":
            torch.cuda.set_device(device)
        distributed.init_process_group(
            "nccl" if device.type == "cuda" else "gloo", init_method=f"file://{meeting}", rank=rank, world_size=size,
            timeout=timedelta(seconds=MEET_SECONDS),
        )  # fmt: skip
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap", cpu_ram_efficient_loading=False
        )
        self._accelerator = Accelerator(cpu=device.type == "cpu", fsdp_plugin=plugin)
        self._accelerator.state.fsdp_plugin = plugin  # on a CPU accelerate leaves it out

    def split(self, model: Any) -> None:
        """Shard a transformers model in place, a layer at a time."""
        from accelerate.utils import fsdp2_prepare_model

        fsdp2_prepare_model(self._accelerator, model)

    def fold(self, model: Any) -> None:
        """Give up what a forward pass has gathered for a backward pass that does not come: it would be used again,
        whatever is written into the parameters meanwhile.
        """
        from torch.distributed.fsdp import FSDPModule

        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def deal(self, parts: Sequence[T]) -> Iterator[tuple[T, float]]:
        """This process's share of parts, with a factor for the loss of each. Gradients are averaged over processes, so
        that a part counts `size` times; all take as many turns, so that some count not at all.
        """
        for start in range(0, len(parts), self.size):
            mine = start + self.rank
            yield (parts[mine], float(self.size)) if mine < len(parts) else (parts[start], 0.0)

    def mean(self, value: float) -> float:
        told = torch.tensor(value, dtype=torch.float64, device=self.device)
        distributed.all_reduce(told)
        return float(told) / self.size

    def any(self, flag: bool) -> bool:
        return self.mean(float(flag)) > 0


def whole(value: Any) -> Any:
    """A tensor that is split over processes gathered, in main memory; anything else as it is."""
    return value.full_tensor().cpu() if hasattr(value, "full_tensor") else value


def like(value: Any, parameter: Any) -> Any:
    """A tensor of a parameter's shape split as the parameter is; anything else as it is."""
    if not hasattr(parameter, "full_tensor") or not isinstance(value, Tensor) or value.shape != parameter.shape:
        return value
    from torch.distributed.tensor import distribute_tensor

    value = value.to(parameter.to_local().device)
    # Every process has all of it, and takes its part.
    return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
