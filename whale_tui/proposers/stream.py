"""What an agent's output says: what it does, what it has spent, whether it has finished, and what went wrong.

One reader for the JSON lines of claude, codex (both its formats), gemini and opencode, told apart by their shape, and
for plain text; so that a wrapper script around any of them is read as well. Nothing a line holds is trusted: a number
that is none counts as zero, and spending never goes down.
"""

from __future__ import annotations

import json
import re
from typing import Any

from whale_tui.proposers.base import Spending
from whale_tui.proposers.presets import Prices, prices_of

SHOWN = 300
COST_IN_TEXT = re.compile(r"\(step \d+, \$(\d+(?:\.\d+)?)\)")
"""How mini-swe-agent heads each of its steps."""
CHARS_A_TOKEN = 4
"""claude gives the sampled tokens of a message before they are all sampled; its text bounds them from below."""


class Stream:
    """Folds lines into `usage`, `finished` and `error`. `prices` are the config's; zeros: those of the model's name."""

    def __init__(self, usage: Spending, prices: Prices) -> None:
        self.usage, self._prices = usage, prices
        self.finished = False
        self.error = ""
        self.last = ""
        self.counted = False
        """Whether a line has ever said what was spent."""
        self._messages: dict[str, tuple[int, int, int, int]] = {}
        self._sizes: dict[str, int] = {}
        self._model = ""
        self._added = 0.0

    def feed(self, line: bytes) -> str:
        """Take one line of output. Returns it in a few plain words, or nothing where it says nothing to a person."""
        text = line.decode("utf-8", "replace").strip()
        if not text:
            return ""
        try:
            event = json.loads(text) if text.startswith("{") else None
        except (ValueError, RecursionError):
            event = None
        words = self._event(event) if isinstance(event, dict) else self._text(text)
        self.last = words or self.last
        return words

    def _text(self, text: str) -> str:
        if cost := COST_IN_TEXT.search(text):
            self._spent(0, 0, 0, 0, dollars=float(cost[1]))
        return _short(text)

    def _event(self, e: dict[str, Any]) -> str:
        part, item, payload = _dict(e.get("part")), _dict(e.get("item")), _dict(e.get("msg")) or _dict(e.get("payload"))
        match e.get("type"):
            case "system":
                self._model = str(e.get("model") or self._model)
                return ""
            case "assistant":
                return self._claude(_dict(e.get("message")))
            case "result" if "stats" in e or "status" in e:
                return self._gemini_result(e)
            case "result":
                return self._claude_result(e)
            case "message" if e.get("role") == "assistant":
                return _short(e.get("content"))
            case "tool_use" if "tool_name" in e:
                return f"{e['tool_name']} {_short(e.get('parameters'))}"
            case "item.completed" | "item.started":
                return _codex_item(item) if e["type"] == "item.completed" else ""
            case "turn.completed":
                self._codex(_dict(e.get("usage")))
                self.finished = True
                return ""
            case "turn.failed" | "error" | "session.error":
                problem = e.get("error") or e.get("message")
                self.error = _short(_dict(problem).get("message") or problem)
                return f"error: {self.error}"
            case "text":
                return _short(part.get("text"))
            case "tool_use" if part:
                return f"{part.get('tool')} {_short(_dict(part.get('state')).get('input'))}"
            case "step_finish":
                self._opencode(part)
                return ""
        if payload.get("type") == "token_count":
            self._codex(_dict(_dict(payload.get("info")).get("total_token_usage")))
        elif payload.get("type") == "task_complete":
            self.finished = True
        elif payload.get("type") == "agent_message":
            return _short(payload.get("message"))
        return ""

    def _claude(self, message: dict[str, Any]) -> str:
        """A message comes once for each block, each time with the usage of the whole: it counts once."""
        usage = _dict(message.get("usage"))
        self._model = str(message.get("model") or self._model)
        blocks = [_dict(block) for block in message.get("content") or [] if isinstance(block, dict)]
        size = sum(len(str(b.get("text") or b.get("thinking") or b.get("input") or "")) for b in blocks)
        id = str(message.get("id"))
        self._sizes[id] = self._sizes.get(id, 0) + size
        fresh, cached, stored = (
            _int(usage.get(k)) for k in ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
        )
        sampled = max(_int(usage.get("output_tokens")), self._sizes[id] // CHARS_A_TOKEN)
        if usage:
            self._messages[id] = (fresh, cached, stored, sampled)
            self._spent(*(sum(m[n] for m in self._messages.values()) for n in range(4)))
        return " ".join(filter(None, map(_claude_block, blocks)))[:SHOWN]

    def _claude_result(self, e: dict[str, Any]) -> str:
        usage = _dict(e.get("usage"))
        self.finished = True
        self._spent(
            _int(usage.get("input_tokens")), _int(usage.get("cache_read_input_tokens")),
            _int(usage.get("cache_creation_input_tokens")), _int(usage.get("output_tokens")),
            total=_float(e.get("total_cost_usd")),
        )  # fmt: skip
        if e.get("is_error") or str(e.get("subtype", "")).startswith("error"):
            self.error = _short(e.get("result") or e.get("subtype") or "error")
            return f"error: {self.error}"
        return _short(e.get("result"))

    def _gemini_result(self, e: dict[str, Any]) -> str:
        stats = _dict(e.get("stats"))
        self.finished = True
        cached, prompt = _int(stats.get("cached")), _int(stats.get("input_tokens"))
        self._spent(max(0, prompt - cached), cached, 0, _int(stats.get("output_tokens")))
        if e.get("status") == "error":
            self.error = _short(_dict(e.get("error")).get("message") or "error")
            return f"error: {self.error}"
        return ""

    def _codex(self, usage: dict[str, Any]) -> None:
        """Totals of the session so far."""
        cached, prompt = _int(usage.get("cached_input_tokens")), _int(usage.get("input_tokens"))
        if usage:
            self._spent(max(0, prompt - cached), cached, 0, _int(usage.get("output_tokens")))

    def _opencode(self, part: dict[str, Any]) -> None:
        """What one step took, on top of those before."""
        tokens, at = _dict(part.get("tokens")), self.usage
        cache = _dict(tokens.get("cache"))
        at.prompt_tokens += _int(tokens.get("input")) + _int(cache.get("read")) + _int(cache.get("write"))
        at.output_tokens += _int(tokens.get("output")) + _int(tokens.get("reasoning"))
        prices = self._prices
        estimate = (_int(tokens.get("input")) * prices.prompt + _int(cache.get("read")) * prices.cached
                    + _int(cache.get("write")) * prices.stored
                    + (_int(tokens.get("output")) + _int(tokens.get("reasoning"))) * prices.output) / 1e6  # fmt: skip
        at.dollars += _float(part.get("cost")) or estimate
        self.counted = True
        self.finished = part.get("reason") == "stop"

    def _spent(
        self, fresh: int, cached: int, stored: int, sampled: int, *, dollars: float = 0.0, total: float = 0.0
    ) -> None:
        """Totals of the session so far, priced where the agent gives no dollars. `total` is the agent's own bill."""
        self.counted = True
        self.usage.prompt_tokens = max(self.usage.prompt_tokens, fresh + cached + stored)
        self.usage.output_tokens = max(self.usage.output_tokens, sampled)
        prices = self._prices if self._prices.known else prices_of(self._model)
        estimate = (
            fresh * prices.prompt + cached * prices.cached + stored * prices.stored + sampled * prices.output
        ) / 1e6
        self.usage.dollars = total if total > 0 else max(self.usage.dollars, dollars, estimate)


def _claude_block(block: dict[str, Any]) -> str:
    if block.get("type") == "text":
        return _short(block.get("text"))
    if block.get("type") == "tool_use":
        return f"{block.get('name')} {_short(block.get('input'), 160)}"
    return ""


def _codex_item(item: dict[str, Any]) -> str:
    match item.get("type"):
        case "agent_message" | "reasoning":
            return _short(item.get("text"))
        case "command_execution":
            return f"$ {_short(item.get('command'))}"
        case "file_change":
            return f"writes {_short(item.get('changes'))}"
    return ""


def _short(value: Any, most: int = SHOWN) -> str:
    """One plain line of anything."""
    if isinstance(value, dict):
        value = " ".join(str(v) for v in value.values() if isinstance(v, str | int | float))
    line = " ".join(str(value if value is not None else "")[: 4 * most].split())
    return line if len(line) <= most else line[: most - 1] + "…"


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _int(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 10**12 else 0


def _float(value: Any) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and 0 <= value < 1e6 else 0.0
