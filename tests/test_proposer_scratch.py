"""The scratch folder: what a session may read stands in it, nothing else does, and what comes back is suspect."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.letters.domain import H0, Letters
from whale_tui.harness import contract
from whale_tui.proposers.base import Request
from whale_tui.proposers.scratch import Scratch
from whale_tui.records import Archived, ArchivedEpisode, ToolUse


def episode(**fields: Any) -> ArchivedEpisode:
    values: dict[str, Any] = {
        "task": {"ask": "harness 3"}, "outputs": ["first", "second"], "answer": "second", "verdict": "reject",
        "tools": [ToolUse("clean", "'early'", "nothing", 0.1, 0), ToolUse("clean", "'first'", "tidy", 0.1, 1)],
        "reason": "odd or empty", "truncated": True, "key": "harness-3",
    }  # fmt: skip
    return ArchivedEpisode(**(values | fields))


def archived(id: str, parent: str = "", **fields: Any) -> Archived:
    values: dict[str, Any] = {
        "source": H0, "hypothesis": "the base harness", "proposer": "domain", "outcome": "accepted", "reason": "",
        "iteration": 1, "cycle": 1,
    }  # fmt: skip
    return Archived(id=id, parent=parent, **(values | fields))


ARCHIVE = [
    archived(
        "h0000", mean=0.25, policy="theta-0002", intervals={"theta-0002": (0.1, 0.4), "theta-0001": (0.0, 0.2)},
        older_means={"theta-0001": 0.05}, results={"harness-3": 0.0, "harness-4": 1.0}, episodes=[episode()], calls=2,
    ),
    archived(
        "h0001", "h0000", source=H0.replace("letter", "word"), hypothesis="words", proposer="claude", outcome="vetoed",
        reason="reads the clock",
    ),
]  # fmt: skip


def request(**fields: Any) -> Request:
    values: dict[str, Any] = {
        "archive": ARCHIVE, "incumbent": "h0000", "brief": Letters.brief, "candidates": 3, "iteration": 2, "seed": 1,
        "fst": False, "notes": ["h0001 vetoed: reads the clock"],
    }  # fmt: skip
    return Request(**(values | fields))


@pytest.fixture
def scratch(tmp_path: Path) -> Scratch:
    return Scratch(tmp_path / "scratch", request())


def everything(scratch: Scratch) -> str:
    return "\n".join(p.read_text() for p in sorted(scratch.folder.rglob("*")) if p.is_file())


def test_the_archive_stands_in_files_with_scores_vetoes_results_and_episodes(scratch: Scratch) -> None:
    at = scratch.folder / "archive"
    index = (at / "index.md").read_text()
    assert "| h0000 (the one to beat) | - | domain | accepted | 25.0% [10.0%, 40.0%] |" in index
    assert "| h0001 | h0000 | claude | vetoed | - |" in index
    about = (at / "h0000/about.md").read_text()
    assert "older policy theta-0001, not comparable: 5.0% [0.0%, 20.0%]" in about
    assert "reason: reads the clock" in (at / "h0001/about.md").read_text()
    assert (at / "h0000/results.tsv").read_text() == "task\treward\nharness-3\t0\nharness-4\t1\n"
    shown = (at / "h0000/episodes/0001-reject.md").read_text()
    order = ["ask: harness 3", "clean('early')", "reply 1\nfirst", "clean('first')\ntidy", "reply 2", "cut at a length"]
    assert [shown.index(part) for part in order] == sorted(shown.index(part) for part in order)
    assert (at / "h0001/harness.py").read_text() == ARCHIVE[1].source
    assert "Begin with an even character" in (scratch.folder / "brief.md").read_text()
    assert "reads the clock" in (scratch.folder / "feedback.md").read_text()
    assert "reads the clock" in scratch.instructions and "3 candidates" in scratch.instructions


def test_reference_answers_are_in_it_only_where_they_are_allowed(tmp_path: Path) -> None:
    assert "secret-answer" not in everything(Scratch(tmp_path / "a", request()))
    allowed = Scratch(tmp_path / "b", request(answers={"harness-3": ["secret-answer"], "harness-9": ["not-shown"]}))
    assert "reference answer: secret-answer" in everything(allowed) and "not-shown" not in everything(allowed)


def test_check_is_a_program_that_says_what_the_run_would(scratch: Scratch) -> None:
    def check(*names: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([scratch.folder / "check", *names], capture_output=True, text=True, env={}, timeout=60)

    assert check().returncode == 1
    good = scratch.candidates / "good.py"
    good.write_text('"""Louder: it helps.\n\nparent: h0000\n"""' + H0.replace("Say", "Shout"))
    assert check().returncode == 0 and check().stdout == "good.py: ok\n"
    (scratch.candidates / "copy.py").write_text(H0)
    (scratch.candidates / "broken.py").write_text("def run(task")
    (scratch.candidates / "import.py").write_text("import os\n" + H0)
    os.mkfifo(scratch.candidates / "pipe.py")
    said = check()
    assert said.returncode == 1
    for words in ("copy.py: FAILS: it is the same code", "broken.py: FAILS: line 1: it doesn't parse", "can't import"):
        assert words in said.stdout
    assert check("candidates/good.py").returncode == 1  # paths are as the working folder has them
    assert check(str(good)).returncode == 0
    assert scratch.check(good.read_text()).ok and not scratch.check(H0).ok


def test_under_fst_only_prompts_pass_and_the_prompt_says_so(tmp_path: Path) -> None:
    scratch = Scratch(tmp_path / "s", request(fst=True))
    assert "EXAMPLES, SYSTEM" in scratch.instructions
    assert scratch.check(H0.replace("Say", "Shout")).ok
    more = H0.replace("MAX_TOKENS = 4", "MAX_TOKENS = 5")
    assert not scratch.check(more).ok
    (scratch.candidates / "more.py").write_text(more)
    said = subprocess.run([scratch.folder / "check"], capture_output=True, text=True, env={}, timeout=60)
    assert said.returncode == 1 and "fst changes the text of prompt constants" in said.stdout


def test_candidates_come_back_with_hypothesis_and_parent(scratch: Scratch) -> None:
    (scratch.candidates / "a.py").write_text('"""Louder: it helps.\n\nparents: h0001, h0000\n"""' + H0)
    (scratch.candidates / "b.py").write_text("#!/usr/bin/env python\n# Hypothesis: quieter\n# parent: h0777\n" + H0)
    (scratch.candidates / "c.py").write_text(H0 + "\nC = 1\n")
    (scratch.candidates / "c.md").write_text("From the note beside it\nparent: h0001\n")
    (scratch.candidates / "d.py").write_text(H0 + "\nD = 1\n")
    a, b, c = scratch.read_candidates()
    assert (a.hypothesis, a.parent, a.also_from) == ("Louder: it helps.", "h0001", ["h0000"])
    assert (b.hypothesis, b.parent) == ("quieter", "h0000")
    assert (c.hypothesis, c.parent) == ("From the note beside it", "h0001")


def test_broken_code_is_a_proposal_unless_the_session_was_cut(scratch: Scratch) -> None:
    (scratch.candidates / "a.py").write_text('"""Half')
    (scratch.candidates / "b.py").write_bytes(b"\xff\xfe\x00 nonsense")
    assert [p.hypothesis for p in scratch.read_candidates()] == ["a: no hypothesis given", "b: no hypothesis given"]
    assert not any(scratch.check(p.source).ok for p in scratch.read_candidates())
    assert scratch.read_candidates(whole_only=True) == []


def test_links_devices_and_giants_bring_nothing_in(scratch: Scratch, tmp_path: Path) -> None:
    secret = tmp_path / "secret.py"
    secret.write_text("SECRET = 1")
    (scratch.candidates / "a.py").symlink_to(secret)
    os.link(secret, scratch.candidates / "b.py")
    os.mkfifo(scratch.candidates / "c.py")
    (scratch.candidates / "d.py").mkdir()
    with (scratch.candidates / "e.py").open("wb") as giant:
        giant.truncate(10_000_000_000)
    found = scratch.read_candidates()
    assert [len(p.source) for p in found] == [contract.SOURCE_BYTES + 1]
    assert "bytes; at most" in scratch.check(found[0].source).reason
    assert [words.split(" is ")[0] for words in scratch.refused] == [f"candidates/{name}.py" for name in "abcd"]


def test_a_candidates_folder_that_became_a_link_is_not_followed(scratch: Scratch, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other/a.py").write_text(H0)
    scratch.candidates.rmdir()
    scratch.candidates.symlink_to(tmp_path / "other")
    assert scratch.read_candidates() == []
