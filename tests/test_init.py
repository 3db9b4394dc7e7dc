"""A folder of one's own: what `init` writes runs at once, a domain in one folder too; and completion in the shell."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli
from cyclopts.completion._engine import compute_completions

from tests.engines import cli, environment, state_of, write_config
from whale_tui import config, starter
from whale_tui.cli import _guarded, app
from whale_tui.domains import base
from whale_tui.rundir import RunDir

ROOT = Path(__file__).parent.parent


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


def test_init_writes_a_whole_folder_named_after_itself(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _guarded(["init", "deep/pets"]) == 0
    folder = here / "deep" / "pets"
    assert {file.name for file in folder.iterdir()} == {
        "run.toml", "tasks.jsonl", "examples.jsonl", "verifier.py", "harness.py", "brief.md", "README.md",
    }  # fmt: skip
    told = capsys.readouterr().out
    assert all(f"wrote {Path('deep/pets') / file.name}" in told for file in folder.iterdir())
    assert "whale-tui run deep/pets" in told
    resolved = config.load(folder / "run.toml")
    assert resolved.config.run.name == "pets" and "NAME" not in (folder / "README.md").read_text()
    domain = base.load("rows", resolved.config.domain.options, relative_to=folder)
    assert sum(len(domain.tasks(split)) for split in ("weight", "harness", "test")) == 10
    assert len(domain.brief.demonstrations) == 6 and "Opposites" in domain.brief.text


def test_init_overwrites_nothing_unless_told_to(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _guarded(["init", "pets"]) == 0
    mine = here / "pets" / "tasks.jsonl"
    mine.write_text("mine")
    (here / "pets" / "notes.txt").write_text("notes")
    assert _guarded(["init", "pets"]) == 1
    assert "pets is not empty, and nothing was written" in capsys.readouterr().err and mine.read_text() == "mine"
    assert _guarded(["init", "pets", "--force"]) == 0
    assert mine.read_text() != "mine" and (here / "pets" / "notes.txt").read_text() == "notes"
    (here / "empty").mkdir()
    assert _guarded(["init", "empty"]) == 0
    (here / "file").write_text("")
    assert _guarded(["init", "file"]) == 1
    assert _guarded(["init", "a b"]) == 1 and not (here / "a b").exists()


def test_every_file_of_the_starter_is_under_version_control_and_so_in_the_wheel() -> None:
    """The wheel takes the package's folder as it is, but for what git ignores."""
    shipped = [*starter.FOLDER.iterdir(), starter.HARNESS]
    assert (
        "whale_tui"
        in tomli.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    )
    for file in shipped:
        assert file.is_relative_to(ROOT / "whale_tui")
        ignored = subprocess.run(["git", "check-ignore", "-q", str(file)], cwd=ROOT, check=False)
        assert ignored.returncode in (1, 128), f"{file} is ignored"


def test_a_new_folder_runs_at_once(here: Path) -> None:
    """`init`, then `run NAME` on a tiny model, to its end."""
    write_config(here)  # for its model
    cli("init", "pets", folder=here)
    short = ["run.cycles=1", "test.samples=1", "run.first_phase=weight", "schedule.iterations=2"]
    short += ["harness.candidates=1", f"model.name={here / 'model'}"]
    done = cli("run", "pets", "--headless", *(word for change in short for word in ("--set", change)), folder=here)
    assert "run finished: 1 cycle done" in done.stdout
    run = RunDir(here / "runs" / "pets")
    state = state_of(run)
    assert len(state.phases) == 2
    assert (state.status, state.splits) == ("finished", {"weight": 4, "harness": 3, "test": 3})
    assert state.total_steps == 2
    assert "ok seal: harnesses run sealed" in run.log.read_text()
    again = cli("run", "pets/run.toml", "--headless", folder=here, check=1)
    assert "was started with another config" in again.stderr


# ------------------------------------------------------------------------------------------- a domain is one folder

