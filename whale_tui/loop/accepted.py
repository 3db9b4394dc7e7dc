"""The accepted set of a step, and its minibatches: pure functions of the step's records (method.md, "Weight phase")."""

from __future__ import annotations

import random
from collections.abc import Sequence

from whale_tui.config import Weight
from whale_tui.policy.protocol import TrainSample
from whale_tui.records import Episode


def accepted_set(episodes: Sequence[Episode], policy_hash: str, options: Weight) -> list[Episode]:
    """The episodes a step trains on, in the order they were run.

    Accepted, sampled from the version that the step started with, not cut at a length limit unless asked for, and with
    sampled tokens in it.
    With `max_accepted_per_task`, at most that many a task, and none whose sampled ids repeat another's.
    """
    kept: list[Episode] = []
    of_task: dict[str, set[tuple[tuple[int, ...], ...]]] = {}
    for episode in episodes:
        if episode.verdict != "accept" or (episode.truncated and not options.train_truncated):
            continue
        if not any(call.output_ids for call in episode.calls):
            continue  # answered without the policy: nothing to learn
        if episode.policy_hash != policy_hash:
            raise ValueError(f"episode {episode.id} was sampled from {episode.policy_hash}, not {policy_hash}")
        if options.max_accepted_per_task:
            seen = of_task.setdefault(episode.task, set())
            sampled = tuple(tuple(call.output_ids) for call in episode.calls)
            if sampled in seen or len(seen) >= options.max_accepted_per_task:
                continue
            seen.add(sampled)
        kept.append(episode)
    return kept


def minibatches(episodes: Sequence[Episode], size: int, seed: str) -> list[list[TrainSample]]:
    """One epoch: every accepted episode once, `size` episodes to an optimizer step.

    Tasks come in a seeded random order and a task's episodes stay together, so that shared prompts are computed once.
    Each call is a sample of its own: a later prompt need not begin with an earlier one (chat templates drop things).
    """
    by_task: dict[str, list[Episode]] = {}
    for episode in episodes:
        by_task.setdefault(episode.task, []).append(episode)
    order = sorted(by_task)
    random.Random(seed).shuffle(order)
    flat = [episode for task in order for episode in by_task[task]]
    return [
        [
            TrainSample(prompt_ids=call.prompt_ids, output_ids=call.output_ids)
            for episode in flat[start : start + size]
            for call in episode.calls
            if call.output_ids
        ]
        for start in range(0, len(flat), size)
    ]


def draw_tasks(seed: int, total: int, drawn: int, count: int) -> list[int]:
    """Positions in D_weight of the next `count` tasks after `drawn` ones, from a shuffled order of each epoch.

    A pure function of how many were drawn, so no task comes twice in an epoch, across phases and resumes. An epoch is
    the whole batches that fit into D_weight: the tail that would not fill a batch is left out, in each epoch another.
    """
    if count > total:
        raise ValueError(f"{count} tasks a step, but D_weight has {total}")
    usable = total // count * count
    epoch, at = divmod(drawn, usable)
    order = list(range(total))
    random.Random(f"{seed}/tasks/{epoch}").shuffle(order)
    return order[at : at + count]
