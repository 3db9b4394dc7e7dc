"""Hostile text in every place where text of models, tasks, files and people is shown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len

from tests.scripted import Script, ScriptedClient, settings
from tests.test_tui_app import Stage
from whale_tui import records as r
from whale_tui.records import Call, Episode, ToolUse, summarise
from whale_tui.service.discovery import RunSummary
from whale_tui.service.protocol import Activity
from whale_tui.tui import plain
from whale_tui.tui.app import WhaleApp
from whale_tui.tui.lines import Lines
from whale_tui.tui.pages.episodes import Conversation, Rows
from whale_tui.tui.session import Services

TEXTS = {
    "markup": "[/] [bold red]x[/nope] [@click=app.quit]quit[/] $primary \\[",
    "escapes": "\x1b[2J\x1b]52;c;aGk=\x07\x1b[?1049l \x9b31m \r\b\x00 end",
    "wide": "鯨は海の歌 🐋👩‍👩‍👧‍👦️ \u202etxet desrever\u202c e" + "\u0301" * 40,
    "lone surrogate": "a\ud800b",
    "a megabyte": "x" * 1_000_000,
    "many lines": "line [/]\n" * 5_000,
}


def hostile_run(path: Path, text: str) -> Script:
    """A run in which everything that others write is this text."""
    safe = text.encode("utf-8", "replace").decode()
    s = Script(path)
    s.rundir.write_harness(
        "h0000", f"SYSTEM = {safe[:400_000]!r}\ndef run(task, model, tools): pass\n# {safe[:100]}", {}
    )
    s.tell(
        r.RunStarted(
            run=safe, condition="whale", seed=0, domain=safe, model=safe, config_hash="c", policy_hash="p0",
            harness_hash="h", tokenizer_hash="t", splits={"weight": 8}, steps_per_epoch=2, budget_episodes=100,
            settings=settings(), version="0",
        ),
        r.PhaseStarted(cycle=1, phase="weight", reason=safe),
    )  # fmt: skip
    ids = s.encode(safe[:3000])
    episodes = [
        Episode(
            id=safe[:50], cycle=1, phase="weight", step=1, iteration=0, purpose="train", task=safe[:300], task_hash="t",
            sample=n, policy="theta-0000", policy_hash="p0", harness="h0000", harness_hash="h", tokenizer_hash="t",
            sampling=r.Sampling(),
            calls=[Call(prompt_ids=ids, output_ids=ids, logprobs=[-0.5] * len(ids), finish_reason="length", seed=1,
                        max_tokens=9)],
            tools=[ToolUse(name=safe[:2000], args=safe, result=safe, seconds=0.1, after_call=0)],
            answer=safe, verdict=verdict, reason=safe, truncated=True,
            reward=None if verdict == "invalid" else float(verdict == "accept"), seconds=1.0,
        )
        for n, verdict in enumerate(("accept", "reject", "invalid"))
    ]  # fmt: skip
    segment = s.journal.write_segment(episodes)
    s.tell(
        r.StepSampled(step=1, policy="theta-0000", harness="h0000", tasks_drawn=1, batch=summarise(episodes, 1.0),
                      segment=segment.name),
        episodes=[segment],
    )  # fmt: skip
    s.train(1)
    s.tell(r.PhaseFinished(cycle=1, phase="weight", reason=safe))
    s.begin_search()
    s.rundir.write_harness(
        "h0001", f"# {safe[:400_000]}\ndef run(task, model, tools):\n    return {safe[:200]!r}\n", {}
    )
    s.tell(
        r.CandidateProposed(harness="h0001", iteration=2, parent="h0000", hypothesis=safe, proposer=safe,
                            source_hash="s1"),
        r.CandidateChecked(harness="h0001", ok=True, reason="", warnings=[safe]),
        r.CandidateProposed(harness="h0002", iteration=2, parent="h0000", hypothesis=safe, proposer=safe,
                            source_hash="s2"),
        r.CandidateChecked(harness="h0002", ok=False, reason=safe),
        r.CommandTaken(id="1", who=safe, what="pause", effect=safe),
        r.Warned(text=safe),
        r.Failure(kind=safe, detail=safe),
        r.CandidateOutcome(harness="h0001", outcome="vetoed", reason=safe),
        r.Paused(reason=safe),
        r.Resumed(reason=safe),
    )  # fmt: skip
    return s


@pytest.mark.parametrize("name", list(TEXTS))
@pytest.mark.parametrize("ascii", [False, True])
async def test_it_is_shown_as_plain_text_everywhere(tmp_path: Path, name: str, ascii: bool) -> None:
    text = TEXTS[name]
    script = hostile_run(tmp_path / "run", text)
    client = ScriptedClient(script)
    client.activity = Activity(doing=text, done=1, total=2, unit=text, detail=text)
    runs = [RunSummary(name=text, path=tmp_path, status="unreadable", condition=text[:20], problem=text)]
    services = Services(lambda rundir: client, lambda: runs, lambda r: None, lambda p, o: script.rundir, list)
    app = WhaleApp(
        services, who=text, rundir=script.rundir, ascii=ascii, config_folder=tmp_path / "c", state_folder=tmp_path / "s"
    )
    try:
        async with app.run_test(size=(120, 40)) as pilot:
            s = Stage(app, pilot, client)
            await s.wait(lambda: s.page is not None and s.page.is_mounted)
            for keys in (("1",), ("3",), ("4", "d"), ("v",), ("5",), ("i",), ("e",), ("l",), ("dollar_sign",), ("H",)):
                await s.press(*keys)
                check(s, ascii)
            await s.press("R", "e")
            await s.wait(lambda: s.one(Rows).rows)
            await s.press("enter")
            await s.wait(lambda: s.one(Conversation).snap)
            check(s, ascii)
            s.app.say(False, text, text, text)
            await s.press("y")
            check(s, ascii)
    finally:
        plain.ascii_only = False


def check(s: Any, ascii: bool) -> None:
    """Nothing on the screen can move a cursor, every row fits, and every kept line is bounded."""
    rows = s.text().splitlines()
    assert len(rows) == 40
    for row in rows:
        assert cell_len(row) == 120
        assert not [c for c in row if ord(c) < 32 or 0x7F <= ord(c) < 0xA0 or 0x202A <= ord(c) <= 0x202E]
        assert not ascii or row.isascii()
    for lines in s.page.query(Lines):
        assert all(len(content.plain) < 6_000 for content in lines.lines)
        assert len(lines.lines) < 25_000
    assert s.app.is_running


async def test_markup_is_kept_to_the_letter(tmp_path: Path) -> None:
    script = hostile_run(tmp_path / "run", TEXTS["markup"])
    client = ScriptedClient(script)
    services = Services(lambda rundir: client, list, lambda r: None, lambda p, o: script.rundir, list)
    app = WhaleApp(services, who="you", rundir=script.rundir, config_folder=tmp_path, state_folder=tmp_path / "s")
    async with app.run_test(size=(160, 45)) as pilot:
        s = Stage(app, pilot, client)
        await s.wait(lambda: s.page is not None and s.page.is_mounted)
        await s.press("i")
        assert "[/] [bold red]x[/nope] [@click=app.quit]quit[/] $primary" in s.text()