DOMAIN = """
from pathlib import Path

import msgspec

from whale_tui.domains import tables
from whale_tui.domains.base import read_brief, read_h0
from whale_tui.records import Task, Verdict


class Options(msgspec.Struct, forbid_unknown_fields=True):
    words: Path
    at_least: int = 2


class Lengths:
    name, edits = "lengths", None

    def __init__(self, options):
        self.report = tables.Report()
        self.options = options
        rows = tables.read_rows(options.words)
        counts = self.report.of("words")
        tasks = tables.distinct(tables.convert(rows, self._task, counts), counts)
        self._splits = tables.assemble(tables.cut(tasks, {"test": 2, "harness": 2, "weight": None}), self.report)
        self.h0, self.brief = read_h0(__file__), read_brief(__file__, {"count": "count(word): its letters"}, [])

    def _task(self, row):
        if len(row.values["word"]) < self.options.at_least:
            raise tables.Drop("the word is too short")
        return Task(row.values["word"], {"word": row.values["word"]}, {"answer": str(len(row.values["word"]))})

    def tasks(self, split):
        return self._splits[split]

    def tools(self, task):
        return {"count": len}

    def verify(self, task, answer, episode):
        right = answer.strip() == task.private["answer"]
        return Verdict("accept" if right else "reject", "counted")


def build(options):
    return Lengths(options)
"""


def own_domain(folder: Path) -> Path:
    folder.mkdir()
    (folder / "domain.py").write_text(DOMAIN)
    (folder / "harness.py").write_text("def run(task, model, tools):\n    return str(tools.count(task.word))\n")
    (folder / "brief.md").write_text("# Lengths of words\n")
    (folder / "words.csv").write_text("word\n" + "\n".join(["a", *("word" + "s" * n for n in range(12))]) + "\n")
    return folder


def test_a_domain_is_one_folder_that_touches_nothing_else(here: Path) -> None:
    """Named in a config by its folder: doctor passes, and a run takes it; the report says what its import dropped."""
    own_domain(here / "lengths")
    file = write_config(here, domain__name="lengths", domain__options={"words": "lengths/words.csv"},
                        run__condition="weight-only", run__cycles=1, test__samples=0)  # fmt: skip
    before = {path: path.stat().st_mtime_ns for path in (ROOT / "whale_tui").rglob("*.py")}
    told = cli("doctor", str(file), "--quick", folder=here).stdout
    assert "words: 12 tasks, from 13 rows, 1 dropped: the word is too short (first at" in told.replace("\n", " ")
    done = cli("run", str(file), "--headless", folder=here)
    assert "100.0% (8 of 8 accepted, 4 of 4 tasks solved)" in done.stdout, "h0 counts with its tool"
    assert {path: path.stat().st_mtime_ns for path in (ROOT / "whale_tui").rglob("*.py")} == before


def test_an_unknown_option_of_a_folder_is_refused_with_the_nearest(here: Path) -> None:
    folder = own_domain(here / "lengths")
    with pytest.raises(base.DomainError, match=r"domain.options.at_leat: .* did you mean at_least\?"):
        base.load("lengths", {"words": "lengths/words.csv", "at_leat": 3}, folder, relative_to=here)


# ----------------------------------------------------------------------------------------------------------- the shell


def test_names_of_runs_complete(here: Path) -> None:
    for name in ("first-light", "second"):
        RunDir(here / "runs" / name).create()
        (here / "runs" / name / "config.toml").write_text("")
    for words in (["attach", ""], ["status", ""], ["ctl", ""], ["repair", ""]):
        assert {found.value for found in compute_completions(app, words)} == {"first-light", "second"}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_completion_script_knows_every_command(shell: Any) -> None:
    script = app.generate_completion(shell=shell)
    for command in ("run", "attach", "ctl", "status", "list", "config", "repair", "init", "doctor"):
        assert command in script
    assert "quick" in script and "headless" in script


def test_completion_is_installed_where_the_shell_looks(here: Path) -> None:
    env = environment(here) | {"HOME": str(here), "SHELL": "/bin/bash", "XDG_DATA_HOME": str(here / "share")}
    done = subprocess.run([sys.executable, "-m", "whale_tui", "--install-completion", "--shell", "bash"],
                          env=env, capture_output=True, text=True, check=True)  # fmt: skip
    written = [file for file in here.rglob("*whale-tui*") if file.is_file() and "complete" in file.read_text()]
    assert written, done.stdout
    assert subprocess.run(["bash", "-n", str(written[0])], check=False).returncode == 0


def test_help_names_completion_init_and_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    _guarded(["--help"])
    told = " ".join(capsys.readouterr().out.split())
    for words in ("--install-completion", "init", "Write a working folder", "doctor", "Check whether a run may start"):
        assert words in told
