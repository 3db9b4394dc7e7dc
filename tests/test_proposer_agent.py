"""The agent proposer against a scripted agent: whatever it does, the session ends, is counted and leaves nothing."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests import engines
from tests.letters.domain import H0, Letters
from tests.test_proposer_scratch import request as scratch_request
from tests.test_tui_app import stage  # noqa: F401 (a fixture)
from whale_tui import records as r
from whale_tui.config import ConfigError, ProposerConfig, Resolved, convert
from whale_tui.harness.checks import source_hash
from whale_tui.journal import Journal
from whale_tui.loop import harness_phase
from whale_tui.loop.run import Run
from whale_tui.proposers import jail, sessions
from whale_tui.proposers.agent import TRANSCRIPT_BYTES, Agent
from whale_tui.proposers.base import Allowance, ProposerFailure, Request, Spending
from whale_tui.proposers.presets import PRESETS, Prices
from whale_tui.proposers.stream import Stream
from whale_tui.proposers.turns import Turns
from whale_tui.records import Proposal
from whale_tui.rundir import RunDir
from whale_tui.service import engine
from whale_tui.service.protocol import Activity

SCRIPT = Path(__file__).parent / "agents" / "agent.py"
JAILED, WHY = jail.available()
needs_jail = pytest.mark.skipif(not JAILED, reason=f"no jail here: {WHY}")


def agent(mode: str, *rest: str, use_jail: bool = False, hidden: tuple[Path, ...] = (), **options: Any) -> Agent:
    words = " ".join([sys.executable, str(SCRIPT), mode, *map(str, rest)])
    options["readable"] = [str(SCRIPT.parent), *options.get("readable", [])]  # the checkout may lie under a mask: /tmp
    config = ProposerConfig(kind="agent", command=words, **{"wall_seconds": 20.0, "idle_seconds": 10.0} | options)
    return Agent(config, use_jail=use_jail, hidden=hidden, after_result=0.3)


def request(tmp_path: Path, **fields: Any) -> Request:
    return scratch_request(**({"folder": tmp_path / "it-0001"} | fields))


def propose(agent: Agent, request: Request) -> list[Proposal]:
    return list(asyncio.run(agent.propose(request)))


def alive(mark: bytes) -> list[str]:
    """Processes of the session that ran in this folder."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark in entry.read_bytes():
                found.append(entry.parent.name)
        except OSError:
            continue
    return found


def test_an_agent_reads_checks_writes_and_finishes(tmp_path: Path) -> None:
    said: list[str] = []
    asked = request(tmp_path, report=said.append)
    found = propose(agent("finishes"), asked)
    assert [p.hypothesis for p in found] == [f"Say it louder ({n}): the policy listens" for n in "ab"]
    assert {p.parent for p in found} == {"h0000"}
    assert "check says 0: a.py: ok b.py: ok" in said and said[-1] == "done"
    assert asked.usage == Spending(prompt_tokens=20_000, output_tokens=200, dollars=0.42)
    folder = tmp_path / "it-0001"
    transcript = (folder / sessions.TRANSCRIPT).read_text().splitlines()
    assert json.loads(transcript[0])["subtype"] == "init" and json.loads(transcript[-1])["type"] == "result"
    assert sorted(p.name for p in folder.iterdir()) == ["candidates", "prompt.md", "session.json", "transcript.jsonl"]
    assert [p.name for p in sorted((folder / "candidates").iterdir())] == ["a.py", "b.py"]


def test_one_that_hangs_after_its_result_has_finished(tmp_path: Path) -> None:
    start = time.monotonic()
    assert len(propose(agent("hangs"), request(tmp_path))) == 1
    assert time.monotonic() - start < 8
    assert alive(str(tmp_path).encode()) == []


def test_silence_is_a_failure_that_may_be_tried_again_and_keeps_what_it_cost(tmp_path: Path) -> None:
    asked = request(tmp_path)
    with pytest.raises(ProposerFailure, match="silent for 0") as failure:
        propose(agent("silent", idle_seconds=0.6), asked)
    assert failure.value.transient
    assert asked.usage.tokens == 10_100 and asked.usage.dollars == pytest.approx(0.0072)  # sonnet's prices
    left = sessions.read(tmp_path / "it-0001")
    assert left is not None and left.usage == asked.usage


