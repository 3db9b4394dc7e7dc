"""Serve the pair in this folder: a policy, and the harness around it. It needs what requirements.txt names.

    python run_agent.py "question"         one task; the answer is all that goes to stdout
    python run_agent.py                    asks for tasks, one a line
    python run_agent.py --json task.json   a task by its fields, or a list of tasks ("-": stdin); answers as JSON lines

From Python: `Agent().answer({"question": "..."})`. harness.py is code that a search wrote. Where whale_tui is
installed it runs in its sealed worker; elsewhere in this process, with all that this process may do.
"""

from __future__ import annotations

import argparse
import asyncio
import builtins
import contextlib
import importlib.util
import inspect
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

HERE = Path(__file__).resolve().parent
ROLES = ("system", "user", "assistant", "tool")


class NoAnswer(Exception):
    """The episode ended without one; the text says why."""


class Over(BaseException):
    """The episode's budget is spent. Not an Exception: a harness's retry has no use for it."""


class ToolError(Exception):
    """A tool refused; the text says why. Harnesses know it by this name."""


class Policy:
    """The weights: token ids in, token ids out."""

    def __init__(self, settings: Mapping[str, Any], device: str, dtype: str, base: str) -> None:
        if device == "auto":
            mps = torch.backends.mps.is_available()
            device = "cuda" if torch.cuda.is_available() else "mps" if mps else "cpu"
        wanted = getattr(torch, dtype or settings["compute_dtype"])
        if settings["adapter"]:
            from peft import PeftModel

            model: Any = AutoModelForCausalLM.from_pretrained(base or settings["base"], dtype=torch.float32)
            model = PeftModel.from_pretrained(model, str(HERE)).merge_and_unload()  # summed in fp32, rounded once below
        else:
            model = AutoModelForCausalLM.from_pretrained(HERE, dtype=wanted)
        self.model = model.to(device, wanted).eval()
        self.tokenizer: Any = AutoTokenizer.from_pretrained(HERE)
        self.device, self.stop_ids = device, set(settings["stop_ids"])

    def render(self, messages: list[dict[str, str]], thinking: bool | None) -> list[int]:
        """Prompt ids, ending where the assistant begins to speak."""
        extra = {} if thinking is None else {"enable_thinking": thinking}
        text = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, **extra)
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    @torch.inference_mode()
    def sample(
        self, prompt: list[int], most: int, stop: list[str], draw: Callable[[torch.Tensor], int]
    ) -> tuple[list[int], str]:
        """Sampled ids, the end-of-turn included, and "stop" or "length"."""
        ids: list[int] = []
        given, cache = prompt, None
        window = max((len(text.encode()) for text in stop), default=0) + 4
        while True:
            step = torch.tensor([given], device=self.device)
            out = self.model(input_ids=step, cache=cache, use_cache=True, logits_to_keep=1)
            cache = out.cache
            ids.append(draw(out.logits[0, -1].float().cpu()))
            given = ids[-1:]
            if ids[-1] in self.stop_ids or (stop and any(text in self.decode(ids[-window:]) for text in stop)):
                return ids, "stop"
            if len(ids) >= most:
                return ids, "length"


class Drawer:
    """Draws a token: temperature, then top-k, then top-p."""

    def __init__(self, temperature: float, top_k: int, top_p: float, seed: int | None) -> None:
        self.temperature, self.top_k, self.top_p = temperature, top_k, top_p
        self.generator = torch.Generator()
        if seed is None:
            self.generator.seed()
        else:
            self.generator.manual_seed(seed)

    def __call__(self, logits: torch.Tensor) -> int:
        if self.temperature == 0:
            return int(logits.argmax())
        values, ids = logits.double().topk(min(self.top_k, len(logits)) if self.top_k else len(logits))
        chances = (values / self.temperature).softmax(-1)
        chances[chances.cumsum(-1) - chances >= self.top_p] = 0.0
        return int(ids[torch.multinomial(chances, 1, generator=self.generator)])


