"""A tiny random model in the hub's layout, made without a network in a moment, for tests of everything above it."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def tiny_model(
    folder: Path, *, seed: int = 0, hidden: int = 64, layers: int = 2, heads: int = 4, kv_heads: int = 2, **config
) -> Path:
    """Write a random Llama with grouped-query attention, a byte-level tokenizer of 259 ids and a ChatML template.

    `config` overrides fields of the model's config (and its class, by model_type "qwen2" or "qwen3"). Weights depend on
    `seed` and shape alone. Pad is the end of turn, as in the embedded model.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    _tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(CHATML)
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": "<|im_start|>",
                "eos_token": "<|im_end|>",
                "pad_token": "<|im_end|>",
                "unk_token": "<|endoftext|>",
            }
        )
    )
    settings = {
        "vocab_size": 256 + len(SPECIAL),
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }
    made = AutoConfig.for_model(config.pop("model_type", "llama"), **{**settings, **config})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(made)
        for name, weight in model.named_parameters():  # larger than the usual start, so that outputs differ by context
            if weight.dim() == 2:
                torch.nn.init.normal_(weight, std=0.6 / weight.shape[1] ** 0.5 if "embed" not in name else 0.15)
    model.save_pretrained(folder)
    return folder


def _tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=256 + len(SPECIAL),
        special_tokens=[AddedToken(text, special=True) for text in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([], trainer)
    return tokenizer


def real_model() -> Path:
    """The embedded model from the user's cache, fetched where it is missing; skips the test where it can't be had."""
    import pytest

    from whale_tui.policy.protocol import PolicyFailure
    from whale_tui.policy.source import EMBEDDED, resolve

    try:
        return resolve(EMBEDDED)
    except PolicyFailure as failure:
        pytest.skip(f"the embedded model can't be had here: {failure}")
