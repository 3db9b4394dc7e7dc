"""The loss of the weight phase, beside a plain reference written out here, for every way of splitting and packing."""

import random

import pytest
import torch

from tests.tiny import tiny_model
from whale_tui.policy import loss, trie
from whale_tui.policy.protocol import TrainRequest, TrainSample
from whale_tui.policy.trainer import Interrupted, Trainer

CPU = torch.device("cpu")
END = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("tiny"))


def make(folder, packed=True, nodes=1024):
    trainer = Trainer(folder, CPU, rank=4, alpha=8, seed=1, compute=torch.float32, packed=packed, pack_nodes=nodes)
    with torch.no_grad():  # a fresh adapter has B = 0, which hides half of the gradient
        for i, p in enumerate(trainer.parameters.values()):
            p.add_(0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(i)))
    return trainer


def samples(count=24, seed=0):
    """Shared headers, repeated outputs, outputs that are prefixes of others, the end-of-turn id inside prompts."""
    rng = random.Random(seed)
    heads = [[1, *[rng.randrange(3, 250) for _ in range(30)], END, 9] for _ in range(2)]
    made = []
    for i in range(count):
        prompt = heads[i % 2] + [40 + i % 5, END, 1] + [7] * (i % 3)
        output = [rng.randrange(3, 8) for _ in range(rng.randrange(1, 4))]
        made.append(TrainSample(prompt, [*output, END] if i % 4 else output))
    return made + made[:5]


def reference(trainer, batch):
    """One sample at a time, no packing, no padding, peft's own layers: loss and gradient by the definition."""
    for module in trainer.model.modules():
        vars(module).pop("forward", None)
    tokens = sum(len(s.output_ids) for s in batch)
    total = 0.0
    for s in batch:
        ids = torch.tensor([s.prompt_ids + s.output_ids])
        logprobs = trainer.model(input_ids=ids, use_cache=False).logits[0].log_softmax(-1)
        start = len(s.prompt_ids)
        part = -sum(logprobs[start + k - 1, t] for k, t in enumerate(s.output_ids)) / tokens
        part.backward()
        total += part.item()
    return total, gradients(trainer)


def gradients(trainer):
    grads = {name: p.grad.clone() for name, p in trainer.parameters.items()}
    trainer.optimizer.zero_grad(set_to_none=True)
    return grads


@pytest.mark.parametrize(("packed", "nodes"), [(True, 4096), (True, 100), (True, 1), (False, 0)])
def test_loss_and_gradient_equal_the_reference(folder, packed, nodes):
    trainer = make(folder, packed, nodes)
    batch = samples()
    total, expected = reference(make(folder), batch)
    assert trainer.gradient(batch) == pytest.approx(total, abs=1e-5)
    for name, grad in gradients(trainer).items():
        assert torch.allclose(grad, expected[name], atol=1e-5, rtol=1e-4), name
        assert grad.abs().max() > 0, name


def test_order_of_samples_is_nothing(folder):
    trainer = make(folder, nodes=100)
    batch = samples()
    trainer.gradient(batch)
    first = gradients(trainer)
    random.Random(3).shuffle(batch)
    trainer.gradient(batch)
    assert all(torch.equal(first[name], grad) for name, grad in gradients(trainer).items())


@pytest.mark.parametrize("packed", [True, False])
def test_prompt_positions_carry_no_loss(folder, packed):
    """Changing every logit at a position that predicts a prompt token changes nothing, changing a sampled one does."""
    trainer = make(folder, packed)
    batch = [TrainSample([1, 5, 6, END, 7], [8, 9, END]), TrainSample([1, 5, END, 4], [8, END])]
    head = trainer.model.get_base_model().lm_head
    plain = trainer.gradient(batch)
    seen = []

    def disturb(at):
        def hook(module, inputs, output):
            seen.append(output.shape)
            noise = torch.zeros_like(output)
            noise.view(-1, output.shape[-1])[at] = torch.linspace(-9, 9, output.shape[-1])
            return output + noise

        return hook

    if packed:
        # Logits exist only at nodes that predict a sampled token: 3 + 2, one of them shared by nothing.
        handle = head.register_forward_hook(disturb([0]))
        assert trainer.gradient(batch) != pytest.approx(plain, abs=1e-3)
        assert seen[0][-2] == 5
    else:
        prompt_positions = [0, 1, 2, 3]  # first three predict prompt ids, the fourth of row 0 (shorter) is position 3
        handle = head.register_forward_hook(disturb([0, 1, 2]))
        assert trainer.gradient(batch) == pytest.approx(plain, abs=1e-6)
        handle.remove()
        handle = head.register_forward_hook(disturb(prompt_positions))
        assert trainer.gradient(batch) != pytest.approx(plain, abs=1e-3)
    handle.remove()


def test_terms_are_the_sampled_tokens_and_nothing_else():
    batch = [TrainSample([5, 6], [7, END]), TrainSample([5, 6], [7, END]), TrainSample([5, 6, 7], [END, 6])]
    (pack,) = loss.packs(batch, 100)
    assert pack.ids == [5, 6, 7, END]
    assert pack.positions == [0, 1, 2, 3]
    terms = dict(zip(zip(pack.nodes, pack.targets, strict=True), pack.weights, strict=True))
    assert terms == {(1, 7): 2.0, (2, END): 3.0, (3, 6): 1.0}
    assert loss.token_count(batch) == 6 == sum(pack.weights)


