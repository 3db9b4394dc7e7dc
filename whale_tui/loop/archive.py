"""The archive as a proposer reads it, and the readable files beside each harness.

They hold D_harness tasks only, and no reference answer.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Mapping, Sequence

import msgspec

from whale_tui.loop.state import Candidate, RunState
from whale_tui.policy.chat import ChatTokenizer
from whale_tui.records import Archived, ArchivedEpisode, Episode, Score, Task
from whale_tui.rundir import RunDir, write_atomic

EPISODES_SHOWN = 32
"""Episodes of each harness that a proposer is given."""


def read_archive(rundir: RunDir, state: RunState) -> list[Archived]:
    """Every harness of the run with its scores, older ones marked as such, and some of its newest episodes."""
    return [_archived(rundir, state, candidate) for candidate in state.harnesses.values()]


def _archived(rundir: RunDir, state: RunState, candidate: Candidate) -> Archived:
    now = state.policy_hash
    names = {v.hash: v.name for v in state.versions.values()}
    newest = candidate.scores.get(now) or next(reversed(candidate.scores.values()), None)
    per = max(1, newest.batch.episodes) if newest else 1
    return Archived(
        id=candidate.id,
        source=rundir.harness_source(candidate.id),
        parent=candidate.parent,
        hypothesis=candidate.hypothesis,
        proposer=candidate.proposer,
        outcome=candidate.outcome,
        reason=candidate.reason,
        iteration=candidate.iteration,
        cycle=candidate.cycle,
        mean=candidate.mean(now),
        older_means={names[h]: mean for h in candidate.scores if h != now and (mean := candidate.mean(h)) is not None},
        calls=newest.batch.calls // per if newest else 0,
        tokens=newest.batch.output_tokens // per if newest else 0,
        episodes=_read_episodes(rundir, candidate.id),
        intervals={names[h]: _interval(score) for h, score in candidate.scores.items() if score.mean is not None},
        results={task: sum(v) / len(v) for task, v in newest.results.items() if v} if newest else {},
        policy=names[newest.policy_hash] if newest else "",
        warnings=candidate.warnings,
    )


def _interval(score: Score) -> tuple[float, float]:
    """Wilson's 95% interval: right at 0% and 100% too, and quick enough for a whole archive."""
    n, p, z = score.batch.episodes - score.batch.invalid, score.mean or 0.0, 1.96
    centre, spread = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return max(0.0, (centre - spread) / (1 + z * z / n)), min(1.0, (centre + spread) / (1 + z * z / n))


def _read_episodes(rundir: RunDir, harness: str) -> list[ArchivedEpisode]:
    path = rundir.harnesses / harness / "episodes.jsonl"
    if not path.exists():
        return []
    lines = path.read_bytes().splitlines()
    return [msgspec.json.decode(line, type=ArchivedEpisode) for line in lines[:EPISODES_SHOWN]]


def write_evaluation(
    rundir: RunDir,
    harness: str,
    score: Score,
    episodes: Sequence[Episode],
    chat: ChatTokenizer,
    tasks: Mapping[str, Task],
) -> None:
    """harnesses/h0007/: eval.json, and the episodes."""
    write_episodes(rundir, harness, episodes, chat, tasks)
    write_atomic(rundir.harnesses / harness / "eval.json", msgspec.json.format(msgspec.json.encode(score)))


def write_episodes(
    rundir: RunDir, harness: str, episodes: Sequence[Episode], chat: ChatTokenizer, tasks: Mapping[str, Task]
) -> None:
    """harnesses/h0007/episodes.jsonl: as text, in a fixed random order, without reference answers."""
    folder = rundir.harnesses / harness
    order = list(episodes)
    random.Random(harness).shuffle(order)
    lines = [msgspec.json.encode(_as_text(episode, chat, tasks[episode.task])) for episode in order]
    write_atomic(folder / "episodes.jsonl", b"\n".join(lines) + b"\n")


def _as_text(episode: Episode, chat: ChatTokenizer, task: Task) -> ArchivedEpisode:
    return ArchivedEpisode(
        task=dict(task.public),
        outputs=[chat.decode(call.output_ids) for call in episode.calls],
        tools=episode.tools,
        answer=episode.answer,
        verdict=episode.verdict,
        reason=_without_answer(episode.reason, task),
        truncated=episode.truncated,
        key=episode.task,
    )


def _without_answer(reason: str, task: Task) -> str:
    """A verifier's reason may quote the reference answer; the proposer must not read it."""
    for answer in sorted(task.answers, key=len, reverse=True):
        reason = re.sub(rf"(?<!\w){re.escape(answer)}(?!\w)", "(reference answer)", reason, flags=re.IGNORECASE)
    return reason
