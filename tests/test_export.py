"""An exported pair answers outside of the project as the engine does, and says what it is."""

from __future__ import annotations

import asyncio
import importlib.util
import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from tests.engines import environment
from tests.pairs import trained_run
from whale_tui.config import load
from whale_tui.domains import base as domains
from whale_tui.domains.base import load_from
from whale_tui.evaluate import resolve
from whale_tui.export import command
from whale_tui.loop.rollouts import Job, Rollouts, Subject, Where, _until_stop, _without_stop
from whale_tui.policy import artifact, export
from whale_tui.policy.chat import ChatTokenizer
from whale_tui.policy.client import TransformersEngine
from whale_tui.policy.protocol import SampleRequest
from whale_tui.policy.rows import Row, Stops
from whale_tui.policy.sampler import FastSampler
from whale_tui.records import Sampling, Task
from whale_tui.rundir import RunDir, RunDirError, sha256_file
from whale_tui.service import discovery

TOOLS = """
def tools(task):
    return {"clean": lambda text: text.strip()}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    made = tmp_path_factory.mktemp("export")
    with pytest.MonkeyPatch.context() as patch:
        for key, value in environment(made).items():
            patch.setenv(key, value)
        yield made


@pytest.fixture(scope="module")
def run(folder: Path) -> RunDir:
    return trained_run(folder)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """policy/export.py in this process, which has loaded torch already."""

    def run(words: list[str], **_) -> subprocess.CompletedProcess[str]:
        assert words[1:3] == ["-m", "whale_tui.policy.export"]
        monkeypatch.setattr(sys, "argv", words[2:])
        capsys.readouterr()
        code = export.main()
        return subprocess.CompletedProcess(words, code, *capsys.readouterr())

    monkeypatch.setattr(command.subprocess, "run", run)


def write(run: RunDir, out: Path, pair: tuple[str, str] = ("theta-0001", "h0001"), **how) -> Path:
    return command.write(run, discovery.read_state(run), *pair, out, **how)


@pytest.fixture(scope="module")
def merged(run: RunDir, folder: Path) -> Path:
    """As a person gets it: by the command line, whose process never loads torch."""
    code = (
        "import sys; from whale_tui.cli import _guarded; code = _guarded(sys.argv[1:]);"
        "assert not {'torch', 'transformers'} & set(sys.modules); sys.exit(code)"
    )
    words = ["export", "tiny", str(folder / "merged")]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"theta-0001 with h0001 is in {folder / 'merged'}" in done.stdout
    return folder / "merged"


@pytest.mark.parametrize("base_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
def test_merged_weights_are_what_the_sampler_serves(
    run: RunDir, tmp_path: Path, base_dtype: torch.dtype, compute: torch.dtype
) -> None:
    """Bit for bit, once loaded in the type that rollouts are computed in; never wider than that takes."""
    version, base = run.weights / "theta-0001", tmp_path / "base"
    shutil.copytree(load(run.config).config.model.name, base)
    tensors = load_file(base / "model.safetensors")
    save_file({name: t.to(base_dtype) for name, t in tensors.items()}, base / "model.safetensors")
    (tmp_path / "out").mkdir()
    written = export.merge(base, version, tmp_path / "out", compute)
    if compute == base_dtype or compute == torch.bfloat16 != base_dtype == torch.float32:
        assert written == base_dtype
    chat = ChatTokenizer(base)
    sampler = FastSampler(base, torch.device("cpu"), compute, Stops(chat.decode), 4)
    sampler.load(artifact.deltas(version))
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert all(t.dtype == written for t in exported.values()) and set(exported) == set(tensors)
    moved = 0
    for module in sampler.linears:
        served, there = sampler.served(module), exported[f"{module}.weight"].to(compute).float()
        assert torch.equal(served, there), module
        moved += not torch.equal(served, tensors[f"{module}.weight"].to(base_dtype).to(compute).float())
    assert moved == len(sampler.linears)
    others = set(exported) - {f"{module}.weight" for module in sampler.linears}
    assert others and all(torch.equal(exported[n].float(), tensors[n].to(base_dtype).float()) for n in others)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == str(written).split(".")[1]


def engine_answers(run: RunDir, tasks: list[str], log: Path) -> list[str]:
    """Greedy answers of the engine's own episodes, in fp32."""
    resolved = load(run.config)
    domain = load_from(resolved.folder, resolved.config.domain.name, {})

    async def play() -> list[str]:
        policy = TransformersEngine(
            resolved.config.model.name, log_path=log, dtype="float32", lora_rank=4, max_rows=1
        )  # fmt: skip
        await policy.start()
        try:
            hash = await policy.restore("theta-0001", str(run.weights / "theta-0001"), with_optimizer=False)
            sampling = msgspec.structs.replace(resolved.config.sampling(), temperature=0.0)
            rollouts = Rollouts(
                policy, ChatTokenizer(resolved.config.model.name), domain, resolved.config.rollout, sampling
            )
            subject = Subject(id="h0001", hash="s1", source=run.harness_source("h0001"))
            where = Where(1, "weight", 1, 0, "test", "theta-0001", hash, 0)
            jobs = [Job(Task(f"t{n}", {"ask": ask}, {"rest": "0"}), subject, 0) for n, ask in enumerate(tasks)]
            return [e.answer for e in await rollouts.run(jobs, where)]
        finally:
            await policy.close()

    return asyncio.run(play())


