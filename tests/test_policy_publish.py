"""A published version is written whole, proved to be served, and restored exactly."""

import json
import shutil

import pytest
import torch

from tests.tiny import tiny_model
from whale_tui.policy import artifact, proof, wire
from whale_tui.policy.chat import ChatTokenizer
from whale_tui.policy.held import HeldPolicy
from whale_tui.policy.llama import Llama
from whale_tui.policy.protocol import PolicyFailure, SampleRequest, TrainRequest, TrainSample
from whale_tui.policy.trainer import Interrupted, Trainer
from whale_tui.records import Sampling


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("tiny"))


def held(folder, dtype="float32", fast=True):
    policy = HeldPolicy(lambda text: None, lambda: False)
    ask = wire.Load(
        number=1,
        model_path=str(folder),
        device="cpu",
        lora_rank=4,
        lora_alpha=8,
        max_rows=32,
        seed=3,
        dtype=dtype,
        fast=fast,
        pack_nodes=256,
    )
    policy.answer(ask)
    return policy


def request(text="hello", lr=2e-2):
    samples = [TrainSample([1, *text.encode(), 5 + i], [10 + i, 11, 2]) for i in range(6)]
    return TrainRequest([samples[:3], samples[3:]], lr)


def sample(policy, folder, seeds=range(4)):
    chat = ChatTokenizer(folder)
    prompt = chat.render([{"role": "user", "content": "go"}])
    rows = [(i, SampleRequest((i, 0), prompt, 12, i, Sampling(), chat.stop_ids)) for i in seeds]
    out = {}
    reply = policy.answer(wire.Advance(number=1, requests=rows))
    while reply.rows:
        out.update({ticket: s.output_ids for ticket, s in reply.rows})
        reply = policy.answer(wire.Advance(number=1, requests=[]))
    return out


def train(policy, *args, **kw):
    return policy.answer(wire.Train(number=1, request=request(*args, **kw))).trained


def publish(policy, root, version):
    return policy.answer(wire.Publish(number=1, version=version, folder=str(root / version))).publication


def restore(policy, root, version, with_optimizer=True):
    path = None if version == "theta-0000" else str(root / version)
    return policy.answer(wire.Restore(number=1, version=version, folder=path, with_optimizer=with_optimizer)).hash


@pytest.mark.parametrize(("dtype", "fast"), [("float32", True), ("bfloat16", True), ("bfloat16", False)])
def test_publish_serves_what_was_trained(folder, tmp_path, dtype, fast):
    policy = held(folder, dtype, fast)
    base = policy._sampler.probe(policy._probe)
    before = sample(policy, folder)
    train(policy, lr=5e-2)
    publication = publish(policy, tmp_path, "theta-0001")
    assert publication.probe_trainer == pytest.approx(publication.probe_rollout, abs=0.02)
    assert publication.changed > 0.5
    assert (policy._sampler.probe(policy._probe) - base).abs().max() > 0.05
    assert sample(policy, folder) != before
    assert restore(policy, tmp_path, "theta-0000") == policy._base_hash
    assert sample(policy, folder) == before


