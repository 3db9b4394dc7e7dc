"""The folder of a published version: adapter in peft's layout, optimizer state, and a manifest that names every
hash.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from msgspec import Struct
from safetensors.torch import load_file, save_file
from torch import Tensor

from whale_tui.policy.protocol import PolicyFailure
from whale_tui.rundir import sha256_file

ADAPTER = "adapter_model.safetensors"
OPTIMIZER = "optimizer.pt"
MANIFEST = "manifest.json"


class Manifest(Struct):
    """`hash` is the version's: over adapter tensors and base hash. `files` holds the sha256 of every other file."""

    version: str
    hash: str
    base_hash: str
    files: dict[str, str]


def hash_tensors(tensors: Mapping[str, Tensor], base_hash: str) -> str:
    """First 16 hex digits of sha256 over the base hash and each tensor's name, type, shape and bytes, in name order."""
    digest = hashlib.sha256(base_hash.encode())
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def hash_base(folder: Path) -> str:
    """First 16 hex digits of sha256 over config and weight files: the identity of theta-0000."""
    digest = hashlib.sha256()
    for path in [folder / "config.json", *sorted(folder.glob("*.safetensors"))]:
        digest.update(sha256_file(path).encode())
    return digest.hexdigest()[:16]


def write(
    folder: Path,
    version: str,
    base_hash: str,
    adapter: Mapping[str, Tensor],
    adapter_config: Mapping[str, Any],
    optimizer: Mapping[str, Any],
) -> tuple[str, str]:
    """Write a version into `folder` (beside it first, then renamed). Returns its hash and the manifest's."""
    if folder.exists():
        raise PolicyFailure("publish-unproved", f"{folder} exists already: a version is published once")
    made = folder.with_name(f".{folder.name}.unfinished-{os.getpid()}")
    try:
        made.mkdir(parents=True)
        save_file({name: t.detach().cpu().contiguous() for name, t in adapter.items()}, made / ADAPTER)
        (made / "adapter_config.json").write_bytes(msgspec.json.format(msgspec.json.encode(adapter_config), indent=2))
        torch.save(optimizer, made / OPTIMIZER)
        files = {path.name: sha256_file(path) for path in sorted(made.iterdir())}
        manifest = Manifest(version=version, hash=hash_tensors(adapter, base_hash), base_hash=base_hash, files=files)
        (made / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=2))
        for path in made.iterdir():
            _fsync(path)
        _fsync(made)
        made.rename(folder)
        _fsync(folder.parent)
    except OSError as error:
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
    config = msgspec.json.decode((folder / "adapter_config.json").read_bytes())
    scale = config["lora_alpha"] / config["r"]
    adapter = read_adapter(folder)

    def product(module: str) -> Tensor:
        prefix = f"base_model.model.{module}"
        return scale * (adapter[f"{prefix}.lora_B.weight"].float() @ adapter[f"{prefix}.lora_A.weight"].float())

    ending = ".lora_A.weight"
    modules = [name.removeprefix("base_model.model.").removesuffix(ending) for name in adapter if name.endswith(ending)]
    return {module: partial(product, module) for module in sorted(modules)}