def test_trie_attention_is_the_path():
    batch = [TrainSample([1, 2], [3, 4]), TrainSample([1, 2], [5, 6]), TrainSample([1], [7, 8, 9])]
    (pack,) = loss.packs(batch, 100)
    mask = pack.mask(CPU)[0, 0]
    for node, position in enumerate(pack.positions):
        ancestors = [j for j in range(len(pack.ids)) if mask[node, j]]
        assert len(ancestors) == position + 1
        assert [pack.positions[j] for j in ancestors] == list(range(position + 1))


def test_packs_are_bounded_and_lose_nothing():
    batch = samples(60)
    made = list(loss.packs(batch, 90))
    assert len(made) > 3
    assert all(len(pack.ids) <= 90 for pack in made)
    assert sum(sum(pack.weights) for pack in made) == loss.token_count(batch)


def test_a_sample_without_prompt_is_refused():
    with pytest.raises(ValueError, match="without a prompt"):
        list(loss.packs([TrainSample([], [1, 2])], 10))


def test_end_of_turn_is_learnt_though_it_is_the_pad(folder):
    trainer = make(folder)
    sample = TrainSample([1, 5, 6], [9, END])
    before = trainer.probe([1, 5, 6, 9, END])[-1]
    request = TrainRequest([[sample]] * 8, 2e-2)
    done = trainer.train(request, lambda: False, lambda text: None)
    assert done.tokens == 16 and len(done.losses) == 8
    assert done.losses[-1] < done.losses[0]
    assert trainer.probe([1, 5, 6, 9, END])[-1] > before + 0.5


def test_a_loss_that_is_not_finite_moves_nothing(folder):
    trainer = make(folder)
    sample = TrainSample([1, 5, 6], [9, END])
    before = {name: p.clone() for name, p in trainer.parameters.items()}
    head = trainer.model.get_base_model().lm_head
    handle = head.register_forward_hook(lambda module, inputs, output: output * float("nan"))
    done = trainer.train(TrainRequest([[sample]], 1e-2), lambda: False, lambda text: None)
    handle.remove()
    assert (done.skipped, done.losses, done.tokens) == (1, [], 0)
    assert all(torch.equal(before[name], p) for name, p in trainer.parameters.items())
    done = trainer.train(TrainRequest([[sample]], 1e-2), lambda: False, lambda text: None)
    assert done.skipped == 0 and len(done.losses) == 1


def test_interrupt_is_seen_between_microbatches(folder):
    trainer = make(folder, nodes=1)
    asked = iter([False, False, True])
    with pytest.raises(Interrupted):
        trainer.train(TrainRequest([samples()], 1e-2), lambda: next(asked), lambda text: None)
    assert all(p.grad is None for p in trainer.parameters.values())


def test_gradient_is_clipped_to_one(folder):
    trainer = make(folder)
    request = TrainRequest([samples(4)], 0.0)
    steps = []
    trainer.optimizer.register_step_pre_hook(
        lambda optimizer, args, kwargs: steps.append(
            torch.stack([p.grad.norm() for p in trainer.parameters.values()]).norm().item()
        )
    )
    with torch.no_grad():
        for p in trainer.parameters.values():
            p.mul_(20)
    done = trainer.train(request, lambda: False, lambda text: None)
    assert done.grad_norms[0] > 1.0
    assert steps[0] == pytest.approx(1.0, abs=1e-3)


SHAPES = {
    "header and branches": [TrainSample([1, 2, 3, 4, 10 + i], [5 + i % 3, 6, END]) for i in range(7)],
    "one path": [TrainSample([1, 2, 3], [4, 5, END]), TrainSample([1, 2, 3], [4])],
    "nothing shared": [TrainSample([20 + i, 3], [4, END]) for i in range(5)],
    "one long branch": [TrainSample([1, 2, 9], [3] * 60)] + [TrainSample([1, 2, 30 + i], [4]) for i in range(9)],
    "a branch off the trunk's end": [
        TrainSample([1, 2], [3]),
        TrainSample([1, 2], [3, END]),
        TrainSample([1, 2, 3], [7]),
    ],
    "a single token": [TrainSample([1], [END])],
}


@pytest.mark.parametrize("shape", SHAPES)
def test_attention_in_parts_is_attention_over_the_mask(shape):
    (pack,) = loss.packs(SHAPES[shape], 10_000)
    nodes = len(pack.ids)
    q, k, v = (
        torch.randn(heads, nodes, 8, generator=torch.Generator().manual_seed(heads), requires_grad=True)
        for heads in (6, 2, 2)
    )
    parts = trie.Layout(pack, CPU, torch.float32).attend(q, k, v, 0.3)
    whole = torch.nn.functional.scaled_dot_product_attention(
        q, k.repeat_interleave(3, 0), v.repeat_interleave(3, 0), attn_mask=pack.mask(CPU)[0], scale=0.3
    )
    assert torch.allclose(parts, whole, atol=1e-5)
    weight = torch.randn(parts.shape, generator=torch.Generator().manual_seed(9))
    for a, b in zip(
        torch.autograd.grad((parts * weight).sum(), (q, k, v)),
        torch.autograd.grad((whole * weight).sum(), (q, k, v)),
        strict=True,
    ):
        assert torch.allclose(a, b, atol=1e-5)
