"""The vLLM engine against scripted servers that reproduce what real ones do to a training loop (docs/vllm.md)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, Literal

import pytest

from tests.letters import domain as letters
from tests.scripted import write_tokenizer
from tests.vllm_server import CONTEXT, ScriptedServer, base_logprobs, moved_logprobs
from whale_tui import config as configuration
from whale_tui.config import Config, Rollout, Vllm
from whale_tui.doctor import servers as doctor_servers
from whale_tui.doctor.checkup import Checkup
from whale_tui.loop.rollouts import Job, Rollouts, Subject, Where
from whale_tui.policy import proof
from whale_tui.policy.chat import ChatTokenizer
from whale_tui.policy.protocol import (
    CallLost,
    PolicyFailure,
    PolicyInfo,
    Publication,
    Sampled,
    SampleRequest,
    Trained,
    TrainRequest,
    TrainSample,
)  # fmt: skip
from whale_tui.policy.vllm import servers as pool
from whale_tui.policy.vllm.client import Client, sampling_body
from whale_tui.policy.vllm.engine import VllmEngine
from whale_tui.policy.vllm.managed import command, room_for
from whale_tui.policy.vllm.status import Gpus, GpuStatus, read_metrics
from whale_tui.records import Sampling

PROBE = [*range(40, 90)]
ROOT = Path(__file__).parent.parent


class ScriptedTrainer:
    """The worker's side of the engine, whose adapters are a number. Each `train` moves it by the learning rate."""

    def __init__(self) -> None:
        self.value = 0.0
        self.probe_ids, self.probe_base = PROBE, base_logprobs(PROBE)
        self.probe = self.probe_base
        self.fails: PolicyFailure | None = None

    async def start(self) -> PolicyInfo:
        return PolicyInfo("m", "base", "t", "cpu", "bfloat16", 10, 1, False)

    async def train(self, request: TrainRequest) -> Trained:
        if self.fails is not None:
            raise self.fails
        self.value += request.learning_rate
        return Trained([1.0], [1.0], 1, 0, 0.0, 0)

    async def publish(self, version: str, folder: str) -> Publication:
        write_adapter(Path(folder), self.value)
        self.probe = moved_logprobs(PROBE, self.value)
        return Publication(version, f"hash-{self.value:.3f}", folder, "m", proof.mean(self.probe), float("nan"))

    async def restore(self, version: str, folder: str | None, *, with_optimizer: bool) -> str:
        self.value = json.loads((Path(folder) / "adapter.json").read_text())["value"] if folder else 0.0
        self.probe = moved_logprobs(PROBE, self.value)
        return f"hash-{self.value:.3f}" if folder else "base"

    async def drop(self) -> None: ...

    async def close(self) -> None: ...


def write_adapter(folder: Path, value: float) -> None:
    folder.mkdir(parents=True)
    (folder / "adapter.json").write_text(json.dumps({"value": value}))


class Bench:
    """Scripted servers, and an engine over them."""

    def __init__(self, count: int, folder: Path, adapt: Literal["lora", "full"] = "lora", **options: Any) -> None:
        self.folder, self.adapt = folder, adapt
        self.servers = [ScriptedServer() for _ in range(count)]
        self.options = {
            "mode": "external",
            "retry_seconds": 5.0,
            "health_seconds": 5.0,
            "request_seconds": 5.0,
        } | options
        self.trainer = ScriptedTrainer()
        self.warnings: list[str] = []

    async def start(self) -> VllmEngine:
        for server in self.servers:
            await server.start()
        config = Config()
        config.model.adapt = self.adapt
        config.vllm = Vllm(devices=[""], urls=[server.url for server in self.servers], **self.options)
        config.rollout.max_context = CONTEXT
        self.engine = VllmEngine(
            self.trainer, config, "m", self.folder, on_warning=self.warnings.append  # type: ignore[arg-type]
        )  # fmt: skip
        await self.engine.start()
        return self.engine

    async def publish(self, version: str, change: float = 0.5) -> Publication:
        await self.engine.train(train_request(change))
        return await self.engine.publish(version, str(self.folder / version))

    def states(self) -> list[str]:
        return [status.state for status in self.engine.status()]


