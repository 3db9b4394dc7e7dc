"""`whale-tui export`: a pair as a folder in the hub's layout, with its harness and a runner that needs no whale-tui."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from whale_tui.config import Config, load
from whale_tui.domains.base import Domain, DomainError, load_from
from whale_tui.export.card import card, licence_of, provenance
from whale_tui.loop.state import RunState
from whale_tui.play import pair_of
from whale_tui.policy import source
from whale_tui.policy.chat import ChatTokenizer
from whale_tui.policy.protocol import PolicyFailure
from whale_tui.rundir import RunDir, RunDirError, sha256_file
from whale_tui.service import discovery

FOLDER = Path(__file__).with_name("folder")
TAKEN = (".json", ".jinja", ".model", ".txt")
"""Endings of the base model's files that go along: all of its tokenizer."""
NOT_TAKEN = re.compile(r"(generation_)?config\.json|.*\.index\.json|requirements\.txt")


def export(rundir: RunDir, out: Path, pair: str, *, adapter: bool) -> int:
    """Write the pair that `pair` names, and say where it is. Raises RunDirError."""
    policy, harness = pair_of(rundir, pair)
    state = discovery.read_state(rundir)
    written = write(rundir, state, policy, harness, out, adapter=adapter, note=lambda text: print(text, flush=True))
    size = sum(path.stat().st_size for path in written.iterdir())
    print(f"{policy} with {harness} is in {written} ({size / 1e6:.0f} MB); its README.md says how to use it")
    return 0


def write(
    rundir: RunDir, state: RunState, policy: str, harness: str, out: Path, *, adapter: bool = False,
    note: Callable[[str], None] = lambda text: None,
) -> Path:  # fmt: skip
    """The folder, whole or not at all. Raises RunDirError with what keeps it from it."""
    out = out.expanduser().absolute()
    if out.exists():
        raise RunDirError(f"{out} exists already; name a folder that does not")
    weights = discovery.weights_of(rundir, state, policy, harness)
    version = state.versions[policy]
    if adapter and weights is None:
        raise RunDirError(f"{policy} is the base model itself: it has no adapter; export it without --adapter")
    resolved = load(rundir.config)
    if adapter and resolved.config.model.adapt == "full":
        raise RunDirError(f"{rundir.name} trains all weights, and no adapter; export it without --adapter")
    made = out.with_name(f".{out.name}.unfinished-{os.getpid()}")
    try:
        base = source.resolve(resolved.config.model.name, note)
        domain = load_from(resolved.folder, resolved.config.domain.name, resolved.config.domain.options)
        made.mkdir(parents=True)
        note("copying the adapter" if adapter else "merging the weights")
        said = _weights(base, weights, made, adapter=adapter, device=resolved.config.model.device)
        if said["hash"] != version.hash:
            raise RunDirError(f"{policy} has hash {said['hash']} here and {version.hash} in the journal")
        _base_files(base, made, resolved.config, adapter=adapter)
        shutil.copyfile(rundir.harnesses / harness / "harness.py", made / "harness.py")
        shutil.copyfile(FOLDER / "run_agent.py", made / "run_agent.py")
        lacking = _tools(domain, made, adapter=adapter)
        licence = licence_of(resolved.config.model.name, base)
        _licences(base, made)
        agent = _agent(base, resolved.config, domain, said, adapter=adapter)
        _put(made / "agent.json", agent)
        facts = provenance(state, policy, harness, resolved.config, said)
        (made / "README.md").write_text(card(facts, state, agent, licence, made, lacking=lacking), encoding="utf-8")
        facts["files"] = {path.name: sha256_file(path) for path in sorted(made.iterdir())}
        _put(made / "provenance.json", facts)
        made.rename(out)
    except (PolicyFailure, DomainError, OSError) as error:
        raise RunDirError(str(error)) from None
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return out


def _weights(base: Path, version: Path | None, folder: Path, *, adapter: bool, device: str) -> dict[str, Any]:
    """What policy/export.py said, run in its own process. Raises RunDirError."""
    command = [sys.executable, "-m", "whale_tui.policy.export", str(base), str(folder), "--device", device]
    command += ["--version", str(version)] if version is not None else []
    command += ["--adapter"] if adapter else []
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        raise RunDirError(f"the weights could not be exported: {lines[-1] if lines else done.returncode}")
    said: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return said


