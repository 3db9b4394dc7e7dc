"""Versions that are all weights of a model, published to a real server, which is started anew on them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.tiny import real_model
from tests.vllm.real_server import ASKED, GREEDY, OPTIONS, PYTHON
from whale_tui.config import Config, Vllm
from whale_tui.policy import engines
from whale_tui.policy.chat import ChatTokenizer
from whale_tui.policy.protocol import SampleRequest, TrainRequest, TrainSample
from whale_tui.policy.vllm.engine import VllmEngine


@asynccontextmanager
async def serving(folder: Path, dtype: str) -> AsyncIterator[VllmEngine]:
    if not PYTHON.exists():
        pytest.skip("there is no .venv-vllm: make vllm-env")
    config = Config()
    config.model.adapt, config.model.device = "full", "cpu"
    config.rollout.engine, config.rollout.max_context = "vllm", 1024
    config.vllm = Vllm(**OPTIONS | {"dtype": dtype})
    engine = engines.build(config, real_model(), folder / "worker.log")
    assert isinstance(engine, VllmEngine)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_all_weights_are_published_and_proved(tmp_path: Path, dtype: str) -> None:
    chat = ChatTokenizer(real_model())
    prompt = chat.render([{"role": "user", "content": ASKED[1]}])
    async with serving(tmp_path, dtype) as engine:

        async def said() -> str:
            ids = (await engine.submit(SampleRequest((0, 0), prompt, 8, 11, GREEDY, chat.stop_ids))).output_ids
            return chat.decode(ids)

        await engine.restore("theta-0000", None, with_optimizer=False)
        before = await said()
        for number, answer in enumerate(("Zebras.", "Forty-two owls."), 1):
            sample = TrainSample(prompt, [*chat.encode(answer), chat.stop_ids[0]])
            await engine.train(TrainRequest(minibatches=[[sample]] * 12, learning_rate=5e-5))
            name = f"theta-{number:04d}"
            made = await engine.publish(name, str(tmp_path / name))
            assert abs(made.probe_rollout - made.probe_trainer) < (0.002 if dtype == "float32" else 0.05)
            assert made.changed is not None and made.changed > 0.2
            assert (await said()).startswith(answer[:5])
            assert [server.state for server in engine.status()] == ["serving"]
        await engine.restore("theta-0000", None, with_optimizer=False)
        assert await said() == before
