"""What prompts share: a trie of computed keys and values, and the choice of stems that many prompts stand on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

STEM_LENGTH = 16
"""Shorter common beginnings are not worth an attention pass of their own."""

STEM_GAIN = 256
"""Tokens that a deeper stem must save, over all its prompts, to be split from its parent's."""

STEMS = 8


class Prefixes:
    """Keys and values of tokens computed under the current weights, by path. A slot is a trie node: a token after a
    path.

    What a slot holds follows from its path alone, so two prompts share exactly the tokens they agree on. Nothing is
    evicted piece by piece: when the room runs out, all is forgotten (what is being sampled has its own copy).
    """

    def __init__(
        self, layers: int, kv_heads: int, head_dim: int, device: torch.device, dtype: torch.dtype, limit: int
    ) -> None:
        """limit: bytes that keys and values together may take."""
        self._shape = (kv_heads, head_dim)
        self._layers, self._device, self._dtype = layers, device, dtype
        self.token_bytes = 2 * layers * kv_heads * head_dim * dtype.itemsize
        self._limit = limit // self.token_bytes
        self.clear()

    def clear(self) -> None:
        self._child: dict[tuple[int, int], int] = {}
        self.used = 1  # slot 0 is the root
        self.keys = [self._empty(0) for _ in range(self._layers)]
        self.values = [self._empty(0) for _ in range(self._layers)]

    def find(self, ids: Sequence[int]) -> list[int]:
        """Slots of the longest known beginning of `ids`."""
        slots: list[int] = []
        slot = 0
        for token in ids:
            slot = self._child.get((slot, token), 0)
            if not slot:
                break
            slots.append(slot)
        return slots

    def add(self, path: Sequence[int], ids: Sequence[int]) -> list[int]:
        """Slots for `ids` after a known path. Their keys and values are the caller's to fill in."""
        slots = []
        slot = path[-1] if path else 0
        for token in ids:
            known = self._child.get((slot, token))
            if known is None:
                known = self._child[slot, token] = self.used
                self.used += 1
            slot = known
            slots.append(slot)
        self._grow()
        return slots

    def room(self, tokens: int) -> bool:
        return self.used + tokens <= self._limit

    def _grow(self) -> None:
        have = len(self.keys[0])
        if self.used <= have:
            return
        more = max(2 * have, self.used, 4096) - have
        self.keys = [torch.cat([k, self._empty(more)]) for k in self.keys]
        self.values = [torch.cat([v, self._empty(more)]) for v in self.values]

    def _empty(self, slots: int) -> Tensor:
        return torch.zeros(slots, *self._shape, device=self._device, dtype=self._dtype)


def new_tokens(prompts: Sequence[Sequence[int]]) -> int:
    """How many trie nodes sorted prompts have."""
    total = 0
    previous: Sequence[int] = ()
    for prompt in prompts:
        total += len(prompt) - common(previous, prompt)
        previous = prompt
    return total


def choose_stems(prompts: Sequence[Sequence[int]]) -> list[tuple[int, list[int]]]:
    """Group sorted, distinct prompts by the beginning they share: (length of the stem, indices of its prompts).

    Stems may begin alike (one is then computed upon the other). A stem leaves each of its prompts at least one token
    of its own. Prompts without a stem come as length 0.
    """
    groups = list(_split(prompts, list(range(len(prompts))), 0))
    groups.sort(key=lambda group: -group[0] * (len(group[1]) - 1))
    stems = [group for group in groups[:STEMS] if group[0] >= STEM_LENGTH and len(group[1]) > 1]
    chosen = {i for _, members in stems for i in members}
    rest = [i for i in range(len(prompts)) if i not in chosen]
    return sorted(stems, key=lambda group: group[1][0]) + ([(0, rest)] if rest else [])


def _split(prompts: Sequence[Sequence[int]], members: list[int], above: int) -> Iterator[tuple[int, list[int]]]:
    """The stem that `members` share, and deeper ones where enough of them share enough more."""
    length = _shared(prompts, members)
    branches: dict[int, list[int]] = {}
    for i in members:
        branches.setdefault(prompts[i][length], []).append(i)
    stay: list[int] = []
    for branch in branches.values():
        deeper = _shared(prompts, branch) if len(branch) > 1 else 0
        if len(branch) < len(members) and (deeper - length) * (len(branch) - 1) >= STEM_GAIN:
            yield from _split(prompts, branch, length)
        else:
            stay += branch
    if stay:
        yield _shared(prompts, stay) if len(stay) > 1 else length, stay


def _shared(prompts: Sequence[Sequence[int]], members: Sequence[int]) -> int:
    """Length of the common beginning of sorted prompts, none of them used up."""
    shortest = min(len(prompts[i]) for i in members) - 1
    return min(common(prompts[members[0]], prompts[members[-1]]), shortest)


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common beginning of two sequences."""
    limit = min(len(a), len(b))
    return next((i for i in range(limit) if a[i] != b[i]), limit)