def test_whole_candidates_of_a_session_that_was_cut_are_kept(tmp_path: Path) -> None:
    found = propose(agent("silent-late", idle_seconds=0.6), request(tmp_path))
    assert [p.hypothesis for p in found] == ["Say it louder (a): the policy listens"]


def test_the_wall_limit_ends_one_that_chatters_for_ever(tmp_path: Path) -> None:
    with pytest.raises(ProposerFailure, match="stopped after 0"):
        propose(agent("chatters", wall_seconds=0.7), request(tmp_path))


def test_five_candidates_are_cut_to_those_asked_for_and_none_is_no_failure(tmp_path: Path) -> None:
    found = propose(agent("five"), request(tmp_path / "five"))
    assert [p.hypothesis[14:17] for p in found] == ["(a)", "(b)", "(c)"]
    assert propose(agent("none"), request(tmp_path / "none")) == []


def test_broken_python_goes_on_to_the_checks(tmp_path: Path) -> None:
    (found,) = propose(agent("broken"), request(tmp_path))
    assert found.hypothesis == "Broken on purpose"


@pytest.mark.parametrize("use_jail", [False, pytest.param(True, marks=needs_jail)])
def test_a_child_that_left_its_group_does_not_outlive_the_session(tmp_path: Path, use_jail: bool) -> None:
    pid_file = "" if use_jail else str(tmp_path / "pid")
    asked = request(tmp_path)
    assert len(propose(agent("forks", pid_file or "''", use_jail=use_jail), asked)) == 1
    left = sessions.read(tmp_path / "it-0001")
    assert left is not None and alive(left.mark.encode()) == []
    if pid_file:
        pid = int(Path(pid_file).read_text())
        with pytest.raises(ProcessLookupError):
            while Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z":
                os.kill(pid, 0)
            raise ProcessLookupError  # a zombie that nobody reaps is dead too


def test_200_megabytes_fill_neither_memory_nor_disk(tmp_path: Path) -> None:
    import resource

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    asked = request(tmp_path)
    assert len(propose(agent("floods", "200"), asked)) == 1
    assert asked.usage.dollars == 0.42  # read after the transcript was full
    transcript = tmp_path / "it-0001" / sessions.TRANSCRIPT
    assert transcript.stat().st_size < TRANSCRIPT_BYTES + 1000
    assert json.loads(transcript.read_bytes().splitlines()[-1])["type"] == "cut"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # kilobytes


@pytest.mark.parametrize(
    "allowance, words",
    [(Allowance(dollars=0.10), r"\$0.1\d of \$0.10 spent"), (Allowance(tokens=60_000), "of 60,000 tokens spent")],
)
def test_a_spender_is_stopped_at_its_cap(tmp_path: Path, allowance: Allowance, words: str) -> None:
    asked = request(tmp_path, allowance=allowance)
    with pytest.raises(ProposerFailure, match=words) as failure:
        propose(agent("spends"), asked)
    assert not failure.value.transient  # trying again would spend again
    assert allowance.passed(asked.usage) and asked.usage.dollars < 1 and asked.usage.tokens < 120_000


def test_failures_that_trying_again_can_mend_are_told_from_those_it_cannot(tmp_path: Path) -> None:
    with pytest.raises(ProposerFailure, match="status 1: API Error: 529 overloaded") as overloaded:
        propose(agent("overloaded"), request(tmp_path / "a"))
    with pytest.raises(ProposerFailure, match="Invalid API key") as denied:
        propose(agent("denied"), request(tmp_path / "b"))
    missing = Agent(ProposerConfig(command="no-such-agent {prompt}"), use_jail=False)
    with pytest.raises(ProposerFailure, match="no-such-agent is not on the PATH") as absent:
        propose(missing, request(tmp_path / "c"))
    assert [f.value.transient for f in (overloaded, denied, absent)] == [True, False, False]
    assert missing.preflight() and not agent("none").preflight()


def test_the_environment_is_what_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "s")
    monkeypatch.setenv("NAMED_TOKEN", "n")
    (found,) = propose(agent("environment", env=["NAMED_TOKEN"]), request(tmp_path))
    names = found.hypothesis.split(" ")[0].split(",")
    assert "NAMED_TOKEN" in names and "SECRET_TOKEN" not in names
    assert set(names) <= {"HOME", "LANG", "LC_ALL", "LC_CTYPE", "LOGNAME", "NAMED_TOKEN", "NO_COLOR", "PATH", "PWD",
                          "TERM", "TMPDIR", "TZ", "USER", "WHALE_SESSION"} | {n for n in names if "PROXY" in n.upper()
                          or "CERT" in n or "BUNDLE" in n}  # fmt: skip
    assert f"HOME={tmp_path / 'it-0001'}/home" in found.hypothesis


