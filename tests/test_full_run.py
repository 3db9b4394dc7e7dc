"""A whole run that trains all weights: versions, what is kept of them, and the pair exported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.engines import cli, environment, events_of, state_of, write_config
from whale_tui import records as r
from whale_tui.loop.words import words
from whale_tui.policy import artifact
from whale_tui.rundir import RunDir


def test_a_run_trains_all_weights_and_exports_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in environment(tmp_path).items():
        monkeypatch.setenv(key, value)
    config = write_config(
        tmp_path, run__condition="weight-only", proposer__kind="person", test__samples=0, model__adapt="full",
        weight__learning_rate=5e-5,
    )  # fmt: skip
    done = cli("run", str(config), "--headless", folder=tmp_path)
    assert "run finished" in done.stdout
    run = RunDir(tmp_path / "runs" / "tiny")
    state, events = state_of(run), events_of(run)
    published = [event for event in events if isinstance(event, r.VersionPublished)]
    assert published, "no step trained: the tiny model's luck changed; take another seed"
    assert all(event.changed is not None and event.changed > 0 for event in published)
    assert "of the weights changed" in words(published[-1])
    folders = [run.path / version.path for version in state.versions.values() if version.path]
    kept = [folder for folder in folders if folder.is_dir()]
    assert [(folder / "optimizer.pt").exists() for folder in kept] == [False] * (len(kept) - 1) + [True]
    last = published[-1]
    assert artifact.hash_weights(kept[-1], state.versions["theta-0000"].hash) == last.hash

    pair = f"{last.policy},h0000"
    refused = cli("export", "tiny", str(tmp_path / "no"), "--pair", pair, "--adapter", folder=tmp_path, check=None)
    assert refused.returncode and "trains all weights, and no adapter" in refused.stdout + refused.stderr
    cli("export", "tiny", str(tmp_path / "out"), "--pair", pair, folder=tmp_path)
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (kept[-1] / "model.safetensors").read_bytes()
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "llama"