def test_the_export_answers_as_the_engine_does(
    run: RunDir, merged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """With nothing of the project in reach, unsealed; and with it, sealed."""
    agent = tmp_path / "agent"
    shutil.copytree(merged, agent)
    (agent / "tools.py").write_text(TOOLS)
    tasks = ["test 0", "Where is it?", "zzz", "12+12", "Say\na longer thing, and then another one.", "\u00e9"]
    (tmp_path / "tasks.json").write_text(json.dumps([{"ask": text} for text in tasks]))
    block = tmp_path / "block"
    (block / "whale_tui").mkdir(parents=True)
    (block / "whale_tui" / "__init__.py").write_text("raise ImportError('not here')")
    bare = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")} | {"PYTHONPATH": str(block)}
    done = subprocess.run(
        [sys.executable, str(agent / "run_agent.py"), "--greedy", "--dtype", "float32", "--json", "tasks.json"],
        env=bare, cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "unsealed, in this process" in done.stderr and "not for stdout" in done.stderr
    answers = [json.loads(line)["answer"] for line in done.stdout.splitlines()]
    assert answers == engine_answers(run, tasks, tmp_path / "log")
    assert len(set(answers)) > 1 and all(a.count("|") >= 4 and "clean" in a for a in answers)

    runner = imported(agent, monkeypatch)
    monkeypatch.setattr(sys, "argv", ["run_agent.py", "--greedy", "--dtype", "float32"])
    monkeypatch.setattr(sys, "stdin", io.StringIO("test 0\n\nzzz\n"))
    capfd.readouterr()
    assert runner.main() == 0
    said = capfd.readouterr()
    assert said.out == f"{answers[0]}\n{answers[2]}\n" and "run_agent" not in said.err, "sealed, and no tool is missing"


def imported(folder: Path, patch: pytest.MonkeyPatch) -> ModuleType:
    """A folder's run_agent.py as a module."""
    spec = importlib.util.spec_from_file_location("run_agent", folder / "run_agent.py")
    module = importlib.util.module_from_spec(spec)
    patch.setattr(sys, "path", list(sys.path))
    spec.loader.exec_module(module)
    return module


def test_a_missing_tool_is_said_and_a_harness_hears_of_it(
    merged: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runner = imported(merged, monkeypatch)
    monkeypatch.setattr(sys, "argv", ["run_agent.py", "--greedy", "test 0"])
    assert runner.main() == 1
    said = capsys.readouterr()
    assert "tools.py does not give what the harness may ask for, clean(text)" in said.err and not said.out
    assert "no answer: error: " in said.err and "there is no tool 'clean'" in said.err


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("while True: model.chat([{'role': 'user', 'content': 'x'}])", "budget: call 9"),
        ("model.chat([{'role': 'user', 'content': 'x' * 9000}])", "budget: a prompt of"),
        ("task['ask'] = 'x'", "a task is read-only"),
        ("model.chat([{'role': 'you', 'content': 'x'}])", "TypeError: model.chat"),
        ("return 3", "must return a str"),
    ],
)
@pytest.mark.parametrize("sealed", [True, False])
def test_an_episode_without_an_answer_says_why(
    merged: Path, monkeypatch: pytest.MonkeyPatch, body: str, words: str, sealed: bool
) -> None:
    agent = imported(merged, monkeypatch)
    made = agent.Agent(greedy=True)
    made.source = f"def run(task, model, tools):\n    {body}\n"
    made._worker = made._worker if sealed else None
    with pytest.raises(agent.NoAnswer, match=words):
        made.answer({"ask": "x"})


def test_an_export_says_what_it_is(run: RunDir, merged: Path) -> None:
    facts = json.loads((merged / "provenance.json").read_text())
    state = discovery.read_state(run)
    assert facts["pair"]["policy_hash"] == state.versions["theta-0001"].hash
    assert [v["name"] for v in facts["lineage"]["policy"]] == ["theta-0001", "theta-0000"]
    assert [(h["id"], h["hypothesis"]) for h in facts["lineage"]["harness"]] == [
        ("h0001", "talk for longer"), ("h0000", "the base harness"),
    ]  # fmt: skip
    assert facts["scores"][0]["low"] == 0.25 and facts["run"]["budget_used"] == 12
    for name, sha in facts["files"].items():
        assert sha256_file(merged / name) == sha
    written = {p.name for p in merged.iterdir()} - {"__pycache__"}  # of the tests that ran it
    assert written == {*facts["files"], "provenance.json"}
    card = (merged / "README.md").read_text()
    score = "theta-0001 with h0001 (this pair) | 50.0% | 25.0 to 75.0% | 60.0% | 2 | 6 |"
    told = ("talk for longer", "runs it in its own process", "tools.py is yours to fill in", "`whale`")
    for words in (score, *told, "license: other"):
        assert words in card, words
    assert str(run.path) not in card
    generation = json.loads((merged / "generation_config.json").read_text())
    assert generation["top_k"] == 20 and generation["eos_token_id"] == 2 and generation["do_sample"]
    assert (merged / "LICENSE").read_text().lstrip().startswith("Apache License")


def test_the_adapter_merges_to_the_same_weights(run: RunDir, merged: Path, tmp_path: Path, here: None) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    out = write(run, tmp_path / "adapter", adapter=True)
    assert not (out / "model.safetensors").exists() and "peft" in (out / "requirements.txt").read_text()
    base = json.loads((out / "adapter_config.json").read_text())["base_model_name_or_path"]
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), str(out))
    theirs, ours = model.merge_and_unload().state_dict(), load_file(merged / "model.safetensors")
    assert all(torch.equal(theirs[name], ours[name]) for name in ours)
    assert "library_name: peft" in (out / "README.md").read_text()


