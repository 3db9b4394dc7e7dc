"""The engine: the process that owns a run. It outlives terminals, and answers them while the policy worker computes.

    python -m whale_tui.service.engine RUNDIR [TESTS]

With TESTS, a JSON array of pairs (Wish), it only measures these on D_test and ends; nothing else of the run goes on.

Own session, stdin from /dev/null, stdout and stderr into engine.log. SIGTERM and SIGINT stop the run in good order,
resumable. What keeps it from starting is one message in engine.exit, for whoever launched it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from whale_tui import __version__, doctor, domains
from whale_tui import records as r
from whale_tui.config import Config, ConfigError, Resolved, load
from whale_tui.domains.base import DomainError
from whale_tui.harness.worker import SealUnavailable
from whale_tui.journal import Journal, JournalError
from whale_tui.loop import retention
from whale_tui.loop.alternation import Test
from whale_tui.loop.run import Run
from whale_tui.loop.words import words
from whale_tui.policy import engines, source
from whale_tui.policy.chat import ChatTokenizer
from whale_tui.policy.protocol import PolicyEngine, PolicyFailure
from whale_tui.policy.vllm.engine import VllmEngine
from whale_tui.policy.vllm.status import Gpus
from whale_tui.proposers import sessions
from whale_tui.proposers.base import Proposer
from whale_tui.proposers.turns import Turns
from whale_tui.rundir import EngineInfo, RunDir, RunDirError, write_atomic
from whale_tui.service import discovery
from whale_tui.service.launch import Wish
from whale_tui.service.protocol import Activity
from whale_tui.service.server import Server, socket_path
from whale_tui.sinks import Sinks

log = logging.getLogger("engine")

EXPECTED = (
    ConfigError, DomainError, doctor.MayNotStart, RunDirError, JournalError, PolicyFailure, SealUnavailable, OSError,
)  # fmt: skip
"""What a person can mend: reported in one message, without a traceback."""


def main() -> int:
    rundir = RunDir(Path(sys.argv[1]))
    wishes = msgspec.json.decode(sys.argv[2], type=list[Wish]) if len(sys.argv) > 2 else []
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO, stream=sys.stdout)
    try:
        with rundir.lock():
            return _own(rundir, wishes)
    except RunDirError as error:  # another engine owns the run
        log.error("%s", error)
        return 1


def _own(rundir: RunDir, wishes: Sequence[Wish]) -> int:
    """Run the engine; what ends it is in engine.exit before the lock is released."""
    exit_file = rundir.path / "engine.exit"
    exit_file.unlink(missing_ok=True)
    message = ""
    try:
        asyncio.run(_serve(rundir, wishes))
    except EXPECTED as error:
        message = str(error)
        log.error("%s", message)
    except asyncio.CancelledError:
        message = "interrupted"
    except Exception as error:
        log.exception("the engine failed")
        message = f"the engine failed: {type(error).__name__}: {error} (see {rundir.log})"
    if message:
        with contextlib.suppress(OSError):
            write_atomic(exit_file, message.encode())
    return 1 if message else 0


async def _serve(rundir: RunDir, wishes: Sequence[Wish] = ()) -> None:
    """Own the run until it ends, or until the pairs are measured. Raises one of EXPECTED when it can't go on."""
    rundir.check_format()
    resolved = load(rundir.config)
    sock = socket_path(rundir)
    server = Server(rundir.name, sock)
    await server.start()
    info = EngineInfo(pid=os.getpid(), socket=str(sock), version=__version__, started_at=time.time())
    write_atomic(rundir.engine, msgspec.json.encode(info))
    main_task = asyncio.current_task()
    loop = asyncio.get_running_loop()
    run: Run | None = None
    policy: PolicyEngine | None = None
    latest = Activity(doing="starting")
    early: list[str] = []
    gpus = Gpus()

    def stop(name: str) -> None:
        log.info("%s: stopping", name)
        if run is not None and not wishes and run.state.status in ("running", "paused"):
            run.command(f"{name}-{time.time()}", name, "stop", {})
        elif main_task is not None:
            main_task.cancel()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, signal.Signals(number).name)
    loop.add_signal_handler(signal.SIGHUP, lambda: None)

    def emit(what: list[r.AnyEvent] | Activity) -> None:
        if isinstance(what, list):
            for event in what:
                log.info("%s", words(event))
            if sinks is not None and run is not None:
                sinks.feed(run.state)
        else:
            if isinstance(policy, VllmEngine):
                what.servers, what.gpus = policy.status(), gpus()
            nonlocal latest
            latest = what
        server.publish(what)

    def note(text: str) -> None:
        loop.call_soon_threadsafe(emit, Activity(doing=text, total=0, unit="", since=time.time()))

    def warn(text: str) -> None:
        """From a sink's thread."""
        log.warning("%s", text)
        if not loop.is_closed():
            loop.call_soon_threadsafe(keep, text)

    def keep(text: str) -> None:
        if run is not None and run.state.status in ("running", "paused"):
            run.record(r.Warned(text=text))
        elif run is None or run.state.settings is None:  # said before the run is there to keep it
            early.append(text)

    sinks: Sinks | None = None
    journal: Journal | None = None
    domain: domains.base.Domain | None = None
    try:
        note("reading the domain and the journal")
        journal = Journal(rundir.journal)
        if journal.seq:
            await asyncio.to_thread(_verify, rundir)
        config = resolved.config
        named = resolved.config.domain
        domain = await asyncio.to_thread(domains.base.load_from, resolved.folder, named.name, named.options)
        for line in report.lines() if (report := getattr(domain, "report", None)) is not None else ():
            log.info("%s", line)
        proposer = None
        if not wishes:
            for finding in await doctor.before_start(resolved, domain, rundir.path):
                log.info("%s %s: %s", finding.level, finding.name, finding.text)
            proposer = _proposer(config, domain, _hidden(rundir, resolved, domain, sock))
        await asyncio.to_thread(sessions.end_all, rundir.proposer)
        path = await asyncio.to_thread(source.resolve, config.model.name, note)
        _keep_tokenizer(rundir, path)
        policy = engines.build(
            config, path, rundir.worker_log, on_note=note, on_warning=warn, on_status=lambda: emit(latest)
        )
        note(f"loading {config.model.name}")
        policy_info = await policy.start()
        log.info("model %s on %s (%s)%s", path, policy_info.device, policy_info.compute_dtype,
                 f": {policy_info.note}" if policy_info.note else "")  # fmt: skip
        chat = ChatTokenizer(path)
        run = Run(rundir, config, journal, domain, policy, chat, proposer, emit)
        server.attach(run, journal)
        if wishes:
            run.begin_measuring()
            await run.measure([Test(w.policy, w.harness, w.label, w.samples) for w in wishes])
            return
        sinks = Sinks(config, rundir, warn)
        run.begin(os.getpid())
        for text in early:
            keep(text)
        _say_once(run, proposer)
        _forecast(run, policy_info.trained_parameters, policy_info.compute_dtype)
        await run.run()
        log.info("the run is %s: %s", run.state.status, run.state.reason)
    finally:
        if sinks is not None:
            await asyncio.to_thread(sinks.close)
        await server.close()
        if policy is not None:
            await policy.close()
        if domain is not None:
            await domains.base.close(domain)
        if journal is not None:
            journal.close()


