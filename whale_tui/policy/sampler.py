"""The fast sampling path: what prompts share is computed once and attended once, finished rows leave, new ones join.

A row's context has three parts: a stem that many prompts begin with (system text, demonstrations), its prompt's own
part (one copy for all samples of the prompt), and its tail, the tokens sampled so far. Attention over the parts is
merged exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from whale_tui.policy.attention import attend, merge
from whale_tui.policy.draw import Drawer
from whale_tui.policy.llama import Llama, memory_bytes
from whale_tui.policy.prefixes import Prefixes, choose_stems, new_tokens
from whale_tui.policy.protocol import Sampled
from whale_tui.policy.rows import Row, Stops
from whale_tui.policy.trainer import Interrupted

CHUNK = 2048
"""Prompt tokens computed in one forward."""

ADMIT_ROWS = 8
ADMIT_SHARE = 4
ADMIT_STEPS = 12
"""Few prompts at a time compute badly: rows wait until there are 8 and a fourth of those in flight, at most 12
steps.
"""

COMPACT = 0.85
"""Finished rows are taken out of the buffers once fewer than this share are alive."""

TAIL = 32
"""Tails grow by this many tokens."""


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


class FastSampler:
    """Samples rows under one version of the weights.

    `submit` queues rows; `advance` samples until at least one is finished; `load` and `replace` serve another version,
    an adapter or all weights (`merges` False); `probe` gives the log-probabilities of a text. All that happens follows
    from the sequence of these calls.
    """

    def __init__(
        self,
        folder: Path,
        device: torch.device,
        dtype: torch.dtype,
        stops: Stops,
        max_rows: int,
        *,
        merges: bool = True,
    ) -> None:
        self.model = Llama(folder, device, dtype, merges=merges)
        self.parameters = self.model.parameters
        self.linears = self.model.linears()
        self._stops = stops
        self._max_rows = max_rows
        memory = memory_bytes(device)
        m = self.model
        self._prefixes = Prefixes(m.depth, m.kv_heads, m.head_dim, device, dtype, memory // 16)
        self._budget = memory // 8 // self._prefixes.token_bytes
        self.clear()

    def load(self, deltas: Mapping[str, Callable[[], Tensor]]) -> None:
        """Serve base + delta."""
        self.clear()
        self.model.load(deltas)

    def replace(self, folder: Path) -> None:
        """Serve the weights in a folder's files."""
        self.clear()
        self.model.replace(folder)

    def weights(self) -> dict[str, Tensor]:
        return self.model.weights()

    def served(self, module: str) -> Tensor:
        return self.model.served(module)

    def base(self, module: str) -> Tensor:
        return self.model.base(module)

    def clear(self) -> None:
        """Forget rows and prefixes."""
        self._interrupted: Callable[[], bool] = lambda: False
        self._waiting: list[Row] = []
        self._held = 0
        self._deck = Deck(self.model)
        self._prefixes.clear()

    def submit(self, rows: Sequence[Row]) -> None:
        self._waiting += rows

    @torch.inference_mode()
    def advance(self, interrupted: Callable[[], bool]) -> list[tuple[int, Sampled]]:
        """Finished rows, in the order of their requests; none where nothing is left to sample."""
        finished: list[Row] = []
        self._interrupted = interrupted
        while not finished and (self._waiting or self._deck.alive):
            if interrupted():
                raise Interrupted
            finished = self._admit(self._due()) if self._due() else self._step()
        finished.sort(key=lambda row: (row.request.order, row.ticket))
        return [(row.ticket, row.sampled()) for row in finished]

    @torch.inference_mode()
    def probe(self, ids: Sequence[int]) -> Tensor:
        """Log-probability of each token of a sequence after its first: [len(ids) - 1] fp32."""
        tokens = torch.tensor(list(ids), device=self.model.device)

        def attend_all(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            n = len(q)
            out, _ = attend(_by_head(q.reshape(n, -1, q.shape[-1])), _by_head(k), _by_head(v), causal=True)
            return out[0].transpose(0, 1).reshape(n, -1)

        hidden = self.model.forward(tokens, torch.arange(len(tokens), device=tokens.device), attend_all)
        return self.model.logprobs(hidden[:-1], tokens[1:]).cpu()

    # ------------------------------------------------------------------------------------------------------ admission

    def _due(self) -> int:
        """How many waiting rows join now. A rule of counts, so that a batch is the same whenever it is repeated."""
        if not self._waiting:
            return 0
        alive = self._deck.alive
        ready, longest = 0, self._deck.width
        for row in self._waiting[: self._max_rows - alive]:
            longest = max(longest, len(row.request.prompt_ids) + row.request.max_tokens)
            if (alive + ready + 1) * longest > self._budget and alive + ready:
                break
            ready += 1
        if alive == 0 or ready >= max(ADMIT_ROWS, alive // ADMIT_SHARE) or (ready and self._held >= ADMIT_STEPS):
            return ready
        return 0

    def _admit(self, count: int) -> list[Row]:
        """Compute the prompts of the oldest waiting rows, draw their first tokens, and let them join the deck."""
        rows, self._waiting = self._waiting[:count], self._waiting[count:]
        self._held = 0
        distinct: dict[tuple[int, ...], Prompt] = {}
        for row in rows:
            distinct.setdefault(tuple(row.request.prompt_ids), Prompt(row.request.prompt_ids, [])).rows.append(row)
        prompts = [distinct[key] for key in sorted(distinct)]
        stems = self._deck.stems
        if not self._prefixes.room(new_tokens([p.ids for p in prompts])):
            self._prefixes.clear()
            stems = []  # their paths are gone with the rest
        self._place_on_stems(prompts, stems)
        self._compute(prompts)

        ordered = [row for prompt in prompts for row in prompt.rows]
        per_prompt = torch.tensor([len(p.rows) for p in prompts], device=self.model.device)
        hidden = torch.stack([p.hidden for p in prompts if p.hidden is not None])
        drawer = _drawer(ordered, self.model)
        logits, ids = self.model.candidates(hidden, drawer.candidates())
        spread = torch.repeat_interleave(torch.arange(len(prompts), device=self.model.device), per_prompt)
        tokens, logprobs = drawer(logits[spread], ids[spread], np.zeros(len(ordered)))
        for row, token, logprob in zip(ordered, tokens, logprobs, strict=True):
            row.take(token, logprob, self._stops)
        for prompt in prompts:
            prompt.rows = [row for row in prompt.rows if not row.finished]
        self._deck.arrange([p for p in prompts if p.rows], self._prefixes)
        return [row for row in ordered if row.finished]

    def _place_on_stems(self, prompts: list[Prompt], stems: list[Stem]) -> None:
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
            self._compute([Prompt(ids, [])])
        slots = torch.tensor(self._prefixes.find(ids), device=self.model.device)
        gather = lambda pool: _by_head(pool[slots]).contiguous()  # noqa: E731
        return Stem(ids, [gather(k) for k in self._prefixes.keys], [gather(v) for v in self._prefixes.values])

    def _compute(self, prompts: Sequence[Prompt]) -> None:
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
        device = self.model.device
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
        plan = _PrefillPlan(sizes, cached, device, self.model.dtype)
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

        hidden = self.model.forward(
            torch.tensor(fresh_ids, device=device), torch.tensor(positions, device=device), attend_parts
        )
        ends = np.cumsum(sizes) - 1
        for prompt, end in zip(prompts, ends, strict=True):
            prompt.hidden = hidden[end]

    # --------------------------------------------------------------------------------------------------------- decode

    def _step(self) -> list[Row]:
        """One token for every row in flight."""
        deck = self._deck
        self._held += bool(self._waiting)
        hidden = deck.forward()
        logits, ids = self.model.candidates(hidden, deck.drawer.candidates())
        tokens, logprobs = deck.drawer(logits, ids, deck.drawn)
        finished: list[Row] = []
        for row, token, logprob in zip(deck.rows, tokens, logprobs, strict=True):
            if not row.finished:
                row.take(token, logprob, self._stops)
                if row.finished:
                    finished.append(row)
        deck.next_tokens(tokens)
        if finished:
            deck.keep_tails(finished, self._prefixes)
            if deck.alive < COMPACT * len(deck.rows):
                deck.arrange([], self._prefixes)
        return finished


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
        self.drawer = _drawer(self.rows, self._model)

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


class _PrefillPlan:
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


def _by_head(x: Tensor) -> Tensor:
    """[n, heads, d] -> [1, heads, n, d]."""
    return x.transpose(0, 1)[None]


def _drawer(rows: Sequence[Row], model: Llama) -> Drawer:
    return Drawer([r.request.sampling for r in rows], [r.request.seed for r in rows], model.vocabulary, model.device)