@pytest.mark.parametrize(
    ("pair", "how", "words"),
    [
        (("theta-0009", "h0001"), {}, "no theta-0009"),
        (("theta-0001", "h0009"), {}, "no h0009"),
        (("theta-0000", "h0001"), {"adapter": True}, "has no adapter"),
    ],
)
def test_what_can_not_be_exported_is_refused_at_once(run, tmp_path, pair, how, words) -> None:
    with pytest.raises(RunDirError, match=words):
        write(run, tmp_path / "out", pair, **how)
    assert list(tmp_path.iterdir()) == []


def test_damaged_weights_leave_nothing_behind(run: RunDir, tmp_path: Path, here: None) -> None:
    copy = tmp_path / "runs" / "tiny"
    shutil.copytree(run.path, copy)
    file = copy / "weights" / "theta-0001" / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(RunDirError, match=r"adapter_model\.safetensors has sha256"):
        write(RunDir(copy), tmp_path / "out")
    shutil.rmtree(copy / "weights" / "theta-0001")
    with pytest.raises(RunDirError, match="no longer kept"):
        write(RunDir(copy), tmp_path / "out")
    (tmp_path / "there").mkdir()
    with pytest.raises(RunDirError, match="exists already"):
        write(run, tmp_path / "there")
    assert {path.name for path in tmp_path.iterdir()} == {"runs", "there"}


