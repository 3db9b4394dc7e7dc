"""A GGUF file into a hub-layout folder, as a process of its own, so that the engine never loads torch.

python -m whale_tui.policy.dequantise GGUF FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path


def dequantise(gguf: Path, folder: Path) -> None:
    """Write the fp32 weights, config, tokenizer and chat template of a GGUF file in the hub's layout."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


if __name__ == "__main__":
    dequantise(Path(sys.argv[1]), Path(sys.argv[2]))
