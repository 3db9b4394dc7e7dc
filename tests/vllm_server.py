"""A server told from a script: vLLM's endpoints with its surprises, each switched on by a test. No model, no torch.

Its base model gives every id the log-probability that `base_logprobs` says. A version is a folder with a value in
`adapter.json`, which moves them; so that what is served can be read from any answer: the sampled id is the value. It is
loaded as an adapter, or as the weights of the model itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import sys
from pathlib import Path
from typing import Any

CONTEXT = 512


def base_logprobs(ids: list[int]) -> list[float]:
    """Of each id after the first."""
    return [-1.0 - (token % 7) / 7 for token in ids[1:]]


def moved_logprobs(ids: list[int], value: float) -> list[float]:
    """What an adapter of this value makes of them."""
    return [p + value * math.sin(1.0 + n) for n, p in enumerate(base_logprobs(ids))]


class ScriptedServer:
    """One server on a port of its own. The attributes are its surprises, off at first."""

    def __init__(self, name: str = "scripted") -> None:
        self.name = name
        """Of the base model."""
        self.sticky_id = False
        """Every adapter gets the same id: a second one is taken for loaded, and its weights are not read."""
        self.without_effect = False
        """Versions load, and the base model answers."""
        self.reloads = True
        """Weights can be replaced while it runs (with the developer's endpoints)."""
        self.refuse_resets = 0
        """Resets of the prefix cache that are refused while blocks are held."""
        self.paused = asyncio.Event()
        self.paused.set()
        """Cleared: calls are answered with 503."""
        self.first_token_seconds = 0.0
        self.drop_connections = 0
        """Calls whose connection breaks once the request was read."""
        self.raw_logprobs = False
        self.developer = True
        self.api_delays: dict[str, float] = {}

        self.asked: list[tuple[str, Any]] = []
        self.most_at_once = self.at_once = 0
        self.sampled = 1500.0
        """Tokens that it says it has sampled."""
        self.weights = 0.0
        """The value of the model's own weights."""
        self.names: dict[str, str] = {}
        self.ids: dict[int, float] = {}
        self.of_name: dict[str, int] = {}
        self.prefixes: dict[tuple[str, str, tuple[int, ...]], float] = {}
        self.asleep = False
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> ScriptedServer:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def kill(self) -> None:
        """As SIGKILL would: every connection breaks, nothing of it is left."""
        if self._server is not None:
            self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()
        self.names, self.ids, self.of_name, self.prefixes, self.weights = {}, {}, {}, {}, 0.0

    # ------------------------------------------------------------------------------------------------------------ HTTP

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError, asyncio.LimitOverrunError):
                while head := await reader.readuntil(b"\r\n\r\n"):
                    lines = head.decode().split("\r\n")
                    method, path, _ = lines[0].split(" ")
                    fields = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines[1:])}
                    raw = await reader.readexactly(int(fields.get("content-length", 0)))
                    status, body, more = await self._answer(method, path, json.loads(raw) if raw else None, writer)
                    data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
                    extra = "".join(f"{key}: {value}\r\n" for key, value in more.items())
                    writer.write(f"HTTP/1.1 {status} X\r\ncontent-length: {len(data)}\r\n{extra}\r\n".encode() + data)
                    await writer.drain()
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _answer(
        self, method: str, path: str, body: Any, writer: asyncio.StreamWriter
    ) -> tuple[int, Any, dict[str, str]]:
        self.asked.append((path, body))
        await asyncio.sleep(self.api_delays.get(path, 0.0))
        match path.partition("?")[0]:
            case "/health":
                return 200, "", {}
            case "/version":
                return 200, {"version": "0.0-scripted"}, {}
            case "/v1/models":
                base = {"id": self.name, "root": "/models/scripted", "parent": None, "max_model_len": CONTEXT}
                return (
                    200,
                    {"data": [base, *({"id": n, "root": p, "parent": self.name} for n, p in self.names.items())]},
                    {},
                )
            case "/metrics":
                return 200, _metrics(self.at_once, self.sampled), {}
            case "/v1/load_lora_adapter":
                return (*self._load(body["lora_name"], body["lora_path"]), {})
            case (
                "/v1/unload_lora_adapter"
            ):  # the name is forgotten; what it loaded stays until something takes its place
                found = self.names.pop(body["lora_name"], None)
                return (200, "Success", {}) if found else (404, {"error": "cannot be found"}, {})
            case "/reset_prefix_cache" | "/sleep" | "/wake_up" | "/collective_rpc" if not self.developer:
                return 404, {"detail": "Not Found"}, {}
            case "/collective_rpc" if self.reloads:
                if not self.without_effect:
                    self.weights = value_of(body["kwargs"]["weights_path"])
                return 200, {"results": [None]}, {}
            case "/reset_prefix_cache":
                if self.refuse_resets > 0:
                    self.refuse_resets -= 1
                    return 200, {"success": False}, {}
                self.prefixes = {}
                return 200, {"success": True}, {}
            case "/sleep" | "/wake_up":
                self.asleep = path.startswith("/sleep") or "tags=weights" in path
                return 200, {"status": "ok"}, {}
            case "/v1/completions":
                return await self._complete(body, writer)
        return 404, {"detail": "Not Found"}, {}

    def _load(self, name: str, path: str) -> tuple[int, Any]:
        if name in self.names:
            return 400, {"error": f"The lora adapter '{name}' has already been loaded."}
        try:
            value = json.loads((Path(path) / "adapter.json").read_text())["value"]
        except OSError:
            return 404, {"error": f"No adapter found for '{path}'"}
        number = 1 if self.sticky_id else len(self.ids) + 1
        if number not in self.ids:
            self.ids[number] = 0.0 if self.without_effect else value
        self.names[name], self.of_name[name] = path, number
        return 200, "Success"

    async def _complete(self, body: Any, writer: asyncio.StreamWriter) -> tuple[int, Any, dict[str, str]]:
        if not self.paused.is_set() or self.asleep:
            return 503, {"error": "paused"}, {"retry-after": "0"}
        if self.drop_connections > 0 and body.get("prompt_logprobs") is None:
            self.drop_connections -= 1
            writer.transport.abort()
            raise ConnectionResetError
        model, ids = body["model"], body["prompt"]
        if model != self.name and model not in self.names:
            return 404, {"error": f"The model `{model}` does not exist."}, {}
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            await asyncio.sleep(self.first_token_seconds)
        finally:
            self.at_once -= 1
        value = self.ids[self.of_name[model]] if model != self.name else self.weights
        if body.get("prompt_logprobs") is None:  # those of a prompt are always computed anew
            # As releases before the path was a part of it: a prefix is known by salt, adapter's name and ids.
            value = self.prefixes.setdefault((body.get("cache_salt") or "", model, tuple(ids[:4])), value)
        return 200, {"choices": [self._choice(body, value)]}, {}

    def _choice(self, body: Any, value: float) -> dict[str, Any]:
        """Ids that tell the adapter's value, then letters up to a stop: `a b c ...` as 65, 66, 67, ..."""
        ids, stops = [1000 + round(value * 100)], body.get("stop") or []
        text, reason = "", "length"
        while len(ids) < body["max_tokens"]:
            token = 64 + len(ids)
            ids.append(token)
            text += chr(token)
            if token in (body.get("stop_token_ids") or []) or any(text.endswith(stop) for stop in stops):
                reason = "stop"
                break
        for stop in stops:
            text = text.removesuffix(stop)
        logprob = -0.7 if self.raw_logprobs or body["top_k"] != 1 else 0.0
        choice: dict[str, Any] = {
            "index": 0, "text": text, "finish_reason": reason, "token_ids": ids, "prompt_token_ids": body["prompt"],
            "logprobs": {"token_logprobs": [logprob] * len(ids)},
        }  # fmt: skip
        if body.get("prompt_logprobs") is not None:
            told = moved_logprobs(body["prompt"], value)
            pairs = zip(body["prompt"][1:], told, strict=True)
            choice["prompt_logprobs"] = [None, *({str(t): {"logprob": p, "rank": 1}} for t, p in pairs)]
        return choice

    def calls(self, path: str = "/v1/completions") -> list[Any]:
        """Bodies of what was asked of one endpoint, in order."""
        return [body for asked, body in self.asked if asked.partition("?")[0] == path]


def value_of(folder: str) -> float:
    """Of the weights in a folder: 0 for the base model's."""
    file = Path(folder) / "adapter.json"
    return float(json.loads(file.read_text())["value"]) if file.exists() else 0.0


def _metrics(running: int, sampled: float) -> str:
    labels = '{engine="0",model_name="scripted"}'
    return (
        f"# HELP vllm:num_requests_running x\nvllm:num_requests_running{labels} {running}.0\n"
        f"vllm:num_requests_waiting{labels} 2.0\nvllm:kv_cache_usage_perc{labels} 0.25\n"
        f"vllm:generation_tokens_total{labels} {sampled:.1e}\n"
    )


async def _serve_alone(model: str, port: int) -> None:
    server = ScriptedServer("base")
    server.port, server.weights = port, value_of(model)
    server.reloads = not os.environ.get("SCRIPTED_NO_RELOAD")
    await server.start()
    print("scripted server: up", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":  # in the place of `vllm serve`, with its arguments
    asyncio.run(_serve_alone(sys.argv[sys.argv.index("serve") + 1], int(sys.argv[sys.argv.index("--port") + 1])))
