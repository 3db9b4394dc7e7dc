"""The rows in flight: how they are arranged, and one step of all of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from whale_tui.policy.draw import Drawer
from whale_tui.policy.llama import Llama
from whale_tui.policy.prefill import Prompt, Stem
from whale_tui.policy.prefixes import Prefixes
from whale_tui.policy.rows import Row

TAIL = 32
"""Tails grow by this many tokens."""


class Deck:
    """The rows in flight and their buffers.

    Rows stand in blocks of equal size, sorted by stem; the rows of a block are samples of one prompt and share a copy
    of its own keys and values. Where a prompt's rows do not fill its last block, finished copies of them do: a regular
    grid costs less than gathering. Per layer: own [blocks, kv heads, own, d], padded on the right; tails
    [rows, kv heads, tail, d], padded on the left, so that a step writes one column of them.
    """

    def __init__(self, model: Llama) -> None:
        self._model = model
        self.rows: list[Row] = []
        self.stems: list[Stem] = []
        self._blocks: list[Prompt] = []
        self._own: list[tuple[Tensor, Tensor]] = []
        self._tails: list[tuple[Tensor, Tensor]] = []
        self._column = 0

    @property
    def alive(self) -> int:
        return sum(not row.finished for row in self.rows)

    @property
    def width(self) -> int:
        """Tokens that the longest row in flight may come to."""
        return max((len(r.request.prompt_ids) + r.request.max_tokens for r in self.rows if not r.finished), default=0)

    # --- arrangement

    def arrange(self, joining: list[Prompt], prefixes: Prefixes) -> None:
        """Take finished rows out and let the rows of new prompts join: all buffers are laid out anew."""
        old_rows = {id(row): i for i, row in enumerate(self.rows)}
        old_blocks = {id(prompt): i for i, prompt in enumerate(self._blocks)}
        prompts = list({id(p): p for p in self._blocks}.values())
        for prompt in prompts:
            prompt.rows = [row for row in prompt.rows if not row.finished]
        prompts = [p for p in prompts if p.rows] + joining
        self.stems = list({id(p.stem): p.stem for p in prompts if p.stem is not None}.values())
        rank = {id(stem): i for i, stem in enumerate(self.stems)}
        prompts.sort(key=lambda p: rank.get(id(p.stem), len(rank)))  # stable: otherwise as they came
        self._size = _block_size([len(p.rows) for p in prompts])
        self._blocks, self.rows = [], []
        for prompt in prompts:
            for start in range(0, len(prompt.rows), self._size):
                rows = prompt.rows[start : start + self._size]
                filler = Row(-1, rows[0].request, list(rows[0].ids), list(rows[0].logprobs), "length")
                self.rows += rows + [filler] * (self._size - len(rows))
                self._blocks.append(prompt)
        if not self.rows:
            self._own, self._tails, self._column = [], [], 0
            return
        self._lay_out_own(old_blocks, prefixes)
        self._lay_out_tails(old_rows)
        self._index()

    def _lay_out_own(self, old: dict[int, int], prefixes: Prefixes) -> None:
        model, device = self._model, self._model.device
        width = max(len(p.ids) - p.begin for p in self._blocks)
        kept = [(i, old[id(p)]) for i, p in enumerate(self._blocks) if id(p) in old]
        fresh = [(i, p) for i, p in enumerate(self._blocks) if id(p) not in old]
        kept_to, kept_from = _pairs(kept, device)
        fresh_to = torch.tensor([i for i, _ in fresh], device=device)
        slots = torch.zeros(len(fresh), width, dtype=torch.long)
        for i, (_, prompt) in enumerate(fresh):
            assert prompt.slots is not None
            slots[i, : len(prompt.slots)] = torch.tensor(prompt.slots)
        slots = slots.to(device)
        shape = (len(self._blocks), model.kv_heads, width, model.head_dim)

        def lay_out(before: Tensor | None, pool: Tensor) -> Tensor:
            made = torch.zeros(shape, device=device, dtype=model.dtype)
            if kept and before is not None:
                some = min(width, before.shape[2])
                made[kept_to, :, :some] = before[kept_from, :, :some]
            if fresh:
                made[fresh_to] = pool[slots].transpose(1, 2)
            return made

        own: Sequence[tuple[Tensor | None, Tensor | None]] = self._own or [(None, None)] * model.depth
        self._own = [
            (lay_out(k, prefixes.keys[layer]), lay_out(v, prefixes.values[layer])) for layer, (k, v) in enumerate(own)
        ]

    def _lay_out_tails(self, old: dict[int, int]) -> None:
        model, device = self._model, self._model.device
        column = max(len(row.ids) for row in self.rows) - 1
        width = (column // TAIL + 1) * TAIL
        to, source = _pairs([(i, old[id(row)]) for i, row in enumerate(self.rows) if id(row) in old], device)
        shape = (len(self.rows), model.kv_heads, width, model.head_dim)
        some = min(column, self._column)

        def lay_out(before: Tensor | None) -> Tensor:
            made = torch.zeros(shape, device=device, dtype=model.dtype)
            if some and before is not None:
                made[to, :, column - some : column] = before[source, :, self._column - some : self._column]
            return made

        tails: Sequence[tuple[Tensor | None, Tensor | None]] = self._tails or [(None, None)] * model.depth
        self._tails = [(lay_out(k), lay_out(v)) for k, v in tails]
        self._column = column

    def _index(self) -> None:
        """What a step needs to know of the arrangement: which rows stand on which stem, and what is padding."""
        device = self._model.device
        self._slices: list[tuple[Stem, slice]] = []
        start = 0
        for stem in self.stems:
            size = self._size * sum(p.stem is stem for p in self._blocks)
            self._slices.append((stem, slice(start, start + size)))
            start += size
        own = self._own[0][0].shape[2]
        lengths = np.repeat([len(p.ids) - p.begin for p in self._blocks], self._size)
        begins = self._column - np.array([len(row.ids) - 1 for row in self.rows])
        unseen = np.concatenate(
            [np.arange(own)[None] >= lengths[:, None], np.arange(self._column)[None] < begins[:, None]], 1
        )
        padding = torch.zeros(unseen.shape).masked_fill_(torch.tensor(unseen), -torch.inf)
        self._padding = padding.to(device)[:, None, None]
        self._tokens = torch.tensor([row.ids[-1] for row in self.rows], device=device)
        self._positions = torch.tensor([len(r.request.prompt_ids) + len(r.ids) - 1 for r in self.rows], device=device)
        self.drawn = np.array([len(row.ids) for row in self.rows])
        self.drawer = drawer_of(self.rows, self._model)

    def next_tokens(self, tokens: list[int]) -> None:
        """The tokens that were just drawn are the next step's input."""
        self._tokens = torch.tensor(tokens, device=self._model.device)
        self._positions = self._positions + 1
        self._column += 1
        self.drawn = self.drawn + 1

    def keep_tails(self, finished: Sequence[Row], prefixes: Prefixes) -> None:
        """Let the trie know what finished rows computed, for a next turn that begins with it."""
        number = {id(row): i for i, row in enumerate(self.rows)}
        rows: list[int] = []
        columns: list[int] = []
        slots: list[int] = []
        for row in finished:
            start, size = len(row.request.prompt_ids), len(row.ids) - 1  # the last token drawn was never an input
            path = prefixes.find(row.request.prompt_ids + row.ids[:-1])
            known = len(path) - start
            if known >= 0 and prefixes.room(size):
                slots += prefixes.add(path, row.ids[known:-1])
                rows += [number[id(row)]] * (size - known)
                columns += range(self._column - size + known, self._column)
        if not slots:
            return
        r, c, s = (torch.tensor(values, device=self._model.device) for values in (rows, columns, slots))
        for layer, (keys, values) in enumerate(self._tails):
            prefixes.keys[layer][s] = keys[r, :, c]
            prefixes.values[layer][s] = values[r, :, c]

    # --- forward

    def forward(self) -> Tensor:
        """The model's output for each row's newest token: [rows, hidden]."""
        model = self._model
        used = self._column + 1
        if used > self._tails[0][0].shape[2]:
            grow = lambda t: torch.cat([t, t.new_zeros(*t.shape[:2], TAIL, t.shape[3])], 2)  # noqa: E731
            self._tails = [(grow(k), grow(v)) for k, v in self._tails]
        self._used = used
        self._stem_width = max((len(stem.ids) for stem in self.stems), default=0)
        width = self._stem_width + self._own[0][0].shape[2] + used
        # One buffer of scores for all layers: where a row has no stem, or a shorter one, it stays at minus infinity.
        self._scores = torch.full(
            (len(self.rows), model.kv_heads, model.heads // model.kv_heads, width), -torch.inf, device=model.device
        )
        return model.forward(self._tokens, self._positions, self._attend)

    def _attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """One softmax over stem, own part and tail. Plain products beat fused attention at so few queries a key."""
        n, kv, per, d = q.shape
        size, scores, stem_width = self._size, self._scores, self._stem_width
        own_k, own_v = self._own[layer]
        blocks, _, own_width, _ = own_k.shape
        tail_k, tail_v = (t[:, :, : self._used] for t in self._tails[layer])
        tail_k[:, :, -1], tail_v[:, :, -1] = k, v
        own_end = stem_width + own_width

        for stem, rows in self._slices:
            queries = q[rows].transpose(0, 1).reshape(kv, -1, d)
            product = torch.bmm(queries, stem.keys[layer][0].transpose(1, 2))
            scores[rows, ..., : len(stem.ids)] = product.view(kv, -1, per, len(stem.ids)).transpose(0, 1)
        queries = q.view(blocks, size, kv, per, d).transpose(1, 2).reshape(blocks, kv, size * per, d)
        product = torch.matmul(queries, own_k.transpose(2, 3)).view(blocks, kv, size, per, own_width)
        scores.view(blocks, size, kv, per, -1)[..., stem_width:own_end] = product.transpose(1, 2)
        scores[..., own_end:] = torch.matmul(q, tail_k.transpose(2, 3))
        scores[..., stem_width : stem_width + self._padding.shape[-1]] += self._padding
        weights = scores.softmax(-1).to(q.dtype)

        out = torch.matmul(weights[..., own_end:], tail_v)
        own = weights[..., stem_width:own_end].reshape(blocks, size, kv, per, own_width).transpose(1, 2)
        product = torch.matmul(own.reshape(blocks, kv, size * per, own_width), own_v).view(blocks, kv, size, per, d)
        out.view(blocks, size, kv, per, d).add_(product.transpose(1, 2))
        for stem, rows in self._slices:
            shared = weights[rows, ..., : len(stem.ids)].transpose(0, 1).reshape(kv, -1, len(stem.ids))
            out[rows] += torch.bmm(shared, stem.values[layer][0]).view(kv, -1, per, d).transpose(0, 1)
        return out.reshape(n, -1)


def _block_size(rows: Sequence[int]) -> int:
    """The largest size of blocks that pads the rows of all prompts by no more than a tenth."""
    alive = sum(rows)
    fits = [size for size in (16, 8, 4, 2) if sum(-(-n // size) * size for n in rows) <= 1.1 * alive]
    return fits[0] if fits else 1


def _pairs(pairs: Sequence[tuple[int, int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Two index tensors out of pairs."""
    first, second = (torch.tensor([pair[i] for pair in pairs], dtype=torch.long, device=device) for i in (0, 1))
    return first, second


def drawer_of(rows: Sequence[Row], model: Llama) -> Drawer:
    return Drawer([r.request.sampling for r in rows], [r.request.seed for r in rows], model.vocabulary, model.device)
