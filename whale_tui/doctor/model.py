"""The model: here, small enough, and with a chat template that says what it means. No weight is loaded."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence

from whale_tui.doctor import weights
from whale_tui.doctor.checkup import Checkup, Finding, fail, ok, warn
from whale_tui.policy import source
from whale_tui.policy.chat import ChatTokenizer
from whale_tui.policy.fit import why_not_fast
from whale_tui.policy.protocol import PolicyFailure

SPARE = 1 << 30
"""Memory for the libraries and the rest of the policy worker, in bytes."""
ASKED = "What is 2 + 2? <b>\u00e9\u4e16</b>"
ANSWERED = "It is four."


async def model(checkup: Checkup) -> Finding:
    """The model is on this machine, or can be had when the run starts."""
    name = checkup.config.model.name
    try:
        folder = source.on_disk(name)
        if folder is None and checkup.fetch:
            folder = await asyncio.to_thread(source.resolve, name)
    except PolicyFailure as failure:
        return fail(failure.detail, "set model.name to the embedded model, a folder in the hub's layout or a hub id")
    if folder is None:
        return warn(f"{name} is not on this machine; a run fetches it when it starts", "or now: doctor --fetch")
    checkup.known_model = folder
    size = f"{name}: {weights.parameters(folder) / 1e6:,.0f} million parameters"
    plain = why_not_fast(json.loads((folder / "config.json").read_text()), folder)
    return ok(f"{size}, sampled on the plain path ({plain})" if plain else f"{size}, sampled on the fast path")


def memory(checkup: Checkup) -> Finding:
    """Weights for sampling and for training, against what the machine or the GPU has. An estimate."""
    folder, wanted = checkup.model, checkup.config.model.device
    gpus = weights.gpu_bytes() if wanted in ("auto", "cuda") else []
    if wanted == "cuda" and not gpus:
        return fail("model.device is cuda, and no NVIDIA GPU is found here", 'set model.device = "auto" or "cpu"')
    device = "cuda" if gpus else wanted if wanted != "auto" else "mps" if sys.platform == "darwin" else "cpu"
    total, free = max(gpus, key=lambda gpu: gpu[1]) if gpus else weights.machine_bytes()
    numbers, each = weights.parameters(folder), weights.bytes_a_number(device)
    config = checkup.config
    merges = 4 * numbers < weights.machine_bytes()[0] / 8 and not gpus and config.model.adapt == "lora"
    sampler = each * numbers + (4 * numbers if merges else 0)  # the latter: the fp32 base of a merge
    trained, processes = weights.trained_parameters(config), config.weight.processes
    if gpus and len(gpus) < processes:
        return fail(
            f"weight.processes = {processes}, and {len(gpus)} GPUs are here", "set it to the number of GPUs or fewer"
        )
    # Where several train together weights are held in fp32 and split.
    trainer = weights.training_bytes(config, numbers, trained, 4 if processes > 1 else each) // (
        processes if gpus else 1
    )
    least = trainer if config.model.adapt == "full" else each * numbers
    need = (sampler if config.rollout.engine == "transformers" else 0) + trainer + SPARE
    text = f"about {need / 1e9:.1f} GB on {device}, {free / 1e9:.1f} of {total / 1e9:.1f} GB free"
    if least > total:
        what = "training all weights takes" if config.model.adapt == "full" else "the weights alone take"
        return fail(f"{text}: {what} {least / 1e9:.1f} GB", "take a smaller model or a larger machine")
    if need > free:
        return warn(f"{text} (an estimate)", "end other programs, or take a smaller model")
    return ok(text)


def chat_template(checkup: Checkup) -> Finding:
    """A conversation survives the round trip, a turn ends with a token that ends sampling, thinking is known."""
    try:
        chat = checkup.known_chat = ChatTokenizer(checkup.model)
        return _template(chat)
    except PolicyFailure as failure:
        return fail(failure.detail, "take an instruction-tuned model, its tokenizer and chat template beside it")
    except ValueError as refused:
        return fail(str(refused), "use an instruction-tuned model whose template takes user and assistant turns")


def _template(chat: ChatTokenizer) -> Finding:
    user, more = {"role": "user", "content": ASKED}, {"role": "user", "content": "And 3 + 3?"}
    prompt = chat.render([user])
    text = "".join(chat.decode_each(prompt))
    if ASKED not in text:
        return fail("a user's text is not in the rendered prompt as it was written", "use another chat template")
    if chat.encode(text) != prompt:
        return fail(
            "the prompt read back gives other token ids", "the tokenizer and its template don't belong together"
        )
    ids = chat.render([user, {"role": "assistant", "content": ANSWERED}, more])
    ending = _after(chat, ids, ANSWERED)
    if not ending:
        return fail("an earlier answer is not in the rendered prompt", "use another chat template")
    stops = set(chat.stop_ids)
    shown = ", ".join(repr(piece) for piece in chat.decode_each(chat.stop_ids))
    if not stops & set(ending[:2]):
        got = repr("".join(chat.decode_each(ending[:2])))
        return fail(
            f"the template ends a turn with {got}, and sampling stops at {shown}: replies would never end",
            "name the template's end-of-turn token as eos_token_id in generation_config.json",
        )
    notes = ["thinking can be switched" if _thinks(chat, [user]) else "no thinking mode", f"a turn ends with {shown}"]
    try:
        chat.render([{"role": "system", "content": "Be brief."}, user])
    except ValueError:
        return warn(f"{'; '.join(notes)}; it refuses a system prompt", "a harness must do without one")
    return ok("; ".join(notes))


def _after(chat: ChatTokenizer, ids: Sequence[int], text: str) -> list[int]:
    """The ids that follow a text in a rendered conversation; empty where it isn't there."""
    seen = ""
    for place, piece in enumerate(chat.decode_each(ids)):
        seen += piece
        if text in seen:
            return list(ids[place + 1 :])
    return []


def _thinks(chat: ChatTokenizer, messages: list[dict[str, str]]) -> bool:
    return chat.render(messages, thinking=True) != chat.render(messages, thinking=False)
