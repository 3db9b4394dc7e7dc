"""A scripted coding agent: `python agent.py MODE` in a scratch folder, with the output of the real ones.

It reads the archive and writes candidates as an agent does, and then misbehaves as its mode says.
"""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import time
from pathlib import Path


def say(**event: object) -> None:
    print(json.dumps(event), flush=True)


def message(number: int, text: str, sampled: int = 100) -> None:
    usage = {"input_tokens": 1000, "cache_read_input_tokens": 9000, "output_tokens": sampled}
    content = [{"type": "text", "text": text}]
    say(
        type="assistant",
        message={"id": f"msg_{number}", "model": "claude-sonnet-9", "usage": usage, "content": content},
    )


def result(dollars: float = 0.42) -> None:
    usage = {"input_tokens": 1000, "cache_read_input_tokens": 9000, "output_tokens": 200}
    say(type="result", subtype="success", is_error=False, result="done", total_cost_usd=dollars, usage=usage)


def candidate(name: str, hypothesis: str = "", body: str | None = None) -> None:
    """h0 with a constant of its own, so that it is new."""
    source = Path("archive/h0000/harness.py").read_text() if body is None else body
    head = f'"""{hypothesis or f"Say it louder ({name}): the policy listens"}\n\nparent: h0000\n"""\n'
    tag = f"{Path.cwd().parent.name} {name}"
    Path(f"candidates/{name}.py").write_text(f"{head}{source}\nTAG = {tag!r}\n" if body is None else body)


def attempt(what: str, action: object) -> str:
    try:
        return f"{what} {action()}"  # type: ignore[operator]
    except OSError as error:
        return f"{what} {errno.errorcode[error.errno or 0]}"


def main() -> None:
    mode, rest = sys.argv[1], sys.argv[2:]
    if not mode.startswith("codex"):
        say(type="system", subtype="init", model="claude-sonnet-9")
        message(1, "I read the archive.")
        message(1, "I read the archive, and the episodes.")
    match mode:
        case "finishes":
            candidate("a")
            candidate("b")
            checked = subprocess.run(["./check"], capture_output=True, text=True)
            message(2, f"check says {checked.returncode}: {checked.stdout or checked.stderr}")
            result()
        case "hangs":
            candidate("a")
            result()
            time.sleep(60)
        case "silent":
            time.sleep(60)
        case "silent-late":
            candidate("a")
            candidate("half", body="def run(task, mod")
            time.sleep(60)
        case "chatters":
            for n in range(600):
                print(f"still thinking {n}", flush=True)
                time.sleep(0.1)
        case "outside":  # the paths to try come after the mode
            tries = [attempt("write", lambda p=p: Path(p, "escaped").write_text("x")) for p in rest]
            tries += [attempt("read", lambda p=p: len(list(Path(p).iterdir()))) for p in rest]
            tries += [attempt("tmp", lambda: Path("/tmp/escaped").write_text("x"))]
            candidate("a", " | ".join(tries))
            result()
        case "environment":
            candidate(
                "a",
                ",".join(sorted(os.environ))
                + f" HOME={os.environ['HOME']} pids={len(list(Path('/proc').glob('[0-9]*')))}",
            )
            result()
        case "five":
            for name in "edcba":
                candidate(name)
            result()
        case "none":
            result()
        case "broken":
            candidate("a", body='"""Broken on purpose\n\nparent: h0000\n"""\ndef run(task, model')
            result()
        case "forks":
            child = (
                "import os, time, sys\nos.setsid()\n"
                "if os.fork(): os._exit(0)\n"
                f"open({rest[0]!r}, 'w').write(str(os.getpid())) if {rest[0]!r} else None\n"
                "time.sleep(60)\n"
            )
            subprocess.run([sys.executable, "-c", child])
            candidate("a")
            result()
        case "floods":
            line = json.dumps({"type": "user", "message": "x" * 8000}).encode() + b"\n"
            for _ in range(int(rest[0]) * 1_000_000 // len(line)):
                sys.stdout.buffer.write(line)
            sys.stdout.buffer.write(b"y" * 20_000_000 + b"\n")  # one line longer than any reader should hold
            sys.stdout.flush()
            candidate("a")
            result()
        case "spends":  # about 3 cents a message at sonnet's prices
            for n in range(2, 400):
                message(n, "thinking", sampled=1500)
                time.sleep(0.05)
        case "codex":
            say(type="thread.started", thread_id="t")
            say(type="item.completed", item={"type": "command_execution", "command": "cat brief.md"})
            candidate("a")
            say(type="turn.completed", usage={"input_tokens": 5000, "cached_input_tokens": 4000, "output_tokens": 700})
        case "codex-silent":  # counts its tokens in a log of its home, and is cut before it says so
            log = Path(os.environ["HOME"], ".codex/sessions/2026/11/rollout-1.jsonl")
            log.parent.mkdir(parents=True)
            total = {"input_tokens": 5000, "cached_input_tokens": 4000, "output_tokens": 700}
            event = {"type": "event_msg", "payload": {"type": "token_count", "info": {"total_token_usage": total}}}
            log.write_text(json.dumps(event) + "\n")
            time.sleep(60)
        case "overloaded":
            print("API Error: 529 overloaded", file=sys.stderr, flush=True)
            sys.exit(1)
        case "denied":
            say(type="result", subtype="success", is_error=True, result="Invalid API key · Please run /login", usage={})
            sys.exit(1)
        case "flaky":  # its first session of a run fails
            if "it-0001-" in str(Path.cwd()) or "it-0002" in str(Path.cwd()):
                candidate("a")
                result()
            else:
                sys.exit(1)
        case "feedback":  # takes up what people said
            said = Path("feedback.md").read_text()
            candidate(
                "a",
                "louder" if "vetoed" not in said else "softer, since a person said: " + said.strip().splitlines()[-1],
            )
            result()


if __name__ == "__main__":
    main()
