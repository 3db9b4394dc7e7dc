"""The weight phase: online rejection-sampling fine-tuning, one step in two halves (method.md, "Weight phase").

Each function ends in one commit. Between the halves the sampled episodes are on disk and paid for, so that a kill in
the middle of training costs no episode.
"""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from whale_tui import records as r
from whale_tui.loop import retention
from whale_tui.loop.accepted import accepted_set, draw_tasks, minibatches
from whale_tui.loop.alternation import first_phase_of, look_words
from whale_tui.loop.rollouts import Job
from whale_tui.policy.protocol import TrainRequest

if TYPE_CHECKING:
    from whale_tui.loop.run import Run


async def look(run: Run) -> None:
    """A short look at h0 (method.md, `first_phase = "auto"`): training tasks, one episode each."""
    count = min(run.config.run.look_episodes, len(run.tasks["weight"]))
    picked = random.Random(f"{run.state.seed}/look").sample(range(len(run.tasks["weight"])), count)
    subject = run.subject(run.state.harness)
    jobs = [Job(run.tasks["weight"][i], subject, 0) for i in picked]
    episodes, batch = await run.episodes(jobs, "look", "looking at h0")
    first, reason = first_phase_of(batch, run.config), look_words(batch, run.config)
    segment = run.journal.write_segment(episodes)
    run.record(r.Looked(batch=batch, first=first, reason=reason, segment=segment.name), segments=[segment])


async def sample_step(run: Run, step: int) -> None:
    """First half of a step: episodes of the next tasks under the current pair."""
    options, state = run.config.weight, run.state
    tasks = run.tasks["weight"]
    picked = draw_tasks(state.seed, len(tasks), state.tasks_drawn, options.prompts_per_step)
    subject = run.subject(state.harness)
    jobs = [Job(tasks[i], subject, sample) for i in picked for sample in range(options.samples_per_task)]
    policy, drawn = state.policy, state.tasks_drawn + len(picked)
    episodes, batch = await run.episodes(jobs, "train", f"sampling step {step}", step=step)
    segment = run.journal.write_segment(episodes)
    run.record(
        r.StepSampled(
            step=step, policy=policy, harness=subject.id, tasks_drawn=drawn, batch=batch, segment=segment.name
        ),
        segments=[segment],
    )


async def train_step(run: Run) -> None:
    """Second half: one epoch over the accepted set, then a new version, published and proved."""
    state, options = run.state, run.config.weight
    sampled = state.open_step
    if sampled is None:
        raise ValueError("no step is open")
    start = time.perf_counter()

    def finished(**more: Any) -> r.StepFinished:
        return r.StepFinished(step=sampled.step, seconds=time.perf_counter() - start, **more)

    episodes = run.journal.segment(sampled.segment)
    kept = accepted_set(episodes, state.versions[sampled.policy].hash, options)
    if state.policy != sampled.policy:
        run.record(_skipped(run, finished, f"rolled back from {sampled.policy}"))
        return
    if not kept:
        cut = sampled.batch.accepted
        why = f"all {cut} accepted episodes were cut at a length limit" if cut else "nothing accepted"
        run.record(_skipped(run, finished, why), r.Warned(text=f"step {sampled.step}: {why}: nothing to train on"))
        return
    await run.serve()
    run.doing(f"training step {sampled.step}", total=0, detail=f"{len(kept)} accepted episodes")
    run.served = ""  # until it is published, what the worker holds is no version
    batches = minibatches(kept, options.minibatch, f"{state.seed}/order/{state.cycle}/{state.total_steps}")
    trained = await run.policy.train(TrainRequest(minibatches=batches, learning_rate=options.learning_rate))
    if trained.skipped >= len(batches):
        run.record(
            _skipped(run, finished, "loss or gradient not finite"),
            r.Failure(kind="not-finite", detail=f"step {sampled.step}: all {trained.skipped} updates skipped"),
        )
        return
    name = f"theta-{len(state.versions):04d}"
    run.doing(f"publishing {name}")
    folder = run.rundir.weights / name
    shutil.rmtree(folder, ignore_errors=True)  # left by a kill between publishing and its event
    run.served = ""
    published = await run.policy.publish(name, str(folder))
    run.served = name
    events: list[r.AnyEvent] = [
        r.VersionPublished(
            policy=name, hash=published.hash, parent=sampled.policy, path=str(folder.relative_to(run.rundir.path)),
            manifest_hash=published.manifest_hash, probe_trainer=published.probe_trainer,
            probe_rollout=published.probe_rollout, changed=published.changed,
        ),
        finished(
            policy=name, trained=len(kept), trained_tokens=trained.tokens,
            loss=_mean(trained.losses), grad_norm=_mean(trained.grad_norms),
        ),
    ]  # fmt: skip
    if trained.skipped:
        events.append(r.Warned(text=f"step {sampled.step}: {trained.skipped} updates skipped, not finite"))
    run.record(*events)
    retention.clean(run.rundir, run.state, run.config.retention.keep_versions)


def _skipped(run: Run, finished: Callable[..., r.StepFinished], why: str) -> r.StepFinished:
    return finished(policy=run.state.policy, trained=0, trained_tokens=0, loss=None, grad_norm=None, skipped=why)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