def test_peft_reads_what_is_written(folder, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    policy = held(folder)
    train(policy)
    publish(policy, tmp_path, "theta-0001")
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, tmp_path / "theta-0001").eval()
    ids = torch.tensor([policy._probe])
    with torch.no_grad():
        logprobs = model(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
    assert torch.allclose(logprobs, policy._sampler.probe(policy._probe), atol=1e-3)
    config = json.loads((tmp_path / "theta-0001" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(folder)
    assert config["r"] == 4 and config["lora_dropout"] == 0.0 and not config.get("modules_to_save")


class Lost(Llama):
    """Takes an adapter and goes on serving the base."""

    def load(self, deltas):
        super().load({})


class Faint(Llama):
    """Forgets the scale of the adapter."""

    def load(self, deltas):
        super().load({module: lambda delta=delta: 0.3 * delta() for module, delta in deltas.items()})


class Stale(Llama):
    """Keeps the first version it ever served."""

    def load(self, deltas):
        if not getattr(self, "loaded", False):
            super().load(deltas)
        self.loaded = bool(deltas)


class ElsewhereServed(Llama):
    """Merges as it should, and computes with weights of another layer's."""

    def forward(self, ids, positions, attend):
        if getattr(self, "loaded", False):
            self.layers[0].down, self.layers[1].down = self.layers[1].down, self.layers[0].down
        try:
            return super().forward(ids, positions, attend)
        finally:
            if getattr(self, "loaded", False):
                self.layers[0].down, self.layers[1].down = self.layers[1].down, self.layers[0].down

    def load(self, deltas):
        super().load(deltas)
        self.loaded = bool(deltas)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("broken", [Lost, Faint, Stale, ElsewhereServed])
@pytest.mark.parametrize("lr", [5e-2, 1e-4])
def test_a_broken_publish_is_caught(folder, tmp_path, broken, dtype, lr):
    """Also where training moved the weights by less than bf16 can show in the probe."""
    policy = held(folder, dtype)
    policy._sampler.model.__class__ = broken
    if broken is Stale:
        train(policy, lr=lr)
        publish(policy, tmp_path, "theta-0001")
    for _ in range(4):
        train(policy, "another", lr=lr)
        policy._trained = False
    with pytest.raises(PolicyFailure) as failure:
        publish(policy, tmp_path, "theta-0002")
    assert failure.value.kind == "publish-unproved"
    with pytest.raises(PolicyFailure, match="restore"):
        sample(policy, folder)
    policy._sampler.model.__class__ = Llama
    restore(policy, tmp_path, "theta-0000")
    assert sample(policy, folder)


def test_proof_rejects_values_that_are_not_finite():
    fine, broken = [0.0] * 5, [0.0, float("nan"), 0.0, 0.0, 0.0]
    proof.prove_probe(fine, fine, fine, fine, "float32")
    with pytest.raises(PolicyFailure, match="not finite"):
        proof.prove_probe(fine, broken, fine, fine, "float32")


def test_restore_is_exact(folder, tmp_path):
    """A process killed after a publish and resumed trains the very same weights as one never killed."""
    one = held(folder, "bfloat16")
    train(one)
    first = publish(one, tmp_path, "theta-0001")
    served = sample(one, folder)
    never_killed = train(one, "again")
    second = publish(one, tmp_path, "theta-0002")

    other = held(folder, "bfloat16")
    assert restore(other, tmp_path, "theta-0001") == first.hash
    assert sample(other, folder) == served
    resumed = train(other, "again")
    assert (resumed.losses, resumed.grad_norms) == (never_killed.losses, never_killed.grad_norms)
    assert publish(other, tmp_path, "theta-0002b").hash == second.hash

    third = held(folder, "bfloat16")
    restore(third, tmp_path, "theta-0001", with_optimizer=False)
    train(third, "again")
    assert publish(third, tmp_path, "theta-0002c").hash != second.hash


def test_what_was_not_published_is_given_up(folder, tmp_path):
    policy = held(folder)
    train(policy)
    first = publish(policy, tmp_path, "theta-0001")
    train(policy, "never published")
    policy.answer(wire.Drop(number=1))
    assert artifact.hash_tensors(policy._trainer.held.tensors(), policy._base_hash) == first.hash
    train(policy, "never published either")
    sample(policy, folder)
    assert artifact.hash_tensors(policy._trainer.held.tensors(), policy._base_hash) == first.hash


def test_an_interrupted_training_leaves_the_published_version(folder, tmp_path):
    policy = held(folder)
    train(policy)
    first = publish(policy, tmp_path, "theta-0001")
    after = train(policy, "second")
    policy.answer(wire.Drop(number=1))
    answers = iter([False, True])
    policy._interrupted = lambda: next(answers)
    with pytest.raises(Interrupted):
        train(policy, "second")
    policy._interrupted = lambda: False
    assert artifact.hash_tensors(policy._trainer.held.tensors(), policy._base_hash) == first.hash
    assert train(policy, "second").losses == after.losses


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "optimizer.pt", "adapter_config.json", "manifest.json"])
@pytest.mark.parametrize("how", ["changed", "cut", "gone"])
def test_a_corrupt_artifact_is_named(folder, tmp_path, name, how):
    policy = held(folder)
    train(policy)
    publish(policy, tmp_path, "theta-0001")
    path = tmp_path / "theta-0001" / name
    data = path.read_bytes()
    if how == "gone":
        path.unlink()
    else:
        path.write_bytes(data[:-8] if how == "cut" else data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(PolicyFailure) as failure:
        restore(policy, tmp_path, "theta-0001")
    assert failure.value.kind == "artifact-corrupt"
    assert name in failure.value.detail
    if name == "optimizer.pt":  # retention removes it from older versions: not missed unless asked for
        restore(policy, tmp_path, "theta-0001", with_optimizer=False)


def test_versions_of_another_base_are_refused(folder, tmp_path):
    policy = held(folder)
    train(policy)
    publish(policy, tmp_path, "theta-0001")
    other = held(tiny_model(tmp_path / "other", seed=9))
    with pytest.raises(PolicyFailure, match="trained from base"):
        restore(other, tmp_path, "theta-0001")


def test_a_version_is_published_once(folder, tmp_path):
    policy = held(folder)
    train(policy)
    publish(policy, tmp_path, "theta-0001")
    with pytest.raises(PolicyFailure, match="exists already"):
        publish(policy, tmp_path, "theta-0001")


def test_a_disk_that_takes_no_more_leaves_nothing_half(folder, tmp_path, monkeypatch):
    policy = held(folder)
    train(policy)

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(artifact.torch, "save", full)
        with pytest.raises(PolicyFailure, match="No space left") as failure:
            publish(policy, tmp_path, "theta-0001")
    assert failure.value.kind == "publish-unwritten"
    assert list(tmp_path.iterdir()) == []
    publish(policy, tmp_path, "theta-0001")


def test_hashes_tell_weights_apart(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "copy")
    assert artifact.hash_base(copy) == artifact.hash_base(folder)
    assert artifact.hash_base(tiny_model(tmp_path / "other", seed=5)) != artifact.hash_base(folder)
    a, b = {"x": torch.zeros(2)}, {"x": torch.tensor([0.0, 1e-30])}
    assert artifact.hash_tensors(a, "base") != artifact.hash_tensors(b, "base")
    assert artifact.hash_tensors(a, "base") != artifact.hash_tensors(a, "other")


def test_info_counts_what_is_trained(folder):
    policy = held(folder)
    info = policy._load(policy._ask)
    trainer = Trainer(folder, torch.device("cpu"), rank=4, alpha=8, seed=0, compute=torch.float32, packed=True)
    assert info.trained_parameters == trainer.trained_parameters
    assert info.base_hash == artifact.hash_base(folder)
    assert info.fast_path and info.device == "cpu" and info.compute_dtype == "float32"


def test_unknown_architecture_takes_the_plain_path(tmp_path):
    windows = tiny_model(tmp_path / "m", model_type="mistral", sliding_window=8)
    policy = held(windows)
    info = policy._load(policy._ask)
    assert not info.fast_path and "sliding-window" in info.note
    train(policy)
    publish(policy, tmp_path, "theta-0001")
    assert (tmp_path / "theta-0001" / "manifest.json").exists()