@pytest.mark.parametrize(
    ("name", "tool", "args"),
    [("arithmetic", "calc", ["6 * 7"]), ("encyclopedia", "search", ["Where was Clara born?", 3])],
)
def test_tools_that_go_along_give_what_the_domains_do(name: str, tool: str, args: list, tmp_path: Path) -> None:
    domain = domains.load(name)
    assert all("whale" not in line for line in domain.export(tmp_path))
    task = domain.tasks("test")[0]
    code = (
        f"import sys, json; sys.path.insert(0, {str(tmp_path)!r}); import tools;"
        f"print(json.dumps(tools.tools({task.public!r})[{tool!r}](*{args!r})));"
        "assert not any(m.startswith('whale') for m in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == domain.tools(task)[tool](*args) != []


def test_a_pair_is_named(run: RunDir) -> None:
    assert resolve(discovery.read_state(run), "best") == ("theta-0001", "h0001")


def test_the_runner_stops_where_the_engine_does(merged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same draws, end of turn, limits and stop strings: the same ids, the same reason, the same text."""
    runner, chat = imported(merged, monkeypatch), ChatTokenizer(merged)
    policy = object.__new__(runner.Policy)  # its weights have no part in it: the draws are given
    policy.device, policy.stop_ids, policy.tokenizer = "cpu", set(chat.stop_ids), AutoTokenizer.from_pretrained(merged)
    policy.model = lambda **asked: SimpleNamespace(logits=torch.zeros(1, 1, 4), cache=None)
    seen = set()

    @settings(max_examples=200, deadline=None)
    @given(
        text=st.text("ab\u00e9\n|<x ", max_size=24), end=st.integers(0, 24), most=st.integers(1, 24),
        stop=st.lists(st.text("ab\u00e9\n|<", min_size=1, max_size=3), max_size=3),
    )  # fmt: skip
    def same(text: str, end: int, most: int, stop: list[str]) -> None:
        draws = chat.encode(text)
        draws.insert(min(end, len(draws)), chat.stop_ids[0])
        row = Row(1, SampleRequest((1, 1), [5], most, 1, Sampling(), chat.stop_ids, stop))
        for token in draws:
            if not row.finished:
                row.take(token, 0.0, Stops(chat.decode))
        budget = {"max_calls": 1, "max_episode_tokens": 999, "max_tokens": most, "max_context": 999}
        left = iter(draws)
        episode = runner.Episode(policy, budget, {}, lambda logits: next(left), lambda said: None)
        reply = episode.chat([{"role": "user", "content": "x"}], stop=stop)
        assert (reply["finish_reason"], reply["completion_tokens"]) == (row.finished, len(row.ids))
        assert reply["text"] == _until_stop(chat.decode(_without_stop(row.ids, chat.stop_ids)), stop)
        seen.add((row.finished, row.ids[-1] in chat.stop_ids))

    same()
    assert seen == {("stop", True), ("stop", False), ("length", False)}


def test_the_runner_draws_from_the_distribution_that_it_says(merged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = imported(merged, monkeypatch)
    logits = torch.tensor([0.0, 3.0, 1.0, 2.0])
    assert runner.Drawer(0.0, 20, 1.0, 0)(logits) == 1
    for top_k, top_p, seen in ((2, 1.0, {1, 3}), (0, 0.7, {1, 3}), (0, 0.5, {1}), (0, 1.0, {0, 1, 2, 3})):
        draw = runner.Drawer(1.0, top_k, top_p, 0)
        assert {draw(logits) for _ in range(400)} == seen
    draw = runner.Drawer(2.0, 2, 1.0, 0)
    share = sum(draw(logits) == 1 for _ in range(4000)) / 4000
    assert abs(share - float(torch.tensor(0.5).sigmoid())) < 0.03
