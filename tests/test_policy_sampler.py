"""The fast path samples what the plain path samples: same ids, same distribution, whatever shares the batch."""

from collections import Counter

import numpy as np
import pytest
import torch

from tests.tiny import real_model, tiny_model
from whale_tui.policy.attention import attend, attend_plainly
from whale_tui.policy.chat import ChatTokenizer
from whale_tui.policy.draw import Drawer, uniforms
from whale_tui.policy.plain import PlainSampler
from whale_tui.policy.prefixes import STEMS, choose_stems, new_tokens
from whale_tui.policy.protocol import SampleRequest
from whale_tui.policy.rows import Row, Stops
from whale_tui.policy.sampler import FastSampler
from whale_tui.policy.trainer import Interrupted
from whale_tui.records import Sampling

CPU = torch.device("cpu")
VARIANTS = {
    "llama": {},
    "untied": {"tie_word_embeddings": False, "num_hidden_layers": 3},
    "no grouping": {"kv_heads": 4},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3", "head_dim": 32},
    "llama3 rope": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 256,
        }
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("tiny"))


def pair(folder, max_rows=256):
    stops = Stops(ChatTokenizer(folder).decode)
    return (
        FastSampler(folder, CPU, torch.float32, stops, max_rows),
        PlainSampler(folder, CPU, torch.float32, stops, max_rows),
    )


def drain(sampler, requests, follow=lambda ticket, sampled: None):
    """Sample all requests, and those that `follow` makes of finished ones, as an engine would."""
    sampler.clear()
    sampler.submit([Row(i, request) for i, request in enumerate(requests)])
    results = {}
    while done := sampler.advance(lambda: False):
        more = []
        for ticket, sampled in done:
            results[ticket] = sampled
            if (request := follow(ticket, sampled)) is not None:
                more.append(Row(*request))
        sampler.submit(more)
    return results


def greedy(chat, text, number=0, tokens=16, system="Be brief.", **kw):
    prompt = chat.render([{"role": "system", "content": system}, {"role": "user", "content": text}])
    return SampleRequest((number, 0), prompt, tokens, number, Sampling(temperature=0.0), chat.stop_ids, **kw)


def batch(chat, seed=0, temperature=None):
    """Four harness headers, prompts of many lengths, three samples each, one prompt that shares nothing."""
    requests = []
    for head in range(4):
        system = f"{'ABCD'[head]} helper. " + "Answer with one word. " * (3 * head)
        for question in range(5):
            for sample in range(3):
                n = len(requests)
                made = greedy(chat, f"What is {question} plus {head}{' please' * question}?", n, 12 + sample, system)
                t = (0.0 if sample == 0 else 1.0) if temperature is None else temperature
                requests.append(
                    SampleRequest(made.order, made.prompt_ids, made.max_tokens, seed + n, Sampling(temperature=t), [2])
                )
    requests.append(SampleRequest((len(requests), 0), chat.encode("zzz"), 9, 5, Sampling(), [2]))
    return requests


def assert_same(a, b, requests, plain):
    """What two ways of computing the same calls sampled. They may part where a number drawn lies within rounding of the
    border between two tokens, which one call in a few thousand comes to.
    """
    assert a.keys() == b.keys()
    for ticket, sampled in a.items():
        ours, other = sampled.output_ids, b[ticket].output_ids
        same = next((i for i, (x, y) in enumerate(zip(ours, other, strict=False)) if x != y), None)
        if same is None:
            assert ours == other
            assert sampled.finish_reason == b[ticket].finish_reason
        else:
            assert {ours[same], other[same]} <= drawn_within_rounding(plain, requests[ticket], ours[:same])
        assert np.allclose(sampled.logprobs[:same], b[ticket].logprobs[:same], atol=2e-4)


@torch.inference_mode()
def drawn_within_rounding(plain, request, ids):
    """The tokens that a call draws after `ids` from logits that are off by rounding."""
    logits = plain.model(input_ids=torch.tensor([request.prompt_ids + ids])).logits[0, -1].float()
    rows = 256
    noisy = logits + 3e-5 * torch.randn(rows, len(logits), generator=torch.Generator().manual_seed(0))
    draw = Drawer([request.sampling] * rows, [request.seed] * rows, len(logits), CPU)
    return set(draw(noisy, torch.arange(len(logits)).expand(rows, -1), np.full(rows, len(ids)))[0])


@pytest.mark.parametrize("variant", VARIANTS)
def test_fast_equals_plain(tmp_path, variant):
    folder = tiny_model(tmp_path / "m", **VARIANTS[variant])
    fast, plain = pair(folder)
    requests = batch(ChatTokenizer(folder))
    assert_same(drain(fast, requests), drain(plain, requests), requests, plain)
    ids = requests[0].prompt_ids
    assert torch.allclose(fast.probe(ids), plain.probe(ids), atol=1e-4)
    assert fast.parameters == plain.parameters
    assert fast.linears == plain.linears


