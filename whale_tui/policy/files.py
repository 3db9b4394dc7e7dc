"""The weights of a folder as its safetensors files hold them."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from pathlib import Path

from safetensors import safe_open
from torch import Tensor


class TensorFiles:
    """All tensors of a folder's safetensors files by name, read where they are asked for."""

    def __init__(self, folder: Path) -> None:
        self._open = [safe_open(path, framework="pt") for path in sorted(folder.glob("*.safetensors"))]
        self._by_name = {name: file for file in self._open for name in file.keys()}  # noqa: SIM118 (not a mapping)

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    def __iter__(self) -> Iterator[str]:
        """Names, in their order."""
        return iter(sorted(self._by_name))

    def size(self, name: str) -> int:
        """How many numbers it holds."""
        return prod(self._by_name[name].get_slice(name).get_shape())

    def tensor(self, name: str) -> Tensor:
        return self._by_name[name].get_tensor(name)
