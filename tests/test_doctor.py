"""doctor: every check can pass and can fail, says why and the mend; and what may not start doesn't."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engines import cli, environment, write_config
from tests.tiny import CHATML, _tokenizer
from whale_tui import config as configuration
from whale_tui import doctor, starter
from whale_tui.cli import _guarded
from whale_tui.doctor import forecast, model, quick, trial, weights
from whale_tui.doctor.checkup import Check, Checkup, Finding, findings
from whale_tui.doctor.command import lines
from whale_tui.domains.base import Known
from whale_tui.harness.worker import can_seal
from whale_tui.loop import retention
from whale_tui.policy.chat import ChatTokenizer
from whale_tui.policy.protocol import PolicyFailure
from whale_tui.records import Brief, Demonstration, Task, Verdict
from whale_tui.rundir import RunDir

ROOT = Path(__file__).parent.parent
SAMPLES = sorted((ROOT / "sample_configs").glob("*.toml"))
needs_seal = pytest.mark.skipif(not can_seal()[0], reason=can_seal()[1])


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for key, value in environment(tmp_path).items():
        monkeypatch.setenv(key, value)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for run in map(RunDir, (tmp_path / "runs").glob("*")):  # a test that failed leaves no engine behind
        info = run.engine_info()
        if info is not None and run.is_locked():
            os.kill(info.pid, signal.SIGKILL)


@pytest.fixture
def own(here: Path) -> Path:
    """A folder as `init` writes it."""
    starter.write(here / "own")
    return here / "own"


def checkup(folder: Path, *overrides: str, domain: Any = None) -> Checkup:
    file = folder / "run.toml" if folder.is_dir() else folder
    return Checkup(configuration.load(file, overrides), folder.parent / "runs", domain=domain)


def visit(visited: Checkup, *checks: Check) -> dict[str, Finding]:
    async def all_of() -> list[Finding]:
        return [finding async for finding in findings(checks or doctor.QUICK, visited)]

    return {finding.name: finding for finding in asyncio.run(all_of())}


class Letters:
    """A domain of ten tasks whose parts a test breaks."""

    name = "letters"
    h0 = "def run(task, model, tools):\n    return model.chat([]).text\n"
    edits = None

    def __init__(self, **broken: Any) -> None:
        self.brief = Brief("", {"double": "double(n)"}, [])
        self.known: list[Task] = [Task(f"k{n}", {"q": n}, {"answer": f"a{n}"}) for n in range(10)]
        for name, value in broken.items():
            setattr(self, name, value)

    def tasks(self, split: str) -> list[Task]:
        return {"weight": self.known[:6], "harness": self.known[6:8], "test": self.known[8:]}[split]

    def tools(self, task: Task) -> dict[str, Callable[..., Any]]:
        return {}

    def verify(self, task: Task, answer: str, episode: Any) -> Verdict:
        return Verdict("accept" if answer == task.private["answer"] else "reject", "")


# ------------------------------------------------------------------------------------------------------ the quick part


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda path: path.stem)
def test_every_sample_config_passes_but_for_data_that_it_says_how_to_get(here: Path, sample: Path) -> None:
    found = visit(checkup(sample))
    failed = {name: finding for name, finding in found.items() if finding.level == "fail"}
    assert failed.keys() <= {"data", "ready", "vllm"}
    for finding in failed.values():
        assert re.search("no such file|not installed|there is no .*bin/python", finding.text), finding
        assert len(finding.mend) > 20, f"{finding} does not say how to get it"


@needs_seal
def test_a_new_folder_passes_and_what_was_read_is_shown(own: Path) -> None:
    found = visit(checkup(own))
    assert {f.level for f in found.values()} == {"ok"}
    assert list(found) == ["data", "splits", "lengths", "harness", "seal", "disk"]
    assert "tasks.jsonl: 10 tasks, from 10 rows" in found["data"].shown
    assert "D_weight 4, D_harness 3, D_test 3; they share no task" in found["splits"].text


def test_missing_data_leave_what_needs_them_untried(own: Path) -> None:
    (own / "tasks.jsonl").unlink()
    found = visit(checkup(own))
    assert found["data"].level == "fail" and "tasks.jsonl: no such file" in found["data"].text
    for name in ("splits", "lengths", "harness"):
        assert found[name] == Finding(name, "warn", "not tried: the domain could not be loaded")
    assert found["disk"].level == "ok"


@pytest.mark.parametrize(
    ("check", "broken", "overrides", "level", "said"),
    [
        ("splits", {"known": []}, [], "fail", "D_weight has no tasks"),
        ("splits", {"known": [Task(str(n), {"q": 0}, {}) for n in range(10)]}, [], "fail", "1 tasks are in both"),
        ("splits", {"brief": Brief("", {}, [Demonstration({"q": 7})])}, [], "fail", "a demonstration of the brief is"),
        ("lengths", {}, ["weight.prompts_per_step=64"], "fail", "is more than the 6 tasks of D_weight"),
        ("lengths", {}, ["run.budget_episodes=9"], "fail", "too small for one round"),
        ("harness", {"h0": "def run(task): pass"}, [], "fail", "must take exactly (task, model, tools)"),
        ("harness", {"h0": "import os\n" + Letters.h0}, [], "fail", "can't import 'os'"),
        ("harness", {"h0": Letters.h0 + "X = 'secret word'", "known": [Task(str(n), {"q": n}, {"answer": "secret word"})
                                                                     for n in range(10)]}, [], "warn", "'secret word'"),
        ("ready", {"preflight": lambda: ["the server is down; start it"]}, [], "fail", "the server is down"),
        ("disk", {}, ["retention.min_free_gb=1e9"], "fail", "retention.min_free_gb"),
        ("disk", {}, ["run.budget_episodes=900000000000"], "warn", "GB free at"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_with_the_mend(
    own: Path, check: str, broken: dict[str, Any], overrides: list[str], level: str, said: str
) -> None:
    more = ["domain.harness=''"] if check == "harness" else []
    found = visit(checkup(own, *overrides, *more, domain=Letters(**broken)))[check]
    assert (found.level, bool(found.mend)) == (level, True) and said in found.text


async def test_a_preflight_may_be_a_coroutine(own: Path) -> None:
    async def preflight() -> list[str]:
        return []

    found = [f async for f in findings([quick.ready], checkup(own, domain=Letters(preflight=preflight)))]
    assert [f.level for f in found] == ["ok"]


def test_no_seal_is_a_failure_unless_it_is_allowed(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quick, "can_seal", lambda: (False, "no seccomp here; install it"))
    refused = visit(checkup(own))["seal"]
    assert (refused.level, refused.text) == ("fail", "no seccomp here") and "install it; or set" in refused.mend
    allowed = visit(checkup(own, "rollout.allow_unsealed=true"))["seal"]
    assert allowed.level == "warn" and "your rights" in allowed.text


def test_a_check_that_breaks_is_a_failure_and_the_others_go_on(own: Path) -> None:
    found = visit(checkup(own, domain=Letters(tasks=lambda split: 1 / 0)))
    assert found["splits"].level == "fail" and "ZeroDivisionError" in found["splits"].text
    assert found["disk"].level == "ok"


def test_the_quick_part_is_quick_and_loads_no_torch(own: Path) -> None:
    code = """
