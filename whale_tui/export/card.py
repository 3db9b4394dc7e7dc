"""What an export says of itself: provenance.json, and README.md as the hub's model card."""

from __future__ import annotations

import json
import re
import shlex
import time
from pathlib import Path
from typing import Any

import jinja2
import msgspec

from whale_tui import __version__
from whale_tui.config import Config
from whale_tui.loop.state import Candidate, RunState, Version
from whale_tui.policy.source import EMBEDDED

ORIGIN = "HuggingFaceTB/SmolLM2-135M-Instruct"
"""Where the embedded model comes from, under Apache-2.0."""
PRIVATE = ("command", "api_base", "api_key_env", "env", "home_files", "readable")
"""Keys of [proposer] that speak of somebody's machine and account, not of the pair."""


def provenance(
    state: RunState, policy: str, harness: str, config: Config, weights: dict[str, Any]
) -> dict[str, Any]:  # fmt: skip
    """Everything that this pair is made of, and how it came about. `weights`: what policy/export.py said."""
    version, candidate = state.versions[policy], state.harnesses[harness]
    described = msgspec.to_builtins(config)
    described["proposer"] = {k: v for k, v in described["proposer"].items() if k not in PRIVATE}
    pairs = {(policy, harness): "this", ("theta-0000", "h0000"): "start"}
    scores = []
    for name, kind in pairs.items():
        test = state.measured(*name)
        if test is not None:
            scores.append({**msgspec.to_builtins(test), "this": kind == "this", "start": kind == "start"})
    mean, found = candidate.mean(version.hash), candidate.scores.get(version.hash)
    return {
        "whale_tui": __version__,
        "exported_at": int(time.time()),
        "run": {
            "name": state.run, "domain": state.domain, "condition": state.condition, "seed": state.seed,
            "status": state.status, "started_at": int(state.started_at), "config_hash": state.config_hash,
            "splits": state.splits, "budget_used": state.budget_used, "episodes": state.episodes,
            "accepted": state.accepted,
        },
        "pair": {
            "policy": policy, "policy_hash": version.hash, "harness": harness,
            "harness_hash": candidate.source_hash, "tokenizer_hash": state.tokenizer_hash,
        },
        "model": {"name": state.model, **{k: weights[k] for k in ("base_hash", "dtype", "compute_dtype")}},
        "scores": scores,
        "search_score": {"mean": mean, "episodes": found.batch.episodes} if mean is not None and found else None,
        "lineage": {
            "policy": [
                {"name": v.name, "hash": v.hash, "cycle": v.cycle, "manifest_hash": v.manifest_hash}
                for v in _policies(state, version)
            ],
            "harness": [
                {
                    "id": c.id, "hash": c.source_hash, "parent": c.parent, "also_from": c.also_from, "cycle": c.cycle,
                    "iteration": c.iteration, "proposer": c.proposer, "hypothesis": c.hypothesis, "outcome": c.outcome,
                }
                for c in _harnesses(state, candidate)
            ],
        },
        "config": described,
    }  # fmt: skip


def _policies(state: RunState, version: Version) -> list[Version]:
    """The version, the one it was trained from, and so on to the base model."""
    line = [version]
    while line[-1].parent in state.versions:
        line.append(state.versions[line[-1].parent])
    return line


def _harnesses(state: RunState, candidate: Candidate) -> list[Candidate]:
    line = [candidate]
    while line[-1].parent in state.harnesses:
        line.append(state.harnesses[line[-1].parent])
    return line


def licence_of(name: str, base: Path) -> dict[str, str]:
    """The base model's licence, as far as it is known here: its id for the hub, and a sentence."""
    if name == EMBEDDED:
        return {"id": "apache-2.0", "text": f"Apache-2.0 ({ORIGIN})"}
    page = base / "README.md"
    stated = (
        re.search(r"^license:\s*['\"]?([\w.-]+)", page.read_text(encoding="utf-8"), re.M) if page.exists() else None
    )
    if stated:
        return {"id": stated[1], "text": stated[1]}
    files = [path.name for path in sorted(base.iterdir()) if re.match(r"licen[cs]e", path.name, re.IGNORECASE)]
    where = f"BASE_MODEL_{files[0]}" if files else f"see the page of {name}; it is not stated in its files"
    return {"id": "other", "text": where}


def card(
    facts: dict[str, Any], state: RunState, agent: dict[str, Any], licence: dict[str, str], folder: Path, *,
    lacking: bool,
) -> str:  # fmt: skip
    """README.md. `folder` is the export so far."""
    name = state.model
    hub = name if re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not Path(name).is_dir() else ""
    field, example, tests = (
        agent["question_field"],
        agent["example"],
        {(t.policy, t.harness) for t in state.tests if t.n},
    )
    best = state.best
    chosen = best is not None and (best.policy, best.harness) == (facts["pair"]["policy"], facts["pair"]["harness"])
    template = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined).from_string(
        Path(__file__).with_name("card.md.j2").read_text(encoding="utf-8")
    )
    return template.render(
        p=facts,
        s=agent["sampling"],
        licence=licence,
        base_model=ORIGIN if name == EMBEDDED else hub,
        embedded=name == EMBEDDED,
        adapter=agent["adapter"],
        question_field=field,
        example=json.dumps(example, ensure_ascii=False),
        example_text=shlex.quote(example[field]) if field else "",
        example_python=repr(example),
        fields=", ".join(f"`{key}`" for key in example),
        harness_lines=len((folder / "harness.py").read_text(encoding="utf-8").splitlines()),
        tools=agent["tools"],
        lacking=lacking,
        warnings=state.harnesses[facts["pair"]["harness"]].warnings,
        best_of_many=len(tests) if chosen and len(tests) > 2 else 0,
    )
