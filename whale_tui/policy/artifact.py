"""The folder of a published version: an adapter in peft's layout or a model in the hub's, optimizer state, and a
manifest that names every hash.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from msgspec import Struct
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from whale_tui.policy.files import TensorFiles
from whale_tui.policy.protocol import PolicyFailure
from whale_tui.rundir import sha256_file

ADAPTER = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
OPTIMIZER = "optimizer.pt"
MANIFEST = "manifest.json"


class Manifest(Struct):
    """`hash` is the version's: over its tensors and the base hash. `files` holds the sha256 of every other file."""

    version: str
    hash: str
    base_hash: str
    files: dict[str, str]


def hash_tensors(tensors: Mapping[str, Tensor], base_hash: str) -> str:
    """First 16 hex digits of sha256 over the base hash and each tensor's name, type, shape and bytes, in name order."""
    return _hash(((name, tensors[name]) for name in sorted(tensors)), base_hash)


def hash_weights(folder: Path, base_hash: str) -> str:
    """The same over the tensors in a version's files: what is served of it."""
    return _hash(each_weight(folder), base_hash)


def _hash(tensors: Iterable[tuple[str, Tensor]], base_hash: str) -> str:
    digest = hashlib.sha256(base_hash.encode())
    for name, found in tensors:
        tensor = found.detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]


def is_full(folder: Path) -> bool:
    """Whether a version is all of a model's weights, and not an adapter."""
    return not (folder / ADAPTER).exists()


def each_weight(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a folder's safetensors files, by name, read one after the other."""
    files = TensorFiles(folder)
    for name in files:
        yield name, files.tensor(name)


def changed_share(folder: Path, before: Path, dtype: torch.dtype) -> float:
    """Share of a full version's numbers that are others in `before` (a version or the base), both as served."""
    others = TensorFiles(before)
    changed = total = 0
    for name, tensor in each_weight(folder):
        if name in others:
            changed += int((others.tensor(name).to(dtype) != tensor).sum())
            total += tensor.numel()
    return changed / total if total else 0.0


def hash_base(folder: Path) -> str:
    """First 16 hex digits of sha256 over config and weight files: the identity of theta-0000."""
    digest = hashlib.sha256()
    for path in [folder / "config.json", *sorted(folder.glob("*.safetensors"))]:
        digest.update(sha256_file(path).encode())
    return digest.hexdigest()[:16]


def write(
    folder: Path,
    version: str,
    put: Callable[[Path], str],
    base_hash: str,
    optimizer: Mapping[str, Any],
) -> tuple[str, str]:
    """Write a version into `folder` (beside it first, then renamed): `put` its weights, which says their hash, and what
    resuming needs. Returns its hash and the manifest's.
    """
    if folder.exists():
        raise PolicyFailure("publish-unproved", f"{folder} exists already: a version is published once")
    made = folder.with_name(f".{folder.name}.unfinished-{os.getpid()}")
    try:
        made.mkdir(parents=True)
        hash = put(made)
        torch.save(optimizer, made / OPTIMIZER)
        files = {path.name: sha256_file(path) for path in sorted(made.iterdir())}
        manifest = Manifest(version=version, hash=hash, base_hash=base_hash, files=files)
        (made / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=2))
        for path in made.iterdir():
            _fsync(path)
        _fsync(made)
        made.rename(folder)
        _fsync(folder.parent)
    except (OSError, SafetensorError) as error:  # the latter is a full disk too
        for path in made.glob("*"):
            path.unlink()
        if made.exists():
            made.rmdir()
        raise PolicyFailure("publish-unwritten", f"can't write {folder}: {error}") from None
    return manifest.hash, sha256_file(folder / MANIFEST)


def verify(folder: Path, base_hash: str, *, with_optimizer: bool) -> Manifest:
    """The manifest of a version whose files are what it says. Raises PolicyFailure("artifact-corrupt"), naming the
    file.

    An optimizer state that retention has removed is missed only where it is asked for.
    """
    try:
        manifest = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=Manifest)
    except (OSError, msgspec.MsgspecError) as error:
        raise PolicyFailure("artifact-corrupt", f"{folder / MANIFEST}: {error}") from None
    if manifest.base_hash != base_hash:
        raise PolicyFailure(
            "artifact-corrupt", f"{folder} was trained from base {manifest.base_hash}, the model loaded is {base_hash}"
        )
    for name, expected in manifest.files.items():
        if name == OPTIMIZER and not with_optimizer:
            continue
        try:
            found = sha256_file(folder / name)
        except OSError as error:
            raise PolicyFailure("artifact-corrupt", f"{folder / name}: {error}") from None
        if found != expected:
            raise PolicyFailure("artifact-corrupt", f"{folder / name} has sha256 {found}, its manifest says {expected}")
    return manifest


def read_adapter(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / ADAPTER)


def read_optimizer(folder: Path) -> dict[str, Any]:
    return torch.load(folder / OPTIMIZER, map_location="cpu", weights_only=True)


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def deltas(folder: Path) -> dict[str, Callable[[], Tensor]]:
    """What a version's adapter adds to the weight of each module, as read from its files: module -> fp32 [out, in]."""
    config = msgspec.json.decode((folder / ADAPTER_CONFIG).read_bytes())
    scale = config["lora_alpha"] / config["r"]
    adapter = read_adapter(folder)

    def product(module: str) -> Tensor:
        prefix = f"base_model.model.{module}"
        return scale * (adapter[f"{prefix}.lora_B.weight"].float() @ adapter[f"{prefix}.lora_A.weight"].float())

    ending = ".lora_A.weight"
    modules = [name.removeprefix("base_model.model.").removesuffix(ending) for name in adapter if name.endswith(ending)]
    return {module: partial(product, module) for module in sorted(modules)}
