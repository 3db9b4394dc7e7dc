"""A run with a trained pair, made in a moment: a tiny model, one published version, a harness that uses everything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.engines import write_config
from whale_tui import records as r
from whale_tui.config import load
from whale_tui.domains.base import load_from
from whale_tui.journal import Journal
from whale_tui.policy import wire
from whale_tui.policy.chat import ChatTokenizer
from whale_tui.policy.protocol import TrainRequest, TrainSample
from whale_tui.rundir import RunDir
from whale_tui.service import launch

HARNESS = """
def run(task, model, tools):
    said = []
    chat = [{"role": "system", "content": "Say more."}, {"role": "user", "content": task.ask}]
    while model.remaining.calls is None or model.remaining.calls > 5:
        reply = model.chat(chat, max_tokens=12, stop=["q"])
        said.append(f"{reply.text}/{reply.finish_reason}/{reply.prompt_tokens}/{reply.completion_tokens}")
        chat += [{"role": "assistant", "content": reply.text}, {"role": "user", "content": "go on"}]
    try:
        tools.clean(1, 2)
    except ToolError as error:
        said.append(str(error)[:5])
    print("not for stdout")
    return tools.clean(" " + "|".join(said) + f"|{model.remaining.tokens} ")
"""
"""Three calls, a stop string, a tool that refuses, and everything that a reply tells."""


def trained_run(folder: Path) -> RunDir:
    """A run that stands after one step and an accepted harness: theta-0001 with h0001."""
    from whale_tui.policy.held import HeldPolicy

    config = write_config(folder, run__name="tiny", model__lora_rank=4, rollout__max_tokens=16, rollout__max_calls=8)
    run = launch.prepare(config, into=folder / "runs")
    resolved = load(run.config)
    model = Path(resolved.config.model.name)
    domain = load_from(resolved.folder, resolved.config.domain.name, {})
    policy = HeldPolicy(lambda text: None, lambda: False)
    ask: dict[str, Any] = {"device": "cpu", "dtype": "float32", "fast": True, "pack_nodes": 256, "max_rows": 8}
    info = policy.answer(
        wire.Load(number=1, model_path=str(model), lora_rank=4, lora_alpha=32, seed=3, sample=True, **ask)
    ).info  # type: ignore[union-attr]
    samples = [TrainSample([1, *b"hello", 5 + i], [10 + i, 11, 2]) for i in range(6)]
    policy.answer(wire.Train(number=2, request=TrainRequest([samples] * 2, 2e-3)))
    made = policy.answer(
        wire.Publish(number=3, version="theta-0001", folder=str(run.weights / "theta-0001"))
    ).publication  # type: ignore[union-attr]
    run.write_harness("h0000", domain.h0, {})
    run.write_harness("h0001", HARNESS, {})
    test = {"policy_hash": made.hash, "harness_hash": "s1", "mean": 0.5, "low": 0.25, "high": 0.75, "n": 6}
    batch = r.Batch(episodes=12, accepted=6, tasks=6, solved=4, mean=0.5)
    journal = Journal(run.journal)
    for event in (
        r.RunStarted(
            run="tiny", condition="whale", seed=3, domain="letters", model=resolved.config.model.name,
            config_hash=resolved.config.hash, policy_hash=info.base_hash, harness_hash="s0",
            tokenizer_hash=ChatTokenizer(model).hash, splits={"weight": 48, "harness": 6, "test": 6},
            steps_per_epoch=12, budget_episodes=2000, settings=resolved.config.settings(12), version="0.1.0",
        ),
        r.PhaseStarted(cycle=1, phase="weight", reason="first"),
        r.StepSampled(step=1, policy="theta-0000", harness="h0000", tasks_drawn=4, batch=batch, segment=""),
        r.VersionPublished(
            policy="theta-0001", hash=made.hash, parent="theta-0000", path="weights/theta-0001",
            manifest_hash=made.manifest_hash, probe_trainer=0.0, probe_rollout=0.0,
        ),
        r.StepFinished(step=1, policy="theta-0001", trained=6, trained_tokens=18, loss=1.0, grad_norm=1.0, seconds=1.0),
        r.CandidateProposed(
            harness="h0001", iteration=2, parent="h0000", hypothesis="talk for longer", proposer="rules",
            source_hash="s1",
        ),
        r.CandidateChecked(harness="h0001", ok=True, reason=""),
        r.HarnessAccepted(harness="h0001", previous="h0000", reason="0.50 beats 0.25"),
        r.TestScored(
            score=r.TestScore(policy="theta-0001", harness="h0001", samples=2, pass_at=0.6, **test),  # type: ignore[arg-type]
            batch=batch, segment="",
        ),
    ):  # fmt: skip
        journal.commit([event])
    journal.close()
    return run
