"""Prompts computed before they are sampled from: what is known of them is taken from the trie, and what is shared is
attended once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from whale_tui.policy.attention import attend, by_head, merge
from whale_tui.policy.llama import Llama
from whale_tui.policy.prefixes import Prefixes, choose_stems
from whale_tui.policy.rows import Row
from whale_tui.policy.trainer import Interrupted

CHUNK = 2048
"""Prompt tokens computed in one forward."""


@dataclass
class Stem:
    """ids: the shared beginning; keys, values: per layer [1, kv heads, len(ids), d]."""

    ids: list[int]
    keys: list[Tensor]
    values: list[Tensor]


@dataclass
class Prompt:
    """A distinct prompt of an admission. hidden: the model's output at its last token."""

    ids: list[int]
    rows: list[Row]
    stem: Stem | None = None
    slots: list[int] | None = None
    hidden: Tensor | None = None

    @property
    def begin(self) -> int:
        """Where its own part begins."""
        return len(self.stem.ids) if self.stem else 0


class Prefill:
    """Computes prompts and stems into the trie. `interrupted` ends it between two forwards, with Interrupted."""

    def __init__(self, model: Llama, prefixes: Prefixes, interrupted: Callable[[], bool]) -> None:
        self._model, self._prefixes, self._interrupted = model, prefixes, interrupted

    def place_on_stems(self, prompts: list[Prompt], stems: list[Stem]) -> None:
        """Give prompts the stems they share: those in use where one fits, new ones where enough is saved."""
        in_use = sorted(stems, key=lambda stem: -len(stem.ids))
        for length, members in choose_stems([p.ids for p in prompts]):
            begins = prompts[members[0]].ids[:length]
            stem = next(
                (s for s in in_use if length and length - 32 <= len(s.ids) and begins[: len(s.ids)] == s.ids), None
            )
            if stem is None and length:
                stem = self._make_stem(begins)
                in_use = sorted([*in_use, stem], key=lambda stem: -len(stem.ids))
            for i in members:
                prompts[i].stem = stem or next(
                    (s for s in in_use if len(s.ids) < len(prompts[i].ids) and prompts[i].ids[: len(s.ids)] == s.ids),
                    None,
                )

    def _make_stem(self, ids: list[int]) -> Stem:
        if len(self._prefixes.find(ids)) < len(ids):
            self.compute([Prompt(ids, [])])
        slots = torch.tensor(self._prefixes.find(ids), device=self._model.device)
        gather = lambda pool: by_head(pool[slots]).contiguous()  # noqa: E731
        return Stem(ids, [gather(k) for k in self._prefixes.keys], [gather(v) for v in self._prefixes.values])

    def compute(self, prompts: Sequence[Prompt]) -> None:
        """Compute what is not known of each prompt; sets `hidden` and `slots` (of the prompt's own part)."""
        for stem in {id(p.stem): p.stem for p in prompts}.values():
            members = [p for p in prompts if p.stem is stem]
            known = {id(p): min(len(self._prefixes.find(p.ids)), len(p.ids) - 1) for p in members}
            members.sort(key=lambda p: (len(p.ids) - known[id(p)], p.begin - known[id(p)]))
            chunk: list[Prompt] = []
            tokens = 0
            for prompt in members:
                missing = len(prompt.ids) - known[id(prompt)]
                if chunk and tokens + missing > CHUNK:
                    self._forward(chunk, stem)
                    chunk, tokens = [], 0
                chunk.append(prompt)
                tokens += missing
            if chunk:
                self._forward(chunk, stem)

    def _forward(self, prompts: Sequence[Prompt], stem: Stem | None) -> None:
        """One forward over the unknown tokens of prompts on one stem, packed without padding except inside
        attention.
        """
        if self._interrupted():  # a second or more of work on two cores: a person who drops it should not wait for all
            raise Interrupted
        device = self._model.device
        begin = len(stem.ids) if stem else 0
        fresh_ids: list[int] = []
        positions: list[int] = []
        sizes: list[int] = []
        cached: list[list[int]] = []
        writes: dict[
            int, int
        ] = {}  # slot -> the first packed token that fills it: the same again may differ in rounding
        # The last token is computed again where it is known: its output is what is wanted. The stem's are never.
        known = [max(min(len(self._prefixes.find(p.ids)), len(p.ids) - 1), begin) for p in prompts]
        paths = [self._prefixes.find(p.ids[:size]) for p, size in zip(prompts, known, strict=True)]
        for prompt, size, path in zip(prompts, known, paths, strict=True):
            news = self._prefixes.used
            slots = self._prefixes.add(path, prompt.ids[size:])
            for offset, slot in enumerate(slots):
                if slot >= news:
                    writes[slot] = len(fresh_ids) + offset
            prompt.slots = path[begin:] + slots
            cached.append(path[begin:])
            fresh_ids += prompt.ids[size:]
            positions += range(size, len(prompt.ids))
            sizes.append(len(prompt.ids) - size)
        plan = _Plan(sizes, cached, device, self._model.dtype)
        where = torch.tensor(list(writes), device=device, dtype=torch.long)
        which = torch.tensor(list(writes.values()), device=device, dtype=torch.long)
        pool_keys, pool_values = self._prefixes.keys, self._prefixes.values

        def attend_parts(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out, lse = plan.attend_own(q, k, v, pool_keys[layer], pool_values[layer])
            pool_keys[layer][where], pool_values[layer][where] = k[which], v[which]
            if stem is not None:
                n, kv, per, d = q.shape
                shared, shared_lse = attend(
                    q.transpose(0, 1).reshape(1, kv, n * per, d), stem.keys[layer], stem.values[layer]
                )
                shared = shared.view(kv, n, per, d).transpose(0, 1)
                out = merge(shared, shared_lse.view(kv, n, per).transpose(0, 1), out, lse)
            return out.reshape(len(q), -1)

        hidden = self._model.forward(
            torch.tensor(fresh_ids, device=device), torch.tensor(positions, device=device), attend_parts
        )
        ends = np.cumsum(sizes) - 1
        for prompt, end in zip(prompts, ends, strict=True):
            prompt.hidden = hidden[end]


class _Plan:
    """How packed prompt tokens are padded for attention among themselves and over what is cached of their own parts."""

    def __init__(
        self, sizes: Sequence[int], cached: Sequence[Sequence[int]], device: torch.device, dtype: torch.dtype
    ) -> None:
        self._batch, self._width, self._before = len(sizes), max(sizes), max(map(len, cached))
        starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
        steps = np.arange(self._width)
        inside = steps[None] < np.array(sizes)[:, None]
        self._pad = torch.tensor(np.where(inside, starts[:, None] + steps, 0).ravel(), device=device)
        self._unpad = torch.tensor(np.flatnonzero(inside.ravel()), device=device)
        self._mask = None
        if self._before:
            slots = np.zeros((self._batch, self._before), dtype=np.int64)
            for i, path in enumerate(cached):
                slots[i, : len(path)] = path
            self._slots = torch.tensor(slots.ravel(), device=device)
            seen = np.zeros((self._batch, 1, self._width, self._before + self._width), dtype=bool)
            seen[..., : self._before] = (np.arange(self._before)[None] < np.array([len(p) for p in cached])[:, None])[
                :, None, None
            ]
            seen[..., self._before :] = np.tril(np.ones((self._width, self._width), dtype=bool))
            mask = torch.zeros(seen.shape, dtype=dtype)
            self._mask = mask.masked_fill_(torch.tensor(~seen), -torch.inf).to(device)

    def attend_own(self, q: Tensor, k: Tensor, v: Tensor, pool_k: Tensor, pool_v: Tensor) -> tuple[Tensor, Tensor]:
        """Packed [n, ...] in; out [n, kv heads, per, d] and log-sum-exp [n, kv heads, per]."""
        _, kv, per, d = q.shape
        queries = q[self._pad].view(self._batch, self._width, kv * per, d).transpose(1, 2)
        keys = self._padded(k, pool_k).transpose(1, 2)
        values = self._padded(v, pool_v).transpose(1, 2)
        # Padding is on the right, so that a causal order alone keeps it out, unless cached keys come before.
        out, lse = attend(queries, keys, values, causal=self._mask is None, mask=self._mask)
        out = out.transpose(1, 2).reshape(-1, kv, per, d)[self._unpad]
        return out, lse.transpose(1, 2).reshape(-1, kv, per)[self._unpad]

    def _padded(self, fresh: Tensor, pool: Tensor) -> Tensor:
        own = fresh[self._pad].view(self._batch, self._width, *fresh.shape[1:])
        if not self._before:
            return own
        return torch.cat([pool[self._slots].view(self._batch, self._before, *fresh.shape[1:]), own], 1)