import asyncio, sys, time
from pathlib import Path
from whale_tui import config, doctor
import whale_tui.service.engine
from whale_tui.domains.base import load_from
resolved = config.load(Path("own/run.toml"))
domain = load_from(resolved.folder, resolved.config.domain.name, resolved.config.domain.options)
start = time.process_time()
asyncio.run(doctor.before_start(resolved, domain, Path(".")))
print(time.process_time() - start, {"torch", "transformers", "textual"} & sys.modules.keys())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    seconds, loaded = done.stdout.split(" ", 1)
    assert float(seconds) < 0.3 and loaded.strip() == "set()"


def test_a_run_that_may_not_start_says_why_and_takes_the_mended_config(own: Path, here: Path) -> None:
    """In the engine, before a model is loaded; the second run is not refused for another config than the first's."""
    (own / "tasks.jsonl").rename(own / "elsewhere.jsonl")
    done = cli("run", "own", "--headless", folder=here, check=1)
    assert "tasks.jsonl: no such file" in done.stderr
    mended = ["--set", "domain.options.train=elsewhere.jsonl", "--set", "run.budget_episodes=3"]
    done = cli("run", "own", "--headless", *mended, folder=here, check=1)
    assert "lengths: run.budget_episodes = 3 is too small for one round" in done.stderr
    assert "tasks.jsonl" not in done.stderr and "loading" not in done.stdout


# ----------------------------------------------------------------------------------------------------------- the trials


