"""The policy engine that a config asks for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from whale_tui.config import Config
from whale_tui.policy.client import TransformersEngine
from whale_tui.policy.vllm.engine import VllmEngine


def build(
    config: Config,
    model: Path,
    log_path: Path,
    *,
    on_note: Callable[[str], None] = lambda text: None,
    on_warning: Callable[[str], None] = lambda text: None,
    on_status: Callable[[], None] = lambda: None,
) -> TransformersEngine | VllmEngine:
    """model: folder of the base model. log_path: the worker's log; those of servers are beside it. The three functions
    hear of progress, of what belongs into the journal, and that `VllmEngine.status` has changed.
    """
    servers = config.rollout.engine == "vllm"
    worker = worker_of(
        config, model, log_path, sample=not servers, served=served_dtype(config) if servers else "", on_note=on_note
    )
    if not servers:
        return worker
    return VllmEngine(
        worker, config, model, log_path.parent, on_note=on_note, on_warning=on_warning, on_status=on_status
    )


def worker_of(
    config: Config,
    model: Path,
    log_path: Path,
    *,
    sample: bool = True,
    served: str = "",
    max_rows: int = 0,
    on_note: Callable[[str], None] = lambda text: None,
) -> TransformersEngine:
    """The policy worker alone. served: the type of a full version's files. max_rows: 0 for the config's."""
    return TransformersEngine(
        model, device=config.model.device, lora_rank=config.model.lora_rank, lora_alpha=config.model.lora_alpha,
        max_rows=max_rows or config.rollout.max_rows, seed=config.run.seed, log_path=log_path, sample=sample,
        full=config.model.adapt == "full", served=served, optimizer=config.weight.optimizer,
        checkpointing=config.model.checkpointing, processes=1 if sample else config.weight.processes, on_note=on_note,
    )  # fmt: skip


def served_dtype(config: Config) -> str:
    """What servers compute in, as far as this side can know it: external ones take what the model's files have."""
    return config.vllm.dtype if config.vllm.mode == "managed" else "auto"
