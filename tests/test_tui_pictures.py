"""Pictures of the Run page, kept as SVG: what it looks like is looked at, and then held.

After a change that was meant, and looked at:  WHALE_PICTURES=new python -m pytest tests/test_tui_pictures.py
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any

import pytest

from tests.scripted import ScriptedClient, write_run
from tests.test_tui_app import Stage
from whale_tui.service.protocol import Activity
from whale_tui.tui import code, plain
from whale_tui.tui.app import WhaleApp
from whale_tui.tui.session import Services

KEPT = Path(__file__).parent / "snapshots"


@pytest.fixture(autouse=True)
def _utc(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(plain, "ascii_only", False)
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.parametrize("theme", ["whale-dark", "ansi-dark"])
@pytest.mark.parametrize("size", [(80, 24), (120, 36)])
async def test_the_run_page_looks_as_it_did(tmp_path: Path, theme: str, size: tuple[int, int]) -> None:
    code.warm()
    script = write_run(tmp_path / "first-light", until="waiting")
    client = ScriptedClient(script)
    client.activity = Activity(doing="waiting for a person", detail="h0009, h0010")
    services = Services(lambda rundir: client, list, lambda r: None, lambda p, o: script.rundir, list)
    app = WhaleApp(
        services, who="you", rundir=script.rundir, theme=theme, config_folder=tmp_path, state_folder=tmp_path
    )
    async with app.run_test(size=size) as pilot:
        s = Stage(app, pilot, client)
        await s.wait(lambda: s.page is not None and s.page.is_mounted)
        assert client.state.phase == "harness" and client.state.iteration == 1
        if size[0] > 100:
            await s.press("4", "down", "d")
        await pilot.pause(0.3)
        drawn = re.sub(r"terminal-\d+", "terminal", app.export_screenshot(title="whale-tui"))
    kept = KEPT / f"run-{size[0]}x{size[1]}-{theme}.svg"
    if os.environ.get("WHALE_PICTURES") == "new":
        kept.parent.mkdir(exist_ok=True)
        kept.write_text(drawn)
    (tmp_path / kept.name).write_text(drawn)
    assert drawn == kept.read_text(), f"it looks different now: compare {tmp_path / kept.name} with {kept}"