@pytest.mark.parametrize(
    ("broken", "level", "said"),
    [
        ({}, "ok", "verdicts as they should be on 6 right answers, 12 wrong answers, taken from the private fields"),
        (
            {"verify": lambda *_: Verdict("accept", "")},
            "fail",
            "12 of 18 known answers get another verdict: '' should",
        ),
        ({"verify": lambda *_: Verdict("reject", "no")}, "fail", "'a0' should be accept and is reject (no)"),
        ({"verify": lambda *_: 1 / 0}, "fail", "is invalid (ZeroDivisionError"),
        ({"known": [Task(str(n), {"q": n}, {}) for n in range(10)]}, "warn", "no right answer to try"),
        ({"known_answers": lambda: [(Task("k", {}, {"answer": "x"}), "x", "reject")]}, "fail", "'x' should be reject"),
        ({"known_answers": lambda: [(Task("k", {}, {"answer": "x"}), "x", "accept")]}, "ok", "on 1 right answers"),
    ],
)
def test_verifier(own: Path, broken: dict[str, Any], level: str, said: str) -> None:
    if "known" in broken:
        broken["verify"] = lambda *_: Verdict("reject", "")
    found = visit(checkup(own, domain=Letters(**broken)), trial.verifier)["verifier"]
    assert found.level == level and said in found.text


@pytest.mark.parametrize(("moves", "level"), [([1, 2], "ok"), ([2, 2], "fail"), ([1], "fail")])
def test_known_answers_may_need_what_was_written_and_tools_with_their_state(
    own: Path, moves: list[int], level: str
) -> None:
    class Steps(Letters):
        def tools(self, task: Task) -> dict[str, Callable[..., Any]]:
            seen: list[int] = []
            return {"step": seen.append, "seen": lambda: seen}

        async def verify(
            self, task: Task, answer: str, episode: Any, *, sampled: Any = (), tools: Any = None
        ) -> Verdict:
            right = tools["seen"]() == [1, 2] and len(episode.tools) == 2 and list(sampled) == ["1", "2"]
            return Verdict("accept" if right else "reject", "")

        def known_answers(self) -> list[Any]:
            good = Known(self.known[0], "", "accept", ["1", "2"], [("step", [move]) for move in moves])
            return [good, Known(self.known[0], "", "reject", ["1", "2"])]

    assert visit(checkup(own, domain=Steps()), trial.verifier)["verifier"].level == level


def double(n: int) -> int:
    if n < 0:
        raise ValueError("below zero")
    if n > 9:
        raise RuntimeError("out of order")
    return 2 * n if n else object()  # type: ignore[return-value]


async def later(n: int) -> int:
    return double(n)


@pytest.mark.parametrize("tool", [double, later])
@pytest.mark.parametrize(
    ("args", "level", "said"),
    [
        ({"n": 4}, "ok", "double answer"),
        ([4], "ok", "double answer"),
        ({"n": -1}, "ok", "double (refused: below zero) answer"),
        ({"n": 10}, "fail", "the tool double fails: RuntimeError: out of order"),
        ({"n": 0}, "fail", "the tool double fails: TypeError"),
        (None, "ok", "none tried; no demonstration uses double"),
    ],
)
def test_tools(own: Path, tool: Callable[..., Any], args: Any, level: str, said: str) -> None:
    uses = [{"name": "double", "args": args, "result": 8}] if args is not None else []
    brief = Brief("", {"double": "double(n)"}, [Demonstration({"q": -1}, uses, "8")])
    found = visit(checkup(own, domain=Letters(brief=brief, tools=lambda task: {"double": tool})), trial.tools)["tools"]
    assert found.level == level and said in found.text


def test_a_domain_without_tools_has_nothing_to_try_and_a_tool_untold_is_a_warning(own: Path) -> None:
    assert visit(checkup(own, domain=Letters()), trial.tools) == {}
    untold = Letters(brief=Brief("", {}, []), tools=lambda task: {"double": double})
    assert visit(checkup(own, domain=untold), trial.tools)["tools"].mend == "say in the brief what double does"


