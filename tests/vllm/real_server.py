"""The vLLM engine against the real server, on the CPU: `make vllm-env`, then `make test-vllm`. Minutes, not seconds.

Calls are few and short: without Triton kernels an adapter is served slowly. The default test run leaves this file out.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.tiny import real_model
from whale_tui.config import Config, Vllm, load
from whale_tui.doctor.checkup import Checkup
from whale_tui.doctor.servers import servers
from whale_tui.policy.chat import ChatTokenizer
from whale_tui.policy.client import TransformersEngine
from whale_tui.policy.protocol import CallLost, PolicyFailure, SampleRequest, TrainRequest, TrainSample
from whale_tui.policy.vllm.engine import VllmEngine
from whale_tui.records import Sampling

pytestmark = pytest.mark.asyncio(loop_scope="module")

PYTHON = Path(__file__).parent.parent.parent / ".venv-vllm" / "bin" / "python"
OPTIONS: dict[str, Any] = {
    "python": str(PYTHON), "dtype": "float32", "memory_share": 0.2, "health_seconds": 600.0, "concurrency": 8,
    "args": ["--enforce-eager", "--max-num-seqs", "8"], "env": {"VLLM_CPU_KVCACHE_SPACE": "1"},
}  # fmt: skip
"""Of servers on a CPU."""
RANK = 8
GREEDY, DRAWN = Sampling(temperature=0.0, top_k=0, top_p=1.0), Sampling(temperature=1.0, top_k=20, top_p=1.0)
ASKED = ("Name a river in France.", "What is 17 + 25?", "Write one sentence about a lighthouse.")


class Real:
    """Managed servers over a model, and the engine that uses them. `tokenizer` renders as a run does."""

    def __init__(self, folder: Path, model: Path | None, **options: Any) -> None:
        self.model, self.folder = model or real_model(), folder
        self.warnings: list[str] = []
        self.tokenizer = ChatTokenizer(self.model)
        config = Config()
        config.rollout.engine, config.rollout.max_context = "vllm", 1024
        config.model.lora_rank = RANK
        config.vllm = Vllm(**OPTIONS | options)
        worker = TransformersEngine(
            self.model, log_path=folder / "worker.log", device="cpu", dtype="float32", lora_rank=RANK, sample=False
        )
        self.engine = VllmEngine(worker, config, self.model, folder, on_warning=self.warnings.append)
        self.versions = 0

    def prompt(self, text: str) -> list[int]:
        return self.tokenizer.render([{"role": "user", "content": text}])

    def call(self, text: str, sampling: Sampling = GREEDY, **more: Any) -> SampleRequest:
        values: dict[str, Any] = {"order": (0, 0), "max_tokens": 8, "seed": 11, "stop_ids": self.tokenizer.stop_ids}
        return SampleRequest(prompt_ids=self.prompt(text), sampling=sampling, **values | more)

    async def base(self) -> None:
        await self.engine.restore("theta-0000", None, with_optimizer=False)

    async def learn(self, text: str, answer: str, times: int = 12) -> Any:
        """Train the answer in, and publish. Returns what was published."""
        sample = TrainSample(self.prompt(text), [*self.tokenizer.encode(answer), self.tokenizer.stop_ids[0]])
        await self.engine.train(TrainRequest(minibatches=[[sample]] * times, learning_rate=2e-3))
        self.versions += 1
        name = f"theta-{self.versions:04d}"
        return await self.engine.publish(name, str(self.folder / name))

    def servers(self) -> list[Any]:
        assert self.engine.servers is not None
        return list(self.engine.servers.all)

    def server(self) -> Any:
        return self.servers()[0]


@contextlib.asynccontextmanager
async def started(folder: Path, model: Path | None = None, **options: Any) -> AsyncIterator[Real]:
    """A `Real` that has been started, ended afterwards. model: the embedded one if not said. options: of [vllm], beside
    OPTIONS.
    """
    if not PYTHON.exists():
        pytest.skip("there is no .venv-vllm: make vllm-env")
    real = Real(folder, model, **options)
    await real.engine.start()
    try:
        yield real
    finally:
        await real.engine.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def real(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Real]:
    async with started(tmp_path_factory.mktemp("real")) as made:
        yield made


async def test_ids_go_in_and_come_out(real: Real) -> None:
    await real.base()
    drawn = real.call(ASKED[0], DRAWN, max_tokens=12)
    one, again, other = await asyncio.gather(
        *(real.engine.submit(request) for request in (drawn, drawn, real.call(ASKED[0], DRAWN, max_tokens=12, seed=12)))
    )
    assert one.output_ids == again.output_ids != other.output_ids, "a seed is one call's own"
    assert len(one.logprobs) == len(one.output_ids) <= 12 and all(p <= 0 for p in one.logprobs)
    only = await real.engine.submit(real.call(ASKED[0], Sampling(temperature=1.0, top_k=1)))
    assert max(map(abs, only.logprobs)) < 1e-4, "log-probabilities are of the distribution that was drawn from"


async def test_stops_are_ids_and_a_stop_string_stays_in_them(real: Real) -> None:
    await real.base()
    whole = await real.engine.submit(real.call(ASKED[0], max_tokens=10))
    word = real.tokenizer.decode(whole.output_ids[3:4]).strip()
    stopped = await real.engine.submit(real.call(ASKED[0], max_tokens=10, stop_strings=[word]))
    assert stopped.finish_reason == "stop" and word in real.tokenizer.decode(stopped.output_ids)
    assert stopped.output_ids == whole.output_ids[: len(stopped.output_ids)]
    by_id = await real.engine.submit(real.call(ASKED[0], max_tokens=10, stop_ids=[whole.output_ids[3]]))
    assert by_id.output_ids == whole.output_ids[: 1 + whole.output_ids.index(whole.output_ids[3])]


async def test_greedy_is_what_the_transformers_engine_gives(real: Real) -> None:
    """At least 32 tokens, or a first difference that is a tie."""
    await real.base()
    ours = TransformersEngine(real.model, log_path=real.folder / "ours.log", device="cpu", dtype="float32")
    try:
        await ours.start()
        requests = [real.call(text, max_tokens=40, stop_ids=[]) for text in ASKED]
        mine = [ours.submit(request) for request in requests]
        ours.flush()
        pairs = list(
            zip(await asyncio.gather(*mine), await asyncio.gather(*map(real.engine.submit, requests)), strict=True)
        )
    finally:
        await ours.close()
    for request, (a, b) in zip(requests, pairs, strict=True):
        assert len(a.output_ids) == len(b.output_ids) == 40
        apart = next((n for n, (x, y) in enumerate(zip(a.output_ids, b.output_ids, strict=True)) if x != y), None)
        if apart is not None:
            start = request.prompt_ids + a.output_ids[:apart]
            server = real.server()
            told = [(await server.http.probe(server.model, "tie", [*start, s.output_ids[apart]]))[-1] for s in (a, b)]
            assert abs(told[0] - told[1]) < 1e-2, f"token {apart} of {request.prompt_ids[:8]}.. is no tie: {told}"


async def test_publish_a_then_b_and_b_is_served(real: Real) -> None:
    await real.base()
    before = await real.engine.submit(real.call(ASKED[1]))
    a = await real.learn(ASKED[1], "Zebras.")
    assert abs(a.probe_rollout - a.probe_trainer) < 0.002
    with_a = await real.engine.submit(real.call(ASKED[1]))
    assert real.tokenizer.decode(with_a.output_ids).startswith("Zebras") and with_a.output_ids != before.output_ids
    await real.learn(ASKED[1], "Forty-two owls.", times=16)
    with_b = await real.engine.submit(real.call(ASKED[1]))
    assert real.tokenizer.decode(with_b.output_ids).startswith("Forty"), real.tokenizer.decode(with_b.output_ids)
    loaded = [model["id"] for model in await real.server().http.models() if model.get("parent")]
    assert len(loaded) == 1 and loaded[0].startswith("theta-0002"), "the version before is unloaded"
    assert real.server().can_reset


async def test_the_doctor_finds_both_sides_equal(real: Real) -> None:
    """Template, ids, log-probabilities, and a trial version from training to proof."""
    await real.base()
    (real.folder / "run.toml").write_text('[rollout]\nengine = "vllm"\n')
    visit = Checkup(load(real.folder / "run.toml"), real.folder)
    visit.known_model, visit.known_chat, visit.policy = real.model, real.tokenizer, real.engine
    finding = await servers(visit)
    assert finding is not None and finding.level == "ok", finding
    assert "proved a trial version" in finding.text and "vLLM 0." in finding.shown[0]


async def test_an_adapter_without_effect_is_caught(real: Real, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its file is emptied behind the trainer's back: it loads, and the server answers as the base model does."""
    from safetensors.numpy import load_file, save_file

    await real.base()
    publish = real.engine.trainer.publish

    async def emptied(version: str, folder: str) -> Any:
        made = await publish(version, folder)
        file = Path(folder) / "adapter_model.safetensors"
        save_file({name: 0 * tensor for name, tensor in load_file(file).items()}, file)
        return made

    monkeypatch.setattr(real.engine.trainer, "publish", emptied)
    with pytest.raises(PolicyFailure, match=r"no effect|changes differ") as caught:
        await real.learn(ASKED[0], "Zebras.", times=1)
    assert caught.value.kind == "publish-unproved" and real.server().state == "out"
    monkeypatch.undo()
    await real.engine.start()  # as a run does after a failure
    await real.base()


async def test_a_killed_server_costs_its_calls_and_comes_back_with_the_version(real: Real) -> None:
    made = await real.learn(ASKED[0], "Zebras.")
    real.warnings.clear()
    lost = real.engine.submit(real.call(ASKED[2], max_tokens=400, stop_ids=[]))
    await until(lambda: real.server().in_flight == 1)
    await asyncio.sleep(1.0)
    for pid in children(real.server().managed.process.pid):
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(CallLost):
        await lost
    after = await real.engine.submit(real.call(ASKED[0]))
    assert real.tokenizer.decode(after.output_ids).startswith("Zebras")
    assert any(f"is back, and has proved {made.version}" in text for text in real.warnings), real.warnings
    assert real.server().restarts == 1


def children(pid: int) -> list[int]:
    found = []
    for status in Path("/proc").glob("[0-9]*/status"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            if f"\nPPid:\t{pid}\n" in status.read_text():
                found.append(int(status.parent.name))
    return found


async def until(condition: Callable[[], Any], seconds: float = 20.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)