def test_home_files_are_copied_where_a_person_names_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "person"
    (home / ".codex").mkdir(parents=True)
    (home / ".codex/auth.json").write_text("{}")
    monkeypatch.setenv("HOME", str(home))
    assert propose(agent("finishes", home_files=[".codex/auth.json"]), request(tmp_path / "a"))
    assert not (tmp_path / "a/it-0001/home").exists()  # nor does a login stay behind
    for bad in ("../person/.codex/auth.json", "nothing.json"):
        with pytest.raises(ProposerFailure, match="no file of your home folder"):
            propose(agent("finishes", home_files=[bad]), request(tmp_path / bad.replace("/", "-")))


@needs_jail
def test_the_jail_hides_the_run_and_the_data_and_lets_nothing_be_written_outside(tmp_path: Path) -> None:
    run, data = tmp_path / "runs" / "one", tmp_path / "data"
    for folder in (run / "harnesses", data, run / "proposer"):
        folder.mkdir(parents=True)
        (folder / "secret").write_text("x")
    code = Path(jail.__file__).parents[1] / "domains"
    home = Path.home()
    (found,) = propose(
        agent("outside", run, data, code, home, "/etc", use_jail=True, hidden=(run.parent, run, data, code)),
        scratch_request(folder=run / "proposer" / "it-0001"),
    )
    assert found.hypothesis.startswith("write EROFS | write EROFS | write EROFS | write EROFS | write EROFS | ")
    assert "read 1 | read 0 | read 0 | " in found.hypothesis  # of the run, the way to its own folder
    assert found.hypothesis.endswith("tmp 1")
    for path in (run, data, code, home, Path("/etc"), Path("/tmp")):
        assert not (path / "escaped").exists()


def test_what_a_domain_reads_is_hidden_from_agents_however_its_options_name_it(tmp_path: Path) -> None:
    for name in ("train.csv", "test.csv", "table.csv"):
        (tmp_path / name).write_text("x")
    options = {"train": "train.csv", "tests": [str(tmp_path / "test.csv")], "more": {"in": "table.csv"}}
    config = convert({"domain": {"name": "letters", "options": options | {"brief": "x" * 9000 + "\0", "none": ""}}})
    run = RunDir(tmp_path / "runs" / "one")
    run.create()
    found = engine._hidden(run, Resolved(config, {}, tmp_path), Letters(), tmp_path / "socket" / "x.sock")
    code = Path(jail.__file__).parents[1] / "domains"
    for path in (run.path, run.path.parent, code, Path(__file__).parent / "letters", *tmp_path.glob("*.csv")):
        assert path in found
    assert Path("/") not in found and all(path.exists() for path in found)


def test_among_several_kinds_the_command_is_the_nameless_agents() -> None:
    taking = {"proposers": ["claude", "agent", "person"], "command": "python mine.py {prompt}"}
    turns = engine._proposer(convert({"proposer": taking}), Letters())
    assert isinstance(turns, Turns)
    assert [member and member.name for member in turns.members] == ["claude", "mine", None]
    assert [m._command[0] for m in turns.members if isinstance(m, Agent)] == ["claude", "python"]
    with pytest.raises(ConfigError, match=r"proposer\.command"):
        engine._proposer(convert({"proposer": {"kind": "agent"}}), Letters())


@needs_jail
def test_what_is_readable_comes_back_out_of_what_is_hidden_and_not_the_other_way_round(tmp_path: Path) -> None:
    project = tmp_path / "project"
    tools, inner = project / "tools", project / "tools" / "runs"
    inner.mkdir(parents=True)
    for folder in (project, tools, inner):
        (folder / "file").write_text("x")
    (project / "answers.csv").write_text("x")
    hidden = (project, inner, project / "answers.csv")
    made = agent("outside", project, tools, inner, use_jail=True, hidden=hidden, readable=[str(tools)])
    (found,) = propose(made, request(tmp_path / "b"))
    assert "read 2 | read 2 | read 0" in found.hypothesis  # tools and an empty answers.csv; file and runs; nothing