def _base_files(base: Path, folder: Path, config: Config, *, adapter: bool) -> None:
    """Tokenizer, template, and how the run sampled, in place of a model's own defaults."""
    for path in sorted(base.iterdir()):
        if path.suffix in TAKEN and not NOT_TAKEN.fullmatch(path.name):
            shutil.copyfile(path, folder / path.name)
    rollout, stop_ids = config.rollout, ChatTokenizer(base).stop_ids
    theirs = [_read(base / "generation_config.json"), _read(base / "config.json")]
    found = {k: next((f[k] for f in theirs if f.get(k) is not None), None) for k in ("bos_token_id", "pad_token_id")}
    sampling = {"temperature": rollout.temperature, "top_k": rollout.top_k, "top_p": rollout.top_p}
    generation = {
        **{k: v for k, v in found.items() if v is not None},
        "eos_token_id": stop_ids if len(stop_ids) > 1 else stop_ids[0],
        "max_new_tokens": rollout.max_tokens,
        "do_sample": rollout.temperature > 0,
        **(sampling if rollout.temperature > 0 else {}),
    }
    _put(folder / "generation_config.json", generation)
    if adapter:
        described = _read(folder / "adapter_config.json")
        described["base_model_name_or_path"] = _base_name(config.model.name, base)
        _put(folder / "adapter_config.json", described)


def _base_name(name: str, base: Path) -> str:
    """Where an adapter finds its base: the hub's id, or the folder here."""
    return str(base) if name == source.EMBEDDED or Path(name).expanduser().is_dir() else name


def _tools(domain: Domain, folder: Path, *, adapter: bool) -> bool:
    """requirements.txt, and tools.py where there are tools. Returns whether a person must fill that in."""
    hook: Callable[[Path], list[str] | None] | None = getattr(domain, "export", None)
    further = hook(folder) if hook is not None and domain.brief.tools else None
    lacking = further is None and bool(domain.brief.tools)
    if lacking:
        shutil.copyfile(FOLDER / "tools.py", folder / "tools.py")
    needed = ["torch", "transformers", "jinja2", *(["peft"] if adapter else [])]
    lines = [f"{name}>={'.'.join(importlib.metadata.version(name).split('.')[:2])}" for name in needed]
    (folder / "requirements.txt").write_text("\n".join([*lines, *(further or [])]) + "\n", encoding="utf-8")
    return lacking


def _agent(base: Path, config: Config, domain: Domain, said: dict[str, Any], *, adapter: bool) -> dict[str, Any]:
    """What run_agent.py reads: how the run sampled, and what an episode could use."""
    rollout = config.rollout
    shown = domain.brief.demonstrations
    example = shown[0].task if shown else domain.tasks("test")[0].public
    texts = [key for key, value in example.items() if isinstance(value, str)]
    field = "question" if "question" in texts else texts[0] if len(example) == len(texts) == 1 else ""
    budget = (
        "max_tokens", "max_calls", "max_episode_tokens", "max_context", "episode_seconds", "worker_memory_mb"
    )  # fmt: skip
    return {
        "domain": domain.name,
        "question_field": field,
        "example": example,
        "tools": domain.brief.tools,
        "sampling": {"temperature": rollout.temperature, "top_k": rollout.top_k, "top_p": rollout.top_p},
        "budget": {key: getattr(rollout, key) for key in budget},
        "stop_ids": ChatTokenizer(base).stop_ids,
        "compute_dtype": said["compute_dtype"],
        "adapter": adapter,
        "base": _base_name(config.model.name, base) if adapter else "",
    }


def _licences(base: Path, folder: Path) -> None:
    """This project's, and what the base model's folder has of its own."""
    own = Path(__file__).parents[2] / "LICENSE"
    if not own.is_file():
        packed = importlib.metadata.files("whale-tui") or []
        own = next((Path(str(file.locate())) for file in packed if file.name == "LICENSE"), own)
    shutil.copyfile(own, folder / "LICENSE")
    for path in sorted(base.iterdir()):
        if path.is_file() and re.match(r"(licen[cs]e|notice|use_policy)", path.name, re.IGNORECASE):
            shutil.copyfile(path, folder / f"BASE_MODEL_{path.name}")


def _read(path: Path) -> dict[str, Any]:
    try:
        value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    return value


def _put(path: Path, value: Any) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n")