class Episode:
    """One run of the harness on one task: its calls, its tools, its budget."""

    def __init__(
        self, policy: Policy, budget: Mapping[str, Any], tools: Mapping[str, Callable[..., Any]], drawer: Drawer,
        say: Callable[[str], None],
    ) -> None:  # fmt: skip
        self.policy, self.budget, self.tools, self.drawer, self.say = policy, budget, tools, drawer, say
        self.calls = self.tokens = 0

    def chat(self, messages: Any, max_tokens: Any = None, stop: Any = None, thinking: Any = None) -> dict[str, Any]:
        """The fields of a reply. Raises TypeError for arguments that are none, Over where the budget is spent."""
        stops = [stop] if isinstance(stop, str) else list(stop or [])
        if not messages or any(m.get("role") not in ROLES or not isinstance(m.get("content"), str) for m in messages):
            raise TypeError(f"model.chat: messages: a list of {{role, content}}, role one of {', '.join(ROLES)}")
        if max_tokens is not None and (not isinstance(max_tokens, int) or max_tokens < 1):
            raise TypeError(f"model.chat: max_tokens: {max_tokens!r}")
        if len(stops) > 16 or any(not isinstance(text, str) or not text for text in stops):
            raise TypeError("model.chat: stop: at most 16 strings, none of them empty")
        budget = self.budget
        if self.calls >= budget["max_calls"]:
            raise Over(f"budget: call {self.calls + 1} of at most {budget['max_calls']}")
        if self.tokens >= budget["max_episode_tokens"]:
            raise Over(f"budget: {self.tokens} sampled tokens of at most {budget['max_episode_tokens']}")
        try:
            prompt = self.policy.render(list(messages), thinking)
        except Exception as refused:  # the template's own error, whatever its type
            raise TypeError(f"model.chat: the chat template refuses these messages: {refused}") from None
        room = min(budget["max_tokens"], budget["max_episode_tokens"] - self.tokens, max_tokens or budget["max_tokens"])
        if len(prompt) + room > budget["max_context"]:
            raise Over(f"budget: a prompt of {len(prompt)} tokens, at most {budget['max_context']} with the answer")
        ids, finish = self.policy.sample(prompt, room, stops, self.drawer)
        self.calls += 1
        self.tokens += len(ids)
        text = self.policy.decode(ids[:-1] if ids[-1] in self.policy.stop_ids else ids)
        for message in messages:
            self.say(f"{message['role']}: {message['content']}")
        self.say(f"-> {text}")
        cuts = [at for at in map(text.find, stops) if at >= 0]
        return {
            "text": text[: min(cuts)] if cuts else text,
            "finish_reason": finish,
            "prompt_tokens": len(prompt),
            "completion_tokens": len(ids),
            "remaining_calls": budget["max_calls"] - self.calls,
            "remaining_tokens": budget["max_episode_tokens"] - self.tokens,
        }

    def use(self, name: str, args: Any, kwargs: Any) -> Any:
        """Call a tool, with JSON values in and out. Raises ToolError where it refuses."""
        if name not in self.tools:
            raise ToolError(f"there is no tool {name!r}; there are: {', '.join(sorted(self.tools)) or 'none'}")
        args, kwargs = json.loads(json.dumps([args, kwargs]))
        try:
            inspect.signature(self.tools[name]).bind(*args, **kwargs)
        except TypeError as misfit:
            raise ToolError(f"{name}: {misfit}") from misfit
        try:
            result = json.loads(json.dumps(self.tools[name](*args, **kwargs)))
        except ValueError as refusal:
            raise ToolError(str(refusal)) from refusal
        self.say(f"{name}({', '.join([*map(repr, args), *(f'{k}={v!r}' for k, v in kwargs.items())])}) = {result!r}")
        return result


# ----------------------------------------------------------------------------- what a harness sees, in this process


