"""The transformers engine on a GPU: sampling, training and publishing on random weights of a 2B model's shape.

    python -m benchmarks.gpu [hybrid] [dense] [--adapt lora full] [--episodes 256] [--prompt 512] [--tokens 256]
    python -m benchmarks.gpu --device cpu --tiny        the same code in seconds, where there is no GPU

Shapes: hybrid is Qwen3.5-2B's (linear and full attention: transformers' own forward, padded rows), dense is
Qwen3-1.7B's (the fast path, the token trie). Nothing is fetched: weights are drawn at random, and the tokenizer is a
small one of bytes. Everything goes through the policy as a worker holds it, proof of the published version included.

Operations are those of products with weights, for tokens that have to be computed: attention and padding count as
nothing. Shares are of the speed of one large product, measured first in the same dtype.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.scripted import write_tokenizer
from whale_tui.policy import loss, wire
from whale_tui.policy.held import HeldPolicy, pick_dtype
from whale_tui.policy.prefixes import new_tokens
from whale_tui.policy.protocol import PolicyFailure, PolicyInfo, Sampled, SampleRequest, TrainRequest, TrainSample
from whale_tui.policy.trainer import peak_bytes
from whale_tui.records import Sampling

SHAPES: dict[str, dict[str, Any]] = {
    "hybrid": {
        "model_type": "qwen3_5_text", "vocab_size": 248320, "hidden_size": 2048, "intermediate_size": 6144,
        "num_hidden_layers": 24, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256,
        "linear_num_key_heads": 16, "linear_num_value_heads": 16,
    },
    "dense": {
        "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144,
        "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    },
}  # fmt: skip
TINY: dict[str, Any] = {
    "vocab_size": 700, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip
TINY_LINEAR: dict[str, Any] = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip
SAMPLES, MINIBATCH = 8, 64
LEARNING_RATE = {"lora": 1e-4, "full": 1e-5}


def write_model(folder: Path, shape: str, device: torch.device, *, tiny: bool) -> None:
    """Random bf16 weights in the hub's layout. Raises ValueError where transformers doesn't know the architecture."""
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = SHAPES[shape] | (TINY if tiny else {})
    if tiny and "linear_num_key_heads" in fields:
        fields |= TINY_LINEAR
    config = AutoConfig.for_model(**fields, tie_word_embeddings=True, max_position_embeddings=32768)
    torch.manual_seed(0)
    with torch.device(device):
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    write_tokenizer(folder)


def peak_speed(device: torch.device, dtype: torch.dtype, *, tiny: bool) -> float:
    """Operations a second of one large matrix product."""
    size = 512 if tiny else 8192
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    times = []
    for _ in range(6):
        seconds = timed(device, lambda: [a @ b for _ in range(10)])[0]
        times.append(seconds / 10)
    return 2 * size**3 / min(times)


def timed(device: torch.device, call: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds, to the end of what the GPU was given, and the result."""
    synchronize(device)
    started = time.perf_counter()
    result = call()
    synchronize(device)
    return time.perf_counter() - started, result


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def requests(vocabulary: int, episodes: int, prompt: int, tokens: int) -> list[SampleRequest]:
    """Prompts that begin with the same half, as those of one harness do, eight samples of each."""
    rng = random.Random(0)

    def ids(count: int) -> list[int]:
        return [rng.randrange(600, vocabulary) for _ in range(count)]

    head = ids(prompt // 2)
    prompts = [head + ids(prompt - len(head)) for _ in range(-(-episodes // SAMPLES))]
    return [SampleRequest((n, 0), prompts[n // SAMPLES], tokens, n, Sampling(), []) for n in range(episodes)]


class Measured:
    """One shape, trained in one way, on one device: what is asked of the policy, one call after the other."""

    def __init__(self, folder: Path, options: argparse.Namespace, adapt: str, peak: float) -> None:
        self.options, self.adapt, self.peak = options, adapt, peak
        self.device = torch.device(options.device)
        self.policy = HeldPolicy(lambda text: None, lambda: False)
        load = wire.Load(
            number=1, model_path=str(folder), device=options.device, lora_rank=16, lora_alpha=32, max_rows=256, seed=0,
            dtype="auto", fast=True, pack_nodes=options.pack_nodes, full=adapt == "full",
        )  # fmt: skip
        self.info = self._answer(load).info
        config = json.loads((folder / "config.json").read_text())
        self.vocabulary = int(config["vocab_size"])
        self.head = int(config["hidden_size"]) * self.vocabulary
        self.body = sum(a * b for a, b in self.policy._sampler.linears.values())

    def _answer(self, ask: wire.Ask) -> Any:
        return self.policy.answer(ask)

    def _watched(self, call: Callable[[], Any]) -> tuple[float, Any, str]:
        """Seconds, the result, and the peak of memory meanwhile (on a CPU: of the process, so far)."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        seconds, result = timed(self.device, call)
        return seconds, result, f"peak {peak_bytes(self.device) / 1e9:.2f} GB"

    def _speed(self, work: float, seconds: float) -> str:
        return f"{work / seconds / 1e12:.3g} TFLOP/s, {work / seconds / self.peak:.1%} of the product's"

    def _sampled(self, asked: list[SampleRequest]) -> list[Sampled]:
        done: dict[int, Sampled] = {}
        waiting = list(enumerate(asked))
        while len(done) < len(asked):
            done |= dict(self._answer(wire.Advance(number=2, requests=waiting)).rows)
            waiting = []
        return [done[n] for n in range(len(asked))]

    def sample(self) -> list[TrainSample]:
        """Prints a row; returns the episodes."""
        o = self.options
        asked = requests(self.vocabulary, o.episodes, o.prompt, o.tokens)
        self._sampled(asked[:SAMPLES])  # kernels are chosen and loaded
        self._answer(wire.Drop(number=3))
        seconds, done, memory = self._watched(lambda: self._sampled(asked))
        prompts = [request.prompt_ids for request in asked]
        read = new_tokens(sorted(prompts)) if self.info.fast_path else sum(map(len, prompts))
        drawn = sum(len(sampled.output_ids) for sampled in done)
        work = 2 * self.body * (read + drawn) + 2 * self.head * drawn
        path = "the fast path" if self.info.fast_path else "transformers' forward"
        say(
            f"sampling by {path}: {len(asked)} episodes of {o.prompt} + {o.tokens} tokens in {seconds:.2f} s, "
            f"{len(asked) / seconds:.1f} episodes/s, {drawn / seconds:,.0f} tokens/s, {self._speed(work, seconds)}, "
            f"{memory}"
        )
        return [TrainSample(prompt, sampled.output_ids) for prompt, sampled in zip(prompts, done, strict=True)]

    def train(self, episodes: list[TrainSample]) -> None:
        """The optimizer steps of half of the episodes, then publish and proof. Prints a row each."""
        accepted = episodes[::2]
        minibatches = [accepted[start : start + MINIBATCH] for start in range(0, len(accepted), MINIBATCH)]
        rate = LEARNING_RATE[self.adapt]
        self._answer(wire.Train(number=4, request=TrainRequest([accepted[:SAMPLES]], rate)))  # loads the trainer
        self._answer(wire.Drop(number=5))  # what that trained is given up
        request = TrainRequest(minibatches, rate)
        seconds, reply, memory = self._watched(lambda: self._answer(wire.Train(number=6, request=request)))
        if reply.trained.skipped:
            raise PolicyFailure("not-finite", f"{reply.trained.skipped} minibatches had no finite loss or gradient")
        packed, nodes, rows = self.policy._need_trainer().packed, 0, 0
        for minibatch in minibatches:
            for pack in loss.packs(minibatch, self.options.pack_nodes if packed else 1):
                nodes, rows = nodes + len(pack.ids), rows + len(set(pack.nodes))
        passes = 2 if self.adapt == "lora" else 3  # forward, to the input, and to the weights where they are trained
        work, steps = 2 * passes * (self.body * nodes + self.head * rows), len(minibatches)
        say(
            f"training ({self.adapt}) by {'the token trie' if packed else 'padded rows'}: {len(accepted)} samples, "
            f"{nodes:,} tokens, {steps} optimizer steps in {seconds:.2f} s, {steps / seconds:.2f} steps/s, "
            f"{len(accepted) / seconds:.1f} samples/s, {self._speed(work, seconds)}, {memory}"
        )
        with tempfile.TemporaryDirectory(prefix="whale-tui-gpu-") as scratch:
            ask = wire.Publish(number=7, version="theta-0001", folder=str(Path(scratch) / "theta-0001"))
            seconds, published, memory = self._watched(lambda: self._answer(ask))
        made = published.publication
        say(
            f"publish and proof: {seconds:.2f} s, a token's log-probability {made.probe_trainer:.4f} by the trainer, "
            f"{made.probe_rollout:.4f} by the sampler, {memory}"
        )


def described(info: PolicyInfo) -> str:
    kernels = "is" if importlib.util.find_spec("fla") else "is not"
    beside = "" if info.fast_path else f"; flash-linear-attention {kernels} installed"
    return f"{info.parameters / 1e9:.3g}B parameters, {info.note or 'fast path'}{beside}"


def say(text: str) -> None:
    print(f"  {text}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="*")
    parser.add_argument("--adapt", nargs="+", default=["lora", "full"], choices=["lora", "full"])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--episodes", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--pack-nodes", type=int, default=1024)
    options = parser.parse_args()
    if unknown := set(options.shapes) - set(SHAPES):
        parser.error(f"no shape {unknown.pop()}; there are {', '.join(SHAPES)}")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("torch sees no CUDA device here; --device cpu --tiny tries the code on a CPU")
    device = torch.device(options.device)
    dtype = pick_dtype(device)
    peak = peak_speed(device, dtype, tiny=options.tiny)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} CPU threads"
    print(f"{name}, torch {torch.__version__}, {dtype}: {peak / 1e12:.3g} TFLOP/s of one large product", flush=True)
    for shape in options.shapes or SHAPES:
        with tempfile.TemporaryDirectory(prefix="whale-tui-gpu-") as scratch:
            try:
                write_model(Path(scratch), shape, device, tiny=options.tiny)
            except ValueError as error:
                print(f"{shape}: left out, {error}")
                continue
            episodes: list[TrainSample] = []
            for adapt in options.adapt:
                try:
                    made = Measured(Path(scratch), options, adapt, peak)
                    if not episodes:
                        print(f"{shape}: {described(made.info)}", flush=True)
                        episodes = made.sample()
                    made.train(episodes)
                except (PolicyFailure, torch.OutOfMemoryError) as failure:
                    say(f"{adapt} failed: {failure}")
                made = None
                gc.collect()
                if device.type == "cuda":
                    torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
