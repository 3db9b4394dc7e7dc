"""Episodes of the embedded engine beside transformers' `generate` and vLLM, on the same prompts, in one go.

    python -m benchmarks.sampling [SHAPE ...] [--model NAME] [--dtype bfloat16] [--prompts N] [--peer-batch 64 128 256]
        [--no-peer] [--vllm .venv-vllm/bin/python]

Shapes: samples (32 prompts x 8), harnesses (four headers at once), turns (two turns, the second prompt grows from the
first), distinct (nothing shared), long (512-token answers). `--prompts` takes fewer of each. The floor beside each
figure is what the machine's own matrix products would need for the tokens that can't be shared, and for reading the
weights once a step. vLLM (`make vllm-env`) runs as a process of its own over the same prompt ids, warm, with its prefix
cache and without adapters. All draw at random, so that ratios are of seconds a sampled token.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from msgspec import Struct

from whale_tui.policy.chat import ChatTokenizer
from whale_tui.policy.held import pick_dtype
from whale_tui.policy.prefixes import new_tokens
from whale_tui.policy.protocol import Sampled, SampleRequest
from whale_tui.policy.rows import Row, Stops
from whale_tui.policy.sampler import FastSampler
from whale_tui.policy.source import EMBEDDED, resolve
from whale_tui.records import Sampling

NAMES = [
    "Arlen",
    "Bresk",
    "Caldow",
    "Denholm",
    "Ersby",
    "Fenwick",
    "Garrow",
    "Hollin",
    "Ister",
    "Jarvik",
    "Keld",
    "Lomond",
    "Marsh",
    "Norrel",
    "Pell",
]
PLACES = ["Port Ellery", "Tamber Vale", "Upper Quill", "Stonewick", "Mirefield", "Saltham", "Greyford", "Dunmere"]
TRADES = ["clockmaker", "botanist", "bridge", "builder", "printer", "cartographer", "glassblower"]


VLLM = Path(__file__).parent / "_vllm.py"


class Shape(Struct):
    """A set of prompts and how much is sampled from each. `turns` beyond 1 asks again with the answer in the prompt."""

    prompts: list[list[int]]
    samples: int
    max_tokens: int
    turns: int = 1


def fact(rng: random.Random) -> str:
    who = f"{rng.choice(NAMES)} {rng.choice(NAMES)}, a {rng.choice(TRADES)}"
    born = f"was born in {rng.choice(PLACES)} in {rng.randint(1700, 1950)}"
    return f"{who}, {born} and moved to {rng.choice(PLACES)} at the age of {rng.randint(12, 40)}."


def question(rng: random.Random) -> str:
    return f"Passage: {fact(rng)}\nQuestion: where was this person born? Answer in one line."


def header(rng: random.Random, demonstrations: int) -> list[dict[str, str]]:
    messages = [{"role": "system", "content": f"Answer with the place alone. {fact(rng)}"}]
    for _ in range(demonstrations):
        messages += [{"role": "user", "content": question(rng)}, {"role": "assistant", "content": rng.choice(PLACES)}]
    return messages


def shapes(chat: ChatTokenizer) -> dict[str, Shape]:
    rng = random.Random(0)

    def prompts(count: int, head: Sequence[dict[str, str]]) -> list[list[int]]:
        return [chat.render([*head, {"role": "user", "content": question(rng)}]) for _ in range(count)]

    def apart(count: int) -> list[list[int]]:
        texts = [f"{fact(rng)} {fact(rng)} {fact(rng)}\n{question(rng)}" for _ in range(count)]
        return [chat.encode(text) for text in texts]

    heads = [header(rng, 2) for _ in range(4)]
    return {
        "samples": Shape(prompts(32, heads[0]), 8, 32),
        "harnesses": Shape([p for head in heads for p in prompts(8, head)], 8, 32),
        "turns": Shape(prompts(32, heads[0]), 4, 32, turns=2),
        "distinct": Shape(apart(64), 1, 32),
        "long": Shape(prompts(8, heads[0]), 4, 512),
    }


# -------------------------------------------------------------------------------------------------------------------
# ours


def ours(sampler: FastSampler, chat: ChatTokenizer, shape: Shape) -> tuple[float, list[Sampled], list[list[int]]]:
    """Seconds, what was sampled, and every prompt that was asked."""
    asked: list[list[int]] = []
    samples: list[Sampled] = []
    started = time.perf_counter()
    sampler.clear()
    follow = chat.encode("\n<|im_start|>user\nAre you sure?<|im_end|>\n<|im_start|>assistant\n")

    def row(prompt: list[int], turn: int) -> Row:
        asked.append(prompt)
        number = len(asked)
        request = SampleRequest((number, turn), prompt, shape.max_tokens, number, Sampling(), chat.stop_ids)
        return Row(number, request)

    sampler.submit([row(prompt, 1) for prompt in shape.prompts for _ in range(shape.samples)])
    turns = {number: 1 for number in range(1, len(asked) + 1)}
    while done := sampler.advance(lambda: False):
        again = []
        for ticket, sampled in done:
            samples.append(sampled)
            if turns[ticket] < shape.turns:
                again.append(row(asked[ticket - 1] + sampled.output_ids + follow, turns[ticket] + 1))
                turns[len(asked)] = turns[ticket] + 1
        sampler.submit(again)
    return time.perf_counter() - started, samples, asked


# -------------------------------------------------------------------------------------------------------------------
# peer


def peer(model, asked: list[list[int]], max_tokens: int, batch: int, stop_ids: list[int]) -> tuple[float, int]:
    """Seconds and sampled tokens of transformers' generate over the same prompts, left-padded, sorted by length."""
    pad = stop_ids[0]
    ordered = sorted(asked, key=len)
    started, tokens = time.perf_counter(), 0
    for start in range(0, len(ordered), batch):
        prompts = ordered[start : start + batch]
        longest = max(map(len, prompts))
        ids = torch.tensor([[pad] * (longest - len(p)) + p for p in prompts])
        seen = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        with torch.inference_mode():
            out = model.generate(
                input_ids=ids,
                attention_mask=seen,
                do_sample=True,
                temperature=1.0,
                top_k=20,
                top_p=1.0,
                max_new_tokens=max_tokens,
                eos_token_id=stop_ids,
                pad_token_id=pad,
            )
        for sampled in out[:, longest:].tolist():
            tokens += next((i + 1 for i, t in enumerate(sampled) if t in stop_ids), len(sampled))
    return time.perf_counter() - started, tokens


