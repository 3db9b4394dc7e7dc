"""The api proposer against a local endpoint that follows a script, and its tools against a hostile folder."""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.answered import World, harness
from whale_tui import records as r
from whale_tui.config import ProposerConfig
from whale_tui.proposers import sessions
from whale_tui.proposers.api import Api
from whale_tui.proposers.base import Allowance, ProposerFailure, Request
from whale_tui.proposers.scratch import Scratch
from whale_tui.proposers.tools import Tools
from whale_tui.records import Archived, ArchivedEpisode, Brief

pydantic_ai = pytest.importorskip("pydantic_ai")

H0 = 'PROMPT = "Say it."\n\n\ndef run(task, model, tools):\n    return model.chat([]).text\n'
BETTER = '"""Ask twice: the first reply is often empty.\n\nparent: h0000\n"""\n' + H0.replace(
    "Say it.", "Please say it."
)


class Endpoint:
    """An OpenAI-compatible (or, by path, Anthropic) server. Each request takes the next entry of the script."""

    def __init__(self) -> None:
        self.script: list[Any] = []
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.asked = threading.Event()
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                endpoint.requests.append(body)
                endpoint.asked.set()
                endpoint.headers.append({k.lower(): v for k, v in self.headers.items()})
                entry = endpoint.script.pop(0) if endpoint.script else say("done")
                if callable(entry):
                    entry = entry(body)
                status, data = entry if isinstance(entry, tuple) else (200, entry)
                raw = data if isinstance(data, bytes) else json.dumps(data).encode()
                try:
                    self.send_response(status)
                    self.send_header("content-type", "application/json")
                    self.send_header("retry-after-ms", "5")
                    self.send_header("content-length", str(len(raw)))
                    self.end_headers()
                    self.wfile.write(raw)
                except OSError:  # it did not wait
                    pass

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"

    def results(self) -> list[str]:
        """What the tools answered, as the model last read it."""
        return [m["content"] for m in self.requests[-1]["messages"] if m["role"] == "tool"]


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    made = Endpoint()
    yield made
    made.server.shutdown()
    made.server.server_close()


def say(text: str | None, *calls: tuple[str, Any], prompt: int = 1000, output: int = 100, cached: int = 0) -> dict:
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if calls:
        message["tool_calls"] = [
            {"id": f"c{n}-{time.monotonic_ns()}", "type": "function",
             "function": {"name": name, "arguments": args if isinstance(args, str) else json.dumps(args)}}
            for n, (name, args) in enumerate(calls)
        ]  # fmt: skip
    usage = {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output,
             "prompt_tokens_details": {"cached_tokens": cached}}  # fmt: skip
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if calls else "stop"}
    return {"id": "x", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], "usage": usage}


def write(name: str = "a", source: str = BETTER) -> tuple[str, Any]:
    return ("write", {"path": f"candidates/{name}.py", "text": source})


def request(folder: Path, **changes: Any) -> Request:
    episode = ArchivedEpisode(
        task={"question": "What is mined at Arlen?"}, outputs=["tin"], tools=[], answer="tin", verdict="reject",
        reason="wrong", truncated=False,
    )  # fmt: skip
    base = Archived(
        id="h0000", source=H0, parent="", hypothesis="the base harness", proposer="", outcome="accepted", reason="",
        iteration=0, cycle=0, mean=0.2, episodes=[episode],
    )  # fmt: skip
    values: dict[str, Any] = {
        "archive": [base], "incumbent": "h0000", "brief": Brief(text="Mines have minerals.", tools={}), "candidates": 3,
        "iteration": 2, "seed": 0, "fst": False, "folder": folder / "it-0002",
    }  # fmt: skip
    return Request(**(values | changes))


def options(endpoint: Endpoint, **changes: Any) -> ProposerConfig:
    values = {"kind": "api", "model": "m", "api_base": endpoint.url, "price_prompt": 2.0, "price_cached": 0.5,
              "price_output": 10.0, "idle_seconds": 5.0}  # fmt: skip
    return msgspec.convert(values | changes, ProposerConfig)


