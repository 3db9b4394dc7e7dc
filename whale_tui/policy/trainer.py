"""The trainer's half of the policy: one epoch over what was accepted. What it trains is an adapter (lora.py) or all
weights (full.py).
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from whale_tui.policy import artifact, loss, trie
from whale_tui.policy.full import Weights
from whale_tui.policy.lora import Adapter
from whale_tui.policy.protocol import PolicyFailure, Trained, TrainRequest, TrainSample, is_out_of_memory

CLIP = 1.0
PADDED_ROWS = 8


class Interrupted(Exception):
    """The engine has abandoned the call that is being served."""


class Trainer:
    """Holds what is trained and its optimizer. `restore` and `write` carry the whole of its state.

    compute: the dtype of autocast; fp32 for none. packed: samples go through the token trie; where an architecture
    does not take its mask, through padded rows instead. full: all weights are trained, and a version holds them in the
    dtype `served`. checkpointing: activations are computed again in the backward pass.
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
        full: bool = False,
        served: torch.dtype = torch.float32,
        optimizer: str = "adamw",
        checkpointing: bool = False,
    ) -> None:
        self.held = (
            Weights(folder, device, served=served, packed=packed)
            if full
            else Adapter(folder, device, rank=rank, alpha=alpha, seed=seed, compute=compute, packed=packed)
        )
        self.model = self.held.model
        if checkpointing:
            _checkpoint(self.held.causal, folder)
        self.device = device
        self.compute = compute
        self.packed = packed
        self.pack_nodes = pack_nodes
        self.padded_rows = PADDED_ROWS
        self.parameters = self.held.parameters
        self.trained_parameters = sum(p.numel() for p in self.parameters.values())
        self._optimizer_name = optimizer
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
            norm = float(torch.nn.utils.clip_grad_norm_(self.parameters.values(), CLIP))
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
                if not is_out_of_memory(error):
                    raise
                said = str(error).partition("\n")[0]
            self.optimizer.zero_grad(set_to_none=True)
            self._smaller(said, note)

    def _accumulate(self, minibatch: Sequence[TrainSample], tokens: int, interrupted: Callable[[], bool]) -> float:
        total = 0.0
        for part in self._packed(minibatch, tokens) if self.packed else self._padded(minibatch, tokens):
            part.backward()
            total += part.item()
            if interrupted():
                self.optimizer.zero_grad(set_to_none=True)
                raise Interrupted
        return total

    def _smaller(self, said: str, note: Callable[[str], None]) -> None:
        """Half the size of a part, from now on. Raises PolicyFailure where the part was a single sample."""
        if self._longest_alone:
            raise PolicyFailure(
                "out-of-memory",
                f"training one sample of {self._longest_alone} tokens takes more memory than there is ({said}); "
                "set model.checkpointing = true, or lower rollout.max_context",
            )
        if self.packed:
            self.pack_nodes //= 2
        else:
            self.padded_rows //= 2
        size = f"{self.pack_nodes} nodes" if self.packed else f"{self.padded_rows} rows"
        note(f"training: out of memory ({said}); the minibatch is begun anew in parts of {size}")
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _packed(self, minibatch: Sequence[TrainSample], tokens: int) -> Iterator[Tensor]:
        base = self.held.causal
        for pack in loss.packs(minibatch, self.pack_nodes):
            self._longest_alone = len(pack.ids) if pack.is_path() else 0
            rows = sorted(set(pack.nodes))
            with self._autocast():
                hidden = base.model(
                    input_ids=self._column(pack.ids),
                    position_ids=self._column(pack.positions),
                    use_cache=False,
                    trie_layout=trie.Layout(pack, self.device, self.compute),
                ).last_hidden_state[0]
                logits = base.lm_head(hidden[torch.tensor(rows, device=self.device)])
            yield loss.trie_loss(logits.float().log_softmax(-1), pack, rows, tokens)

    def _padded(self, minibatch: Sequence[TrainSample], tokens: int) -> Iterator[Tensor]:
        """The plain computation: right-padded rows, a mask from lengths. Reference in tests, fallback for any
        architecture.
        """
        ordered = sorted((s for s in minibatch if s.output_ids), key=lambda s: len(s.prompt_ids) + len(s.output_ids))
        for start in range(0, len(ordered), self.padded_rows):
            rows = ordered[start : start + self.padded_rows]
            lengths = [len(s.prompt_ids) + len(s.output_ids) for s in rows]
            self._longest_alone = lengths[0] if len(rows) == 1 else 0
            ids = torch.zeros(len(rows), max(lengths), dtype=torch.long)
            seen = torch.zeros_like(ids)
            sampled = torch.zeros_like(ids, dtype=torch.bool)
            for i, sample in enumerate(rows):
                ids[i, : lengths[i]] = torch.tensor(sample.prompt_ids + sample.output_ids)
                seen[i, : lengths[i]] = 1
                sampled[i, len(sample.prompt_ids) : lengths[i]] = True
            ids, seen, sampled = ids.to(self.device), seen.to(self.device), sampled.to(self.device)
            with self._autocast():
                logits = self.model(input_ids=ids, attention_mask=seen, use_cache=False).logits
            chosen = sampled[:, 1:]
            yield (
                torch.nn.functional.cross_entropy(logits[:, :-1][chosen].float(), ids[:, 1:][chosen], reduction="sum")
                / tokens
            )

    @torch.no_grad()
    def probe(self, ids: Sequence[int]) -> Tensor:
        """Log-probability of each token of a sequence after its first: [len(ids) - 1] fp32."""
        self.held.prepare()
        with self._autocast():
            logits = self.model(input_ids=self._column(ids), use_cache=False).logits[0, :-1]
        target = torch.tensor(list(ids[1:]), device=self.device)
        return logits.float().log_softmax(-1).gather(-1, target[:, None])[:, 0].cpu()

    def _column(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(list(values), device=self.device)[None]

    def _autocast(self) -> AbstractContextManager:
        if self.compute == torch.float32:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.compute)

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
            self.optimizer.load_state_dict(state.get("optimizer", state))

    def write(self, folder: Path, version: str, base_hash: str) -> tuple[str, str]:
        """Write a version into `folder`. Returns its hash and its manifest's."""
        return artifact.write(folder, version, base_hash, self.held.write, self._resumable)

    def _resumable(self) -> dict[str, Any]:
        state, beside = self.optimizer.state_dict(), self.held.beside()
        return {"optimizer": state, **beside} if beside else state

    def _new_optimizer(self) -> None:
        parameters = self.parameters.values()
        if self._optimizer_name == "adafactor":
            self.optimizer: torch.optim.Optimizer = torch.optim.Adafactor(parameters, lr=0.0, weight_decay=0.0)
        else:
            self.optimizer = torch.optim.AdamW(parameters, lr=0.0, weight_decay=0.0)


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
