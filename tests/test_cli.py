"""The command line: what it says and with which code it ends; and what it must never import."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.scripted import Script, write_run
from whale_tui.cli import _control_args, _guarded
from whale_tui.rundir import FORMAT, RunDir

ROOT = Path(__file__).parent.parent


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WHALE_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    return tmp_path


@pytest.fixture
def script(here: Path) -> Iterator[Script]:
    script = write_run(here / "runs" / "first-light", until="waiting")
    yield script
    script.journal.close()


def whale(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "whale_tui", *words], capture_output=True, text=True, check=False,
                          stdin=subprocess.DEVNULL, env=os.environ | {"PYTHONPATH": str(ROOT)})  # fmt: skip


# ---------------------------------------------------------------------------------------------------------- as a whole


def test_help_names_every_command(here: Path) -> None:
    done = whale("--help")
    assert done.returncode == 0
    for command in ("run", "attach", "ctl", "status", "list", "config", "repair"):
        assert f" {command} " in done.stdout
    assert whale("--version").stdout.strip()


@pytest.mark.parametrize(
    "words", [["fly"], ["run"], ["run", "a.toml", "--bogus"], ["ctl", "one"], ["status"], ["run", "a", "b", "c"]]
)
def test_a_wrong_command_line_is_2(here: Path, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        raise SystemExit(_guarded(words))
    assert end.value.code == 2
    said = capsys.readouterr()
    assert said.out + said.err and "Traceback" not in said.err


def test_the_process_ends_with_the_code_and_one_line_on_stderr(here: Path) -> None:
    done = whale("run", "nowhere.toml", "--headless")
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr == "whale-tui: nowhere.toml: no such file\n"
    assert whale("fly").returncode == 2


@pytest.mark.parametrize(
    ("text", "overrides", "said"),
    [
        ("[run]\nsede = 1\n", [], "a.toml:2: run.sede: unknown key; did you mean run.seed?"),
        ("[run]\nseed = 'x'\n", [], "a.toml:2: run.seed: Expected `int`"),
        ("[run\n", [], "a.toml: not valid TOML"),
        ("", ["run.sede=1"], "--set run.sede: unknown key"),
        ("", ["sede"], "write it as table.key=value"),
    ],
)
def test_a_config_error_is_1_with_file_line_and_key(
    here: Path, capsys: pytest.CaptureFixture[str], text: str, overrides: list[str], said: str
) -> None:
    Path("a.toml").write_text(text)
    words = [w for o in overrides for w in ("--set", o)]
    assert _guarded(["run", "a.toml", *words]) == 1
    captured = capsys.readouterr()
    assert said in captured.err and captured.err.startswith("whale-tui: ") and captured.out == ""
    assert not Path("runs").exists()  # nothing was made
    assert _guarded(["config", "a.toml", *words]) == 1


def test_an_unknown_run_names_the_nearest(script: Script, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["status", "first-ligth"], ["ctl", "first-ligth", "pause"], ["repair", "first-ligth"]):
        assert _guarded(words) == 1
        assert capsys.readouterr().err == "whale-tui: no run 'first-ligth'; did you mean first-light?\n"


def test_a_run_of_a_newer_version_is_1(script: Script, capsys: pytest.CaptureFixture[str]) -> None:
    (script.rundir.path / "format").write_text(str(FORMAT + 1))
    for words in (["status", "first-light"], ["run", "first-light"], ["ctl", "first-light", "pause"]):
        assert _guarded(words) == 1
        assert "newer whale-tui" in capsys.readouterr().err


def test_no_engine_is_4(script: Script, capsys: pytest.CaptureFixture[str]) -> None:
    assert _guarded(["ctl", "first-light", "pause"]) == 4
    assert capsys.readouterr().err.startswith("whale-tui: no engine runs first-light")


def test_what_the_system_refuses_is_one_line(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("a.toml").write_text("")
    Path("runs").write_text("a file where the folder of runs should be")
    assert _guarded(["run", "a.toml", "--headless"]) == 1
    assert "runs" in (said := capsys.readouterr().err) and said.count("\n") == 1


# -------------------------------------------------------------------------------------------------------------- status


def test_status_json_is_one_object_with_what_was_promised(script: Script, capsys: pytest.CaptureFixture[str]) -> None:
    assert _guarded(["status", "first-light", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    state = script.state
    assert set(told) >= {
        "run", "state", "condition", "cycle", "phase", "step", "iteration", "policy", "harness", "pinned", "episodes",
        "start", "best",
    }  # fmt: skip
    assert (told["run"], told["condition"]) == ("first-light", "adaptive")
    assert told["state"] == "crashed"  # the journal says it runs, and no process holds the lock
    assert (told["cycle"], told["phase"]) == (2, "harness")
    assert (told["policy"], told["harness"], told["pinned"]) == (state.policy, state.harness, None)
    assert told["episodes"] == sum(script.journal.counts().values())
    assert told["start"] == {"policy": "theta-0000", "harness": "h0000"} | {
        key: told["start"][key] for key in ("mean", "n", "low", "high", "samples")
    }
    assert told["limited"]["half"] == "harness-limited" and told["limited"]["harness"]["low"] > 0
    assert told["best"]["mean"] == max(t.mean for t in state.tests) and told["best"]["n"] == 24
    with script.rundir.lock():
        assert _guarded(["status", str(script.rundir.path), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["state"] == "running"


def test_status_of_every_state(script: Script, capsys: pytest.CaptureFixture[str]) -> None:
    def now() -> str:
        _guarded(["status", "first-light", "--json"])
        return str(json.loads(capsys.readouterr().out)["state"])

    with script.rundir.lock():
        script.command("pause")
        assert now() == "paused"
        script.command("resume")
        assert now() == "running"
        script.command("stop")
        assert now() == "stopped"
    assert now() == "stopped"


def test_status_in_words_says_how_to_go_on(script: Script, capsys: pytest.CaptureFixture[str]) -> None:
    assert _guarded(["status", "first-light"]) == 0
    said = capsys.readouterr().out
    assert "first-light: crashed" in said and "whale-tui run first-light" in said
    assert "cycle 2, harness phase: iteration 1" in said and "cost  weight/train" in said


def test_status_before_anything_ran(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = RunDir(here / "runs" / "new")
    run.create()
    run.config.write_text("")
    assert _guarded(["status", "new"]) == 0
    assert capsys.readouterr().out == "new: new; nothing has run yet\n"
    assert _guarded(["status", "new", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["best"] is None


def test_list(script: Script, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(script.rundir.path.parent / "second", name="second", until="finished").journal.close()
    broken = script.rundir.path.parent / "broken"
    RunDir(broken).create()
    (broken / "config.toml").write_text("")
    (broken / "journal.sqlite").write_bytes(b"no journal" * 1000)
    assert _guarded(["list", "--json"]) == 0
    told = {one["name"]: one for one in map(json.loads, capsys.readouterr().out.splitlines())}
    assert {name: one["status"] for name, one in told.items()} == {
        "first-light": "crashed", "second": "finished", "broken": "unreadable"
    }  # fmt: skip
    assert "broken/journal.sqlite" in told["broken"]["problem"]
    assert _guarded([]) == 0  # no terminal: the list instead of the application
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_list_of_nothing_says_how_to_begin(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _guarded(["list"]) == 0
    assert "whale-tui run sample_configs/quickstart.toml" in capsys.readouterr().out
    assert _guarded(["attach"]) == 1
    assert "no run on this machine yet" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------- config, run, repair


def test_config_without_a_file_documents_every_key(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from whale_tui.config import document

    assert _guarded(["config"]) == 0
    said = capsys.readouterr().out
    for key, _, _ in document():
        assert key in said


def test_config_with_a_file_is_the_resolved_one(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("a.toml").write_text("[run]\nseed = 4\n")
    assert _guarded(["config", "a.toml", "--set", "run.cycles=2"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert "seed = 4  # a.toml" in said and "cycles = 2  # --set" in said


def test_a_finished_run_says_what_it_came_to_and_new_takes_the_next_name(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from whale_tui.service.launch import prepare

    write_run(here / "runs" / "done", name="done", until="finished").journal.close()
    assert _guarded(["run", "done"]) == 0
    said = capsys.readouterr().out
    assert "done is finished: 2 cycles done" in said and "--new" in said and "best  theta-" in said
    another = prepare(Path("done"), ["run.seed=9"], new=True)
    assert another.name == "done-2" and 'name = "done-2"' in another.config.read_text()
    assert prepare(Path("done"), new=True).name == "done-3"


def test_a_run_keeps_its_config(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from whale_tui.service.launch import prepare

    Path("a.toml").write_text("[run]\nseed = 1\n")
    run = prepare(Path("a.toml"))
    assert prepare(Path("a.toml")).path == run.path and prepare(run.path).path == run.path
    assert "seed = 3" in prepare(Path("a.toml"), ["run.seed=3"]).config.read_text()  # nothing of it has happened yet
    with run.lock():
        assert _guarded(["run", "a.toml", "--set", "run.seed=2", "--detach"]) == 1
    assert "was started with another config" in capsys.readouterr().err
    assert _guarded(["run", "a", "--set", "run.seed=2", "--detach"]) == 1
    assert "whale-tui ctl a set KEY=VALUE" in capsys.readouterr().err


def test_repair_by_name(script: Script, capsys: pytest.CaptureFixture[str]) -> None:
    script.journal.db.execute("UPDATE events SET body = x'00' WHERE seq = 20")
    assert _guarded(["status", "first-light"]) == 1
    assert "the first 19 events are good: `whale-tui repair first-light`" in capsys.readouterr().err
    with script.rundir.lock():
        assert _guarded(["repair", "first-light"]) == 1
        assert "already has an engine" in capsys.readouterr().err
    script.journal.close()
    assert _guarded(["repair", "first-light"]) == 0
    assert "19 events are good" in capsys.readouterr().out
    assert _guarded(["status", "first-light"]) == 0


# ------------------------------------------------------------------------------------------------------- ctl's words


@pytest.mark.parametrize(
    ("command", "words", "args"),
    [
        ("pin", [], {}),
        ("pin", ["h0003"], {"harness": "h0003"}),
        ("veto", ["h0003", "reads the clock"], {"harness": "h0003", "reason": "reads the clock"}),
        ("veto", ["harness=h0003", "reason=reads the clock"], {"harness": "h0003", "reason": "reads the clock"}),
        ("veto", ["reason=late", "h0003"], {"harness": "h0003", "reason": "late"}),
        ("set", ["epochs=0.2", "candidates=4", "approval=auto"], {"epochs": 0.2, "candidates": 4, "approval": "auto"}),
        ("rollback", ["policy=theta-0002"], {"policy": "theta-0002"}),
        ("switch", ["now=true"], {"now": True}),
        ("evaluate", ["theta-0002", "h0003"], {"policy": "theta-0002", "harness": "h0003"}),
        ("evaluate", ["harness=h0003", "samples=4"], {"harness": "h0003", "samples": 4}),
    ],
)
def test_ctl_arguments(command: str, words: list[str], args: dict[str, object]) -> None:
    assert _control_args(command, words) == args


def test_ctl_propose_reads_the_file(here: Path) -> None:
    Path("h.py").write_text("x = 1\n")
    assert _control_args("propose", ["h.py", "hypothesis=two words"]) == {
        "source": "x = 1\n", "hypothesis": "two words"
    }  # fmt: skip


@pytest.mark.parametrize("words", [["pause", "h0001"], ["pin", "h1", "h2"], ["propose"], ["propose", "nowhere.py"]])
def test_ctl_words_that_make_no_sense_are_2(
    script: Script, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert _guarded(["ctl", "first-light", *words]) == 2
    assert capsys.readouterr().err.startswith("whale-tui: ")


async def test_ctl_against_an_engine(script: Script, capsys: pytest.CaptureFixture[str]) -> None:
    """0 done, 3 refused; the same id twice is said to have been taken."""
    import asyncio

    from tests.test_service import Engine

    script.journal.close()
    engine = await Engine(script.rundir).start()

    def ctl(*words: str) -> tuple[int, str, str]:
        code = _guarded(["ctl", "first-light", *words])
        said = capsys.readouterr()
        return code, said.out, said.err

    async def run(*words: str) -> tuple[int, str, str]:
        return await asyncio.to_thread(ctl, *words)

    assert await run("pause", "--dry-run") == (0, "would: pauses at the next safe point\n", "")
    assert await run("pause", "--id", "p") == (0, "pauses at the next safe point\n", "")
    assert (await run("pause", "--id", "p"))[1] == "pauses at the next safe point (taken before; not done again)\n"
    code, out, err = await run("veto", "h0099", "no")
    assert (code, out) == (3, "") and "no harness h0099" in err
    assert (await run("fly"))[0] == 3
    code, out, _ = await run("evaluate", "theta-0010", "h0005", "--dry-run")
    assert (code, engine.run.state.wanted) == (0, []) and out.startswith("would: theta-0010 with h0005 is measured")
    code, out, _ = await run("switch", "--now", "--json")
    assert code == 0 and json.loads(out)["ok"] and engine.run.state.switch == "now"
    assert (await run("status"))[0] == 0
    await engine.close()


# -------------------------------------------------------------------------------------------------------- import rules


@pytest.mark.parametrize(
    "modules",
    [
        "cli records config journal rundir",
        "service.engine service.server service.client service.launch service.lines service.discovery",
        "loop.run loop.rollouts loop.alternation loop.control loop.state harness.worker harness.checks harness.fst",
        "domains.base domains.encyclopedia domains.arithmetic proposers.base proposers.rules",
        "policy.protocol policy.client policy.chat policy.source",
    ],
)
def test_the_engine_side_loads_neither_torch_nor_a_screen(modules: str) -> None:
    code = "import sys\n" + "".join(f"import whale_tui.{name}\n" for name in modules.split())
    code += "print(sorted({m.partition('.')[0] for m in sys.modules} & {'torch','transformers','peft','textual'}))\n"
    code += "print(sorted(m for m in sys.modules if m.startswith('whale_tui.tui')))\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.stdout == "[]\n[]\n", done.stdout + done.stderr


def test_the_terminal_loads_neither_torch_nor_the_engine_side_of_the_loop() -> None:
    code = (
        "import sys, whale_tui.tui.app\n"
        "print(sorted({m.partition('.')[0] for m in sys.modules} & {'torch', 'transformers', 'peft'}))\n"
        "print(sorted(set(sys.modules) & {'whale_tui.loop.run', 'whale_tui.loop.rollouts'}))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.stdout == "[]\n[]\n", done.stdout + done.stderr


def test_the_import_contracts_hold() -> None:
    done = subprocess.run([Path(sys.executable).with_name("lint-imports")], capture_output=True, text=True, cwd=ROOT,
                          check=False)  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert "0 broken" in done.stdout