def propose(endpoint: Endpoint, asked: Request, **changes: Any) -> list[r.Proposal]:
    return list(asyncio.run(Api(options(endpoint, **changes)).propose(asked)))


def fails(endpoint: Endpoint, asked: Request, **changes: Any) -> ProposerFailure:
    with pytest.raises(ProposerFailure) as caught:
        propose(endpoint, asked, **changes)
    return caught.value


# ------------------------------------------------------------------------------------------------------- the session


def test_a_model_reads_searches_writes_and_checks(endpoint: Endpoint, tmp_path: Path) -> None:
    endpoint.script = [
        say("I look first.", ("read", {"path": "archive/index.md"}), ("grep", {"pattern": "t[i]n", "path": "archive"})),
        say(None, write("broken", "def run(task, model, tools:\n"), write("same", H0)),
        say(None, ("check", {})),
        say(None, write("broken"), write("same", BETTER.replace("Please", "Kindly"))),
        say(None, ("check", {"path": "candidates/broken.py"})),
        say("Two candidates are written."),
    ]
    asked, said = request(tmp_path), []
    asked.report = said.append
    found = propose(endpoint, asked)
    assert [p.source for p in found] == [BETTER, BETTER.replace("Please", "Kindly")]
    assert found[0].hypothesis.startswith("Ask twice") and found[0].parent == "h0000" and found[0].warnings == []
    results = endpoint.results()
    assert "| h0000 (the one to beat)" in results[0] and "archive/h0000/episodes/0001-reject.md" in results[1]
    assert "broken.py: fails: line 1: it doesn't parse" in results[4] and "already in the archive" in results[4]
    assert results[7] == "candidates/broken.py: passes"
    system = endpoint.requests[0]["messages"][0]
    assert "candidates/<name>.py" in str(system["content"]) and endpoint.headers[0]["authorization"] == "Bearer none"
    assert {t["function"]["name"] for t in endpoint.requests[0]["tools"]} == {"read", "grep", "write", "check"}
    assert any(line.startswith("grep(pattern='t[i]n'") for line in said) and "Two candidates are written." in said
    lines = [json.loads(line) for line in (tmp_path / "it-0002" / "transcript.jsonl").read_text().splitlines()]
    assert sum(line["type"] == "tool_use" for line in lines) == 8
    assert {"text", "tool_use", "tool-return", "usage"} <= {line["type"] for line in lines}
    kept = sorted(p.name for p in (tmp_path / "it-0002").iterdir())
    assert kept == ["candidates", "prompt.md", "session.json", "transcript.jsonl"]


def test_what_it_spends_is_counted_with_every_reply(endpoint: Endpoint, tmp_path: Path) -> None:
    asked, seen = request(tmp_path), []

    def spent_so_far(body: dict) -> dict:
        left = sessions.read(tmp_path / "it-0002")
        assert left is not None
        seen.append((left.usage.prompt_tokens, round(left.usage.dollars, 6)))
        return say("done", prompt=500, output=10)

    endpoint.script = [say(None, write(), prompt=3000, cached=1000, output=200), spent_so_far]
    propose(endpoint, asked)
    first = (2000 * 2.0 + 1000 * 0.5 + 200 * 10.0) / 1e6
    assert seen == [(3000, pytest.approx(first))]
    assert (asked.usage.prompt_tokens, asked.usage.output_tokens) == (3500, 210)
    assert asked.usage.dollars == pytest.approx(first + (500 * 2.0 + 10 * 10.0) / 1e6)


@pytest.mark.parametrize("allowance", [Allowance(dollars=0.005), Allowance(tokens=2000)])
def test_a_cap_ends_the_session_and_keeps_what_was_written(
    endpoint: Endpoint, tmp_path: Path, allowance: Allowance
) -> None:
    """Before the tools of the reply that passed it run."""
    endpoint.script = [say(None, write()), say(None, write("late")), say(None, write("later"))]
    asked = request(tmp_path, allowance=allowance)
    assert [p.source for p in propose(endpoint, asked)] == [BETTER]
    assert len(endpoint.requests) == 2 and asked.usage.tokens == 2200