def _verify(rundir: RunDir) -> None:
    """The journal's pages, and the weights that it names. Raises JournalError naming what is broken."""
    journal = Journal(rundir.journal, read_only=True)
    try:
        journal.verify()
    finally:
        journal.close()


def _proposer(config: Config, domain: domains.base.Domain, hidden: Sequence[Path] = ()) -> Proposer | None:
    """Who writes candidates; None where a person does. `hidden`: what an agent must not see. Raises ConfigError."""
    members = [_member(kind, config, domain, hidden) for kind in config.proposer.proposers or [config.proposer.kind]]
    return members[0] if len(members) == 1 else Turns(members)


def _member(kind: str, config: Config, domain: domains.base.Domain, hidden: Sequence[Path]) -> Proposer | None:
    if kind == "person":
        return None
    if kind == "rules":
        from whale_tui.proposers.rules import Rules

        return Rules(domain.edits)
    from whale_tui.proposers.agent import Agent
    from whale_tui.proposers.api import Api

    try:
        if kind == "api":
            return Api(config.proposer)
        # Among several kinds the command is the nameless agent's.
        known = kind != "agent" and "agent" in config.proposer.proposers
        options = msgspec.structs.replace(config.proposer, command="") if known else config.proposer
        return Agent(options, "" if kind == "agent" else kind, hidden=hidden)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _hidden(rundir: RunDir, resolved: Resolved, domain: domains.base.Domain, sock: Path) -> list[Path]:
    """What no proposer may see: runs, the domain's code and data (D_test is made of them), the engine's socket."""
    own = resolved.folder / resolved.config.domain.name
    runs = [run.path for run in discovery.list_runs()]
    code = Path(sys.modules[type(domain).__module__].__file__ or "")
    found = [rundir.path, rundir.path.parent, *runs, Path(domains.__file__).parent, own, sock.parent]
    found += [code if code.parent.name in ("site-packages", "") else code.parent]
    waiting: list[object] = [resolved.config.domain.options]
    while waiting:
        match waiting.pop():
            case dict() as table:
                waiting += table.values()
            case list() as values:
                waiting += values
            case str() as text if text:
                found.append(resolved.folder / text)
    there = [path for path in found if os.path.exists(path)]  # noqa: PTH110 (any text is asked for)
    return [path for path in there if path.resolve() != Path("/")]


def _say_once(run: Run, proposer: Proposer | None) -> None:
    """What a person should know of the proposers before they start, as a warning in the journal."""
    for member in proposer.members if isinstance(proposer, Turns) else [proposer]:
        notice = getattr(member, "notice", "")
        if notice and notice not in run.state.warnings:
            run.record(r.Warned(text=notice))


def _keep_tokenizer(rundir: RunDir, model: Path) -> None:
    """A copy of the tokenizer, so that a terminal can show token ids without the model."""
    folder = rundir.path / "tokenizer"
    folder.mkdir(exist_ok=True)
    for name in (
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "generation_config.json",
        "config.json",
    ):
        if (model / name).exists() and not (folder / name).exists():
            write_atomic(folder / name, (model / name).read_bytes())


def _forecast(run: Run, trained_parameters: int, dtype: str) -> None:
    """Say what the run will take of the disk; warn when it isn't there."""
    state, config = run.state, run.config
    left = max(0, (state.settings.budget_episodes if state.settings else 0) - state.budget_used)
    phases = config.run.cycles or 20
    served = 4 if (config.vllm.dtype if config.rollout.engine == "vllm" else dtype) == "float32" else 2
    version = retention.version_bytes(config, trained_parameters, served)
    need = retention.forecast_bytes(*version, config.retention.keep_versions, phases, left)
    free = run.rundir.free_bytes()
    log.info("disk: up to %.1f GB for this run, %.1f GB free", need / 1e9, free / 1e9)
    if need > free:
        run.record(r.Warned(text=f"the run may need {need / 1e9:.1f} GB of disk and {free / 1e9:.1f} GB are free"))


if __name__ == "__main__":
    raise SystemExit(main())
