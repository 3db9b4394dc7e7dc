"""The policy as the worker holds it: a sampler, a trainer (built when first needed), and the version that both are
at.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from whale_tui.policy import artifact, proof, serving, wire
from whale_tui.policy.chat import ChatTokenizer
from whale_tui.policy.fit import why_not_fast
from whale_tui.policy.plain import PlainSampler
from whale_tui.policy.protocol import PolicyFailure, PolicyInfo, Publication
from whale_tui.policy.ranks import Ranks
from whale_tui.policy.rows import Row, Stops
from whale_tui.policy.sampler import FastSampler
from whale_tui.policy.trainer import Trainer

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class HeldPolicy:
    """Serves the calls of wire.py. `note` says progress; `interrupted` tells that the call being served is
    abandoned.
    """

    def __init__(self, note: Callable[[str], None], interrupted: Callable[[], bool]) -> None:
        self._note = note
        self._interrupted = interrupted
        self._trainer: Trainer | Ranks | None = None
        self._folder: Path | None = None  # of the published version; None: the base model
        self._with_optimizer = False
        self._trained = False  # the trainer has moved away from the published version
        self._proved = True

    def answer(self, ask: wire.Ask) -> wire.Reply:
        number = ask.number
        match ask:
            case wire.Load():
                info = self._load(ask)
                base = self._trainer_base.tolist() if not ask.sample else []
                return wire.Loaded(number=number, info=info, probe=self._probe, base=base)
            case wire.Advance():
                return self._advance(ask)
            case wire.Drop():
                self._clear()
                self._settle()
                return wire.Dropped(number=number)
            case wire.Train():
                return self._train(ask)
            case wire.Publish():
                publication = self._publish(ask.version, Path(ask.folder))
                return wire.Published(number=number, publication=publication, probe=self._told())
            case wire.Restore():
                folder = Path(ask.folder) if ask.folder is not None else None
                return wire.Restored(number=number, hash=self._restore(folder, ask.with_optimizer), probe=self._told())
        raise TypeError(f"no call {type(ask).__name__}")

    # ------------------------------------------------------------------------------------------------------- loading

    def _load(self, ask: wire.Load) -> PolicyInfo:
        torch.set_num_threads(_cores())
        self._ask = ask
        self._model = Path(ask.model_path)
        started = time.perf_counter()
        try:
            self._config = json.loads((self._model / "config.json").read_text())
            self._device = pick_device(ask.device)
            self._dtype = DTYPES[ask.dtype] if ask.dtype != "auto" else pick_dtype(self._device)
            self._chat = ChatTokenizer(self._model)
            self._base_hash = artifact.hash_base(self._model)
            self._note(f"loading {self._model.name} on {self._device} in {_name(self._dtype)}")
            self._why_plain = why_not_fast(self._config, self._model) or ("" if ask.fast else "switched off")
            self._probe = self._chat.encode(proof.TEXT)
            if not ask.sample:
                return self._load_trainer_alone(started)
            sampler = PlainSampler if self._why_plain else FastSampler
            stops = Stops(self._chat.decode)
            self._sampler = sampler(self._model, self._device, self._dtype, stops, ask.max_rows, merges=not ask.full)
        except (OSError, ValueError, KeyError, json.JSONDecodeError) as error:
            raise PolicyFailure("bad-model", f"{self._model}: {type(error).__name__}: {error}") from None
        self._rollout_base = self._sampler.probe(self._probe)
        self._note(f"loaded in {time.perf_counter() - started:.1f} s")
        return PolicyInfo(
            model_path=str(self._model),
            base_hash=self._base_hash,
            tokenizer_hash=self._chat.hash,
            device=str(self._device),
            compute_dtype=_name(self._dtype),
            parameters=self._sampler.parameters,
            trained_parameters=self._sampler.parameters
            if ask.full
            else sum(ask.lora_rank * (a + b) for a, b in self._sampler.linears.values()),
            fast_path=not self._why_plain,
            note=f"plain sampling path: {self._why_plain}" if self._why_plain else "",
        )

    def _load_trainer_alone(self, started: float) -> PolicyInfo:
        trainer = self._need_trainer()
        self._note(f"the trainer is loaded in {time.perf_counter() - started:.1f} s")
        return PolicyInfo(
            model_path=str(self._model),
            base_hash=self._base_hash,
            tokenizer_hash=self._chat.hash,
            device=str(self._device),
            compute_dtype=_name(self._dtype),
            parameters=trainer.numbers - (0 if self._ask.full else trainer.trained_parameters),
            trained_parameters=trainer.trained_parameters,
            fast_path=False,
        )

    def _need_trainer(self) -> Trainer | Ranks:
        if self._trainer is None:
            self._note("loading the trainer")
            options: dict[str, Any] = dict(
                rank=self._ask.lora_rank,
                alpha=self._ask.lora_alpha,
                seed=self._ask.seed,
                compute=self._dtype,
                packed=why_not_fast(self._config, self._model) == "",
                pack_nodes=self._ask.pack_nodes,
                full=self._ask.full,
                served=self._served_dtype(),
                optimizer_name=self._ask.optimizer,
                checkpointing=self._ask.checkpointing,
            )
            if self._ask.processes > 1:
                size, threads = self._ask.processes, max(1, _cores() // self._ask.processes)
                self._trainer = Ranks(self._model, self._device, size, threads=threads, note=self._note, **options)
            else:
                self._trainer = Trainer(self._model, self._device, **options)
            self._trainer_base = self._trainer.probe(self._probe)
            if self._folder is not None:
                self._set_trainer(self._trainer)
        return self._trainer

    def _served_dtype(self) -> torch.dtype:
        """In which a full version is written."""
        wanted = self._ask.served
        if wanted == "auto":
            wanted = str(self._config.get("dtype") or self._config.get("torch_dtype") or "bfloat16")
        return DTYPES.get(wanted, torch.bfloat16) if wanted else self._dtype

    # ------------------------------------------------------------------------------------------- sampling and training

    def _advance(self, ask: wire.Advance) -> wire.Rows:
        self._settle()
        if not self._ask.sample:
            raise PolicyFailure("worker-error", "this worker only trains: servers sample")
        if not self._proved:
            raise PolicyFailure("publish-unproved", "the last publish was not proved: restore a version first")
        try:
            self._sampler.submit([Row(ticket, request) for ticket, request in ask.requests])
            return wire.Rows(number=ask.number, rows=self._sampler.advance(self._interrupted))
        except Exception:
            self._sampler.clear()
            raise

    def _train(self, ask: wire.Train) -> wire.TrainDone:
        self._clear()
        self._settle()
        trainer = self._need_trainer()
        self._trained = True
        try:
            done = trainer.train(ask.request, self._interrupted, self._note)
        except Exception:
            self._settle()
            raise
        finally:
            self._give_back()
        return wire.TrainDone(number=ask.number, trained=done)

    def _clear(self) -> None:
        if self._ask.sample:
            self._sampler.clear()

    def _settle(self) -> None:
        """What was trained and not published is given up: the trainer goes back to the published version."""
        if self._trained and self._trainer is not None:
            self._set_trainer(self._trainer)
        self._trained = False

    def _set_trainer(self, trainer: Trainer | Ranks) -> None:
        trainer.restore(self._folder, with_optimizer=self._with_optimizer)

    # --------------------------------------------------------------------------------------------- publish and restore

    def _publish(self, version: str, folder: Path) -> Publication:
        trainer = self._need_trainer()
        hash, manifest_hash = trainer.write(folder, version, self._base_hash)
        self._proved = False
        probe_trainer, probe_rollout, changed = self._serve(folder, hash)
        if self._ask.full:
            changed = artifact.changed_share(folder, self._folder or self._model, self._served_dtype())
        if changed is not None:
            self._note(f"{version}: {changed:.2%} of the weights differ from the version before as served")
        self._folder, self._with_optimizer, self._trained, self._proved = folder, True, False, True
        return Publication(
            version=version,
            hash=hash,
            path=str(folder),
            manifest_hash=manifest_hash,
            probe_trainer=probe_trainer,
            probe_rollout=probe_rollout,
            changed=changed,
        )

    def _restore(self, folder: Path | None, with_optimizer: bool) -> str:
        hash = self._base_hash
        if folder is not None:
            hash = artifact.verify(folder, self._base_hash, with_optimizer=with_optimizer).hash
            if artifact.is_full(folder) != self._ask.full:
                kinds = ("an adapter", "all weights")
                said = f"{folder} holds {kinds[not self._ask.full]}, model.adapt is for {kinds[self._ask.full]}"
                raise PolicyFailure("artifact-corrupt", said)
        self._proved = False
        self._folder, self._with_optimizer, self._trained = folder, with_optimizer, False
        if folder is None:
            if self._trainer is not None:
                self._set_trainer(self._trainer)
            if self._ask.sample:
                if self._ask.full:
                    serving.take_weights(self._sampler, self._model)
                else:
                    self._sampler.load({})
                base = self._rollout_base
                _prove(base, self._sampler.probe(self._probe), base, base, self._dtype)
        else:
            fresh = self._trainer is None
            trainer = self._need_trainer()
            if not fresh:
                self._set_trainer(trainer)
            self._serve(folder, hash)
        self._proved = True
        return hash

    def _serve(self, folder: Path, hash: str) -> tuple[float, float, float | None]:
        """Load a version into the sampler from its files, and prove it. Returns the probe's means (trainer, rollouts)
        and, of an adapter, the share of the weights that differ from what was served before.
        """
        loaded = artifact.hash_weights(folder, self._base_hash)
        if loaded != hash:
            raise PolicyFailure("publish-unproved", f"{folder} read back has hash {loaded}, not {hash}")
        trainer = self._need_trainer()
        trainer.prove_written(folder)
        if not self._ask.sample:  # each server proves it by itself
            return float(trainer.probe(self._probe).mean()), math.nan, None
        changed = None
        if self._ask.full:
            serving.take_weights(self._sampler, folder)
        else:
            from_base, changed = serving.take_adapter(self._sampler, folder, self._dtype)
            self._note(f"{folder.name}: {from_base:.0%} of the adapted weights differ from the base as served")
        trained, rollout = trainer.probe(self._probe), self._sampler.probe(self._probe)
        _prove(trained, rollout, self._trainer_base, self._rollout_base, self._dtype)
        return float(trained.mean()), float(rollout.mean()), changed

    def _told(self) -> list[float]:
        """What servers have to give the probe, where they sample."""
        told = [] if self._ask.sample else self._need_trainer().probe(self._probe).tolist()
        self._give_back()
        return told

    def _give_back(self) -> None:
        """Servers that sleep on this GPU are about to wake."""
        if not self._ask.sample and self._trainer is not None:
            self._trainer.give_back()


def pick_device(wanted: str) -> torch.device:
    if wanted != "auto":
        if wanted.startswith("cuda") and not torch.cuda.is_available():
            raise PolicyFailure("bad-device", "model.device is cuda, but torch sees no CUDA device here")
        if wanted == "mps" and not torch.backends.mps.is_available():
            raise PolicyFailure("bad-device", "model.device is mps, but torch sees no MPS device here")
        return torch.device(wanted)
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def pick_dtype(device: torch.device) -> torch.dtype:
    """bf16 where the processor multiplies it natively, else fp32."""
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float32
    if device.type == "cpu":
        native = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
        return torch.bfloat16 if native else torch.float32
    return torch.float32


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _prove(trainer: Tensor, rollout: Tensor, trainer_base: Tensor, rollout_base: Tensor, dtype: torch.dtype) -> None:
    now, base = (trainer.tolist(), rollout.tolist()), (trainer_base.tolist(), rollout_base.tolist())
    proof.prove_probe(*now, *base, dtype=_name(dtype))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
