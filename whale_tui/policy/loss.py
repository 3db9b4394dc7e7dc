"""The loss of the weight phase: - sum of log p(sampled token) / number of sampled tokens, over the whole minibatch.

Samples are packed as a token trie: what samples share (few-shot header, question, identical outputs) is computed once,
and identical terms are added up as a weight. A pack is laid out depth first, so node i attends to node j exactly where
j <= i < end[j], and its position is its depth. Only sampled tokens are ever targets; prompt tokens never are, whatever
their ids, because the terms come from lengths. A sum over terms divided by the minibatch's token count: however
samples are split into packs, the gradients of the packs add up to the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from msgspec import Struct
from torch import Tensor

from whale_tui.policy.protocol import TrainSample


class Pack(Struct):
    """nodes: ids, positions, ends [nodes]; terms: nodes [terms] that predict targets [terms], weights [terms] times."""

    ids: list[int]
    positions: list[int]
    ends: list[int]
    nodes: list[int]
    targets: list[int]
    weights: list[float]

    def is_path(self) -> bool:
        """Whether it can't be split into smaller ones: every node stands on the one before."""
        return all(end == len(self.ids) for end in self.ends)

    def mask(self, device: torch.device) -> Tensor:
        """[1, 1, nodes, nodes], true where the row may attend to the column."""
        ends = torch.tensor(self.ends, device=device)
        index = torch.arange(len(self.ids), device=device)
        return ((index[None, :] <= index[:, None]) & (index[:, None] < ends[None, :]))[None, None]


class Rows(Struct):
    """The plain form: right-padded rows. ids, seen (the mask, from lengths), sampled: [rows, longest]."""

    ids: Tensor
    seen: Tensor
    sampled: Tensor


def padded(samples: Sequence[TrainSample]) -> Rows:
    lengths = [len(s.prompt_ids) + len(s.output_ids) for s in samples]
    ids = torch.zeros(len(samples), max(lengths), dtype=torch.long)
    seen = torch.zeros_like(ids)
    sampled = torch.zeros_like(ids, dtype=torch.bool)
    for i, sample in enumerate(samples):
        ids[i, : lengths[i]] = torch.tensor(sample.prompt_ids + sample.output_ids)
        seen[i, : lengths[i]] = 1
        sampled[i, len(sample.prompt_ids) : lengths[i]] = True
    return Rows(ids, seen, sampled)


def row_loss(logits: Tensor, ids: Tensor, sampled: Tensor, tokens: int) -> Tensor:
    """The part of the minibatch loss of padded rows. logits: [rows, longest, vocabulary]."""
    chosen = sampled[:, 1:]
    found = logits[:, :-1][chosen].float()
    return torch.nn.functional.cross_entropy(found, ids[:, 1:][chosen], reduction="sum") / tokens


def token_count(minibatch: Sequence[TrainSample]) -> int:
    return sum(len(sample.output_ids) for sample in minibatch)


def packs(minibatch: Sequence[TrainSample], limit: int) -> Iterator[Pack]:
    """Split a minibatch into packs of at most `limit` nodes (one sample alone may exceed it), neighbours together."""
    together: list[tuple[list[int], int]] = []
    nodes = 0
    for ids, start in sorted((sample.prompt_ids + sample.output_ids, len(sample.prompt_ids)) for sample in minibatch):
        if start == 0:
            raise ValueError("a sample without a prompt: its first sampled token has nothing to be predicted from")
        if start == len(ids):
            continue
        added = len(ids) - 1 - (_shared(ids, together[-1][0]) if together else 0)
        if together and nodes + added > limit:
            yield _pack(together)
            together, nodes, added = [], 0, len(ids) - 1
        together.append((ids, start))
        nodes += added
    if together:
        yield _pack(together)


def trie_loss(logprobs: Tensor, pack: Pack, rows: Sequence[int], tokens: int) -> Tensor:
    """One pack's part of the minibatch loss. logprobs: [rows, vocabulary] fp32 at the nodes listed in `rows`."""
    place = {node: row for row, node in enumerate(rows)}
    device = logprobs.device
    index = torch.tensor([place[node] for node in pack.nodes], device=device)
    targets = torch.tensor(pack.targets, device=device)
    weights = torch.tensor(pack.weights, device=device)
    return -(logprobs[index, targets] * weights).sum() / tokens


def _pack(samples: Sequence[tuple[list[int], int]]) -> Pack:
    """Build the trie of sorted sequences. The last token of a sequence is only ever a target, never a node."""
    pack = Pack([], [], [], [], [], [])
    path: list[int] = []  # open nodes by depth
    terms: dict[tuple[int, int], int] = {}
    for ids, start in samples:
        depth = 0
        while depth < min(len(path), len(ids) - 1) and pack.ids[path[depth]] == ids[depth]:
            depth += 1
        for node in path[depth:]:
            pack.ends[node] = len(pack.ids)
        del path[depth:]
        for position in range(depth, len(ids) - 1):
            path.append(len(pack.ids))
            pack.ids.append(ids[position])
            pack.positions.append(position)
            pack.ends.append(0)
        for position in range(start, len(ids)):
            term = (path[position - 1], ids[position])
            terms[term] = terms.get(term, 0) + 1
    for node in path:
        pack.ends[node] = len(pack.ids)
    pack.nodes = [node for node, _ in terms]
    pack.targets = [target for _, target in terms]
    pack.weights = [float(count) for count in terms.values()]
    return pack


def _shared(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common prefix, the last token of each left out."""
    limit = min(len(a), len(b)) - 1
    return next((i for i in range(limit) if a[i] != b[i]), limit)
