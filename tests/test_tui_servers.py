"""The pane of servers: there where a run samples from some, and nowhere else."""

from __future__ import annotations

from typing import Any

from tests.test_tui_app import SMALL, stage  # noqa: F401 - a fixture
from whale_tui.policy.vllm.status import GpuStatus, ServerStatus
from whale_tui.service.protocol import Activity
from whale_tui.tui.panes import Pane
from whale_tui.tui.servers import Servers

GOOD = ServerStatus(
    name="vLLM server 1", state="serving", version="theta-0018", running=12, waiting=3, tokens_per_second=2345.6,
    kv_cache=0.42, apart=0.0021,
)  # fmt: skip
LOST = ServerStatus(name="vLLM server 2", state="down", restarts=1, note="ended by SIGKILL [/b] \x1b[31m")


async def test_the_servers_are_shown_where_there_are_any(stage: Any) -> None:  # noqa: F811
    async with stage() as s:
        assert not s.page.query(Servers)
        await s.press("6")
        assert "samples from no servers" in s.said()
        s.client.changed(
            Activity(doing="sampling step 6", servers=[GOOD, LOST], gpus=[GpuStatus(0, 61.25, 80.0, 0.97)])
        )
        await s.wait(lambda: s.page.query(Servers) and s.one(Servers).display and s.one(Servers).lines)
        text = s.one(Servers).as_text()
        for words in ("theta-0018 proved, +0.0021 apart", "12 running", "3 waiting", "cache 42%", "ended by SIGKILL"):
            assert words in text, text
        assert "61.2 of 80 GB, busy 95%" in text and "\x1b" not in text and "[/b]" in text
        assert "1 of 2 serve" in str(s.one(Servers).border_title)
        draws = s.one(Servers).draws
        s.client.changed(
            Activity(doing="sampling step 6", done=3, servers=[GOOD, LOST], gpus=[GpuStatus(0, 61.26, 80.0, 0.96)])
        )
        await s.settle()
        assert s.one(Servers).draws == draws, "nothing new to read draws nothing"


async def test_in_a_small_terminal_they_are_a_tab(stage: Any) -> None:  # noqa: F811
    async with stage(size=SMALL) as s:
        s.client.changed(Activity(doing="sampling step 6", servers=[GOOD]))
        await s.wait(lambda: "6 servers" in s.text())
        await s.press("6")
        await s.wait(lambda: {pane.id for pane in s.page.query(Pane) if pane.display} == {"servers"})
        assert "theta-0018" in s.text()
