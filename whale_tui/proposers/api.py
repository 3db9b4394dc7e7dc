"""The `api` proposer: a model behind an endpoint, with tools to read, search, write and check in the scratch folder.

OpenAI-compatible (a local vLLM too) or Anthropic, through pydantic-ai, which is an optional part (`whale-tui[api]`) and
is loaded when the first session begins. A session ends when the model has no more to do, or is ended: past the wall
limit or a cap on spending. Usage is counted with every reply, and on disk before the next request. A rate limit or a
server's error is waited out within the session; what does not pass is a failure of the session, with what it spent.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import msgspec

from whale_tui.config import ProposerConfig
from whale_tui.harness.leaks import reads_outside
from whale_tui.proposers import sessions
from whale_tui.proposers.base import ProposerFailure, Request
from whale_tui.proposers.scratch import Scratch
from whale_tui.proposers.tools import Tools
from whale_tui.records import Proposal

TRIES = 4
"""Attempts of one request, with the pauses that the endpoint asks for, or growing ones."""
REPLY_TOKENS = 16_384
"""Most new tokens of one reply: a whole harness and some thought."""
REQUESTS = 200
"""Most requests of one session."""
KEYS = {"openai": "OPENAI_API_KEY", "anthropic": "ANTHROPIC_API_KEY"}
TASK = "Begin. Use the tools: they see this folder and nothing else; paths are relative to it. `check` is ./check."


class Api:
    """Implements proposers.base.Proposer by sessions of a model with tools."""

    def __init__(self, options: ProposerConfig) -> None:
        """Raises ValueError where the options name no model."""
        if not options.model:
            raise ValueError("proposer.model: name the model that the endpoint serves")
        self.options = options
        self.name = f"api {options.model}"

    def preflight(self) -> list[str]:
        """What keeps it from working now."""
        problems = []
        try:
            import pydantic_ai  # noqa: F401
        except ImportError:
            problems.append("pydantic-ai is not installed; install it with: pip install 'whale-tui[api]'")
        if not self._key():
            problems.append(f"{self._key_name()} is not set; proposer.api_key_env names another variable")
        return problems

    async def propose(self, request: Request) -> Sequence[Proposal]:
        problems = await asyncio.to_thread(self.preflight)  # the import takes seconds
        if problems:
            raise ProposerFailure(f"{self.name}: {'; '.join(problems)}", transient=False)
        with contextlib.ExitStack() as stack:
            folder = request.folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="whale-")))
            try:
                if folder.exists():  # of an engine that was killed before it could begin
                    shutil.rmtree(folder)
                scratch = Scratch(folder / sessions.SCRATCH, request)
                (folder / sessions.PROMPT).write_text(scratch.instructions, encoding="utf-8")
                try:
                    with (folder / sessions.TRANSCRIPT).open("wb") as transcript:
                        session = _Session(self, request, folder, Tools(scratch), transcript)
                        cut, failure = await session.run()
                    return self._taken(session, scratch, cut, failure)
                finally:
                    shutil.copytree(scratch.candidates, folder / "candidates")
                    sessions.clear(folder)
            except OSError as error:
                raise ProposerFailure(f"{self.name}: {error}", transient=False) from error

    def _taken(self, session: _Session, scratch: Scratch, cut: str, failure: ProposerFailure | None) -> list[Proposal]:
        """The candidates of a session that is over, or the failure that it was."""
        found = scratch.read_candidates(whole_only=bool(cut or failure))
        if failure is not None:
            if not found:
                raise failure
            session.request.report(str(failure))
        if not found and cut:
            raise ProposerFailure(f"{self.name} wrote no candidate: {cut}", transient=session.cap == "")
        strange = [f"it tried to {text}" for text in reads_outside(session.uses, scratch.folder)]
        return [msgspec.structs.replace(proposal, warnings=strange) for proposal in found]

    def _key_name(self) -> str:
        return self.options.api_key_env or KEYS[self.options.provider]

    def _key(self) -> str:
        """The endpoint's key. One of your own, named by its address, may have none."""
        return os.environ.get(self._key_name(), "") or ("none" if self.options.api_base else "")

    def connect(self) -> tuple[Any, Any]:
        """The model as pydantic-ai takes it, and the client to close."""
        options, base, timeout = self.options, self.options.api_base or None, self.options.idle_seconds
        if options.provider == "anthropic":
            from anthropic import AsyncAnthropic
            from pydantic_ai.models.anthropic import AnthropicModel
            from pydantic_ai.providers.anthropic import AnthropicProvider

            own = AsyncAnthropic(api_key=self._key(), base_url=base, max_retries=TRIES - 1, timeout=timeout)
            return AnthropicModel(options.model, provider=AnthropicProvider(anthropic_client=own)), own
        from openai import AsyncOpenAI
        from pydantic_ai.models.openai import OpenAIChatModel
        from pydantic_ai.providers.openai import OpenAIProvider

        client = AsyncOpenAI(api_key=self._key(), base_url=base, max_retries=TRIES - 1, timeout=timeout)
        return OpenAIChatModel(options.model, provider=OpenAIProvider(openai_client=client)), client


