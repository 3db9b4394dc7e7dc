"""The benchmark of a GPU, run through on a CPU: on a GPU box it has to work at once; what `make bench` runs."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import benchmarks

TINY = ("--device", "cpu", "--tiny", "--episodes", "16", "--prompt", "32", "--tokens", "8")


def gpu(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.gpu", *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent.parent, timeout=300)


@pytest.mark.parametrize("shape, sampled", [("hybrid", "transformers' forward"), ("dense", "the fast path")])
def test_every_row_is_printed(shape: str, sampled: str) -> None:
    done = gpu(shape, *TINY)
    assert done.returncode == 0, done.stderr
    assert "failed" not in done.stdout and f"sampling by {sampled}: 16 episodes of 32 + 8 tokens" in done.stdout
    trained = "padded rows" if shape == "hybrid" else "the token trie"
    for adapt in ("lora", "full"):
        assert f"training ({adapt}) by {trained}: 8 samples" in done.stdout, done.stdout
    assert done.stdout.count("publish and proof") == 2


def test_without_a_gpu_it_says_so() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = gpu()
    assert done.returncode == 1 and "torch sees no CUDA device here" in done.stderr


@pytest.mark.parametrize("name", [m.name for m in pkgutil.iter_modules(benchmarks.__path__) if m.name[0] != "_"])
def test_every_benchmark_has_a_main_that_can_be_called(name: str) -> None:
    main = importlib.import_module(f"benchmarks.{name}").main
    assert not inspect.iscoroutinefunction(main) and not inspect.signature(main).parameters