def test_a_cap_with_nothing_written_is_a_failure_that_another_session_would_not_mend(
    endpoint: Endpoint, tmp_path: Path
) -> None:
    endpoint.script = [say(None, ("read", {"path": "."}))] * 3
    failure = fails(endpoint, request(tmp_path, allowance=Allowance(tokens=1000)))
    assert not failure.transient and "stopped at its cap: 1,100 of 1,000 tokens spent" in str(failure)


def test_a_rate_limit_and_a_servers_error_are_waited_out(endpoint: Endpoint, tmp_path: Path) -> None:
    error = {"error": {"message": "slow down", "type": "rate_limit"}}
    endpoint.script = [(429, error), say(None, write()), (500, error), (503, error), say("done")]
    assert len(propose(endpoint, request(tmp_path))) == 1
    assert len(endpoint.requests) == 5


@pytest.mark.parametrize(("status", "transient"), [(429, True), (500, True), (401, False), (400, False), (404, False)])
def test_what_does_not_pass_is_a_failure_with_what_it_spent(
    endpoint: Endpoint, tmp_path: Path, status: int, transient: bool
) -> None:
    error = {"error": {"message": "no more today", "type": "x"}}
    endpoint.script = [say(None, ("read", {"path": "."}))] + [(status, error)] * 10
    asked = request(tmp_path)
    failure = fails(endpoint, asked)
    assert failure.transient == transient and "no more today" in str(failure)
    assert asked.usage.tokens == 1100


def test_a_failure_after_a_candidate_was_written_keeps_it(endpoint: Endpoint, tmp_path: Path) -> None:
    endpoint.script = [say(None, write(), write("half", "def run(task"))] + [(400, {"error": {"message": "no"}})] * 5
    assert [p.source for p in propose(endpoint, request(tmp_path))] == [BETTER]


@pytest.mark.parametrize(
    "reply",
    [
        b"<html>bad gateway</html>",
        b"{}",
        {"id": "x", "object": "chat.completion", "created": 1, "model": "m", "choices": []},
    ],
)
def test_replies_without_sense_are_transient_failures(endpoint: Endpoint, tmp_path: Path, reply: Any) -> None:
    endpoint.script = [reply] * 10
    assert fails(endpoint, request(tmp_path)).transient


def test_malformed_tool_calls_are_told_to_the_model_and_mended(endpoint: Endpoint, tmp_path: Path) -> None:
    endpoint.script = [
        say(None, ("read", '{"path": ')),
        say(None, ("write", {"file": "a.py"})),
        say(None, ("shell", {"command": "ls"})),
        say(None, write()),
        say("done"),
    ]
    assert len(propose(endpoint, request(tmp_path))) == 1


def test_an_endpoint_that_does_not_answer_ends_at_the_wall_limit(endpoint: Endpoint, tmp_path: Path) -> None:
    def slow(body: dict) -> dict:
        time.sleep(6)
        return say("late")

    endpoint.script = [say(None, write()), slow]
    start = time.monotonic()
    found = propose(endpoint, request(tmp_path), wall_seconds=1.0)
    assert len(found) == 1 and time.monotonic() - start < 5.5


