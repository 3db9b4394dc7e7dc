"""The pane of the servers that sample, where a run has any: what each does, which version it has proved, the GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from textual.content import Content

from whale_tui.policy.vllm.status import GpuStatus, ServerStatus
from whale_tui.tui.panes import Pane, View
from whale_tui.tui.plain import cut, line, plain, sides

STYLES = {"serving": "good", "asleep": "muted", "starting": "warning", "down": "warning", "out": "failure"}


class Servers(Pane):
    NAME = "servers"

    def snapshot(self, view: View) -> Any:
        """What is shown, rounded: a rate that moves by less than a digit draws nothing."""
        activity = view.session.client.activity
        if activity is None or not view.session.client.live:
            return ((), ())
        return (
            tuple(_server(server) for server in activity.servers),
            tuple((g.number, round(g.used_gb, 1), round(g.total_gb), round(g.busy * 20) / 20) for g in activity.gpus),
        )

    def draw(self, snap: Any, width: int, height: int) -> tuple[Sequence[Content], Sequence[Content]]:
        servers, gpus = [ServerStatus(*packed) for packed in snap[0]], [GpuStatus(*packed) for packed in snap[1]]
        serving = sum(server.state == "serving" for server in servers)
        rate = sum(server.tokens_per_second for server in servers)
        self.name_it(f"servers {self.look.glyphs.dot} {serving} of {len(servers)} serve {rate:,.0f} tokens/s")
        lines = [text for server in servers for text in self._of(server, width)]
        return lines + [self._gpu(gpu, width) for gpu in gpus] or [line(("no word yet", self.look("muted")))], ()

    def _of(self, server: ServerStatus, width: int) -> list[Content]:
        look, g = self.look, self.look.glyphs
        left = line(
            (f"{server.name.removeprefix('vLLM server ')} ", look("title")),
            (server.state, look(STYLES[server.state])),
            (f" {server.version}" if server.version else "", look("phase-weight")),
            (f" proved, {server.apart:+.4f} apart" if server.version else "", look("muted")),
        )
        busy = f"{server.running} running {g.dot} {server.waiting} waiting {g.dot} cache {server.kv_cache:.0%}"
        right = line((f"{busy} {g.dot} {server.tokens_per_second:,.0f}/s", look("muted")))
        if server.state != "serving":
            told = [cut(left, width)]
        elif left.cell_length + right.cell_length < width:
            told = [sides(left, right, width)]
        else:
            told = [cut(left, width), cut(line("  ").append(right), width)]
        if server.note or server.restarts:
            restarted = f"started again: {server.restarts}; " if server.restarts else ""
            told.append(line((f"  {plain(restarted + server.note, 300).removesuffix('; ')}", look("warning"))))
        return told

    def _gpu(self, gpu: GpuStatus, width: int) -> Content:
        text = f"GPU {gpu.number}: {gpu.used_gb:.1f} of {gpu.total_gb:.0f} GB, busy {gpu.busy:.0%}"
        return cut(line((text, self.look("muted"))), width)


def _server(s: ServerStatus) -> tuple[Any, ...]:
    numbers = (s.running, s.waiting, float(f"{s.tokens_per_second:.2g}"), round(s.kv_cache, 2), round(s.apart, 4))
    return (s.name, s.state, s.version, *numbers, s.restarts, s.note)
