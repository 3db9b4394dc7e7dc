"""The trainer's half of the policy: one epoch over what was accepted. What it trains is an adapter (lora.py) or all
weights (full.py).
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from whale_tui.policy import artifact, loss, optimizer
from whale_tui.policy.full import Weights
from whale_tui.policy.lora import Adapter
from whale_tui.policy.parts import PADDED_ROWS, Parts
from whale_tui.policy.protocol import PolicyFailure, Trained, TrainRequest, TrainSample, is_out_of_memory
from whale_tui.policy.shards import Shards, whole

CLIP = 1.0


class Interrupted(Exception):
    """The engine has abandoned the call that is being served."""


class Trainer(Parts):
    """Holds what is trained and its optimizer. `restore` and `write` carry the whole of its state.

    compute: the dtype of autocast; fp32 for none. packed: samples go through the token trie; where an architecture
    does not take its mask, through padded rows instead. full: all weights are trained, and a version holds them in the
    dtype `served`. checkpointing: activations are computed again in the backward pass. shards: this process trains
    with others.
    """

    def __init__(
        self,
        folder: Path,
        device: torch.device,
        *,
        compute: torch.dtype,
        packed: bool,
        rank: int = 16,
        alpha: int = 32,
        seed: int = 0,
        pack_nodes: int = 1024,
        padded_rows: int = PADDED_ROWS,
        full: bool = False,
        served: torch.dtype = torch.float32,
        optimizer_name: str = "adamw",
        checkpointing: bool = False,
        shards: Shards | None = None,
    ) -> None:
        held: Adapter | Weights
        if full:
            held = Weights(folder, device, served=served, packed=packed, shards=shards)
        else:
            held = Adapter(
                folder, device, rank=rank, alpha=alpha, seed=seed, compute=compute, packed=packed, shards=shards
            )
        if checkpointing:
            _checkpoint(held.causal, folder)
        super().__init__(held, device, compute, packed=packed, shards=shards)
        self.pack_nodes, self.padded_rows = pack_nodes, padded_rows
        self.model = held.model
        self.parameters = self.held.parameters
        self.trained_parameters = sum(p.numel() for p in self.parameters.values())
        self.numbers = sum(p.numel() for p in self.model.parameters())
        self._optimizer_name = optimizer_name
        self._new_optimizer()

    # ------------------------------------------------------------------------------------------------------ training

    def train(self, request: TrainRequest, interrupted: Callable[[], bool], note: Callable[[str], None]) -> Trained:
        """One optimizer step per minibatch. Raises Interrupted between microbatches; the state is then to be
        restored.
        """
        started = time.perf_counter()
        done = Trained(losses=[], grad_norms=[], tokens=0, skipped=0, seconds=0.0, peak_bytes=0)
        for group in self.optimizer.param_groups:
            group["lr"] = request.learning_rate
        for number, minibatch in enumerate(request.minibatches, 1):
            tokens = loss.token_count(minibatch)
            if tokens == 0:
                continue
            total = self.gradient(minibatch, interrupted, note)
            norm = float(whole(torch.nn.utils.clip_grad_norm_(self.parameters.values(), CLIP)))
            if total == total and abs(total) != float("inf") and norm == norm and norm != float("inf"):
                self.optimizer.step()
                done.losses.append(total)
                done.grad_norms.append(norm)
                done.tokens += tokens
            else:
                done.skipped += 1
            self.optimizer.zero_grad(set_to_none=True)
            note(f"training: minibatch {number} of {len(request.minibatches)}, loss {total:.4f}")
        done.seconds = time.perf_counter() - started
        done.peak_bytes = peak_bytes(self.device)
        return done

    def gradient(
        self,
        minibatch: Sequence[TrainSample],
        interrupted: Callable[[], bool] = lambda: False,
        note: Callable[[str], None] = lambda text: None,
    ) -> float:
        """Add the gradient of one minibatch's loss to the parameters; returns the loss.

        Where memory runs out it is begun anew in smaller parts, whose gradients add up to the same.
        """
        self.held.prepare()
        tokens = loss.token_count(minibatch)
        while True:
            try:
                return self._accumulate(minibatch, tokens, interrupted)
            except (RuntimeError, MemoryError) as error:
                if self.shards or not is_out_of_memory(error):  # the other processes wait inside theirs: ranks.py
                    raise
                said = str(error).partition("\n")[0]
            self.optimizer.zero_grad(set_to_none=True)
            self.smaller(said, note)

    def _accumulate(self, minibatch: Sequence[TrainSample], tokens: int, interrupted: Callable[[], bool]) -> float:
        total = 0.0
        for part in self.parts(minibatch, tokens):
            part.backward()
            total += part.item()
            if self.shards.any(interrupted()) if self.shards else interrupted():
                self.optimizer.zero_grad(set_to_none=True)
                raise Interrupted
        return self.shards.mean(total) if self.shards else total

    # --------------------------------------------------------------------------------------------------------- state

    def restore(self, folder: Path | None, *, with_optimizer: bool) -> None:
        """Take over a version (None: the base model) from its files, with its optimizer's state or a new one."""
        self._new_optimizer()
        if folder is None:
            self.held.reset()
            return
        state = artifact.read_optimizer(folder) if with_optimizer else {}
        self.held.read(folder, state)
        if state:
            optimizer.load(self.optimizer, state.get("optimizer", state), list(self.parameters.values()))

    def give_back(self) -> None:
        """Others are about to use this GPU: what torch keeps of it for later is theirs."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def write(self, folder: Path, version: str, base_hash: str) -> tuple[str, str]:
        """Write a version into `folder`. Returns its hash and its manifest's."""
        tensors, state = self._gathered(), optimizer.state_of(self.optimizer)
        if self.shards and self.shards.rank:
            return "", ""
        beside = self.held.beside(tensors)
        return artifact.write(
            folder, version, lambda made: self.held.write(made, base_hash, tensors), base_hash,
            {"optimizer": state, **beside} if beside else state,
        )  # fmt: skip

    def prove_written(self, folder: Path) -> None:
        """What a version's files hold is what is trained here. Raises PolicyFailure("publish-unproved")."""
        tensors = self._gathered()
        if not (self.shards and self.shards.rank):
            self.held.prove_written(folder, tensors)

    def _gathered(self) -> dict[str, Tensor]:
        """What is trained, by its names in files; nothing but in the first process."""
        found = {}
        for name, tensor in self.held.tensors().items():
            gathered = whole(tensor)
            if not (self.shards and self.shards.rank):
                found[name] = gathered
        return found

    def _new_optimizer(self) -> None:
        self.optimizer = optimizer.make(self._optimizer_name, list(self.parameters.values()))


def _checkpoint(model: Any, folder: Path) -> None:
    try:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    except ValueError:
        raise PolicyFailure(
            "bad-model", f"{folder}: this architecture can't checkpoint; leave model.checkpointing out"
        ) from None


def peak_bytes(device: torch.device) -> int:
    """Peak memory: of the GPU where there is one, else of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