class _Session:
    """One conversation with the model, its transcript and its bill."""

    def __init__(self, api: Api, request: Request, folder: Path, tools: Tools, transcript: IO[bytes]) -> None:
        self.api, self.request, self.folder, self.tools, self.transcript = api, request, folder, tools, transcript
        self.left = sessions.Left(mark=uuid.uuid4().hex, usage=request.usage, started_at=time.time())
        self.uses: list[tuple[str, Any]] = []
        self.cap = ""
        """The cap on spending that ended it."""

    async def run(self) -> tuple[str, ProposerFailure | None]:
        """Until the model is done. Returns why it was cut short (empty where it was not), and the failure it met."""
        sessions.write(self.folder, self.left)
        model, client = await asyncio.to_thread(self.api.connect)
        limit = asyncio.timeout(self.api.options.wall_seconds)
        try:
            async with limit:
                return await self._converse(model), None
        except TimeoutError as late:
            if limit.expired():
                return f"stopped after {self.api.options.wall_seconds:g} s (proposer.wall_seconds)", None
            return "", ProposerFailure(f"{self.api.name}: {late}")
        except ProposerFailure as failure:
            return "", failure
        finally:
            await client.close()

    async def _converse(self, model: Any) -> str:
        from pydantic_ai import Agent, UsageLimits
        from pydantic_ai.settings import ModelSettings

        agent: Any = Agent(
            model, instructions=self.tools.scratch.instructions, tools=self.tools.all(), retries=5,
            model_settings=ModelSettings(max_tokens=REPLY_TOKENS),
        )  # fmt: skip
        try:
            async with agent.iter(TASK, usage_limits=UsageLimits(request_limit=REQUESTS)) as conversation:
                async for node in conversation:
                    if Agent.is_model_request_node(node):
                        self._keep_results(node.request)
                    elif Agent.is_call_tools_node(node):
                        self._count(node.model_response)
                        self._keep_reply(node.model_response)
                        self.cap = self.request.allowance.passed(self.request.usage)
                        if self.cap:
                            return f"stopped at its cap: {self.cap}"
        except Exception as error:  # whatever the library makes of what came over the wire
            raise ProposerFailure(f"{self.api.name}: {_words(error)}", transient=_may_pass(error)) from error
        return ""

    def _count(self, response: Any) -> None:
        """Add what a reply took to the session's usage, and put that on disk."""
        options, usage, spent = self.api.options, response.usage, self.request.usage
        cached = usage.cache_read_tokens or 0
        prompt, output = usage.input_tokens or 0, usage.output_tokens or 0  # cached tokens are among the prompt's
        spent.prompt_tokens += prompt
        spent.output_tokens += output
        if options.price_prompt or options.price_output:
            price = max(0, prompt - cached) * options.price_prompt + cached * (options.price_cached or 0.0)
            spent.dollars += (price + output * options.price_output) / 1e6
        elif not options.api_base:  # a provider whose prices are known
            with contextlib.suppress(Exception):  # not this model's
                spent.dollars += float(response.cost().total_price)
        sessions.write(self.folder, self.left)

    def _keep_reply(self, response: Any) -> None:
        usage = response.usage
        self._keep({"type": "usage", "prompt_tokens": usage.input_tokens, "output_tokens": usage.output_tokens,
                    "dollars": round(self.request.usage.dollars, 6)})  # fmt: skip
        for part in response.parts:
            kind = part.part_kind
            if kind == "tool-call":
                try:
                    args = part.args_as_dict()
                except Exception:  # what a model takes for JSON
                    args = {"unreadable": str(part.args)}
                self.uses.append((part.tool_name, args))
                self._keep({"type": "tool_use", "name": part.tool_name, "input": args})
                shown = ", ".join(f"{key}={str(value)[:60]!r}" for key, value in args.items() if key != "text")
                self.request.report(f"{part.tool_name}({shown})")
            elif kind in ("text", "thinking") and part.content:
                self._keep({"type": kind, "text": part.content})
                self.request.report(" ".join(part.content.split())[:300])

    def _keep_results(self, request: Any) -> None:
        for part in request.parts:
            content = getattr(part, "content", "")
            text = content if isinstance(content, str) else str(content)
            self._keep({"type": part.part_kind, "name": getattr(part, "tool_name", None) or "", "text": text})

    def _keep(self, line: dict[str, Any]) -> None:
        self.transcript.write(msgspec.json.encode(line) + b"\n")
        self.transcript.flush()


def _may_pass(error: Exception) -> bool:
    """Whether another session may go better: the network, a rate limit, a server's error, a reply without sense."""
    from pydantic_ai.exceptions import ModelQuotaExceededError, ModelRequestRejectedError, UserError

    if isinstance(error, ModelQuotaExceededError | ModelRequestRejectedError | UserError):
        return False
    status = getattr(error, "status_code", None)
    return status is None or status in (408, 409, 425, 429) or status >= 500


def _words(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
