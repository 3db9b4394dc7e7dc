"""Two processes that train together, on the CPU: the same as one, and what ends one of them ends in words."""

import os
import signal
import threading
from pathlib import Path

import pytest
import torch

from tests.engines import write_config
from tests.test_policy_loss import samples
from tests.test_vllm_scripted import children, lives, until
from tests.tiny import tiny_model
from whale_tui.config import ConfigError, load
from whale_tui.policy import artifact
from whale_tui.policy.client import TransformersEngine
from whale_tui.policy.protocol import PolicyFailure, TrainRequest
from whale_tui.policy.ranks import Ranks
from whale_tui.policy.trainer import Interrupted, Trainer

CPU = torch.device("cpu")
OPTIONS = {"compute": torch.float32, "pack_nodes": 100, "rank": 4, "seed": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("tiny"))


def ranks(folder, **more):
    return Ranks(folder, CPU, 2, threads=1, **(OPTIONS | more))


def request(seed=0):
    batch = samples(seed=seed)
    return TrainRequest([batch[:17], batch[17:]], 1e-3)


def train(trainer, what, said=None):
    return trainer.train(what, lambda: False, said.append if said is not None else lambda text: None)


def assert_same(one, other, folders):
    assert one.losses == pytest.approx(other.losses, abs=1e-5) and one.tokens == other.tokens
    assert one.grad_norms == pytest.approx(other.grad_norms, rel=1e-4)
    a, b = (dict(artifact.each_weight(folder)) for folder in folders)
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        assert torch.allclose(tensor, b[name], atol=1e-5), name


def test_all_weights_over_two_processes_are_those_of_one(folder, tmp_path):
    options = {"full": True, "packed": True, "checkpointing": True}
    alone, group = Trainer(folder, CPU, **(OPTIONS | options)), ranks(folder, **options)
    try:
        assert (group.numbers, group.trained_parameters) == (alone.numbers, alone.trained_parameters)
        for number in (1, 2):
            done = [train(trainer, request(number)) for trainer in (alone, group)]
            name = f"theta-000{number}"
            hashes = [t.write(tmp_path / kind / name, name, "base") for kind, t in (("alone", alone), ("group", group))]
            assert hashes[1][0] == artifact.verify(tmp_path / "group" / name, "base", with_optimizer=True).hash
            assert_same(*done, [tmp_path / "alone" / name, tmp_path / "group" / name])
            group.prove_written(tmp_path / "group" / name)
        ids = [1, 5, 6, 7, 8]
        assert torch.allclose(group.probe(ids), alone.probe(ids), atol=1e-4)

        # One goes on from what the other has written, optimizer and all.
        for trainer, kind in ((alone, "group"), (group, "alone")):
            trainer.restore(tmp_path / kind / "theta-0001", with_optimizer=True)
        again = [train(trainer, request(2)) for trainer in (alone, group)]
        assert again[0].losses == pytest.approx(again[1].losses, abs=1e-5)
        assert again[0].grad_norms == pytest.approx(again[1].grad_norms, rel=1e-4)
        last = group.write(tmp_path / "again", "theta-0002", "base")
        assert_same(*again, [tmp_path / "alone" / "theta-0002", tmp_path / "again"])
        assert last[0]

        with pytest.raises(Interrupted):
            group.train(TrainRequest(request().minibatches * 200, 1e-3), lambda: True, lambda text: None)
        group.restore(tmp_path / "again", with_optimizer=True)
        group.prove_written(tmp_path / "again")

        pids = group.pids
        threading.Timer(0.5, os.kill, (pids[1], signal.SIGKILL)).start()
        with pytest.raises(PolicyFailure, match="training process 2 of 2 was ended by SIGKILL") as failure:
            train(group, TrainRequest(request().minibatches * 500, 1e-3))
        assert failure.value.kind == "worker-died"
        assert group.pids == [] and not any(Path(f"/proc/{pid}").exists() for pid in pids)
    finally:
        group.end()


def test_an_adapter_over_two_processes_where_one_runs_out_of_memory(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(Ranks, "module", "tests.short_rank")
    alone, group, said = Trainer(folder, CPU, packed=True, **OPTIONS), ranks(folder, packed=True), []
    try:
        done = [train(alone, request()), train(group, request(), said)]
        assert any("out of memory" in text and "parts of 50 nodes" in text for text in said), said
        for trainer, name in ((alone, "alone"), (group, "group")):
            trainer.write(tmp_path / name, "theta-0001", "base")
        assert_same(*done, [tmp_path / "alone", tmp_path / "group"])
        assert {p.name for p in (tmp_path / "group").iterdir()} == {p.name for p in (tmp_path / "alone").iterdir()}
    finally:
        group.end()


async def test_they_end_with_a_worker_that_is_killed(folder, tmp_path):
    log = tmp_path / "worker.log"
    more = {"device": "cpu", "dtype": "float32", "lora_rank": 4, "sample": False, "full": True, "processes": 2}
    engine = TransformersEngine(folder, log_path=log, **more)
    try:
        info = await engine.start()
        assert info.trained_parameters == info.parameters and len(engine.probe_base) > 50
        await engine.train(request())
        made = await engine.publish("theta-0001", str(tmp_path / "theta-0001"))
        assert made.changed > 0.9 and made.hash == artifact.hash_weights(tmp_path / "theta-0001", info.base_hash)
        assert engine.probe != engine.probe_base
        assert await engine.restore("theta-0000", None, with_optimizer=False) == info.base_hash
        assert engine.probe == pytest.approx(engine.probe_base, abs=1e-5)
        pids = children(engine.pid)
        assert len(pids) == 2
        os.kill(engine.pid, signal.SIGKILL)
        await until(lambda: not any(lives(pid) for pid in pids))
    finally:
        await engine.close()


def test_several_processes_need_servers_that_sample(tmp_path):
    config = write_config(tmp_path)
    with pytest.raises(ConfigError, match=r"weight\.processes.*rollout\.engine"):
        load(config, ["weight.processes=2"])
    load(config, ["weight.processes=2", "rollout.engine=vllm"])
    with pytest.raises(ConfigError, match="adafactor"):
        load(config, ["weight.processes=2", "rollout.engine=vllm", "weight.optimizer=adafactor"])