class Task(dict):
    """Public fields, read-only, as items and as attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"the task has no field {name!r}; it has: {', '.join(self)}") from None

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("a task is read-only")

    __setitem__ = __delitem__ = __setattr__ = __delattr__ = __ior__ = _refuse
    update = pop = popitem = clear = setdefault = _refuse


class Reply:
    def __init__(self, fields: Mapping[str, Any]) -> None:
        self.__dict__.update(fields)


class Remaining:
    def __init__(self, calls: int, tokens: int) -> None:
        self.calls, self.tokens = calls, tokens


class Model:
    def __init__(self, episode: Episode) -> None:
        self._episode = episode
        self.remaining = Remaining(episode.budget["max_calls"], episode.budget["max_episode_tokens"])

    def chat(self, messages: Any, *, max_tokens: Any = None, stop: Any = None, thinking: Any = None) -> Reply:
        fields = self._episode.chat(messages, max_tokens, stop, thinking)
        self.remaining = Remaining(fields.pop("remaining_calls"), fields.pop("remaining_tokens"))
        return Reply(fields)


class Tools:
    def __init__(self, episode: Episode) -> None:
        self._episode = episode

    def __dir__(self) -> list[str]:
        return list(self._episode.tools)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name not in self._episode.tools:
            raise AttributeError(f"there is no tool {name!r}; there are: {', '.join(self._episode.tools) or 'none'}")
        return lambda *args, **kwargs: self._episode.use(name, args, kwargs)


def read_only(value: Any) -> Any:
    if isinstance(value, dict):
        return Task({key: read_only(item) for key, item in value.items()})
    return tuple(map(read_only, value)) if isinstance(value, list) else value


def run_here(source: str, task: dict[str, Any], episode: Episode) -> str:
    """The harness in this process, unsealed; what it prints goes to stderr."""
    names: dict[str, Any] = {"__name__": "harness", "__builtins__": {**vars(builtins), "ToolError": ToolError}}
    try:
        with contextlib.redirect_stdout(sys.stderr):
            exec(compile(source, "harness.py", "exec"), names)
            answer = names["run"](read_only(task), Model(episode), Tools(episode))
    except Over as spent:
        raise NoAnswer(str(spent)) from None
    except Exception as error:
        raise NoAnswer(f"error: {type(error).__name__}: {error}") from error
    if not isinstance(answer, str):
        raise NoAnswer(f"error: run() must return a str, not {type(answer).__name__}")
    return answer


async def run_sealed(worker: Any, source: str, task: dict[str, Any], episode: Episode) -> str:
    """The harness in whale-tui's sealed worker."""

    async def on_chat(*call: Any) -> Any:
        try:
            return worker.Reply(**episode.chat(*call))
        except Over as spent:
            raise worker.BudgetExceeded(str(spent).removeprefix("budget: ")) from None

    async def on_tool(name: str, args: Any, kwargs: Any) -> Any:
        try:
            return episode.use(name, args, kwargs)
        except ToolError as refusal:
            raise worker.ToolError(str(refusal)) from None

    budget = episode.budget
    limits = worker.Limits(memory_mb=budget["worker_memory_mb"], episode_seconds=budget["episode_seconds"])
    async with worker.HarnessRunner(source, limits) as runner:
        end = await runner.run_episode(
            task, on_chat, on_tool, tools=list(episode.tools), remaining_calls=budget["max_calls"],
            remaining_tokens=budget["max_episode_tokens"],
        )  # fmt: skip
    if end.kind != "answer":
        raise NoAnswer(f"{end.kind}: {end.detail}")
    return str(end.answer)


# --------------------------------------------------------------------------------------------------------- the agent


