"""The run: does what the alternation says next, writes down what came of it, and asks again.

Every method here named after an action performs it and ends in one commit to the journal. What happens between two
commits is work in flight: a kill loses that and nothing else.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from whale_tui import __version__
from whale_tui import records as r
from whale_tui.config import Config, ConfigError
from whale_tui.domains.base import Domain
from whale_tui.harness.checks import check, source_hash
from whale_tui.journal import Journal, JournalError, Segment
from whale_tui.loop import alternation as todo
from whale_tui.loop import control, evaluation, harness_phase, weight_phase
from whale_tui.loop.holdout import set_aside
from whale_tui.loop.rollouts import Job, Progress, Rollouts, Subject, Where
from whale_tui.loop.state import RunState, reduce
from whale_tui.policy.chat import ChatTokenizer
from whale_tui.policy.protocol import PolicyEngine, PolicyFailure
from whale_tui.proposers.base import Proposer
from whale_tui.records import Batch, Episode, Purpose, Split, Task
from whale_tui.rundir import RunDir
from whale_tui.service.protocol import Activity

FAILURES_IN_A_ROW = 3
"""Policy failures without anything done in between, after which the run pauses for a person."""


class Run:
    """One run and everything it works with. `emit` gets each committed batch of events and each change of activity."""

    measuring = False
    """Taken up only to measure pairs."""

    def __init__(
        self,
        rundir: RunDir,
        config: Config,
        journal: Journal,
        domain: Domain,
        policy: PolicyEngine,
        chat: ChatTokenizer,
        proposer: Proposer | None,
        emit: Callable[[list[r.AnyEvent] | Activity], None],
    ) -> None:
        self.rundir, self.config, self.journal, self.domain = rundir, config, journal, domain
        self.policy, self.chat, self.proposer, self.emit = policy, chat, proposer, emit
        self.rollouts = Rollouts(policy, chat, domain, config.rollout, config.sampling())
        self.state = RunState()
        self.tasks: dict[Split, Sequence[Task]] = {s: domain.tasks(s) for s in ("weight", "harness", "test")}
        self.tasks["harness"], self.holdout = set_aside(self.tasks["harness"], config.harness.holdout, config.run.seed)
        self.activity = Activity(doing="starting")
        self.served = ""
        self._action: asyncio.Task[None] | None = None
        self._interrupted = False
        self._wake = asyncio.Event()
        self._failures = 0

    # ------------------------------------------------------------------------------------------------ the journal

    def record(self, *events: r.AnyEvent, segments: Sequence[Segment] = ()) -> None:
        """Commit events, fold them into the state, and tell whoever watches."""
        self.journal.commit(events, segments)
        for event in events:
            reduce(self.state, event)
        self.emit(list(events))
        self._wake.set()

    def begin(self, pid: int) -> None:
        """Take the run up: replay its journal, or write its first event. Raises ConfigError, JournalError."""
        self._replay()
        if self.state.settings is None:
            self._start()
        else:
            self._resume()
        self.record(r.EngineStarted(pid=pid, resumed=self.state.engine_starts > 0))

    def begin_measuring(self) -> None:
        """Take the run up only to measure pairs: nothing else of it goes on. Raises ConfigError, JournalError."""
        self.measuring = True
        self._replay()
        if self.state.settings is None:
            raise ConfigError(f"{self.rundir.name} has not started: there is no pair to measure")
        self._resume()

    def _replay(self) -> None:
        for event in self.journal.events():
            reduce(self.state, event)

    def _start(self) -> None:
        config, splits = self.config, {str(k): len(v) for k, v in self.tasks.items()}
        if self.holdout:
            splits["holdout"] = len(self.holdout)
        if not splits["harness"]:
            raise ConfigError(
                f"harness.holdout = {config.harness.holdout} leaves nothing of D_harness to search on: it has "
                f"{len(self.holdout)} tasks; set it to a quarter of that or less"
            )
        per_epoch = config.steps_per_epoch(splits["weight"])
        settings = config.settings(per_epoch)
        source = Path(config.domain.harness).read_text() if config.domain.harness else self.domain.h0
        todo.refuse_small_budget(config, settings, splits)
        self.rundir.write_harness("h0000", source, {"hypothesis": "the base harness", "proposer": "domain"})
        self.record(
            r.RunStarted(
                run=self.rundir.name, condition=config.run.condition, seed=config.run.seed, domain=config.domain.name,
                model=config.model.name, config_hash=config.hash, policy_hash=self.policy.info.base_hash,
                harness_hash=source_hash(source), tokenizer_hash=self.chat.hash, splits=splits,
                steps_per_epoch=per_epoch, budget_episodes=config.run.budget_episodes, settings=settings,
                version=__version__,
            )
        )  # fmt: skip

    def _resume(self) -> None:
        if self.state.versions["theta-0000"].hash != self.policy.info.base_hash:
            raise ConfigError(
                f"{self.rundir.config}: model.name = {self.config.model.name!r} now holds other weights than the ones "
                "this run started from; put them back, or start another run"
            )
        counted = {k: n for k, n in self.journal.counts().items() if n}
        ledger: dict[str, int] = {}
        for key, spend in self.state.ledger.items():
            if spend.episodes:
                purpose = key.partition("/")[2]
                ledger[purpose] = ledger.get(purpose, 0) + spend.episodes
        if counted != ledger:
            raise JournalError(
                f"{self.journal.path}: the ledger says {ledger}, the episode records {counted}; "
                f"`whale-tui repair {self.rundir.name}` rebuilds the records from what is good"
            )

    # ------------------------------------------------------------------------------------------------ the main loop

    async def run(self) -> None:
        """Until the run is finished or stopped. Raises JournalError when the record can't be written."""
        while self.state.status not in ("finished", "stopped"):
            self._pause_when_disk_is_low()
            if self.state.status == "paused":
                self.doing(f"paused {self.state.reason}")
                await self.something_happens()
                continue
            action = todo.next_action(self.state, self.config)
            self._action = asyncio.ensure_future(self._perform(action))
            try:
                await self._action
                self._failures = 0
            except asyncio.CancelledError:
                if not self._interrupted:
                    raise
            except PolicyFailure as failure:
                await self._recover(failure)
            finally:
                self._action, self._interrupted = None, False

    def interrupt(self) -> None:
        """Drop what is in flight; the next action follows from the state as it is now."""
        if self._action is not None and not self._action.done():
            self._interrupted = True
            self._action.cancel()
        self._wake.set()

    async def _perform(self, action: todo.Action) -> None:
        match action:
            case todo.Look():
                await weight_phase.look(self)
            case todo.StartPhase():
                self.record(r.PhaseStarted(cycle=action.cycle, phase=action.phase, reason=action.reason))
            case todo.SampleStep():
                await weight_phase.sample_step(self, action.step)
            case todo.TrainStep():
                await weight_phase.train_step(self)
            case todo.Evaluate():
                await harness_phase.evaluate(self, action.harnesses)
            case todo.Confirm():
                await harness_phase.confirm(self, action.harnesses)
            case todo.HoldOut():
                await harness_phase.hold_out(self, action.harnesses)
            case todo.Propose():
                await harness_phase.propose(self, action.iteration)
            case todo.Check():
                await harness_phase.check(self, action.harnesses)
            case todo.Ask():
                await harness_phase.ask(self, action)
            case todo.EndIteration():
                self.record(
                    r.IterationFinished(
                        iteration=action.iteration, best=action.best, best_mean=action.mean, measured=action.measured
                    )
                )
            case todo.EndPhase():
                harness_phase.end_phase(self, action)
            case todo.Test():
                await self._test(action)
            case todo.Finish():
                self.record(r.RunFinished(status="finished", reason=action.reason))

    async def _test(self, action: todo.Test) -> None:
        """A pair that a person asked for and that can't be had any more stops nothing."""
        try:
            await evaluation.test(self, action)
        except PolicyFailure as failure:
            if not action.asked or failure.kind != "artifact-corrupt" or action.policy == self.state.policy:
                raise
            self.served = ""
            self.record(r.EvaluationDropped(policy=action.policy, harness=action.harness, reason=failure.detail))

    async def measure(self, tests: Sequence[todo.Test]) -> None:
        """Measure pairs on D_test, one after another. Raises PolicyFailure."""
        for action in tests:
            await evaluation.test(self, action)

    def _pause_when_disk_is_low(self) -> None:
        free = self.rundir.free_bytes() / 1e9
        if free < self.config.retention.min_free_gb and self.state.status == "running":
            self.record(
                r.Failure(kind="disk-low", detail=f"{free:.2f} GB free at {self.rundir.path}"),
                r.Paused(reason=f"{free:.2f} GB of disk left (retention.min_free_gb); free some, then resume"),
            )

    async def something_happens(self, seconds: float | None = None) -> None:
        self._wake.clear()
        try:
            async with asyncio.timeout(seconds):
                await self._wake.wait()
        except TimeoutError:
            pass

    async def _recover(self, failure: PolicyFailure) -> None:
        """A failure of the policy's machinery is an event and a restart from the last published version."""
        self._failures += 1
        self.served = ""
        self.record(r.Failure(kind=failure.kind, detail=failure.detail))
        if failure.kind == "artifact-corrupt":
            earlier = [v.name for v in self.state.versions.values() if v.name != self.state.policy]
            back = f"; go back with: whale-tui ctl {self.rundir.name} rollback policy={earlier[-1]}" if earlier else ""
            self.record(r.Paused(reason=f"{failure.detail}{back}, then resume"))
            return
        if self._failures >= FAILURES_IN_A_ROW:
            self._failures = 0
            self.record(
                r.Paused(reason=f"{FAILURES_IN_A_ROW} failures in a row, the last {failure.kind}; see engine.log")
            )
            return
        await self.policy.close()
        await asyncio.sleep(0.5 * (self._failures - 1))
        self.doing("restarting the policy worker")
        try:
            await self.policy.start()
        except PolicyFailure as again:
            await self._recover(again)

    async def serve(self, policy: str = "") -> None:
        """Make the policy engine serve a version (the state's), with the optimizer that belongs to the newest."""
        version = self.state.versions[policy or self.state.policy]
        if self.served == version.name:
            return
        self.doing(f"loading {version.name}")
        folder = str(self.rundir.path / version.path) if version.path else None
        got = await self.policy.restore(version.name, folder, with_optimizer=version.name == self._newest())
        if got != version.hash:
            raise PolicyFailure("artifact-corrupt", f"{version.name} has hash {got}, the journal says {version.hash}")
        self.served = version.name

    def _newest(self) -> str:
        return next(reversed(self.state.versions))

    # ------------------------------------------------------------------------------------------------------ controls

    def command(self, id: str, who: str, what: str, args: dict[str, Any], *, dry_run: bool = False) -> tuple[str, bool]:
        """Take a command. Returns its effect, and whether it had been taken before. Raises control.Refused."""
        if self.measuring:
            raise control.Refused("this engine only measures pairs, and ends then: the run itself does not go on")
        if id in self.state.commands:
            return self.state.commands[id], True
        if what == "propose":
            return self._take_proposal(id, who, args, dry_run), False
        planned = control.plan(self.state, what, args, who)
        if what in ("rollback", "evaluate") and not self._on_disk(planned.args["policy"]):
            kept = ", ".join(name for name in self.state.versions if self._on_disk(name))
            raise control.Refused(f"{planned.args['policy']} is no longer kept (retention.keep_versions); {kept} are")
        if not dry_run:
            self.record(
                r.CommandTaken(id=id, who=who, what=what, args=planned.args, effect=planned.effect), *planned.events
            )
            if planned.interrupt:
                self.interrupt()
        return planned.effect, False

    def _on_disk(self, policy: str) -> bool:
        path = self.state.versions[policy].path
        return not path or (self.rundir.path / path).is_dir()

    def _take_proposal(self, id: str, who: str, args: dict[str, Any], dry_run: bool) -> str:
        """A person's own harness joins the archive; the next harness iteration evaluates it."""
        source, parent = str(args.get("source", "")), str(args.get("parent") or self.state.harness)
        hypothesis = str(args.get("hypothesis") or f"written by {who}")
        if parent not in self.state.harnesses:
            raise control.Refused(f"no harness {parent}; there are {', '.join(self.state.harnesses)}")
        known = {c.source_hash for c in self.state.harnesses.values()}
        base = self.rundir.harness_source("h0000") if self.state.condition == "fst" else None
        checked = check(source, archive_hashes=known, answers=(), fst_base=base)
        if not checked.ok:
            raise control.Refused(checked.reason)
        name = f"h{len(self.state.harnesses):04d}"
        effect = f"{name} joins the archive and is evaluated in the next harness iteration"
        if not dry_run:
            event = harness_phase.write_candidate(
                self, 
                len(self.state.harnesses), source, parent=parent, hypothesis=hypothesis, proposer="person",
                iteration=self.state.iteration + 1,
            )  # fmt: skip
            self.record(r.CommandTaken(id=id, who=who, what="propose", args={"harness": name}, effect=effect), event)
        return effect

    # ------------------------------------------------------------------------------------------------------- helpers

    def subject(self, harness: str) -> Subject:
        return Subject(harness, self.state.harnesses[harness].source_hash, self.rundir.harness_source(harness))

    async def episodes(
        self, jobs: Sequence[Job], purpose: Purpose, doing: str, *, step: int = 0, iteration: int = 0, policy: str = ""
    ) -> tuple[list[Episode], Batch]:
        await self.serve(policy)
        state, start = self.state, time.perf_counter()
        version = state.versions[policy or state.policy]
        where = Where(
            cycle=state.cycle, phase=state.phase, step=step, iteration=iteration, purpose=purpose, policy=version.name,
            policy_hash=version.hash, seed=state.seed,
        )  # fmt: skip
        self.doing(doing, total=len(jobs))

        def report(progress: Progress) -> None:
            spent = time.perf_counter() - start
            self.doing(
                doing, done=progress.done, total=progress.total, accepted=progress.accepted,
                tokens_per_second=progress.output_tokens / spent if spent else 0.0,
            )  # fmt: skip

        episodes = await self.rollouts.run(jobs, where, report)
        return episodes, r.summarise(episodes, time.perf_counter() - start)

    def doing(self, doing: str, **more: Any) -> None:
        since = self.activity.since if self.activity.doing == doing else time.time()
        self.activity = Activity(doing=doing, since=since, **more)
        self.emit(self.activity)