@needs_jail
def test_in_the_jail_check_works_and_other_processes_are_out_of_sight(tmp_path: Path) -> None:
    said: list[str] = []
    assert len(propose(agent("finishes", use_jail=True), request(tmp_path / "a", report=said.append))) == 2
    assert "check says 0: a.py: ok b.py: ok" in said
    (found,) = propose(agent("environment", use_jail=True), request(tmp_path / "b"))
    assert int(found.hypothesis.rpartition("pids=")[2]) <= 3  # its own


def test_without_a_jail_a_person_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jail, "available", lambda: ("", "bubblewrap (bwrap) is not installed"))
    told = Agent(ProposerConfig(), "claude").notice
    assert told == "claude runs without a jail: bubblewrap (bwrap) is not installed. It can read what you can read"
    monkeypatch.setattr(jail, "available", lambda: ("/usr/bin/bwrap", ""))
    assert Agent(ProposerConfig(), "claude").notice == ""


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_are_filled_in(preset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The words that would be run, recorded by a stand-in of the agent's name on the PATH."""
    stand_in = tmp_path / "bin" / preset
    stand_in.parent.mkdir()
    stand_in.write_text(f'#!/bin/sh\nfor word in "$@"; do printf "%s\\036" "$word"; done > {tmp_path}/words\n')
    stand_in.chmod(0o755)
    monkeypatch.setenv("PATH", f"{stand_in.parent}{os.pathsep}{os.environ['PATH']}")
    made = Agent(ProposerConfig(model="big-1"), preset, use_jail=False)
    asked = request(tmp_path, allowance=Allowance(dollars=1.5))
    assert propose(made, asked) == []
    words = (tmp_path / "words").read_text().split("\x1e")[:-1]
    assert words[words.index("--model") + 1] == "big-1"
    assert sum("You improve a harness" in word for word in words) == 1
    assert not any(name in word for word in words for name in ("{prompt", "{scratch}", "{model}", "{dollars}"))
    if PRESETS[preset].budget:
        assert words[words.index(PRESETS[preset].budget[0]) + 1] == "1.50"


def test_codex_is_counted_at_its_end_and_from_its_log_when_it_is_cut(tmp_path: Path) -> None:
    prices = {"price_prompt": 2.0, "price_cached": 0.2, "price_output": 10.0}
    asked = request(tmp_path / "a")
    made = agent("codex", **prices)
    assert len(propose(made, asked)) == 1
    assert asked.usage == Spending(5000, 700, pytest.approx(0.0098))
    asked = request(tmp_path / "b")
    made = agent("codex-silent", idle_seconds=0.7, **prices)
    made.preset = PRESETS["codex"]
    with pytest.raises(ProposerFailure, match="silent"):
        propose(made, asked)
    assert asked.usage == Spending(5000, 700, pytest.approx(0.0098))


def lines(*events: Any) -> Stream:
    stream = Stream(Spending(), Prices())
    for event in events:
        stream.feed(event if isinstance(event, bytes) else json.dumps(event).encode())
    return stream


def test_what_other_agents_print_is_read() -> None:
    step = {"type": "step_finish", "part": {"reason": "tool-calls", "cost": 0.01,
            "tokens": {"input": 100, "output": 20, "reasoning": 5, "cache": {"read": 30, "write": 4}}}}  # fmt: skip
    stop = {"type": "step_finish", "part": step["part"] | {"reason": "stop"}}
    assert lines(step, stop).usage == Spending(268, 50, 0.02)
    assert not lines(step).finished and lines(step, stop).finished
    gemini = {"type": "result", "status": "success", "stats": {"input_tokens": 70, "output_tokens": 7, "cached": 10}}
    assert lines(gemini).usage == Spending(70, 7, 0.0) and lines(gemini).finished
    assert lines(b"mini-swe-agent (step 3, $0.07):", b"mini-swe-agent (step 4, $0.11):").usage.dollars == 0.11
    old = {"id": "0", "msg": {"type": "token_count", "info": {"total_token_usage": {"input_tokens": 9,
           "cached_input_tokens": 4, "output_tokens": 2}}}}  # fmt: skip
    assert lines(old, old).usage == Spending(9, 2, 0.0)
    failed = {"type": "turn.failed", "error": {"message": "stream disconnected"}}
    assert lines(failed).error == "stream disconnected"


def test_lies_and_rubbish_do_no_harm() -> None:
    deep = b'{"a":' * 100_000
    rubbish = [b"\xff\xfe", b"{", deep, [1], "text", {"type": ["x"]}, {"type": "assistant", "message": {"usage": 7}},
               {"type": "assistant", "message": {"content": "x", "usage": {"input_tokens": -5}}},
               {"type": "result", "usage": {"output_tokens": 1e300}, "total_cost_usd": -3},
               {"type": "turn.completed", "usage": {"input_tokens": True}}, {"type": "step_finish", "part": []},
               {"type": "result", "total_cost_usd": float("nan")}]  # fmt: skip
    stream = lines(*rubbish)
    assert stream.usage == Spending()
    after = lines({"type": "turn.completed", "usage": {"input_tokens": 50, "output_tokens": 5}}, *rubbish)
    assert after.usage == Spending(50, 5, 0.0)  # it never goes down


# ------------------------------------------------------------------------------------------- the run around a session


class Scripted:
    """A proposer that does what its script says, one step a session: spends, then fails or proposes."""

    def __init__(self, name: str, *script: tuple[float, str]) -> None:
        self.name, self.script = name, list(script)
        self.requests: list[Request] = []

    async def propose(self, request: Request) -> list[Proposal]:
        self.requests.append(request)
        dollars, what = self.script.pop(0)
        request.usage.dollars, request.usage.output_tokens = dollars, 1000
        request.report(f"{self.name} says {what}")
        if what == "waits":
            await asyncio.sleep(60)
        if what != "proposes":
            raise ProposerFailure(what, transient=what == "transient")
        source = request.archive[0].source + f"\nN = {len(self.requests)}\n"
        return [Proposal(source, "h0000", f"an idea of {self.name}")]


def make_run(folder: Path, proposer: Any, **settings: Any) -> tuple[Run, list[Any]]:
    rundir = RunDir(folder / "run")
    rundir.create()
    rundir.write_harness("h0000", H0, {})
    config = convert({"proposer": {"retries": 2} | settings, "weight": {"prompts_per_step": 4}})
    told: list[Any] = []
    run = Run(rundir, config, Journal(rundir.journal), Letters(), None, None, proposer, told.append)  # type: ignore[arg-type]
    run.record(
        r.RunStarted(
            run="run", condition="whale", seed=1, domain="letters", model="m", config_hash="c", policy_hash="p",
            harness_hash=source_hash(H0), tokenizer_hash="t", splits={"weight": 48, "harness": 6, "test": 6},
            steps_per_epoch=12, budget_episodes=1000, settings=config.settings(12), version="0",
        ),
        r.PhaseStarted(cycle=1, phase="harness", reason=""),
    )  # fmt: skip
    told.clear()
    return run, told


def events(told: list[Any], kind: type) -> list[Any]:
    return [event for batch in told if isinstance(batch, list) for event in batch if isinstance(event, kind)]


@pytest.fixture(autouse=True)
def no_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness_phase, "BACKOFF", 0.0)