def test_real_model_equals_plain_and_generate():
    folder = real_model()
    chat = ChatTokenizer(folder)
    fast, plain = pair(folder)
    requests = batch(chat)[::2]
    assert_same(drain(fast, requests), drain(plain, requests), requests, plain)
    one = greedy(chat, "Name three colours.", tokens=24)
    with torch.inference_mode():
        out = plain.model.generate(
            input_ids=torch.tensor([one.prompt_ids]), do_sample=False, max_new_tokens=24, eos_token_id=2, pad_token_id=2
        )
    assert drain(fast, [one])[0].output_ids == out[0, len(one.prompt_ids) :].tolist()


def test_greedy_batch_equals_singles(folder):
    fast, _ = pair(folder)
    requests = batch(ChatTokenizer(folder), temperature=0.0)
    together = drain(fast, requests)
    for i in range(0, len(requests), 7):
        assert drain(fast, [requests[i]])[0].output_ids == together[i].output_ids


@pytest.mark.parametrize("room", [1, 700, 1 << 28])
def test_attention_out_of_plain_products_is_the_kernels(room):
    """What a GPU computes with, some queries at a time, beside the CPU's kernel."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, n, 16) for heads, n in ((4, 37), (2, 37), (2, 37)))
    for kind in ({"causal": True}, {"mask": torch.where(torch.rand(2, 1, 37, 37) < 0.5, -torch.inf, 0.0)}, {}):
        if "mask" in kind:
            kind["mask"].diagonal(dim1=-2, dim2=-1).zero_()
        for ours, kernels in zip(attend_plainly(q, k, v, room=room, **kind), attend(q, k, v, **kind), strict=True):
            assert torch.allclose(ours, kernels, atol=1e-5)


def test_few_places_in_the_batch_change_nothing(folder):
    """Rows join while others decode; with 7 places most of them do."""
    requests = batch(ChatTokenizer(folder))
    fast, plain = pair(folder)
    assert_same(drain(pair(folder, max_rows=7)[0], requests), drain(fast, requests), requests, plain)


def test_a_full_prefix_store_changes_nothing(folder):
    requests = batch(ChatTokenizer(folder))
    fast, plain = pair(folder, max_rows=20)
    fast._prefixes._limit = 600
    assert_same(drain(fast, requests), drain(plain, requests), requests, plain)


def test_same_calls_same_bits(folder):
    requests = batch(ChatTokenizer(folder))
    fast, _ = pair(folder)
    assert drain(fast, requests) == drain(fast, requests)
    other = batch(ChatTokenizer(folder), seed=1000)
    assert drain(fast, requests) != drain(fast, other)


def test_growing_turns_reuse_and_equal_fresh_ones(folder):
    chat = ChatTokenizer(folder)
    fast, plain = pair(folder)
    requests = batch(chat)
    turns = {}

    def follow(ticket, sampled):
        if ticket >= 2000:
            return None
        before = requests[ticket] if ticket < 1000 else turns[ticket]
        prompt = before.prompt_ids + sampled.output_ids + chat.encode("<|im_end|>\n<|im_start|>user\nmore\n")
        turns[ticket + 1000] = SampleRequest((ticket, 1), prompt, 6, ticket + 7, Sampling(), [2])
        return ticket + 1000, turns[ticket + 1000]

    computed = []
    forward = fast.model.forward
    fast.model.forward = lambda ids, *rest: (computed.append(len(ids)), forward(ids, *rest))[1]
    results = drain(fast, requests, follow)
    again = drain(plain, list(turns.values()))
    assert_same({n: results[t] for n, t in enumerate(turns)}, again, list(turns.values()), plain)
    # Without reuse the later turns alone would compute all of their prompts again.
    assert sum(computed) < sum(len(t.prompt_ids) for t in turns.values())


def test_stop_string_ends_a_row_and_keeps_its_ids(folder):
    chat = ChatTokenizer(folder)
    fast, _ = pair(folder)
    whole = drain(fast, [greedy(chat, "go", tokens=12)])[0]
    text = chat.decode(whole.output_ids)
    stop = text[3:5]
    cut = drain(fast, [greedy(chat, "go", tokens=12, stop_strings=["never", stop])])[0]
    assert cut.finish_reason == "stop"
    assert cut.output_ids == whole.output_ids[: len(cut.output_ids)]
    assert stop in chat.decode(cut.output_ids)
    assert stop not in chat.decode(cut.output_ids[:-1])


def test_end_of_turn_is_kept_and_is_last(folder):
    fast, _ = pair(folder)
    chat = ChatTokenizer(folder)
    free = drain(fast, [greedy(chat, "go", tokens=12)])[0]
    token = free.output_ids[4]
    request = greedy(chat, "go", tokens=12)
    request.stop_ids = [token]
    ended = drain(fast, [request])[0]
    assert ended.output_ids == free.output_ids[: free.output_ids.index(token) + 1]
    assert ended.finish_reason == "stop"
    assert len(ended.logprobs) == len(ended.output_ids)


def test_interrupt_is_seen_between_steps(folder):
    fast, _ = pair(folder)
    fast.submit([Row(0, greedy(ChatTokenizer(folder), "go", tokens=100))])
    steps = iter([False, False, True])
    with pytest.raises(Interrupted):
        fast.advance(lambda: next(steps))


# --- distribution


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_distribution_over_20000_draws(folder, dtype):
    """Frequencies of first and second tokens beside exact probabilities of the plain path in fp32."""
    chat = ChatTokenizer(folder)
    fast = FastSampler(folder, CPU, dtype, Stops(chat.decode), 1000)
    _, plain = pair(folder)
    sampling = Sampling(temperature=0.8, top_k=12, top_p=0.9)
    prompt = greedy(chat, "go").prompt_ids
    draws = 20_000
    results = drain(fast, [SampleRequest((i, 0), prompt, 2, i, sampling, []) for i in range(draws)])
    first = Counter(r.output_ids[0] for r in results.values())
    check_frequencies(first, processed(plain, prompt, sampling), draws, dtype)
    token, count = first.most_common(1)[0]
    second = Counter(r.output_ids[1] for r in results.values() if r.output_ids[0] == token)
    check_frequencies(second, processed(plain, [*prompt, token], sampling), count, dtype)
    expected = processed(plain, prompt, sampling)
    slack = 1e-3 if dtype == torch.float32 else 0.1
    for r in list(results.values())[:50]:
        assert abs(r.logprobs[0] - np.log(expected[r.output_ids[0]])) < slack


def processed(plain, prompt, sampling):
    """Probabilities by id after temperature, top-k and top-p, written out plainly."""
    with torch.inference_mode():
        logits = plain.model(torch.tensor([prompt])).logits[0, -1].double() / sampling.temperature
    order = logits.argsort(descending=True)[: sampling.top_k]
    p = logits[order].softmax(0)
    keep = (p.cumsum(0) - p) < sampling.top_p
    p = p[keep] / p[keep].sum()
    return dict(zip(order[keep].tolist(), p.tolist(), strict=True))


def check_frequencies(found, expected, draws, dtype):
    assert set(found) <= set(expected)
    if dtype == torch.float32:
        chi = sum((found[t] - draws * p) ** 2 / (draws * p) for t, p in expected.items())
        assert chi < len(expected) + 5 * (2 * len(expected)) ** 0.5
    # bf16 weights shift probabilities by some percent of themselves: bounded in total.
    distance = sum(abs(found[t] / draws - p) for t, p in expected.items()) / 2
    assert distance < (0.03 if dtype == torch.float32 else 0.06)


def test_uniform_numbers_depend_on_seed_and_position_alone():
    seeds, positions = np.repeat(np.arange(200), 200).astype(np.uint64), np.tile(np.arange(200), 200)
    u = uniforms(seeds, positions)
    assert len(set(u.tolist())) == 40_000
    assert u.min() > 0 and u.max() < 1
    assert abs(u.mean() - 0.5) < 0.01
    grid = u.reshape(200, 200)
    assert abs(np.corrcoef(grid[:-1].ravel(), grid[1:].ravel())[0, 1]) < 0.02
    assert abs(np.corrcoef(grid[:, :-1].ravel(), grid[:, 1:].ravel())[0, 1]) < 0.02
    assert uniforms(seeds[7:8], positions[7:8])[0] == u[7]


def test_mixed_settings_in_one_batch_do_not_touch_each_other():
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    ids = torch.arange(50).expand(4, -1)
    settings = [
        Sampling(temperature=0.0),
        Sampling(top_k=3),
        Sampling(top_k=0, top_p=0.5),
        Sampling(temperature=2.0, top_k=0),
    ]
    together = Drawer(settings, [1, 2, 3, 4], 50, CPU)(logits, ids, np.zeros(4))
    for i, sampling in enumerate(settings):
        alone = Drawer([sampling], [i + 1], 50, CPU)(logits[i : i + 1], ids[:1], np.zeros(1))
        assert alone[0][0] == together[0][i]
        assert alone[1][0] == pytest.approx(together[1][i], abs=1e-12)
    assert together[0][0] == int(logits[0].argmax()) and together[1][0] == 0.0


# --- stems


def test_stems_are_found_per_harness():
    heads = [[9, 9, *[h] * 100] for h in range(3)]
    prompts = sorted([*head, 50 + q, *range(5)] for head in heads for q in range(6))
    groups = choose_stems(prompts)
    assert sorted((length, len(members)) for length, members in groups) == [(102, 6)] * 3
    assert new_tokens(prompts) == 2 + 3 * 100 + 18 * 6


def test_a_stem_leaves_every_prompt_a_token():
    long = list(range(40))
    prompts = sorted([long, long[:30], [*long, 7]])
    groups = choose_stems(prompts)
    assert all(length < min(len(prompts[i]) for i in members) for length, members in groups)


def test_every_prompt_is_in_one_group():
    rng = np.random.default_rng(0)
    prompts = sorted({tuple(rng.integers(0, 2, rng.integers(5, 60))) for _ in range(200)})
    groups = choose_stems(prompts)
    assert sorted(i for _, members in groups for i in members) == list(range(len(prompts)))
    for length, members in groups:
        assert len({prompts[i][:length] for i in members}) == 1
    assert len(groups) <= STEMS + 1