def vllm(python: str, folder: Path, dtype: str, rounds: list[list[list[int]]], shape: Shape, stop_ids: list[int]):
    """Seconds and sampled tokens of vLLM's offline engine, each round submitted at once."""
    asked = {
        "model": str(folder), "dtype": dtype, "rounds": rounds, "max_tokens": shape.max_tokens, "stop_ids": stop_ids,
        "warm": [[7 + n] * len(rounds[0][0]) for n in range(8)],
    }  # fmt: skip
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    env = {"VLLM_CPU_KVCACHE_SPACE": "4", "VLLM_CPU_OMP_THREADS_BIND": cores, "VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run(
        [python, str(VLLM)], input=json.dumps(asked), env=os.environ | env, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"{python} benchmarks/_vllm.py: {done.stdout[-1000:]}{done.stderr[-3000:]}")
    told = json.loads(done.stdout.strip().splitlines()[-1])
    return told["seconds"], told["tokens"]


# ------------------------------------------------------------------------------------------------------------------
# floor


def measure(call: Callable[[], object], seconds: float = 1.0) -> float:
    call()
    runs, started = 0, time.perf_counter()
    while time.perf_counter() - started < seconds:
        call()
        runs += 1
    return (time.perf_counter() - started) / runs


def machine(sampler: FastSampler) -> tuple[float, float]:
    """Operations a second of this machine's matrix products (2,048 rows), bytes a second of reading the weights."""
    layer = sampler.model.layers[0]
    x = torch.randn(2048, sampler.model.hidden, dtype=sampler.model.dtype)
    with torch.inference_mode():
        flops = 2 * 2048 * layer.gate_up.numel() / measure(lambda: torch.nn.functional.linear(x, layer.gate_up))
        bandwidth = sampler.model.head.nbytes / measure(lambda: torch.nn.functional.linear(x[:1], sampler.model.head))
    return flops, bandwidth