def test_nobody_at_the_address(tmp_path: Path, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("whale_tui.proposers.api.TRIES", 1)
    failure = fails(endpoint, request(tmp_path), api_base="http://127.0.0.1:9/v1")
    assert failure.transient


def test_cancelling_ends_the_session(endpoint: Endpoint, tmp_path: Path) -> None:
    async def cut() -> None:
        task = asyncio.ensure_future(Api(options(endpoint)).propose(request(tmp_path)))
        await asyncio.to_thread(endpoint.asked.wait, 20)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    endpoint.script = [lambda body: time.sleep(1) or say("late")]
    asyncio.run(cut())
    assert not (tmp_path / "it-0002" / "scratch").exists()


def test_an_anthropic_endpoint(endpoint: Endpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "secret")
    usage = {"input_tokens": 700, "output_tokens": 50, "cache_read_input_tokens": 300, "cache_creation_input_tokens": 0}
    name, args = write()
    message = {"id": "m1", "type": "message", "role": "assistant", "model": "m", "usage": usage, "stop_sequence": None}
    endpoint.script = [
        message
        | {"content": [{"type": "tool_use", "id": "t1", "name": name, "input": args}], "stop_reason": "tool_use"},
        message | {"content": [{"type": "text", "text": "done"}], "stop_reason": "end_turn"},
    ]
    asked = request(tmp_path)
    changes = {"provider": "anthropic", "api_base": endpoint.url.removesuffix("/v1"), "api_key_env": "MY_KEY"}
    assert len(propose(endpoint, asked, **changes)) == 1
    assert "secret" in str(endpoint.headers[0])
    assert asked.usage.prompt_tokens == 2 * 1000 and asked.usage.output_tokens == 100
    assert asked.usage.dollars == pytest.approx(2 * (700 * 2.0 + 300 * 0.5 + 50 * 10.0) / 1e6)


def test_what_keeps_it_from_working_is_said_with_the_mend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"proposer\.model"):
        Api(ProposerConfig(kind="api"))
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    api = Api(ProposerConfig(kind="api", model="gpt-x"))
    assert api.preflight() == ["OPENAI_API_KEY is not set; proposer.api_key_env names another variable"]
    with pytest.raises(ProposerFailure) as caught:
        asyncio.run(api.propose(request(tmp_path)))
    assert not caught.value.transient
    assert Api(ProposerConfig(kind="api", model="m", api_base="http://localhost:8000/v1")).preflight() == []


def test_the_engine_side_does_not_load_it_before_it_is_used() -> None:
    import subprocess
    import sys

    code = "import sys, whale_tui.proposers.api, whale_tui.service.engine; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"pydantic_ai", "openai", "anthropic", "torch"} & set(loaded)


# -------------------------------------------------------------------------------------------------------- out of bounds


@pytest.fixture
def tools(tmp_path: Path) -> Tools:
    (tmp_path / "secret.txt").write_text("the reference answers")
    scratch = Scratch(tmp_path / "scratch", request(tmp_path))
    (scratch.folder / "link.md").symlink_to(tmp_path / "secret.txt")
    (scratch.folder / "away").symlink_to(tmp_path)
    os.mkfifo(scratch.folder / "pipe")
    return Tools(scratch)


@pytest.mark.parametrize(
    "path",
    ["../secret.txt", "archive/../../secret.txt", "/etc/passwd", "link.md", "away/secret.txt", "away", "pipe", "none",
     "~/x", "a\0b", "brief.md/x"],
)  # fmt: skip
def test_no_way_out_of_the_folder(tools: Tools, path: str) -> None:
    for answer in (
        asyncio.run(tools.read(path)), asyncio.run(tools.grep("answers", path)), asyncio.run(tools.check(path)),
    ):  # fmt: skip
        assert "refused: " in answer and "the reference answers" not in answer


def test_a_search_follows_no_link_and_reads_no_pipe(tools: Tools) -> None:
    assert "secret" not in asyncio.run(tools.grep("reference answers"))
    assert "brief.md:1:Mines have minerals." in asyncio.run(tools.grep("^Mines"))
    assert asyncio.run(tools.grep("nothing of the kind")) == "nothing matches"
    assert "Unmatched" in asyncio.run(tools.grep("("))
    assert "minerals" in asyncio.run(tools.grep("minerals", "brief.md"))
    assert asyncio.run(tools.grep("--help")) == "nothing matches"