def train_request(rate: float) -> TrainRequest:
    return TrainRequest(minibatches=[[TrainSample([1], [2])]], learning_rate=rate)


@asynccontextmanager
async def bench(
    count: int, folder: Path, adapt: Literal["lora", "full"] = "lora", **options: Any
) -> AsyncIterator[Bench]:
    made = Bench(count, folder, adapt, **options)
    try:
        await made.start()
        yield made
    finally:
        await made.engine.close()
        for server in made.servers:
            await server.kill()


def call(number: int = 0, *, prompt: list[int] | None = None, **more: Any) -> SampleRequest:
    values: dict[str, Any] = {"max_tokens": 1, "seed": number, "sampling": Sampling(top_k=20), "stop_ids": [2]} | more
    return SampleRequest(order=(number, 0), prompt_ids=prompt or [7, 8, 9, 10, 11 + number], **values)


def version_of(sampled: Sampled) -> float:
    """The value of the adapter that a scripted server answered with."""
    return (sampled.output_ids[0] - 1000) / 100


async def until(condition: Callable[[], Any], seconds: float = 20.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


# ---------------------------------------------------------------------------------------------- ids and sampling fields


def test_every_sampling_field_is_explicit() -> None:
    """What vLLM takes from the model's generation_config, or from its own defaults, where a request is silent."""
    body = sampling_body("m", "salt", call(sampling=Sampling(temperature=0.7, top_k=5, top_p=0.9)))
    silent = {
        "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed",
        "max_tokens", "min_tokens", "n", "stop", "stop_token_ids", "ignore_eos", "cache_salt", "add_special_tokens",
    }  # fmt: skip
    assert silent <= set(body)
    assert (body["temperature"], body["top_k"], body["top_p"]) == (0.7, 5, 0.9)
    assert body["ignore_eos"] and body["stop_token_ids"] == [2], "a call ends at our ids, not at the model's list"
    assert body["return_token_ids"] and body["logprobs"] == 0


async def test_ids_go_in_and_come_out_and_a_stop_string_stays_in_them(tmp_path: Path) -> None:
    async with bench(1, tmp_path) as b:
        await b.engine.restore("theta-0000", None, with_optimizer=False)
        sampled = await b.engine.submit(call(max_tokens=20, stop_strings=["CD"]))
        assert sampled.output_ids == [1000, 65, 66, 67, 68] and sampled.finish_reason == "stop"
        assert len(sampled.logprobs) == 5
        ended = await b.engine.submit(call(max_tokens=20, stop_ids=[66]))
        assert ended.output_ids[-1] == 66, "the end of turn that was sampled is one of the ids"
        cut = await b.engine.submit(call(max_tokens=3))
        assert cut.finish_reason == "length" and len(cut.output_ids) == 3
        assert [c["seed"] for c in b.servers[0].calls()[-3:]] == [0, 0, 0]


async def test_a_server_that_answers_something_else_is_refused(tmp_path: Path) -> None:
    made = Bench(1, tmp_path)
    made.servers[0].raw_logprobs = True
    with pytest.raises(PolicyFailure, match="processed_logprobs"):
        await made.start()
    other = Bench(1, tmp_path)
    other.trainer.probe_base = [p - 0.5 for p in other.trainer.probe_base]
    with pytest.raises(PolicyFailure, match="base model is not the trainer's"):
        await other.start()
    for server in (*made.servers, *other.servers):
        await server.kill()


async def test_calls_are_fed_as_they_come_and_bounded(tmp_path: Path) -> None:
    """No waves: with 8 seats and a slow first token, 16 calls take two turns."""
    async with bench(2, tmp_path, concurrency=4) as b:
        await b.engine.restore("theta-0000", None, with_optimizer=False)
        for server in b.servers:
            server.first_token_seconds = 0.3
        loop = asyncio.get_running_loop()
        start = loop.time()
        calls = [b.engine.submit(call(n)) for n in range(16)]
        await asyncio.gather(*calls)
        assert loop.time() - start < 3.0, "one after the other they would take 4.8 s"
        assert [server.most_at_once for server in b.servers] == [4, 4]


# ------------------------------------------------------------------------------------------------------------- versions


async def test_publish_a_then_b_and_b_is_seen_on_every_server(tmp_path: Path) -> None:
    """With the prefix cache of old releases: the same prompt before and after a publish never meets a stale prefix."""
    async with bench(2, tmp_path) as b:
        await b.engine.restore("theta-0000", None, with_optimizer=False)
        for name, value in (("theta-0001", 0.5), ("theta-0002", 1.0)):
            published = await b.publish(name)
            assert published.probe_rollout == pytest.approx(published.probe_trainer)
            calls = await asyncio.gather(*(b.engine.submit(call(n, prompt=[7, 8, 9, 10])) for n in range(6)))
            assert {version_of(sampled) for sampled in calls} == {value}
        for server in b.servers:
            assert [n.split("-")[1] for n in server.names] == ["0002"], "the version before is unloaded"
            names = [body["lora_name"] for body in server.calls("/v1/load_lora_adapter")]
            assert len(set(names)) == len(names) == 2
            assert server.calls("/reset_prefix_cache")
        back = await b.engine.restore("theta-0001", str(tmp_path / "theta-0001"), with_optimizer=True)
        assert back == "hash-0.500" and version_of(await b.engine.submit(call())) == 0.5


async def test_an_adapter_without_effect_is_caught(tmp_path: Path) -> None:
    async with bench(1, tmp_path) as b:
        b.servers[0].without_effect = True
        with pytest.raises(PolicyFailure, match="no effect") as caught:
            await b.publish("theta-0001", 0.02)
        assert caught.value.kind == "publish-unproved"


async def test_a_sticky_id_takes_one_server_out_and_the_other_goes_on(tmp_path: Path) -> None:
    """The second adapter is silently not loaded: the change is far within rounding, and still it is seen."""
    async with bench(2, tmp_path) as b:
        b.servers[0].sticky_id = True
        await b.publish("theta-0001", 0.5)
        await b.publish("theta-0002", 0.02)
        assert b.states() == ["out", "serving"]
        assert any("taken out" in text and "theta-0001" in text for text in b.warnings), b.warnings
        calls = await asyncio.gather(*(b.engine.submit(call(n)) for n in range(4)))
        assert {version_of(sampled) for sampled in calls} == {0.52}


async def test_a_refused_reset_is_asked_for_again(tmp_path: Path) -> None:
    async with bench(1, tmp_path) as b:
        b.servers[0].refuse_resets = 2
        before = len(b.servers[0].calls("/reset_prefix_cache"))
        await b.publish("theta-0001")
        assert len(b.servers[0].calls("/reset_prefix_cache")) - before == 3


async def test_without_developer_endpoints_the_salt_keeps_versions_apart(tmp_path: Path) -> None:
    made = Bench(1, tmp_path)
    made.servers[0].developer = False
    await made.start()
    for name in ("theta-0001", "theta-0002"):
        await made.publish(name)
        await made.engine.submit(call())
    salts = {body["model"]: body["cache_salt"] for body in made.servers[0].calls() if body["model"] != "scripted"}
    assert len(set(salts.values())) == 2
    await made.engine.close()
    await made.servers[0].kill()


async def test_no_call_starts_before_every_server_has_proved(tmp_path: Path) -> None:
    """One server is slow to load: what is submitted meanwhile waits, and is sampled from the new version."""
    async with bench(2, tmp_path) as b:
        await b.publish("theta-0001")
        b.servers[1].api_delays["/v1/load_lora_adapter"] = 0.5
        publishing = asyncio.ensure_future(b.publish("theta-0002"))
        await until(lambda: len(b.servers[0].calls("/v1/load_lora_adapter")) == 2)
        early = [b.engine.submit(call(n)) for n in range(4)]
        await asyncio.sleep(0.2)
        await publishing
        assert {version_of(await one) for one in early} == {1.0}


async def test_a_version_is_unloaded_when_no_call_of_it_is_in_flight(tmp_path: Path) -> None:
    async with bench(1, tmp_path) as b:
        await b.publish("theta-0001")
        b.servers[0].first_token_seconds = 0.4
        late = b.engine.submit(call())
        await until(lambda: b.servers[0].at_once == 1)
        b.servers[0].first_token_seconds = 0.0
        await b.publish("theta-0002")
        assert len(b.servers[0].names) == 2, "theta-0001 has a call in flight"
        assert version_of(await late) == 0.5
        await b.publish("theta-0003")
        assert len(b.servers[0].names) == 1


# ---------------------------------------------------------------------------------------------------- servers that fail


async def test_calls_wait_out_a_pause(tmp_path: Path) -> None:
    async with bench(1, tmp_path, concurrency=8) as b:
        await b.publish("theta-0001")
        b.servers[0].paused.clear()
        calls = [b.engine.submit(call(n)) for n in range(8)]
        await until(lambda: b.engine.servers.all[0].limit == 1)  # type: ignore[union-attr]
        b.servers[0].paused.set()
        assert {version_of(sampled) for sampled in await asyncio.gather(*calls)} == {0.5}
        assert b.states() == ["serving"] and not b.warnings


async def test_a_pause_without_an_end_costs_the_call_alone(tmp_path: Path) -> None:
    async with bench(1, tmp_path, retry_seconds=0.3) as b:
        await b.publish("theta-0001")
        b.servers[0].paused.clear()
        with pytest.raises(CallLost, match="503"):
            await b.engine.submit(call())


async def test_a_dropped_connection_loses_its_call_and_no_other(tmp_path: Path) -> None:
    async with bench(1, tmp_path) as b:
        await b.publish("theta-0001")
        b.servers[0].drop_connections = 1
        results = await asyncio.gather(*(b.engine.submit(call(n)) for n in range(6)), return_exceptions=True)
        assert [type(r) for r in results].count(CallLost) == 1
        assert sum(isinstance(r, Sampled) for r in results) == 5
        assert b.states() == ["serving"]
        sent = [
            body["prompt"]
            for body in b.servers[0].calls()
            if body["model"] != "scripted" and "prompt_logprobs" not in body
        ]
        assert len(sent) == 6, "a call that a server may have sampled is not sent again"


async def test_the_episode_of_a_lost_call_is_invalid_and_the_batch_goes_on(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tokenizer")
    domain = letters.build(letters.NoOptions())
    async with bench(1, tmp_path) as b:
        await b.publish("theta-0001")
        b.servers[0].drop_connections = 1
        chat = ChatTokenizer(tmp_path / "tokenizer")
        rollouts = Rollouts(b.engine, chat, domain, Rollout(max_context=CONTEXT), Sampling())
        subject = Subject("h0000", "hash", domain.h0)
        where = Where(1, "weight", 1, 0, "train", "theta-0001", "hash-0.500", 0)
        episodes = await rollouts.run([Job(task, subject, 0) for task in domain.tasks("harness")], where)
        lost = [episode for episode in episodes if episode.verdict == "invalid"]
        assert len(lost) == 1 and lost[0].reward is None and "policy call lost" in lost[0].reason
        assert all(len(episode.calls) == 1 for episode in episodes if episode not in lost)
        assert episodes[-1].calls[0].output_ids[0] == 1050


async def test_a_slow_answer_is_lost_in_time(tmp_path: Path) -> None:
    async with bench(1, tmp_path, request_seconds=0.3) as b:
        await b.publish("theta-0001")
        b.servers[0].first_token_seconds = 5.0
        with pytest.raises(CallLost, match=r"no answer within 0\.3 s"):
            await b.engine.submit(call())


async def test_a_killed_server_comes_back_and_proves_before_it_samples(tmp_path: Path) -> None:
    async with bench(2, tmp_path) as b:
        await b.publish("theta-0001")
        b.servers[0].first_token_seconds = b.servers[1].first_token_seconds = 0.5
        calls = [b.engine.submit(call(n)) for n in range(8)]
        await until(lambda: b.servers[0].at_once == 4)
        await b.servers[0].kill()
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(r) for r in results].count(CallLost) == 4
        b.servers[1].first_token_seconds = 0.0
        assert b.states() == ["down", "serving"]
        await b.publish("theta-0002")  # goes on without it
        assert version_of(await b.engine.submit(call())) == 1.0
        b.servers[0].first_token_seconds = 0.0
        asked = len(b.servers[0].asked)
        await b.servers[0].start()
        await until(lambda: b.states() == ["serving", "serving"])
        assert [n.split("-")[1] for n in b.servers[0].names] == ["0002"], "it missed the publish, and has it now"
        sampled_before_proof = [
            body for path, body in b.servers[0].asked[asked:]
            if path == "/v1/completions" and body["model"] != "scripted" and "prompt_logprobs" not in body
        ]  # fmt: skip
        assert not sampled_before_proof
        assert any("is back, and has proved theta-0002" in text for text in b.warnings)


async def test_a_server_that_started_anew_under_the_same_address_is_noticed(tmp_path: Path) -> None:
    """It is healthy, and knows no adapter: the call was not sampled, and is once the version is proved again."""
    async with bench(1, tmp_path) as b:
        await b.publish("theta-0001")
        await b.servers[0].kill()
        await b.servers[0].start()
        assert version_of(await b.engine.submit(call())) == 0.5
        assert any("is back" in text for text in b.warnings)


async def test_when_the_last_server_is_out_the_policy_fails(tmp_path: Path) -> None:
    async with bench(1, tmp_path, health_seconds=0.5) as b:
        await b.publish("theta-0001")
        await b.servers[0].kill()
        with pytest.raises(PolicyFailure, match="no vLLM server is left") as caught:
            await b.engine.submit(call())
        assert not isinstance(caught.value, CallLost)
        with pytest.raises(PolicyFailure, match="no vLLM server is left"):
            await b.publish("theta-0002")


async def test_drop_gives_up_what_is_in_flight(tmp_path: Path) -> None:
    async with bench(1, tmp_path) as b:
        await b.publish("theta-0001")
        b.servers[0].first_token_seconds = 5.0
        calls = [b.engine.submit(call(n)) for n in range(3)]
        await until(lambda: b.servers[0].at_once == 3)
        await b.engine.drop()
        assert all(one.cancelled() for one in calls)
        assert b.engine.servers.all[0].in_flight == 0  # type: ignore[union-attr]


# ------------------------------------------------------------------------------------- servers that the run starts


def stand_in(folder: Path, script: str = "") -> str:
    """A python whose vLLM is the scripted server: the real process, keeper and log around it."""
    file = folder / "python"
    file.write_text(f'#!/bin/sh\n{script}\ncd {ROOT} && exec {sys.executable} -m tests.vllm_server "$@"\n')
    file.chmod(0o755)
    return str(file)


def children(pid: int) -> list[int]:
    found = []
    for status in Path("/proc").glob("[0-9]*/status"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            if f"\nPPid:\t{pid}\n" in status.read_text():
                found.append(int(status.parent.name))
    return found


def lives(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    return False


async def test_a_managed_server_is_started_restarted_and_ended(tmp_path: Path) -> None:
    async with bench(0, tmp_path, mode="managed", python=stand_in(tmp_path)) as b:
        await b.publish("theta-0001")
        keeper = b.engine.servers.all[0].managed.process.pid  # type: ignore[union-attr]
        (server,) = children(keeper)
        os.kill(server, signal.SIGKILL)
        await until(lambda: b.states() == ["down"])
        assert version_of(await b.engine.submit(call())) == 0.5, "it waits for the server, and for its proof"
        assert b.engine.status()[0].restarts == 1 and "ended by SIGKILL" in b.warnings[0], b.warnings
        assert "scripted server: up" in (tmp_path / "vllm-1.log").read_text()
        keeper = b.engine.servers.all[0].managed.process.pid  # type: ignore[union-attr]
        (server,) = children(keeper)
    assert not lives(server)


async def test_a_managed_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    broken = stand_in(tmp_path, 'echo "RuntimeError: no kernel for this GPU" >&2; exit 3')
    made = Bench(0, tmp_path, mode="managed", python=broken)
    with pytest.raises(PolicyFailure, match="RuntimeError: no kernel for this GPU"):
        await made.start()


async def test_a_server_ends_when_its_engine_is_killed(tmp_path: Path) -> None:
    """Otherwise it would hold the GPU of the run that is started next."""
    code = f"""
import asyncio
from pathlib import Path
from whale_tui.config import Vllm
from whale_tui.policy.vllm.client import Client
from whale_tui.policy.vllm.managed import ManagedServer

async def main():
    options = Vllm(python={stand_in(tmp_path)!r}, health_seconds=20)
    managed = ManagedServer(1, options, "m", Path({str(tmp_path / "log")!r}), rank=8, context=512, devices="")
    await managed.start(lambda url: Client(url, seconds=2), lambda text: None)
    print(managed.process.pid, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""
    engine = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE, cwd=ROOT)
    assert engine.stdout is not None
    keeper = int(await engine.stdout.readline())
    (server,) = children(keeper)
    engine.kill()
    await engine.wait()
    await until(lambda: not lives(server) and not lives(keeper))


# --------------------------------------------------------------------------- versions that are all weights of a model


async def test_weights_take_the_place_of_those_before_on_every_server(tmp_path: Path) -> None:
    """No name tells versions apart here: the proof and the salt do."""
    async with bench(2, tmp_path, "full") as b:
        await b.engine.restore("theta-0000", None, with_optimizer=False)
        assert version_of(await b.engine.submit(call())) == 0.0
        for name, value in (("theta-0001", 0.5), ("theta-0002", 1.0)):
            published = await b.publish(name)
            assert published.probe_rollout == pytest.approx(published.probe_trainer)
            calls = await asyncio.gather(*(b.engine.submit(call(n, prompt=[7, 8, 9, 10])) for n in range(6)))
            assert {version_of(sampled) for sampled in calls} == {value}
        for server in b.servers:
            assert not server.names and not server.calls("/v1/load_lora_adapter")
            asked = [body["kwargs"]["weights_path"] for body in server.calls("/collective_rpc")]
            assert asked[1:] == ["/models/scripted", str(tmp_path / "theta-0001"), str(tmp_path / "theta-0002")]
            salts = {body["cache_salt"] for body in server.calls() if body.get("prompt_logprobs") is None}
            assert len(salts) >= 3
        back = await b.engine.restore("theta-0001", str(tmp_path / "theta-0001"), with_optimizer=True)
        assert back == "hash-0.500" and version_of(await b.engine.submit(call())) == 0.5
        await b.engine.restore("theta-0000", None, with_optimizer=False)
        assert version_of(await b.engine.submit(call())) == 0.0


async def test_weights_are_replaced_when_no_call_is_in_flight(tmp_path: Path) -> None:
    async with bench(1, tmp_path, "full") as b:
        await b.publish("theta-0001")
        b.servers[0].first_token_seconds = 0.4
        late = b.engine.submit(call())
        await until(lambda: b.servers[0].at_once == 1)
        reloads = len(b.servers[0].calls("/collective_rpc"))
        publishing = asyncio.ensure_future(b.publish("theta-0002"))
        await asyncio.sleep(0.1)
        assert len(b.servers[0].calls("/collective_rpc")) == reloads, "a call is in flight"
        assert version_of(await late) == 0.5
        await publishing
        assert version_of(await b.engine.submit(call())) == 1.0


async def test_weights_without_effect_are_caught(tmp_path: Path) -> None:
    async with bench(1, tmp_path, "full") as b:
        await b.publish("theta-0001", 0.5)
        b.servers[0].without_effect = True
        with pytest.raises(PolicyFailure, match="no effect") as caught:
            await b.publish("theta-0002", 0.02)
        assert caught.value.kind == "publish-unproved"


async def test_an_external_server_that_takes_no_weights_says_what_it_lacks(tmp_path: Path) -> None:
    made = Bench(1, tmp_path, "full")
    made.servers[0].developer = False
    with pytest.raises(PolicyFailure, match="VLLM_SERVER_DEV_MODE=1"):
        await made.start()
    await made.servers[0].kill()


async def test_an_external_server_with_a_version_of_an_earlier_engine_starts_from_its_base(tmp_path: Path) -> None:
    made = Bench(1, tmp_path, "full")
    made.servers[0].weights = 0.7
    await made.start()
    await made.engine.restore("theta-0000", None, with_optimizer=False)
    assert version_of(await made.engine.submit(call())) == 0.0
    await made.engine.close()
    await made.servers[0].kill()


async def test_a_server_that_started_anew_on_its_base_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is healthy and refuses nothing: what it has sampled in all says that it is another."""
    monkeypatch.setattr(pool, "GLANCE_SECONDS", 0.05)
    async with bench(1, tmp_path, "full") as b:
        await b.publish("theta-0001")
        await until(lambda: "tokens" in b.engine.servers.all[0].metrics)  # type: ignore[union-attr]
        await b.servers[0].kill()
        b.servers[0].sampled = 3
        await b.servers[0].start()
        await until(lambda: any("is back, and has proved theta-0001" in text for text in b.warnings))
        assert version_of(await b.engine.submit(call())) == 0.5


async def test_a_managed_server_is_started_anew_on_the_weights(tmp_path: Path) -> None:
    options = {"mode": "managed", "python": stand_in(tmp_path), "env": {"SCRIPTED_NO_RELOAD": "1"}}
    async with bench(0, tmp_path, "full", **options) as b:
        for name, value in (("theta-0001", 0.5), ("theta-0002", 1.0)):
            await b.publish(name)
            assert version_of(await b.engine.submit(call())) == value
        assert b.engine.status()[0].restarts == 0 and not b.warnings, "no restart of a server that died"
        commands = [line for line in (tmp_path / "vllm-1.log").read_text().splitlines() if line.startswith("$ ")]
        assert len(commands) == 3 and f"serve {tmp_path / 'theta-0002'} " in commands[-1]
        assert not any("lora" in line for line in commands)


# ------------------------------------------------------------------------------------------------- a GPU that is shared


async def test_servers_sleep_while_the_trainer_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with bench(1, tmp_path) as b:
        b.engine.config.vllm.share_gpu = True
        await b.engine.restore("theta-0000", None, with_optimizer=False)
        slept: list[bool] = []
        train = b.trainer.train

        async def watched(request: TrainRequest) -> Trained:
            slept.append(b.servers[0].asleep)
            return await train(request)

        monkeypatch.setattr(b.trainer, "train", watched)
        await b.publish("theta-0001")
        woken = [path for path, _ in b.servers[0].asked if path.startswith(("/sleep", "/wake_up"))]
        assert slept == [True] and woken == ["/sleep?level=1", "/wake_up?tags=weights", "/wake_up?tags=kv_cache"]
        assert version_of(await b.engine.submit(call())) == 0.5
        b.trainer.fails = PolicyFailure("out-of-memory", "x")
        with pytest.raises(PolicyFailure):
            await b.engine.train(train_request(1.0))
        assert version_of(await b.engine.submit(call())) == 0.5, "nothing was published: the version before goes on"


# ------------------------------------------------------------------------------------------------------------- the rest


def test_metrics_are_read_under_old_names_and_new() -> None:
    text = '# TYPE x\nvllm:num_requests_running{engine="0"} 3.0\nvllm:num_requests_running{engine="1"} 2.0\n'
    assert read_metrics(text + 'vllm:gpu_cache_usage_perc{engine="0"} 0.5\n') == {"running": 5.0, "kv_cache": 0.5}
    assert read_metrics("") == {}


async def test_the_status_tells_what_the_servers_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "GLANCE_SECONDS", 0.05)
    async with bench(1, tmp_path) as b:
        await b.publish("theta-0001")
        await until(lambda: b.engine.status()[0].waiting == 2)
        status = b.engine.status()[0]
        assert (status.state, status.version, status.kv_cache) == ("serving", "theta-0001", 0.25)
        assert abs(status.apart) < 1e-6


def test_the_command_of_a_managed_server_pins_what_bends_sampling() -> None:
    words = command(Vllm(python="py", share_gpu=True, args=["--x"]), "/m", port=1, rank=24, context=64, devices="0,1")
    text = " ".join(words)
    for part in (
        "--logprobs-mode processed_logprobs", "--generation-config vllm", "--host 127.0.0.1", "--enable-sleep-mode",
        "--max-lora-rank 32", "--tensor-parallel-size 2", "--max-model-len 64", "--enable-lora",
    ):  # fmt: skip
        assert part in text
    assert words[-1] == "--x"
    with pytest.raises(PolicyFailure):
        room_for(513)


def test_a_model_that_sees_images_is_served_by_its_text_alone(tmp_path: Path) -> None:
    """As the trainer holds it: beside a part for images, the names in an adapter would match nothing."""

    def overrides(*architectures: str) -> list[str]:
        (tmp_path / "config.json").write_text(json.dumps({"architectures": architectures}))
        words = command(Vllm(python="py"), str(tmp_path), port=1, rank=8, context=64, devices="")
        return [words[i + 1] for i, word in enumerate(words) if word == "--hf-overrides"]

    assert overrides("Qwen3_5ForConditionalGeneration") == ['{"architectures": ["Qwen3_5ForCausalLM"]}']
    assert overrides("Qwen3ForCausalLM") == overrides() == []


async def test_a_client_does_not_follow_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy that is set for the internet must not get the calls to a server on this machine."""
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    server = await ScriptedServer().start()
    client = Client(server.url, seconds=2)
    assert await client.healthy()
    await client.close()
    await server.kill()


def test_the_proof_tells_a_change_from_rounding() -> None:
    """Noise as bf16 makes it, beside a change that is not much larger: served or not, it is told apart."""
    base, random = base_logprobs([*range(40, 150)]), Random(0)

    def noisy(values: list[float], sigma: float) -> list[float]:
        return [value + random.gauss(0, sigma) for value in values]

    trained = moved_logprobs([*range(40, 150)], 0.05)
    for _ in range(200):
        proof.prove_change(trained, noisy(trained, 0.03), base, base, "theta-0001")
        with pytest.raises(PolicyFailure, match=r"of the change since"):
            proof.prove_change(trained, noisy(base, 0.01), base, base, "theta-0001")
    proof.prove_change(noisy(base, 1e-4), base, base, base, "theta-0001")  # nothing that could be told


# ---------------------------------------------------------------------------------------------------------- the doctor


def visited(tmp_path: Path, *overrides: str) -> Checkup:
    (tmp_path / "run.toml").write_text('[rollout]\nengine = "vllm"\n')
    return Checkup(configuration.load(tmp_path / "run.toml", overrides), tmp_path)


async def test_the_doctor_says_what_keeps_servers_from_serving(tmp_path: Path) -> None:
    async def found(*overrides: str) -> Any:
        finding = await doctor_servers.vllm(visited(tmp_path, *overrides))
        assert finding is not None
        return finding.level, finding.text, finding.mend

    level, text, mend = await found('vllm.python="/nowhere/python"')
    assert (level, "there is no /nowhere/python" in text, "environment of its own" in mend) == ("fail", True, True)
    level, text, _ = await found(f'vllm.python="{sys.executable}"')
    assert level == "fail" and "has no vLLM" in text
    level, text, mend = await found("model.lora_rank=600")
    assert level == "fail" and "512" in text
    level, text, _ = await found("model.lora_rank=64", "vllm.max_lora_rank=16")
    assert level == "fail" and "vllm.max_lora_rank = 16 holds no adapter" in text
    server = await ScriptedServer().start()
    external = ('vllm.mode="external"', f'vllm.urls=["{server.url}"]')
    assert (await found(*external))[0] == "ok"
    await server.kill()
    level, text, _ = await found(*external)
    assert level == "fail" and server.url in text
    with pytest.raises(configuration.ConfigError, match=r"vllm\.urls"):
        await found('vllm.mode="external"')
    with pytest.raises(configuration.ConfigError, match="http://host:port"):
        await found('vllm.urls=["localhost:8000"]')
    assert await doctor_servers.vllm(visited(tmp_path, "rollout.engine=transformers")) is None


def test_gpus_are_asked_for_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert Gpus()() == [], "without the package there is nothing to show"
    asked: list[int] = []
    driver = SimpleNamespace(
        nvmlInit=lambda: asked.append(1), nvmlDeviceGetCount=lambda: 1, nvmlDeviceGetHandleByIndex=lambda n: n,
        nvmlDeviceGetMemoryInfo=lambda h: SimpleNamespace(used=30e9, total=80e9),
        nvmlDeviceGetUtilizationRates=lambda h: SimpleNamespace(gpu=97),
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    gpus = Gpus()
    assert gpus() == gpus() == [GpuStatus(number=0, used_gb=30.0, total_gb=80.0, busy=0.97)]
    assert len(asked) == 1
