"""What a person sees of servers and GPUs while a run goes on. Not a record."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import Literal

from msgspec import Struct

ServerState = Literal["starting", "serving", "asleep", "down", "out"]
"""down: being mended; out: given up for this run, until the engine restarts."""


class ServerStatus(Struct, frozen=True):
    """One server. `version` is the policy version that it has proved, empty before it has."""

    name: str
    state: ServerState
    version: str = ""
    running: int = 0
    waiting: int = 0
    tokens_per_second: float = 0.0
    kv_cache: float = 0.0
    """Share of its blocks in use."""
    apart: float = 0.0
    """Mean log-probability of the probe, less the trainer's: the proof."""
    restarts: int = 0
    note: str = ""


class GpuStatus(Struct, frozen=True):
    """One GPU, as the driver tells it."""

    number: int
    used_gb: float
    total_gb: float
    busy: float
    """Share of the last second in which a kernel ran."""


GLANCE_SECONDS = 2.0
"""Between two looks at what servers and GPUs do."""
NAMES = {
    "running": ("vllm:num_requests_running",),
    "waiting": ("vllm:num_requests_waiting",),
    "kv_cache": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    "tokens": ("vllm:generation_tokens_total", "vllm:generation_tokens"),
}
"""What is read of /metrics, under the names that releases have given it."""


def read_metrics(text: str) -> dict[str, float]:
    """The sums over a server's engines (the mean, for the cache); a name that is not there is not in the result."""
    seen: dict[str, list[float]] = {}
    for found in re.finditer(r"^(vllm:\w+)(?:\{[^}\n]*\})? ([0-9.eE+-]+)$", text, re.MULTILINE):
        seen.setdefault(found[1], []).append(float(found[2]))
    told = {}
    for key, names in NAMES.items():
        values = next((seen[name] for name in names if name in seen), None)
        if values:
            told[key] = sum(values) / (len(values) if key == "kv_cache" else 1)
    return told


class Gpus:
    """The NVIDIA GPUs of this machine, asked for once in GLANCE_SECONDS at most."""

    def __init__(self) -> None:
        self._asked, self._told = -GLANCE_SECONDS, list[GpuStatus]()

    def __call__(self) -> list[GpuStatus]:
        """Empty without GPUs, or without the package nvidia-ml-py."""
        if time.monotonic() - self._asked >= GLANCE_SECONDS:
            self._asked = time.monotonic()
            try:
                self._told = list(_gpus())
            except Exception:  # the driver's errors have no common class where the package isn't there
                self._told = []
        return self._told


def _gpus() -> Iterator[GpuStatus]:
    import pynvml

    pynvml.nvmlInit()
    for number in range(pynvml.nvmlDeviceGetCount()):
        handle = pynvml.nvmlDeviceGetHandleByIndex(number)
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        busy = pynvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
        yield GpuStatus(number=number, used_gb=memory.used / 1e9, total_gb=memory.total / 1e9, busy=busy)