def test_a_failed_session_is_counted_and_asked_again_and_no_iteration_is_used_up(tmp_path: Path) -> None:
    proposer = Scripted("claude", (0.5, "transient"), (0.25, "transient"), (0.1, "proposes"))
    run, told = make_run(tmp_path, proposer)
    asyncio.run(harness_phase.propose(run, 1))
    assert [f.dollars for f in events(told, r.Failure)] == [0.5, 0.25]
    (done,) = events(told, r.ProposalsIn)
    assert (done.dollars, done.candidates, run.state.proposed_for, run.state.turns) == (0.1, ["h0001"], 1, 1)
    assert run.state.ledger["harness/propose"].dollars == pytest.approx(0.85)
    assert run.state.ledger["harness/propose"].output_tokens == 3000
    assert run.state.harnesses["h0001"].proposer == "claude"
    assert events(told, r.Paused) == []
    lines = [what for what in told if isinstance(what, Activity) and what.tail]
    assert lines[-1].tail == ["claude says proposes"] and lines[-1].detail == "claude says proposes"


def test_after_its_retries_the_run_pauses_with_the_reason(tmp_path: Path) -> None:
    run, told = make_run(tmp_path, Scripted("claude", *[(0.1, "transient")] * 3))
    asyncio.run(harness_phase.propose(run, 1))
    (paused,) = events(told, r.Paused)
    assert paused.reason == "the proposer failed: transient (3 sessions)"
    assert run.state.iteration == 0 and run.state.proposed_for == 0
    run, told = make_run(tmp_path / "b", Scripted("claude", (0.1, "Invalid API key")))
    asyncio.run(harness_phase.propose(run, 1))
    assert events(told, r.Paused)[0].reason == "the proposer failed: Invalid API key"


