"""The weights of a version as transformers or peft loads them, written in a process of its own: this one needs torch.

    python -m whale_tui.policy.export BASE FOLDER [--version WEIGHTS] [--adapter] [--device DEVICE]

BASE is the model's folder, WEIGHTS that of the version (none: the base model). Says on stdout, as JSON, what the run
computes in and what was written; what is wrong is one line on stderr and status 1.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from whale_tui.policy import artifact
from whale_tui.policy.held import pick_device, pick_dtype
from whale_tui.policy.protocol import PolicyFailure

FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("base", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--version", type=Path)
    parser.add_argument("--adapter", action="store_true")
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()
    try:
        compute = pick_dtype(pick_device(args.device))
        base_hash = artifact.hash_base(args.base)
        hash = base_hash
        if args.version is not None:
            hash = artifact.verify(args.version, base_hash, with_optimizer=False).hash
        if args.adapter:
            copy_adapter(args.version, args.folder)
            written = compute
        elif args.version is not None and artifact.is_full(args.version):
            written = copy_weights(args.version, args.folder)
        else:
            written = merge(args.base, args.version, args.folder, compute)
    except (PolicyFailure, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    said = {"hash": hash, "base_hash": base_hash, "compute_dtype": _name(compute), "dtype": _name(written)}
    print(json.dumps(said))
    return 0


@torch.no_grad()
def merge(base: Path, version: Path | None, folder: Path, compute: torch.dtype) -> torch.dtype:
    """Write base + delta, file by file, each sum in fp32 and rounded once. Returns the type that they are written in.

    That is the base's own, or a wider one where rounding to it first would give other weights in `compute` than the
    sampler serves. Raises PolicyFailure where the adapter changes what the files don't name.
    """
    deltas = artifact.deltas(version) if version is not None else {}
    files = sorted(base.glob("*.safetensors"))
    left = set(deltas)
    written, size = _dtype(files, left, compute), 0
    for path in files:
        tensors = {}
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a mapping)
                tensor, module = file.get_tensor(name), name.removesuffix(".weight")
                if module in left:
                    tensor = tensor.float() + deltas[module]()
                    left.remove(module)
                tensors[name] = tensor.to(written) if tensor.is_floating_point() else tensor
                size += tensors[name].nbytes
        save_file(tensors, folder / path.name, metadata={"format": "pt"})
    if left:
        raise PolicyFailure(
            "bad-model",
            f"the files of {base} name no {sorted(left)[0]}.weight, which the adapter changes; export with --adapter",
        )
    _describe(base, folder, written, size)
    return written


def _dtype(files: list[Path], modules: set[str], compute: torch.dtype) -> torch.dtype:
    """The widest type among the adapted weights, and as wide as what they are served in."""
    found = compute if modules else None
    for path in files:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                if not modules or name.removesuffix(".weight") in modules:
                    kind = FLOATS.get(file.get_slice(name).get_dtype())
                    if kind is not None:
                        found = kind if found is None else torch.promote_types(found, kind)
    return found or compute


def _describe(base: Path, folder: Path, written: torch.dtype, size: int) -> None:
    """config.json and the index of several files, which name type and size."""
    config = json.loads((base / "config.json").read_text(encoding="utf-8"))
    config.pop("torch_dtype", None)
    config["dtype"] = _name(written)
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    for path in base.glob("*.safetensors.index.json"):
        index = json.loads(path.read_text(encoding="utf-8"))
        index["metadata"] = {"total_size": size}
        (folder / path.name).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def copy_weights(version: Path, folder: Path) -> torch.dtype:
    """The model that a full version is, as rollouts served it. Returns its type."""
    for path in (*version.glob("*.safetensors"), *version.glob("*.safetensors.index.json"), version / "config.json"):
        shutil.copyfile(path, folder / path.name)
    return getattr(torch, json.loads((version / "config.json").read_text(encoding="utf-8"))["dtype"])


def copy_adapter(version: Path | None, folder: Path) -> None:
    if version is None:
        raise PolicyFailure("no-adapter", "theta-0000 is the base model itself: it has no adapter")
    if artifact.is_full(version):
        raise PolicyFailure("no-adapter", f"{version.name} is all weights of a model: it has no adapter")
    for name in (artifact.ADAPTER, "adapter_config.json"):
        shutil.copyfile(version / name, folder / name)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


if __name__ == "__main__":
    raise SystemExit(main())
