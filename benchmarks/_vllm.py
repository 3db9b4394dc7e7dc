"""vLLM's offline engine over prompt ids, as a process of its own: `.venv-vllm/bin/python benchmarks/_vllm.py < JSON`.

In: model, dtype, rounds (lists of prompts, each list sampled together), max_tokens, stop_ids, warm (prompts to warm up
on). Out, as the last line: seconds and sampled tokens of all rounds, and the seconds it took to load.
"""

from __future__ import annotations

import json
import sys
import time


def main() -> None:
    asked = json.load(sys.stdin)
    from vllm import LLM, SamplingParams

    started = time.perf_counter()
    longest = max(len(prompt) for prompts in asked["rounds"] for prompt in prompts) + asked["max_tokens"]
    engine = LLM(
        asked["model"], dtype=asked["dtype"], max_model_len=longest + 16, max_num_seqs=256, seed=0,
        enable_prefix_caching=True, generation_config="vllm", disable_log_stats=True,
    )  # fmt: skip
    settings = SamplingParams(
        temperature=1.0, top_k=20, top_p=1.0, max_tokens=asked["max_tokens"], stop_token_ids=asked["stop_ids"],
        logprobs=0, detokenize=False,
    )  # fmt: skip

    def sample(prompts: list[list[int]]) -> int:
        done = engine.generate([{"prompt_token_ids": ids} for ids in prompts], settings, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in done)

    sample(asked["warm"])
    engine.reset_prefix_cache()
    loaded, started = time.perf_counter() - started, time.perf_counter()
    tokens = sum(sample(prompts) for prompts in asked["rounds"])
    print(json.dumps({"seconds": time.perf_counter() - started, "tokens": tokens, "loaded": loaded}), flush=True)


if __name__ == "__main__":
    main()