def test_turns_go_round_and_one_that_fails_leaves_its_turn_to_the_next(tmp_path: Path) -> None:
    claude = Scripted("claude", (0.1, "proposes"), (0.1, "not logged in"))
    rules = Scripted("rules", (0.0, "proposes"), (0.0, "proposes"))
    run, told = make_run(tmp_path, Turns([claude, rules, None]), proposers=["claude", "rules", "person"])
    for iteration in (1, 2):
        asyncio.run(harness_phase.propose(run, iteration))
    assert run.config.proposer.whose(run.state.turns) == "person"
    run.record(
        r.CandidateProposed(
            harness="h0003", iteration=3, parent="h0000", hypothesis="", proposer="person", source_hash="x"
        )
    )
    run.rundir.write_harness("h0003", H0 + "\nP = 1\n", {})
    asyncio.run(harness_phase.propose(run, 4))
    authors = [c.proposer for c in run.state.harnesses.values()][1:]
    assert authors == ["claude", "rules", "person", "rules"]
    assert [f.detail for f in events(told, r.Failure)] == ["attempt 1: not logged in"]


def test_a_run_at_its_cap_pauses_before_it_spends_more_and_goes_on_when_it_is_raised(tmp_path: Path) -> None:
    proposer = Scripted("claude", (0.7, "proposes"), (0.5, "proposes"), (0.1, "proposes"))
    run, told = make_run(tmp_path, proposer, max_dollars=1.0, session_dollars=0.9)
    for iteration in (1, 2, 3):
        asyncio.run(harness_phase.propose(run, iteration))
    assert [q.allowance.dollars for q in proposer.requests] == [0.9, pytest.approx(0.3)]
    (paused,) = events(told, r.Paused)
    assert "1.20 of 1.00 dollars" in paused.reason and "ctl run set max_dollars=.." in paused.reason
    run.command("1", "ann", "set", {"max_dollars": 2.0})
    asyncio.run(harness_phase.propose(run, 3))
    assert proposer.requests[2].allowance.dollars == pytest.approx(0.8)
    run, told = make_run(tmp_path / "b", Scripted("codex", (0.0, "proposes")), max_tokens=1000)
    for iteration in (1, 2):
        asyncio.run(harness_phase.propose(run, iteration))
    assert "1,000 of 1,000 tokens" in events(told, r.Paused)[0].reason


def test_a_session_that_a_person_ends_is_counted(tmp_path: Path) -> None:
    run, told = make_run(tmp_path, Scripted("claude", (0.4, "waits")))

    async def switch_now() -> None:
        task = asyncio.ensure_future(harness_phase.propose(run, 1))
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(switch_now())
    assert [f.dollars for f in events(told, r.Failure)] == [0.4]


def test_a_cancelled_agent_leaves_nothing_running(tmp_path: Path) -> None:
    run, told = make_run(tmp_path, agent("chatters"))

    async def cancel() -> str:
        task = asyncio.ensure_future(harness_phase.propose(run, 1))
        folder = run.rundir.proposer / "it-0001"
        while (left := sessions.read(folder)) is None or not left.usage.tokens:  # noqa: ASYNC110 (a file says so)
            await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return left.mark

    mark = asyncio.run(cancel())
    assert alive(mark.encode()) == []
    (failure,) = events(told, r.Failure)
    assert failure.session == "it-0001" and failure.prompt_tokens == 10_000 and failure.dollars > 0


