"""One weight update of the embedded engine beside the same update on padded rows of 8, on the same samples, in one go.

    python -m benchmarks.training [SHAPE ...] [--model NAME] [--dtype bfloat16] [--tasks 24] [--samples 8] [--check]

Shapes: repeats (an accepted set as it really is: most samples of a task end in the same few words), distinct (no two
outputs alike). `--check` compares the gradients of both in fp32, with each other and each with fp64. The floor is the
matrix products of the distinct tokens, forward and back to the adapters, at this machine's speed.
"""

from __future__ import annotations

import argparse
import copy
import random
import time
from functools import partial
from pathlib import Path

import torch

from benchmarks import _floor
from benchmarks.sampling import header, question
from whale_tui.policy import loss
from whale_tui.policy.chat import ChatTokenizer
from whale_tui.policy.held import pick_dtype
from whale_tui.policy.protocol import TrainSample
from whale_tui.policy.source import EMBEDDED, resolve
from whale_tui.policy.trainer import Trainer, peak_bytes


def accepted(chat: ChatTokenizer, tasks: int, samples: int, *, repeats: bool) -> list[TrainSample]:
    """Samples of `tasks` prompts under one header of two demonstrations."""
    rng = random.Random(1)
    head = header(rng, 2)
    made = []
    for _ in range(tasks):
        prompt = chat.render([*head, {"role": "user", "content": question(rng)}])
        answers = [rng.choice(["Port Ellery", "Tamber Vale", "Upper Quill"]) for _ in range(2)]
        for number in range(samples):
            text = answers[number == 0]
            if not repeats:
                text = f"{text}, as {rng.randint(100, 999)} {rng.choice(['say', 'hold', 'write', 'find'])}"
            made.append(TrainSample(prompt, [*chat.encode(text), chat.stop_ids[0]]))
    return made


def timed(trainer: Trainer, minibatches: list[list[TrainSample]], *, packed: bool) -> float:
    trainer.packed = packed
    started = time.perf_counter()
    for minibatch in minibatches:
        trainer.gradient(minibatch)
        trainer.optimizer.zero_grad(set_to_none=True)
    return time.perf_counter() - started


def differences(trainer: Trainer, minibatch: list[TrainSample]) -> tuple[float, float, float]:
    """Largest difference of a gradient's entry, over the largest entry: ours from fp64, padded from fp64, and the two
    from each other.
    """
    with torch.no_grad():  # a new adapter's B is 0 and hides half of the gradient
        for p in trainer.parameters.values():
            p.add_(0.01 * torch.randn_like(p))
    grads = [in_fp64(trainer, minibatch)]
    for packed in (True, False):
        trainer.packed = packed
        trainer.gradient(minibatch)
        grads.append(torch.cat([p.grad.flatten() for p in trainer.parameters.values() if p.grad is not None]).double())
        trainer.optimizer.zero_grad(set_to_none=True)
    exact, ours, padded = grads
    largest = exact.abs().max()
    apart = [float((a - b).abs().max() / largest) for a, b in ((ours, exact), (padded, exact), (ours, padded))]
    return apart[0], apart[1], apart[2]


def in_fp64(trainer: Trainer, minibatch: list[TrainSample]) -> torch.Tensor:
    """The gradient by peft's own layers, sample by sample, without packing, padding or a shared prefix."""
    model = copy.deepcopy(trainer.model).double()
    for module in model.modules():
        module.__dict__.pop("forward", None)  # lora.use put it there
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = partial(norm_in_fp64, module.weight, module.variance_epsilon)  # its own rounds to fp32
    total = sum(len(sample.output_ids) for sample in minibatch)
    for sample in minibatch:
        ids = torch.tensor(sample.prompt_ids + sample.output_ids)
        logits = model(input_ids=ids[None, :-1], use_cache=False).logits[0, len(sample.prompt_ids) - 1 :]
        chosen = logits.log_softmax(-1).gather(-1, torch.tensor(sample.output_ids)[:, None])
        (-chosen.sum() / total).backward()
    named = dict(model.named_parameters())
    return torch.cat([named[name].grad.flatten() for name in trainer.parameters])


def norm_in_fp64(weight: torch.Tensor, eps: float, x: torch.Tensor) -> torch.Tensor:
    return weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="*")
    parser.add_argument("--model", default=EMBEDDED)
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16"])
    parser.add_argument("--tasks", type=int, default=24)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tasks-per-step", type=int, default=6)
    parser.add_argument("--pack-nodes", type=int, default=1024)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--no-peer", action="store_true")
    options = parser.parse_args()

    folder: Path = resolve(options.model, print)
    device = torch.device("cpu")
    dtype = pick_dtype(device) if options.dtype == "auto" else getattr(torch, options.dtype)
    chat = ChatTokenizer(folder)
    trainer = Trainer(
        folder, device, rank=16, alpha=32, seed=0, compute=dtype, packed=True, pack_nodes=options.pack_nodes
    )
    flops, weights = _floor.flops(dtype), _floor.size_of(folder)
    print(f"{folder.name}, {dtype}, {torch.get_num_threads()} threads, {flops / 1e9:.0f} GFLOPS")
    columns = ["samples", "tokens", "nodes", "ours s", "floor s", "padded s", "ratio", "peak GB"]
    print(f"{'shape':10} " + " ".join(f"{column:>9}" for column in columns))
    for name in options.shapes or ["repeats", "distinct"]:
        samples = accepted(chat, options.tasks, options.samples, repeats=name == "repeats")
        size = options.tasks_per_step * options.samples
        minibatches = [samples[start : start + size] for start in range(0, len(samples), size)]
        nodes = sum(len(pack.ids) for minibatch in minibatches for pack in loss.packs(minibatch, options.pack_nodes))
        tokens = sum(len(s.prompt_ids) + len(s.output_ids) for s in samples)
        timed(trainer, minibatches[:1], packed=True)
        ours = timed(trainer, minibatches, packed=True)
        figures = [len(samples), tokens, nodes, ours, _floor.of_update(minibatches, weights) / flops]
        peak = peak_bytes(device) / 1e9
        if not options.no_peer:
            padded = timed(trainer, minibatches, packed=False)
            figures += [padded, padded / ours]
        figures.append(peak)
        print(f"{name:10} " + " ".join(f"{f:9.2f}" if isinstance(f, float) else f"{f:9}" for f in figures), flush=True)
        if options.check:
            exact = Trainer(folder, device, rank=16, alpha=32, seed=0, compute=torch.float32, packed=True)
            few = minibatches[0][:3] + minibatches[0][options.samples : options.samples + 3]
            ours_off, padded_off, apart = differences(exact, few)
            print(
                f"  gradients in fp32, in the largest entry: ours {ours_off:.1e} and padded {padded_off:.1e} from "
                f"fp64, {apart:.1e} from each other"
            )


if __name__ == "__main__":
    main()