@needs_seal
def test_escape_is_tried_for_real_and_would_be_seen(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = visit(checkup(own), trial.escape)["escape"]
    assert found.level == "ok" and "7 ways out tried" in found.text
    assert not Path("/tmp/whale-tui-escaped").exists()
    monkeypatch.setitem(trial.WAYS, "ask for its number", "os.getpid()")
    assert visit(checkup(own), trial.escape)["escape"].text == "code behind the seal could ask for its number"


def test_proposer(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from whale_tui.proposers.rules import Rules

    def said(*overrides: str) -> Finding:
        return visit(checkup(own, *overrides), quick.data, trial.proposer)["proposer"]

    assert said().text == "candidates are written by rules"
    assert "a person" in said("proposer.kind=person").text
    monkeypatch.setattr(Rules, "preflight", lambda self: ["no key; set one"], raising=False)
    assert said() == Finding("proposer", "fail", "rules: no key", "set one")


# ------------------------------------------------------------------------------------------------------------ the model

QWEN = CHATML.replace(
    "assistant\\n' }}", "assistant\\n' }}{% if not enable_thinking|default(true) %}{{ '<think></think>' }}{% endif %}"
)


def tokenizer(folder: Path, template: str = CHATML) -> ChatTokenizer:
    folder.mkdir(exist_ok=True)
    _tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", "bos_token": "<|im_start|>"}))
    (folder / "chat_template.jinja").write_text(template)
    return ChatTokenizer(folder)


@pytest.mark.parametrize(
    ("template", "level", "said"),
    [
        (CHATML, "ok", "no thinking mode; a turn ends with '<|im_end|>'"),
        (QWEN, "ok", "thinking can be switched"),
        (CHATML.replace("<|im_end|>", "<|endoftext|>"), "fail", "ends a turn with '<|endoftext|>\\n', and sampling"),
        (CHATML.replace("message['content']", "message['content']|upper"), "fail", "a user's text is not in the"),
        (CHATML.replace("message in messages", "message in messages[-1:]"), "fail", "earlier answer"),
        ("{% if messages[0]['role'] == 'system' %}{{ raise_exception('no') }}{% endif %}" + CHATML, "warn", "system"),
        ("{{ raise_exception('never') }}", "fail", "refuses these messages"),
        ("{% if", "fail", "not readable"),
    ],
)  # fmt: skip
def test_chat_template(own: Path, template: str, level: str, said: str) -> None:
    visited = checkup(own)
    visited.known_model = own / "model"
    try:
        tokenizer(own / "model", template)
    except PolicyFailure:
        assert template == "{% if"
    found = visit(visited, model.chat_template)["chat template"]
    assert found.level == level and said in found.text and (level == "ok" or found.mend)


def test_a_model_that_is_not_here_is_not_fetched(own: Path, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(here / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    found = visit(checkup(own), model.model, model.memory, model.chat_template)
    assert found["model"].level == "warn" and "a run fetches it when it starts" in found["model"].text
    assert found["memory"].text == found["chat template"].text == "not tried: the model is not here"
    assert not (here / "cache").exists()
    assert visit(checkup(own, "model.name=no/such-model-anywhere"), model.model)["model"].level == "warn"
    assert visit(checkup(own, "model.name=nothing"), model.model)["model"].level == "fail"


def test_sizes_are_read_from_the_files_and_memory_is_compared(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    config = write_config(here)
    loaded = AutoModelForCausalLM.from_pretrained(here / "model")
    visited = checkup(config)
    found = visit(visited, model.model)["model"]
    assert found.level == "ok" and "fast path" in found.text
    assert weights.parameters(here / "model") == sum(p.numel() for p in loaded.parameters())
    linear = [m for name, m in loaded.named_modules() if isinstance(m, torch.nn.Linear) and name.endswith("proj")]
    assert weights.trained_parameters(visited.config) == sum(2 * (m.in_features + m.out_features) for m in linear)

    def memory(total: float, free: float, gpus: list[tuple[int, int]] | None = None) -> str:
        monkeypatch.setattr(weights, "machine_bytes", lambda: (int(total), int(free)))
        monkeypatch.setattr(weights, "gpu_bytes", lambda: gpus or [])
        return visit(visited, model.memory)["memory"].level

    assert memory(8e9, 4e9) == "ok"
    assert memory(8e9, 1e8) == "warn"
    assert memory(1e5, 1e5) == "fail"
    assert memory(8e9, 1e8, gpus=[(1 << 30, 1 << 20), (8 << 30, 4 << 30)]) == "ok", "the emptiest GPU counts"
    visited.config.model.device = "cuda"
    assert memory(8e9, 4e9) == "fail"


def test_training_all_weights_takes_more_and_an_adapters_rate_is_warned_of(here: Path, own: Path) -> None:
    config = write_config(here)
    numbers = weights.parameters(here / "model")
    full = checkup(config, "model.adapt=full").config
    assert weights.trained_parameters(full) == numbers
    assert weights.training_bytes(full, numbers, numbers, 2) == 16 * numbers
    assert retention.version_bytes(full, numbers, 2) == (2 * numbers, 12 * numbers)
    assert retention.version_bytes(full, numbers, 4) == (4 * numbers, 8 * numbers)
    lean = checkup(config, "model.adapt=full", "weight.optimizer=adafactor").config
    assert weights.training_bytes(lean, numbers, numbers, 2) == 8 * numbers
    assert retention.version_bytes(lean, numbers, 2) == (2 * numbers, 4 * numbers)
    assert retention.version_bytes(checkup(config).config, 10, 2) == (40, 80)
    warned = visit(checkup(own, "model.adapt=full"), quick.learning_rate)["learning rate"]
    assert warned.level == "warn" and "weight.learning_rate = 0.0003 is an adapter's" in warned.text and warned.mend
    assert not visit(checkup(own, "model.adapt=full", "weight.learning_rate=1e-5"), quick.learning_rate)
    assert not visit(checkup(own), quick.learning_rate)


# --------------------------------------------------------------------------------------------------------- the forecast


def test_forecast_counts_what_the_config_says(own: Path) -> None:
    sizes = {"weight": 4, "harness": 3, "test": 3}

    def of(*overrides: str) -> tuple[int, int, int]:
        f = forecast.forecast(checkup(own, "harness.revisit=1", "schedule.iterations=3", *overrides).config, sizes)
        return f.train, f.search, f.test

    cycle = (2 * 4 * 8, (1 + 1) * 3 + 2 * 3 * (3 + 1))  # 2 steps of 4 tasks x 8; then 3 iterations
    assert of() == (2 * cycle[0], 2 * cycle[1], 2 * 8 * 3)
    assert of("run.condition=weight-only") == (2 * cycle[0], 0, 48)
    assert of("run.condition=harness-only") == (0, 2 * cycle[1], 48)
    assert of("test.at=phases") == (2 * cycle[0], 2 * cycle[1], 5 * 8 * 3)
    assert sum(of("run.cycles=0", "run.budget_episodes=940", "test.samples=0")) == 940, "the budget is the end"
    assert of("run.condition=stagewise", "run.budget_episodes=600")[:2] == (300, 300)


def test_times_are_told_in_words() -> None:
    assert [forecast.in_words(s) for s in (0.2, 80, 100, 6000, 200000)] == [
        "1 seconds", "80 seconds", "2 minutes", "2 hours", "2 days",
    ]  # fmt: skip


# --------------------------------------------------------------------------------------------------------- the command


def test_a_config_error_is_a_finding_with_the_line(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("a.toml").write_text("[run]\nsede = 1\n")
    assert _guarded(["doctor", "a.toml"]) == 1
    told = capsys.readouterr().out
    assert "fail  config        a.toml:2: run.sede: unknown key\n      mend:         did you mean run.seed?" in told
    assert told.endswith("a run may not start: mend config\n")
    assert _guarded(["doctor", "a.toml", "--set", "run.seed=1", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["may_start"] is False


def test_lines_move_no_cursor_and_need_no_unicode(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Finding("data", "warn", "a\x1b[31m\nb \u4e16", "mend\tit", ["\r\u202e"])

    class Ascii:
        encoding = "ascii"

    monkeypatch.setattr(sys, "stdout", Ascii())
    assert lines(found) == [
        "warn  data          a\\x1b[31m\\nb \\u4e16", "      mend:         mend\\tit", "        \\r\\u202e",
    ]  # fmt: skip


@needs_seal
def test_everything_on_a_tiny_model_with_an_episode_shown(
    own: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    write_config(here)  # for its model
    words = ["doctor", "own", "--set", f"model.name={here / 'model'}"]
    done = cli(*words, folder=here, check=0)
    assert done.stdout.isascii() and "\x1b" not in done.stdout
    heads = [line for line in done.stdout.splitlines() if line[4:6] == "  " and line[0] != " "]
    levels = {line[6:19].strip(): line[:4].strip() for line in heads}
    assert list(levels) == [
        "config", "data", "splits", "lengths", "harness", "seal", "disk", "verifier", "escape", "proposer", "model",
        "memory", "chat template", "episode", "length",
    ]  # fmt: skip
    assert "fail" not in levels.values()
    for part in ("prompt  '<|im_start|>user\\nWhat is the opposite of", "sampled ", "answer  ", "verdict reject"):
        assert f"        {part}" in done.stdout
    assert "tokens a second over 8 episodes of h0" in done.stdout
    assert f"a run may start, with {sum(level == 'warn' for level in levels.values())} warnings" in done.stdout
    broken = (own / "harness.py").read_text().replace("return text.strip()", "return text[10_000]")
    (own / "harness.py").write_text(broken)
    told = json.loads(cli(*words, "--json", folder=here, check=1).stdout)
    failed = [finding for finding in told["findings"] if finding["level"] == "fail"]
    assert [f["name"] for f in failed] == ["episode"] and "IndexError" in failed[0]["text"] and not told["may_start"]
