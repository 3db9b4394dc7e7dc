"""The optimizer of a training, and its state as a file holds it: whole tensors, whatever they are split over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from whale_tui.policy.shards import like, whole


def make(name: str, parameters: Sequence[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """name: as in the config. Without decay; the learning rate is a request's own."""
    if name == "adafactor":
        return torch.optim.Adafactor(parameters, lr=0.0, weight_decay=0.0)
    return torch.optim.AdamW(parameters, lr=0.0, weight_decay=0.0)


def state_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    state = optimizer.state_dict()
    return {**state, "state": {n: {key: whole(value) for key, value in of.items()} for n, of in state["state"].items()}}


def load(optimizer: torch.optim.Optimizer, state: Mapping[str, Any], parameters: Sequence[torch.nn.Parameter]) -> None:
    split = {
        number: {key: like(value, parameters[number]) for key, value in of.items()}
        for number, of in state["state"].items()
    }
    optimizer.load_state_dict({**state, "state": split})
