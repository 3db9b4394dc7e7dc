"""One `vllm serve` that this run starts, waits for and ends: its command, its log, its process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

from whale_tui.config import Vllm
from whale_tui.policy.protocol import PolicyFailure
from whale_tui.policy.vllm.client import Client

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM makes room for; an adapter takes the next one up."""
SAY_SECONDS = 5.0
"""Between two words on how the start goes."""
TEXT_ALONE = {
    "Qwen3_5ForConditionalGeneration": "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForConditionalGeneration": "Qwen3_5MoeForCausalLM",
}
"""Models that see images too, and the class of their text alone, which is what the trainer holds."""
BASE = "base"
"""Name under which a managed server serves the base model."""


def room_for(rank: int) -> int:
    """The least rank that vLLM can be started with for adapters of this one. Raises PolicyFailure("bad-model")."""
    for room in RANKS:
        if rank <= room:
            return room
    raise PolicyFailure("bad-model", f"vLLM serves no adapter of rank {rank}; model.lora_rank may be {RANKS[-1]}")


def command(options: Vllm, model: str, *, port: int, rank: int, context: int, devices: str) -> list[str]:
    """The command of a server. What bends sampling is pinned; `vllm.args` comes last and may add what it needs.

    rank: of the adapters that it serves; 0 where versions are weights of their own.
    """
    words = [
        options.python, "-m", "vllm.entrypoints.cli.main", "serve", model,
        "--host", "127.0.0.1", "--port", str(port), "--served-model-name", BASE, "--dtype", options.dtype,
        "--max-model-len", str(context), "--gpu-memory-utilization", str(options.memory_share),
        "--generation-config", "vllm", "--logprobs-mode", "processed_logprobs", *text_alone(model),
    ]  # fmt: skip
    if rank:
        words += ["--enable-lora", "--max-loras", str(options.max_loras)]
        words += ["--max-lora-rank", str(options.max_lora_rank or room_for(rank))]
    if len(devices.split(",")) > 1:
        words += ["--tensor-parallel-size", str(len(devices.split(",")))]
    if options.share_gpu:
        words += ["--enable-sleep-mode"]
    return words + options.args


def text_alone(model: str) -> list[str]:
    """Arguments that make a server hold what the trainer holds of a model.

    An adapter names the trainer's layers. Where the server calls them otherwise, as it does beside a part for images,
    it leaves the adapter out without a word.
    """
    try:
        named = json.loads((Path(model) / "config.json").read_text(encoding="utf-8")).get("architectures") or []
    except (OSError, ValueError):
        return []
    found = [TEXT_ALONE[name] for name in named if name in TEXT_ALONE]
    return ["--hf-overrides", json.dumps({"architectures": found})] if found else []


def environment(options: Vllm, devices: str) -> dict[str, str]:
    """Runtime adapters, and the developer endpoints (reset of the prefix cache, sleep): the server is bound to
    loopback. No request leaves the machine."""
    made = {
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1",
    }  # fmt: skip
    if devices:
        made["CUDA_VISIBLE_DEVICES"] = devices
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHONPATH", "VIRTUAL_ENV"))}
    return kept | made | options.env


class ManagedServer:
    """The process of one server; `client` speaks to it once it is up. Every start takes a port of its own."""

    def __init__(
        self, number: int, options: Vllm, model: str, log: Path, *, rank: int, context: int, devices: str
    ) -> None:
        self.number, self.options, self.model, self.log = number, options, model, log
        self.rank, self.context, self.devices = rank, context, devices
        self.process: asyncio.subprocess.Process | None = None
        self.url = ""

    async def start(self, connect: Callable[[str], Client], note: Callable[[str], None], model: str = "") -> Client:
        """Start it (anew) and wait until it is healthy. model: a folder to serve in place of the base model's.

        Raises PolicyFailure("server-died").
        """
        await self.close()
        if shutil.which(self.options.python) is None:
            raise PolicyFailure(
                "server-died", f"there is no {self.options.python} to start vLLM with; set vllm.python (docs/vllm.md)"
            )
        port = _free_port()
        self.url = f"http://127.0.0.1:{port}"
        words = command(
            self.options, model or self.model, port=port, rank=self.rank, context=self.context, devices=self.devices
        )
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            log.write(f"\n$ {' '.join(words)}\n".encode())
            log.flush()
            self._from = log.tell()
            self.process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", str(Path(__file__).with_name("keeper.py")), *words),
                stdin=asyncio.subprocess.PIPE, stdout=log, stderr=log, start_new_session=True,
                env=environment(self.options, self.devices),
            )  # fmt: skip
        client = connect(self.url)
        try:
            await self._wait(client, note)
        except BaseException:
            await client.close()
            await self.close()
            raise
        return client

    async def _wait(self, client: Client, note: Callable[[str], None]) -> None:
        assert self.process is not None
        start = said = time.monotonic()
        while not await client.healthy():
            spent = time.monotonic() - start
            if self.process.returncode is not None:
                raise PolicyFailure("server-died", f"vLLM server {self.number} did not start: {self.how_it_ended()}")
            if spent > self.options.health_seconds:
                raise PolicyFailure(
                    "server-died",
                    f"vLLM server {self.number} was not up after {spent:.0f} s (vllm.health_seconds); see {self.log}",
                )
            if time.monotonic() - said >= SAY_SECONDS:
                said = time.monotonic()
                note(f"vLLM server {self.number} starts, {spent:.0f} s: {self._last_line()}")
            await asyncio.sleep(0.25)
        note(f"vLLM server {self.number} is up after {time.monotonic() - start:.0f} s")

    async def died(self) -> None:
        """Returns when the process has ended."""
        if self.process is not None:
            await self.process.wait()

    async def close(self) -> None:
        """End the server and everything it started."""
        process, self.process = self.process, None
        if process is None:
            return
        if process.stdin is not None:
            process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), 15)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    def how_it_ended(self) -> str:
        """The last error of its log, or how it was ended."""
        code = self.process.returncode if self.process is not None else 0
        if code is not None and code > 128:
            with contextlib.suppress(ValueError):
                return f"ended by {signal.Signals(code - 128).name}; see {self.log}"
        errors = [line for line in self._lines() if "Error" in line or "error:" in line]
        return f"{(errors or [self._last_line()])[-1][-300:]}; see {self.log}"

    def _last_line(self) -> str:
        return (self._lines() or ["no word yet"])[-1][-120:]

    def _lines(self) -> list[str]:
        try:
            with self.log.open("rb") as file:
                file.seek(max(self._from, file.seek(0, os.SEEK_END) - 65536))
                text = file.read().decode(errors="replace")
        except OSError:
            return []
        return [line for line in (line.strip() for line in text.replace("\r", "\n").splitlines()) if line]


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
