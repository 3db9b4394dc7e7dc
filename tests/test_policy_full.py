"""All weights as what is trained: gradients, versions, the proof, and what an adapter's versions share with them."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.test_policy_loss import END, reference, samples
from tests.test_policy_publish import publish, request, restore, sample
from tests.tiny import real_model, tiny_model
from whale_tui.policy import artifact, export, parts, wire
from whale_tui.policy.chat import ChatTokenizer
from whale_tui.policy.held import HeldPolicy
from whale_tui.policy.llama import Llama
from whale_tui.policy.protocol import PolicyFailure, TrainRequest, TrainSample
from whale_tui.policy.trainer import Interrupted, Trainer

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def untied(tmp_path_factory):
    made = tmp_path_factory.mktemp("untied")
    return tiny_model(made, model_type="qwen3", tie_word_embeddings=False, head_dim=16)


def make(folder, packed=True, nodes=100, **more):
    return Trainer(folder, CPU, compute=torch.float32, packed=packed, pack_nodes=nodes, **({"full": True} | more))


def held(folder, dtype="bfloat16", fast=True, **more):
    policy = HeldPolicy(lambda text: None, lambda: False)
    ask = {"device": "cpu", "lora_rank": 4, "lora_alpha": 8, "max_rows": 32, "seed": 3, "pack_nodes": 256, "full": True}
    policy.answer(wire.Load(number=1, model_path=str(folder), dtype=dtype, fast=fast, **(ask | more)))
    return policy


def train(policy, text="hello", lr=1e-3):
    return policy.answer(wire.Train(number=1, request=request(text, lr))).trained


# --------------------------------------------------------------------------------------------------------- gradients


@pytest.mark.parametrize("which", ["folder", "untied"])
@pytest.mark.parametrize(("packed", "checkpointing"), [(True, False), (True, True), (False, False), (False, True)])
def test_loss_and_gradient_equal_the_reference(which, packed, checkpointing, request):
    folder = request.getfixturevalue(which)
    batch = samples()
    total, expected = reference(make(folder), batch)
    one = make(folder, packed, checkpointing=checkpointing)
    assert one.gradient(batch) == pytest.approx(total, abs=1e-5)
    assert len(expected) == len(list(AutoModelForCausalLM.from_pretrained(folder).parameters()))
    for name, parameter in one.parameters.items():
        assert torch.allclose(parameter.grad, expected[name], atol=1e-5, rtol=1e-4), name
        assert parameter.grad.abs().max() > 0, name


@pytest.mark.parametrize("packed", [True, False])
def test_an_adapter_has_the_same_gradient_with_checkpointing(folder, packed):
    grads = []
    for checkpointing in (False, True):
        one = make(folder, packed, full=False, rank=4, checkpointing=checkpointing)
        with torch.no_grad():
            for i, p in enumerate(one.parameters.values()):
                p.add_(0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(i)))
        one.gradient(samples())
        grads.append(torch.cat([p.grad.flatten() for p in one.parameters.values()]))
    assert torch.allclose(*grads, atol=1e-6) and grads[0].abs().max() > 1e-3


def test_gradients_of_the_real_model_are_those_of_padded_rows():
    folder = real_model()
    batch = [s for s in samples(8) if len(s.output_ids) > 1][:4]
    grads = []
    for packed in (True, False):
        one = make(folder, packed, nodes=1024)
        one.gradient(batch)
        grads.append({name: p.grad for name, p in one.parameters.items()})
        del one
    largest = max(float(g.abs().max()) for g in grads[1].values())
    for name, grad in grads[1].items():
        assert float((grads[0][name] - grad).abs().max()) < 1e-5 * max(1.0, largest), name


def limit_memory(one, most):
    """A forward of more tokens than `most` runs out of memory, as a GPU would say it. Returns the sizes that were
    computed.
    """
    sizes = []
    embed = one.held.causal.get_input_embeddings()

    def forward(module, args):
        if args[0].numel() > most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        sizes.append(args[0].numel())

    embed.register_forward_pre_hook(forward)
    return sizes


@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize(("packed", "most"), [(True, 60), (False, 150)])
def test_out_of_memory_is_met_with_smaller_parts_and_the_same_gradient(folder, packed, most, full):
    batch, said = samples(), []
    plain, tight = (make(folder, packed, nodes=400, full=full, rank=4) for _ in range(2))
    total = plain.gradient(batch)
    sizes = limit_memory(tight, most)
    assert tight.gradient(batch, note=said.append) == pytest.approx(total, abs=1e-5)
    for name, parameter in tight.parameters.items():
        assert torch.allclose(parameter.grad, plain.parameters[name].grad, atol=1e-6), name
    assert len(said) >= 2 and "begun anew in parts of" in said[-1] and max(sizes) <= most
    tight.optimizer.zero_grad(set_to_none=True)
    said.clear()
    tight.gradient(batch, note=said.append)
    assert not said, "the size that fits is kept"


@pytest.mark.parametrize("packed", [True, False])
def test_a_sample_that_does_not_fit_alone_is_said_with_a_mend(folder, packed):
    one = make(folder, packed)
    limit_memory(one, 20)
    with pytest.raises(PolicyFailure, match=r"one sample of \d+ tokens .* model.checkpointing") as failure:
        one.train(TrainRequest([samples()], 1e-3), lambda: False, lambda text: None)
    assert failure.value.kind == "out-of-memory"


def test_another_error_is_no_lack_of_memory(folder):
    one = make(folder)

    def broken(module, args):
        raise RuntimeError("shapes do not fit")

    one.held.causal.get_input_embeddings().register_forward_pre_hook(broken)
    with pytest.raises(RuntimeError, match="shapes do not fit"):
        one.gradient(samples())
    assert one.padded_rows == parts.PADDED_ROWS and one.pack_nodes == 100


# ----------------------------------------------------------------------------------------------------------- versions


@pytest.mark.parametrize(("dtype", "fast"), [("float32", True), ("bfloat16", True), ("bfloat16", False)])
def test_publish_serves_what_was_trained(untied, tmp_path, dtype, fast):
    policy = held(untied, dtype, fast)
    before, base = sample(policy, untied), policy._sampler.probe(policy._probe)
    train(policy, lr=5e-3)
    made = publish(policy, tmp_path, "theta-0001")
    assert made.probe_trainer == pytest.approx(made.probe_rollout, abs=0.02)
    assert (policy._sampler.probe(policy._probe) - base).abs().max() > 0.05 and sample(policy, untied) != before
    assert made.changed > 0.5
    assert restore(policy, tmp_path, "theta-0000") == policy._base_hash
    assert sample(policy, untied) == before
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "theta-0001", dtype="auto")
    assert str(model.dtype) == f"torch.{dtype}" and model.config.use_cache
    ids = torch.tensor([policy._probe])
    with torch.no_grad():
        logprobs = model(ids).logits[0, :-1].float().log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
    assert float(logprobs.mean()) == pytest.approx(made.probe_rollout, abs=0.02)
    assert ChatTokenizer(tmp_path / "theta-0001").hash == ChatTokenizer(untied).hash


def test_the_share_that_bf16_shows_is_said(folder, tmp_path):
    """A rate under the resolution of bf16 moves the masters, and next to nothing of what is served."""
    policy, said = held(folder), []
    policy._note = said.append
    train(policy, lr=1e-6)
    first = publish(policy, tmp_path, "theta-0001")
    train(policy, lr=1e-3)
    second = publish(policy, tmp_path, "theta-0002")
    assert first.changed < 0.05 < 0.5 < second.changed
    assert f"theta-0002: {second.changed:.2%} of the weights differ from the version before as served" in said


@pytest.mark.parametrize("optimizer", ["adamw", "adafactor"])
def test_restore_is_exact(folder, tmp_path, optimizer):
    one = held(folder, optimizer=optimizer)
    train(one)
    first = publish(one, tmp_path, "theta-0001")
    served = sample(one, folder)
    never_killed = train(one, "again")
    second = publish(one, tmp_path, "theta-0002")
    train(one, "third")
    third = publish(one, tmp_path, "theta-0003")

    other = held(folder, optimizer=optimizer)
    assert restore(other, tmp_path, "theta-0001") == first.hash
    assert sample(other, folder) == served
    resumed = train(other, "again")
    assert (resumed.losses, resumed.grad_norms) == (never_killed.losses, never_killed.grad_norms)
    assert publish(other, tmp_path, "theta-0002b").hash == second.hash
    train(other, "third")
    assert publish(other, tmp_path, "theta-0003b").hash == third.hash

    (tmp_path / "theta-0001" / "optimizer.pt").unlink()  # as retention leaves an older version
    rolled = held(folder, optimizer=optimizer)
    with pytest.raises(PolicyFailure, match=r"optimizer\.pt"):
        restore(rolled, tmp_path, "theta-0001")
    assert restore(rolled, tmp_path, "theta-0001", with_optimizer=False) == first.hash
    assert sample(rolled, folder) == served
    train(rolled, "again")
    assert publish(rolled, tmp_path, "theta-0002c").hash != second.hash, "from what was served, and not the masters"


def test_what_was_not_published_is_given_up(folder, tmp_path):
    policy = held(folder)

    def state():
        return artifact.hash_tensors(policy._trainer.held.tensors(), "")

    train(policy)
    policy.answer(wire.Drop(number=1))
    base = state()
    train(policy)
    publish(policy, tmp_path, "theta-0001")
    published = state()
    train(policy, "never published")
    assert state() != published
    policy.answer(wire.Drop(number=1))
    assert state() == published
    answers = iter([False, True])
    policy._interrupted = lambda: next(answers)
    with pytest.raises(Interrupted):
        train(policy, "second")
    policy._interrupted = lambda: False
    assert state() == published
    restore(policy, tmp_path, "theta-0000")
    assert state() == base


class Lost(Llama):
    """Reads the files and goes on with the weights that it has."""

    def replace(self, folder):
        pass


class Torn(Llama):
    """Leaves one matrix as it was."""

    def replace(self, folder):
        kept = self.weights()["model.layers.1.mlp.down_proj.weight"].clone()
        super().replace(folder)
        self.weights()["model.layers.1.mlp.down_proj.weight"].copy_(kept)


@pytest.mark.parametrize("broken", [Lost, Torn])
def test_a_broken_publish_is_caught(folder, tmp_path, broken):
    policy = held(folder)
    policy._sampler.model.__class__ = broken
    train(policy)
    with pytest.raises(PolicyFailure, match="is not served as") as failure:
        publish(policy, tmp_path, "theta-0001")
    assert failure.value.kind == "publish-unproved"


def test_a_file_that_is_not_what_was_trained_is_caught(folder, tmp_path, monkeypatch):
    policy = held(folder)
    train(policy)
    write = type(policy._trainer.held).write

    def stale(weights, made, base_hash, tensors):
        return write(weights, made, base_hash, {**tensors, "model.norm.weight": tensors["model.norm.weight"] + 0.25})

    monkeypatch.setattr(type(policy._trainer.held), "write", stale)
    with pytest.raises(PolicyFailure, match=r"model\.norm\.weight was not written"):
        publish(policy, tmp_path, "theta-0001")


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt", "config.json"])
def test_a_corrupt_artifact_is_named(folder, tmp_path, name):
    policy = held(folder)
    train(policy)
    publish(policy, tmp_path, "theta-0001")
    path = tmp_path / "theta-0001" / name
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(PolicyFailure, match=name) as failure:
        restore(policy, tmp_path, "theta-0001")
    assert failure.value.kind == "artifact-corrupt"


def test_versions_of_the_other_kind_are_refused(folder, tmp_path):
    full, adapter = held(folder), held(folder, full=False)
    for policy, name in ((full, "theta-0001"), (adapter, "theta-0002")):
        train(policy)
        publish(policy, tmp_path, name)
    with pytest.raises(PolicyFailure, match=r"holds an adapter, model\.adapt is for all weights"):
        restore(full, tmp_path, "theta-0002")
    with pytest.raises(PolicyFailure, match=r"holds all weights, model\.adapt is for an adapter"):
        restore(adapter, tmp_path, "theta-0001")


def test_an_adapters_share_is_that_of_the_version_before(folder, tmp_path):
    policy = held(folder, full=False)
    train(policy, lr=2e-2)
    assert publish(policy, tmp_path, "theta-0001").changed > 0.3
    train(policy, lr=1e-8)
    assert publish(policy, tmp_path, "theta-0002").changed < 0.01


def test_a_full_version_is_exported_as_it_was_served(folder, tmp_path):
    policy = held(folder)
    train(policy)
    publish(policy, tmp_path, "theta-0001")
    (tmp_path / "out").mkdir()
    assert export.copy_weights(tmp_path / "theta-0001", tmp_path / "out") == torch.bfloat16
    exported = dict(artifact.each_weight(tmp_path / "out"))
    assert exported.keys() == {name for name, _ in artifact.each_weight(folder)}
    served = policy._sampler.weights()
    assert all(torch.equal(served[name].to(tensor.dtype), tensor) for name, tensor in exported.items())
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    with pytest.raises(PolicyFailure, match="it has no adapter"):
        export.copy_adapter(tmp_path / "theta-0001", tmp_path / "out")


def test_adafactor_keeps_next_to_nothing_and_learns(folder):
    one = make(folder, optimizer_name="adafactor")
    batch = [TrainSample([1, 5, 6], [9, END])]
    before = float(one.probe([1, 5, 6, 9, END])[-2:].sum())
    one.train(TrainRequest([batch] * 20, 1e-2), lambda: False, lambda text: None)
    assert float(one.probe([1, 5, 6, 9, END])[-2:].sum()) > before + 1
    kept = sum(t.numel() for state in one.optimizer.state.values() for t in state.values())
    assert kept < one.trained_parameters / 10