def floor(sampler: FastSampler, asked: list[list[int]], samples: list[Sampled], speed: tuple[float, float]) -> float:
    """Seconds for the distinct prompt tokens and all sampled tokens at full speed, or for reading weights if that
    is more.
    """
    model = sampler.model
    body = sum(a * b for a, b in model.linears().values())
    head = model.head.numel()
    lengths = [len(s.output_ids) for s in samples]
    fresh = new_tokens(sorted(asked)) if len(asked) == len(samples) else 0
    work = 2 * body * (fresh + sum(lengths)) + 2 * head * sum(lengths)
    reading = max(lengths) * (body + head) * model.dtype.itemsize
    return max(work / speed[0], reading / speed[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="*")
    parser.add_argument("--model", default=EMBEDDED)
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16"])
    parser.add_argument("--prompts", type=int, default=0, help="of each shape, spread over it; 0 for all")
    parser.add_argument("--peer-batch", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--no-peer", action="store_true")
    parser.add_argument("--vllm", metavar="PYTHON", default="", help="an interpreter that has vLLM")
    parser.add_argument("--repeat", type=int, default=2)
    options = parser.parse_args()

    folder: Path = resolve(options.model, print)
    device = torch.device("cpu")
    dtype = pick_dtype(device) if options.dtype == "auto" else getattr(torch, options.dtype)
    chat = ChatTokenizer(folder)
    sampler = FastSampler(folder, device, dtype, Stops(chat.decode), max_rows=256)
    model = None
    if not options.no_peer:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    speed = machine(sampler)
    threads = torch.get_num_threads()
    print(f"{folder.name}, {dtype}, {threads} threads, {speed[0] / 1e9:.0f} GFLOPS, {speed[1] / 1e9:.0f} GB/s")
    columns = ["episodes", "prompt", "sampled", "ours s", "floor s"]
    columns += [] if options.no_peer else ["generate s", "ratio"]
    columns += ["vllm s", "ratio"] if options.vllm else []
    print(f"{'shape':10} " + " ".join(f"{column:>10}" for column in columns))
    for name, shape in shapes(chat).items():
        if options.shapes and name not in options.shapes:
            continue
        if 0 < options.prompts < len(shape.prompts):
            shape.prompts = shape.prompts[:: len(shape.prompts) // options.prompts][: options.prompts]
        seconds, samples, asked = min((ours(sampler, chat, shape) for _ in range(options.repeat)), key=lambda r: r[0])
        sampled = sum(len(s.output_ids) for s in samples)
        figures = [len(asked) // shape.turns, sum(map(len, asked)) / len(asked), sampled, seconds]
        figures.append(floor(sampler, asked, samples, speed))
        sampler.clear()
        peers = []
        if model is not None:
            batches = sorted({min(batch, len(asked)) for batch in options.peer_batch})
            runs = (peer(model, asked, shape.max_tokens, batch, chat.stop_ids) for batch in batches)
            peers.append(min(runs, key=lambda r: r[0] / r[1]))
        if options.vllm:
            first = len(shape.prompts) * shape.samples
            rounds = [asked[:first], asked[first:]] if asked[first:] else [asked]
            peers.append(vllm(options.vllm, folder, str(dtype).removeprefix("torch."), rounds, shape, chat.stop_ids))
        for took, tokens in peers:
            figures += [took, took / seconds * sampled / tokens]
        print(
            f"{name:10} " + " ".join(f"{f:10.2f}" if isinstance(f, float) else f"{f:10}" for f in figures), flush=True
        )


if __name__ == "__main__":
    main()
