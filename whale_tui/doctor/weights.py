"""What a model's files say of themselves, read from their headers: sizes without loading a weight."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from whale_tui.config import Config
from whale_tui.policy import source
from whale_tui.policy.protocol import PolicyFailure

ADAPTED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def shapes(folder: Path) -> Iterator[tuple[str, list[int]]]:
    """Name and shape of every tensor in a folder's safetensors files. Raises OSError or ValueError."""
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            header: dict[str, Any] = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        yield from ((name, entry["shape"]) for name, entry in header.items() if name != "__metadata__")


def parameters(folder: Path) -> int:
    return sum(math.prod(shape) for _, shape in shapes(folder))


def trained_parameters(config: Config) -> int:
    """Numbers that training changes; 0 while the model isn't on this machine, or isn't one."""
    try:
        folder = source.on_disk(config.model.name)
    except PolicyFailure:  # the check of the model says so
        return 0
    if folder is not None and config.model.adapt == "full":
        return parameters(folder)
    adapted = (
        [shape for name, shape in shapes(folder) if name.removesuffix(".weight").endswith(ADAPTED)] if folder else []
    )
    return sum(config.model.lora_rank * sum(shape) for shape in adapted if len(shape) == 2)


def training_bytes(config: Config, numbers: int, trained: int, each: int) -> int:
    """Memory of the trainer, activations apart: its weights (fp32 where they are trained), gradients and the
    optimizer's state. each: bytes of a number as it is computed with.
    """
    frozen = numbers * each if config.model.adapt == "lora" else 0
    return frozen + (4 + 4 + (8 if config.weight.optimizer == "adamw" else 0)) * trained


def machine_bytes() -> tuple[int, int]:
    """Memory of this machine, and what of it is free or can be freed at once."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        return total, int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return total, total


def gpu_bytes() -> list[tuple[int, int]]:
    """Memory of each NVIDIA GPU and what of it is free; empty where there is none."""
    query = ["nvidia-smi", "--query-gpu=memory.total,memory.free", "--format=csv,noheader,nounits"]
    try:
        told = subprocess.run(query, capture_output=True, text=True, timeout=20, stdin=subprocess.DEVNULL)
        rows = [line.split(",") for line in told.stdout.splitlines()] if told.returncode == 0 else []
        return [(int(total) << 20, int(free) << 20) for total, free in rows]
    except (OSError, ValueError, subprocess.SubprocessError):
        return []


def served_bytes(config: Config) -> int:
    """Of a number as rollouts hold it; the larger where the device isn't known yet."""
    if config.rollout.engine == "vllm":
        return 4 if config.vllm.dtype == "float32" else 2
    return bytes_a_number("cuda" if config.model.device == "cuda" else "cpu")


def bytes_a_number(device: str) -> int:
    """Of the weights as they compute: 2 where the processor multiplies bf16 natively, else 4."""
    if device == "cuda":
        return 2
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return 4
    return 2 if device == "cpu" and re.search(r"\b(avx512_bf16|amx_bf16)\b", flags) else 4