class Agent:
    """The pair, ready to answer. `notes` says what a person should know: missing tools, and whether it is sealed."""

    def __init__(
        self, *, greedy: bool = False, seed: int | None = None, device: str = "auto", dtype: str = "", base: str = "",
        say: Callable[[str], None] = lambda text: None,
    ) -> None:  # fmt: skip
        self.settings = json.loads((HERE / "agent.json").read_text(encoding="utf-8"))
        self.source = (HERE / "harness.py").read_text(encoding="utf-8")
        sampling = self.settings["sampling"]
        temperature = 0.0 if greedy else sampling["temperature"]
        self.drawer = Drawer(temperature, sampling["top_k"], sampling["top_p"], seed)
        self.say = say
        self.notes: list[str] = []
        self._worker = self._find_worker()
        self._tools = self._find_tools()
        self.policy = Policy(self.settings, device, dtype, base)

    def answer(self, task: dict[str, Any]) -> str:
        """The pair's answer. `task`: its public fields. Raises NoAnswer with the reason."""
        episode = Episode(self.policy, self.settings["budget"], self._tools(task), self.drawer, self.say)
        if self._worker is None:
            return run_here(self.source, task, episode)
        return asyncio.run(run_sealed(self._worker, self.source, task, episode))

    def _find_worker(self) -> Any:
        try:
            from whale_tui.harness import worker
        except ImportError:
            why = "whale_tui is not installed"
        else:
            sealed, why = worker.can_seal()
            if sealed:
                return worker
        self.notes.append(f"harness.py runs unsealed, in this process: {why}")
        return None

    def _find_tools(self) -> Callable[[dict[str, Any]], Mapping[str, Callable[..., Any]]]:
        found: Callable[[dict[str, Any]], Mapping[str, Callable[..., Any]]] = lambda task: {}  # noqa: E731
        spec = importlib.util.spec_from_file_location("exported_tools", HERE / "tools.py")
        if (HERE / "tools.py").exists() and spec is not None and spec.loader is not None:
            if str(HERE) not in sys.path:
                sys.path.insert(0, str(HERE))
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            found = module.tools
        lacking = [text for name, text in self.settings["tools"].items() if name not in found(self.settings["example"])]
        if lacking:
            self.notes.append(f"tools.py does not give what the harness may ask for, {'; '.join(lacking)}: fill it in")
        return found


def read_tasks(file: str, field: str) -> Iterator[dict[str, Any]]:
    text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    value = json.loads(text)
    for task in value if isinstance(value, list) else [value]:
        yield {field: task} if isinstance(task, str) else task


def main() -> int:
    parser = argparse.ArgumentParser(description="Answer tasks with the pair in this folder.")
    parser.add_argument("question", nargs="?", help="the task as text")
    parser.add_argument("--json", metavar="FILE", help='a task by its fields, or a list; "-" is stdin')
    parser.add_argument("--greedy", action="store_true", help="take the likeliest token instead of sampling")
    parser.add_argument("--seed", type=int, help="of the sampling")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, mps")
    parser.add_argument("--dtype", default="", help="what to compute in; default: what the run computed in")
    parser.add_argument("--base", default="", help="of an adapter: the base model's folder or hub id")
    parser.add_argument("--verbose", action="store_true", help="prompts, samples and tool uses on stderr")
    args = parser.parse_args()
    logging.disable_progress_bar()
    say = (lambda text: print(text, file=sys.stderr)) if args.verbose else lambda text: None
    agent = Agent(greedy=args.greedy, seed=args.seed, device=args.device, dtype=args.dtype, base=args.base, say=say)
    for note in agent.notes:
        print(f"run_agent: {note}", file=sys.stderr)
    field = agent.settings["question_field"]
    if not field and not args.json:
        parser.error(f"a task here has several fields: use --json, e.g. {json.dumps(agent.settings['example'])}")
    if args.json:
        failed = False
        for task in read_tasks(args.json, field):
            try:
                said = {"answer": agent.answer(task)}
            except NoAnswer as why:
                said, failed = {"answer": "", "why": str(why)}, True
            print(json.dumps(said, ensure_ascii=False), flush=True)
        return int(failed)
    if args.question is not None:
        try:
            print(agent.answer({field: args.question}))
        except NoAnswer as why:
            print(f"run_agent: no answer: {why}", file=sys.stderr)
            return 1
        return 0
    terminal = sys.stdin.isatty()
    while True:
        if terminal:
            print("task> ", end="", flush=True)
        line = sys.stdin.readline()
        if not line:
            return 0
        if line.strip():
            try:
                print(agent.answer({field: line.strip()}), flush=True)
            except NoAnswer as why:
                print(f"(no answer: {why})", flush=True)


if __name__ == "__main__":
    sys.exit(main())