@pytest.mark.parametrize("use_jail", [False, pytest.param(True, marks=needs_jail)])
def test_a_killed_engine_leaves_no_agent_behind_and_its_session_is_counted_once(tmp_path: Path, use_jail: bool) -> None:
    run, told = make_run(tmp_path, Scripted("claude", (0.1, "proposes")))
    folder = run.rundir.proposer / "it-0001"
    code = (
        "import asyncio, pathlib, sys\n"
        "from tests.test_proposer_agent import agent, scratch_request\n"
        f"request = scratch_request(folder=pathlib.Path({str(folder)!r}))\n"
        f"asyncio.run(agent('chatters', use_jail={use_jail}).propose(request))\n"
    )
    engine = subprocess.Popen([sys.executable, "-c", code], cwd=SCRIPT.parents[2])
    deadline = time.monotonic() + 20
    while ((left := sessions.read(folder)) is None or not left.usage.tokens) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert left is not None
    engine.kill()
    engine.wait()
    if use_jail:  # the kernel does it
        while alive(left.mark.encode()) and time.monotonic() < deadline:
            time.sleep(0.02)
    else:
        assert alive(left.mark.encode()) != []
        sessions.end_all(run.rundir.proposer)  # as the next engine does at its start
    assert alive(left.mark.encode()) == []
    asyncio.run(harness_phase.propose(run, 1))
    (failure,) = events(told, r.Failure)
    assert (failure.session, failure.prompt_tokens) == ("it-0001", 10_000)
    assert run.state.sessions == ["it-0001"] and run.state.ledger["harness/propose"].prompt_tokens == 10_000
    assert run.state.harnesses["h0001"].proposer == "claude"


async def test_what_a_session_says_is_on_the_events_pane_as_plain_text(stage: Any) -> None:  # noqa: F811
    async with stage() as s:
        s.client.changed(Activity(doing="claude writes candidates", tail=["[/red] I read the archive", "$ ./check"]))
        await s.wait(lambda: "[/red] I read the archive" in s.text() and "$ ./check" in s.text())
        s.client.changed(Activity(doing="evaluating h0009"))
        await s.wait(lambda: "I read the archive" not in s.text())


def test_a_veto_reaches_the_next_session_of_a_real_engine_and_the_cap_pauses_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key, value in engines.environment(tmp_path).items():
        monkeypatch.setenv(key, value)
    config = engines.write_config(
        tmp_path, run__condition="harness-only", schedule__iterations=5, harness__candidates=1,
        harness__approval="before-eval", test__samples=0, proposer__kind="agent", proposer__max_dollars=0.8,
        proposer__command=f"{sys.executable} {SCRIPT} feedback",
        proposer__readable=[str(SCRIPT.parent)],
    )  # fmt: skip
    engines.cli("run", str(config), "--detach", folder=tmp_path)
    run = RunDir(tmp_path / "runs" / "tiny")
    try:
        engines.wait_for(lambda: run.journal.exists() and "h0001" in engines.state_of(run).harnesses, what="a proposal")
        state = engines.state_of(run)
        assert state.harnesses["h0001"].proposer == "agent"  # the script's name, not the interpreter's
        assert state.harnesses["h0001"].hypothesis == "louder"
        assert bool(state.warnings) == (not JAILED)  # said where there is no jail
        engines.wait_for(lambda: engines.state_of(run).harnesses["h0001"].checked, what="its check")
        engines.command(run, "veto", {"harness": "h0001", "reason": "too loud for this house"})
        engines.wait_for(lambda: "h0002" in engines.state_of(run).harnesses, what="the next proposal")
        second = engines.state_of(run).harnesses["h0002"]
        assert second.hypothesis.startswith("softer, since a person said") and "this house" in second.hypothesis
        folder = run.proposer / engines.state_of(run).sessions[-1]
        assert "h0001 vetoed: too loud for this house" in (folder / "prompt.md").read_text()
        assert (folder / "transcript.jsonl").read_text().count("\n") == 4 and not (folder / "home").exists()
        engines.wait_for(lambda: engines.state_of(run).harnesses["h0002"].checked, what="its check")
        engines.command(run, "veto", {"harness": "h0002", "reason": "still"})
        engines.wait_for(lambda: engines.state_of(run).status == "paused", what="the pause at the cap")
        state = engines.state_of(run)
        assert "0.84 of 0.80 dollars" in state.reason and len(state.sessions) == 2
        own = tmp_path / "mine.py"
        own.write_text(H0.replace("Say", "Whisper"))
        said = engines.cli("propose", "tiny", str(own), "--parent", "h0001", "--hypothesis", "a = b", folder=tmp_path)
        assert "h0003 joins the archive" in said.stdout
        mine = engines.state_of(run).harnesses["h0003"]
        assert (mine.proposer, mine.parent, mine.hypothesis) == ("person", "h0001", "a = b")
    finally:
        info = run.engine_info()
        if info is not None and run.is_locked():
            os.kill(info.pid, 9)
