"""The trainer's half of the policy: LoRA over frozen fp32 weights, AdamW, one epoch over what was accepted."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from whale_tui.policy import lora, loss, trie
from whale_tui.policy.protocol import Trained, TrainRequest, TrainSample

CLIP = 1.0
PADDED_ROWS = 8


class Interrupted(Exception):
    """The engine has abandoned the call that is being served."""


class Trainer:
    """Holds adapter and optimizer. Its state is fully described by `adapter()` and `optimizer_state()`.

    compute: the dtype of autocast; fp32 for none. packed: samples go through the token trie; where an architecture
    does not take its mask, through padded rows instead.
    """

    def __init__(
        self,
        folder: Path,
        device: torch.device,
        *,
        rank: int,
        alpha: int,
        seed: int,
        compute: torch.dtype,
        packed: bool,
        pack_nodes: int = 1024,
    ) -> None:
        from peft import LoraConfig, get_peft_model
        from transformers import AutoModelForCausalLM

        base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
        base.config.use_cache = False
        torch.manual_seed(seed)
        config = LoraConfig(
            r=rank, lora_alpha=alpha, lora_dropout=0.0, bias="none", target_modules="all-linear", task_type="CAUSAL_LM"
        )
        self.model = get_peft_model(base, config).to(device).train()
        self.model.peft_config["default"].base_model_name_or_path = str(folder)
        if packed:
            trie.use(base)
        self._merged = lora.use(self.model, compute)
        self.device = device
        self.compute = compute
        self.packed = packed
        self.pack_nodes = pack_nodes
        self.parameters = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self.trained_parameters = sum(p.numel() for p in self.parameters.values())
        self._initial = {name: p.detach().clone() for name, p in self.parameters.items()}
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
            total = self.gradient(minibatch, interrupted)
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

    def gradient(self, minibatch: Sequence[TrainSample], interrupted: Callable[[], bool] = lambda: False) -> float:
        """Add the gradient of one minibatch's loss to the parameters; returns the loss."""
        self._merge()
        tokens = loss.token_count(minibatch)
        total = 0.0
        parts = self._packed(minibatch, tokens) if self.packed else self._padded(minibatch, tokens)
        for part in parts:
            part.backward()
            total += part.item()
            if interrupted():
                self.optimizer.zero_grad(set_to_none=True)
                raise Interrupted
        return total

    def _packed(self, minibatch: Sequence[TrainSample], tokens: int):
        base: Any = self.model.get_base_model()
        for pack in loss.packs(minibatch, self.pack_nodes):
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

    def _padded(self, minibatch: Sequence[TrainSample], tokens: int):
        """The plain computation: right-padded rows, a mask from lengths. Reference in tests, fallback for any
        architecture.
        """
        ordered = sorted((s for s in minibatch if s.output_ids), key=lambda s: len(s.prompt_ids) + len(s.output_ids))
        for start in range(0, len(ordered), PADDED_ROWS):
            rows = ordered[start : start + PADDED_ROWS]
            lengths = [len(s.prompt_ids) + len(s.output_ids) for s in rows]
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
        self._merge()
        with self._autocast():
            logits = self.model(input_ids=self._column(ids), use_cache=False).logits[0, :-1]
        target = torch.tensor(list(ids[1:]), device=self.device)
        return logits.float().log_softmax(-1).gather(-1, target[:, None])[:, 0].cpu()

    def _merge(self) -> None:
        """The adapter may have changed since: a product of rank r a layer, nothing beside a forward."""
        for layer in self._merged:
            layer.merge()

    def _column(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(list(values), device=self.device)[None]

    def _autocast(self) -> AbstractContextManager:
        if self.compute == torch.float32:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.compute)

    # --------------------------------------------------------------------------------------------------------- state

    def adapter(self) -> dict[str, Tensor]:
        """Adapter tensors under the names that peft (and so vLLM) gives them in a file."""
        return {_file_name(name): p.detach() for name, p in self.parameters.items()}

    def adapter_config(self) -> dict[str, Any]:
        config = {**self.model.peft_config["default"].to_dict(), "inference_mode": True}
        return {key: sorted(value) if isinstance(value, set) else value for key, value in config.items()}

    @torch.no_grad()
    def load(self, adapter: Mapping[str, Tensor], optimizer: Mapping[str, Any] | None) -> None:
        """Take over a version's adapter, and its optimizer state or a new one."""
        expected = {_file_name(name): p for name, p in self.parameters.items()}
        if set(expected) != set(adapter) or any(expected[n].shape != t.shape for n, t in adapter.items()):
            raise ValueError("the adapter has other layers or another rank than this run's")
        for name, parameter in expected.items():
            parameter.copy_(adapter[name])
        self._new_optimizer()
        if optimizer is not None:
            self.optimizer.load_state_dict(dict(optimizer))

    @torch.no_grad()
    def reset(self) -> None:
        """Back to the base model: the adapter as it was first drawn, a new optimizer."""
        for name, parameter in self.parameters.items():
            parameter.copy_(self._initial[name])
        self._new_optimizer()

    def optimizer_state(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def _new_optimizer(self) -> None:
        self.optimizer = torch.optim.AdamW(self.parameters.values(), lr=0.0, weight_decay=0.0)


def _file_name(parameter: str) -> str:
    return parameter.replace(".default.weight", ".weight")


def peak_bytes(device: torch.device) -> int:
    """Peak memory: of the GPU where there is one, else of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
