"""The worker process: killed, closed, abandoned, cancelled; and what its calls' futures say then."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.tiny import tiny_model
from whale_tui.policy.chat import ChatTokenizer
from whale_tui.policy.client import TransformersEngine
from whale_tui.policy.protocol import PolicyFailure, SampleRequest, TrainRequest, TrainSample
from whale_tui.records import Sampling


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
async def engine(folder, tmp_path):
    engine = TransformersEngine(folder, log_path=tmp_path / "worker.log", device="cpu", dtype="float32", lora_rank=4)
    await engine.start()
    yield engine
    await engine.close()


def request(folder, number=0, tokens=8, text="go"):
    chat = ChatTokenizer(folder)
    prompt = chat.render([{"role": "user", "content": text}])
    return SampleRequest((number, 0), prompt, tokens, number, Sampling(), chat.stop_ids)


def endless(folder, number):
    made = request(folder, number, tokens=100_000)
    made.stop_ids = []
    return made


async def sample_all(engine, requests):
    futures = [engine.submit(r) for r in requests]
    while not all(f.done() for f in futures):
        engine.flush()
        await asyncio.wait([f for f in futures if not f.done()], return_when=asyncio.FIRST_COMPLETED, timeout=30)
    return [f.result() for f in futures]


def training(repeats=1):
    return TrainRequest([[TrainSample([1, 5, 6], [7, 8, 2])]] * repeats, 1e-2)


async def test_order_of_submission_is_nothing(engine, folder):
    requests = [request(folder, n, tokens=4 + n, text="go" * n) for n in range(6)]
    first = await sample_all(engine, requests)
    await engine.drop()
    backwards = await sample_all(engine, requests[::-1])
    assert backwards[::-1] == first


async def test_killed_worker_fails_calls_and_starts_again(engine, folder, tmp_path):
    await engine.train(training())
    published = await engine.publish("theta-0001", str(tmp_path / "theta-0001"))
    before = await sample_all(engine, [request(folder)])
    futures = [engine.submit(endless(folder, n)) for n in range(3)]
    engine.flush()
    await asyncio.sleep(0.1)
    os.kill(engine.pid, signal.SIGKILL)
    for future in futures:
        with pytest.raises(PolicyFailure, match="SIGKILL") as failure:
            await asyncio.wait_for(future, 10)
        assert failure.value.kind == "worker-died"
    with pytest.raises(PolicyFailure):
        await engine.submit(request(folder))
    with pytest.raises(PolicyFailure):
        await engine.train(training())
    assert engine.pid is None

    await engine.start()
    assert await engine.restore("theta-0001", str(tmp_path / "theta-0001"), with_optimizer=True) == published.hash
    assert await sample_all(engine, [request(folder)]) == before


async def test_drop_is_quick_and_leaves_a_clean_table(engine, folder):
    before = await sample_all(engine, [request(folder)])
    futures = [engine.submit(endless(folder, n)) for n in range(4)]
    engine.flush()
    await asyncio.sleep(0.2)
    started = time.perf_counter()
    await engine.drop()
    assert time.perf_counter() - started < 5
    assert all(future.cancelled() for future in futures)
    assert await sample_all(engine, [request(folder)]) == before


async def test_cancelled_training_leaves_the_published_version(engine, folder, tmp_path):
    await engine.train(training())
    first = await engine.publish("theta-0001", str(tmp_path / "theta-0001"))
    task = asyncio.create_task(engine.train(training(5_000)))
    await asyncio.sleep(0.5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    started = time.perf_counter()
    await engine.drop()
    assert time.perf_counter() - started < 10
    again = await engine.publish("theta-0002", str(tmp_path / "theta-0002"))
    assert again.hash == first.hash


async def test_the_engine_answers_while_the_worker_trains(engine):
    task = asyncio.create_task(engine.train(training(40)))
    worst = 0.0
    while not task.done():
        started = time.perf_counter()
        await asyncio.sleep(0.01)
        worst = max(worst, time.perf_counter() - started)
    assert (await task).tokens == 120
    assert worst < 0.1


async def test_empty_prompt_is_refused(engine):
    with pytest.raises(ValueError, match="prompt"):
        await engine.submit(SampleRequest((0, 0), [], 4, 0, Sampling(), [2]))


async def test_a_call_that_fails_in_the_worker_fails_alone(engine, folder):
    bad = request(folder)
    bad.prompt_ids = [10**6]  # no such token
    future = engine.submit(bad)
    engine.flush()
    with pytest.raises(PolicyFailure, match="worker-error"):
        await future
    assert await sample_all(engine, [request(folder)])


async def test_bad_models_are_named(tmp_path, folder):
    for path, word in [(tmp_path, "config.json"), (tmp_path / "none", "none")]:
        engine = TransformersEngine(path, log_path=tmp_path / "w.log", device="cpu")
        with pytest.raises(PolicyFailure, match=word) as failure:
            await engine.start()
        assert failure.value.kind == "bad-model"
        await engine.close()
    engine = TransformersEngine(folder, log_path=tmp_path / "w.log", device="cuda")
    with pytest.raises(PolicyFailure, match="CUDA"):
        await engine.start()
    await engine.close()


def test_the_worker_ends_with_its_engine(folder, tmp_path):
    """SIGKILL for the engine: the worker, in the middle of a long call, is gone within seconds."""
    script = f"""
import asyncio, sys
from whale_tui.policy.client import TransformersEngine
from whale_tui.policy.protocol import TrainRequest, TrainSample
async def main():
    engine = TransformersEngine({str(folder)!r}, log_path={str(tmp_path / "w.log")!r}, device="cpu")
    await engine.start()
    print(engine.pid, flush=True)
    await engine.train(TrainRequest([[TrainSample([1, 5], [7, 2])]] * 10**6, 1e-3))
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        worker = int(process.stdout.readline())
        time.sleep(1)
        process.kill()
    for _ in range(100):
        if not _alive(worker):
            return
        time.sleep(0.1)
    os.kill(worker, signal.SIGKILL)
    pytest.fail("the worker outlived its engine")


def _alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_the_engine_side_loads_no_torch():
    script = (
        "import sys, whale_tui.policy.client, whale_tui.policy.chat, whale_tui.policy.source, whale_tui.policy.fit;"
        "print([m for m in ('torch', 'transformers', 'peft', 'textual') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout == "[]\n"