@pytest.mark.parametrize(
    "path",
    ["a.py", "../a.py", "candidates/../check", "candidates/a.sh", "candidates/x/a.py", "/tmp/a.py", "check",
     "candidates/.py", "candidates/a\n.py", "brief.md"],
)  # fmt: skip
def test_only_candidates_are_written(tools: Tools, path: str) -> None:
    before = sorted(p.name for p in tools.scratch.folder.rglob("*"))
    assert asyncio.run(tools.write(path, "x")).startswith("refused: ")
    assert sorted(p.name for p in tools.scratch.folder.rglob("*")) == before


def test_a_link_where_a_candidate_would_go_is_not_written_through(tools: Tools, tmp_path: Path) -> None:
    (tools.scratch.candidates / "a.py").symlink_to(tmp_path / "secret.txt")
    assert asyncio.run(tools.write("candidates/a.py", "x")).startswith("refused: ")
    assert (tmp_path / "secret.txt").read_text() == "the reference answers"
    assert "refused" in asyncio.run(tools.write("candidates/b.py", "x" * 2_000_000))


def test_long_files_come_in_pieces(tools: Tools) -> None:
    (tools.scratch.folder / "long.md").write_text("\n".join(f"line {n}" for n in range(1, 1001)))
    assert asyncio.run(tools.read("long.md", 11, 2)) == "line 11\nline 12\n(988 more lines)"
    assert "archive/" in asyncio.run(tools.read("."))
    (tools.scratch.folder / "wide.md").write_text("x" * 100_000)
    assert "(cut at 30,000 characters)" in asyncio.run(tools.read("wide.md"))


def test_an_escape_that_was_tried_is_on_the_card(endpoint: Endpoint, tmp_path: Path) -> None:
    endpoint.script = [say(None, ("read", {"path": "../../journal.sqlite"}), write()), say("done")]
    found = propose(endpoint, request(tmp_path))
    assert endpoint.results()[0].startswith("refused: ")
    assert found[0].warnings == ["it tried to read ../../journal.sqlite, outside its folder"]


# ------------------------------------------------------------------------------------------------------------ in a run


@pytest.mark.parametrize("condition", ["harness-only", "fst"])
def test_a_search_by_an_endpoint(
    endpoint: Endpoint, tmp_path: Path, condition: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failing session is tried again and costs no iteration; fst refuses what changes more than prompts."""
    h0 = harness(40).replace("LEVEL = 40", 'LEVEL = "level 40"').replace("level {LEVEL}", "{LEVEL}")
    better, code = h0.replace("40", "70"), h0.replace("24", "23")
    endpoint.script = [
        b"{}",
        say(None, ("read", {"path": "../x"}), write("a", better), write("b", code)),
        say("done"),
    ]
    monkeypatch.setattr("whale_tui.loop.harness_phase.BACKOFF", 0.01)
    world = World(tmp_path, Api(options(endpoint)), h0=h0, run__condition=condition, run__first_phase="harness")
    asyncio.run(_until_searched(world))
    world.journal.close()
    state = world.state
    assert state.harnesses["h0001"].proposer == "api m" and state.harnesses["h0001"].mean("p0") == 0.7
    assert "it tried to read ../x, outside its folder" in state.harnesses["h0001"].warnings
    second = state.harnesses["h0002"]
    assert (second.outcome == "invalid" and "fst changes the text" in second.reason) == (condition == "fst")
    failures = [e for e in world.events(r.Failure) if e.kind == "proposer"]
    assert len(failures) == 1
    spent = state.ledger["harness/propose"]
    assert spent.prompt_tokens >= 2000 and spent.dollars == pytest.approx(2 * (1000 * 2.0 + 100 * 10.0) / 1e6)


async def _until_searched(world: World) -> None:
    world.run.begin(1)
    main = asyncio.ensure_future(world.run.run())
    while not main.done() and not any(p.ended for p in world.state.phases):
        await asyncio.wait([main], timeout=0.02)
        assert world.state.status != "paused", world.state.reason
    main.cancel()
    await asyncio.gather(main, return_exceptions=True)
