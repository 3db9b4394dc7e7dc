"""The fast sampling path: what prompts share is computed once and attended once, finished rows leave, new ones join.

A row's context has three parts: a stem that many prompts begin with (system text, demonstrations), its prompt's own
part (one copy for all samples of the prompt), and its tail, the tokens sampled so far. Attention over the parts is
merged exactly.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from whale_tui.policy.attention import attend, merge
from whale_tui.policy.draw import Drawer
from whale_tui.policy.llama import Llama
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

    `submit` queues rows; `advance` samples until at least one is finished; `load` serves another version; `probe`
    gives the log-probabilities of a text. All that happens follows from the sequence of these calls.
    """

    def __init__(self, folder: Path, device: torch.device, dtype: torch.dtype, stops: Stops, max_rows: int) -> None:
        self.model = Llama(folder, device, dtype)
        self.parameters = self.model.parameters
        self.linears = self.model.linears()
        self._stops = stops
        self._max_rows = max_rows
        memory = _memory(device)
        m = self.model
        self._prefixes = Prefixes(m.depth, m.kv_heads, m.head_dim, device, dtype, memory // 8)
        self._budget = memory // 4 // self._prefixes.token_bytes
        self.clear()

    def load(self, deltas: Mapping[str, Callable[[], Tensor]]) -> None:
        """Serve base + delta."""
        self.clear()
        self.model.load(deltas)

    def served(self, module: str) -> Tensor:
        return self.model.served(module)

    def base(self, module: str) -> Tensor:
        return self.model.base(module)

    def clear(self) -> None:
        """Forget rows and prefixes."""
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

    Rows are sorted by stem, then by prompt. Per layer: own keys and values [prompts, kv heads, own, d], padded on the
    right; tails [rows, kv heads, tail, d], filled from the left, each to its row's own length.
    """

    def __init__(self, model: Llama) -> None:
        self._model = model
        self.rows: list[Row] = []
        self.stems: list[Stem] = []
        self._prompts: list[Prompt] = []
        self._own: list[tuple[Tensor, Tensor]] = []
        self._tails: list[tuple[Tensor, Tensor]] = []
        self._of_row: list[Prompt] = []

    @property
    def alive(self) -> int:
        return sum(not row.finished for row in self.rows)

    @property
    def width(self) -> int:
        """Tokens that the longest row in flight may come to."""
        return max((len(r.request.prompt_ids) + r.request.max_tokens for r in self.rows if not r.finished), default=0)

    # ---------------------------------------------------------------------------------------------------- arrangement

    def arrange(self, joining: list[Prompt], prefixes: Prefixes) -> None:
        """Take finished rows out and let the rows of new prompts join: all buffers are laid out anew."""
        old_rows = {id(row): i for i, row in enumerate(self.rows)}
        old_prompts = {id(prompt): i for i, prompt in enumerate(self._prompts)}
        for prompt in self._prompts:
            prompt.rows = [row for row in prompt.rows if not row.finished]
        prompts = [p for p in self._prompts if p.rows] + joining
        self.stems = list({id(p.stem): p.stem for p in prompts if p.stem is not None}.values())
        rank = {id(stem): i for i, stem in enumerate(self.stems)}
        prompts.sort(key=lambda p: rank.get(id(p.stem), len(rank)))  # stable: otherwise as they came
        self._prompts = prompts
        self.rows = [row for prompt in prompts for row in prompt.rows]
        self._of_row = [prompt for prompt in prompts for _ in prompt.rows]
        if not self.rows:
            self._own, self._tails = [], []
            return
        self._lay_out_own(old_prompts, prefixes)
        self._lay_out_tails(old_rows)
        self._index()

    def _lay_out_own(self, old: dict[int, int], prefixes: Prefixes) -> None:
        model, device = self._model, self._model.device
        lengths = [len(p.ids) - p.begin for p in self._prompts]
        width = max(lengths)
        kept = [(i, old[id(p)]) for i, p in enumerate(self._prompts) if id(p) in old]
        fresh = [(i, p) for i, p in enumerate(self._prompts) if id(p) not in old]
        kept_to = torch.tensor([i for i, _ in kept], device=device)
        kept_from = torch.tensor([j for _, j in kept], device=device)
        fresh_to = torch.tensor([i for i, _ in fresh], device=device)
        slots = torch.zeros(len(fresh), width, dtype=torch.long)
        for i, (_, prompt) in enumerate(fresh):
            assert prompt.slots is not None
            slots[i, : len(prompt.slots)] = torch.tensor(prompt.slots)
        slots = slots.to(device)
        shape = (len(self._prompts), model.kv_heads, width, model.head_dim)

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
        self._own_lengths = lengths

    def _lay_out_tails(self, old: dict[int, int]) -> None:
        model, device = self._model, self._model.device
        longest = max(len(row.ids) for row in self.rows)
        width = -(-longest // TAIL) * TAIL
        kept = [(i, old[id(row)]) for i, row in enumerate(self.rows) if id(row) in old]
        to = torch.tensor([i for i, _ in kept], device=device)
        source = torch.tensor([j for _, j in kept], device=device)
        shape = (len(self.rows), model.kv_heads, width, model.head_dim)

        def lay_out(before: Tensor | None) -> Tensor:
            made = torch.zeros(shape, device=device, dtype=model.dtype)
            if kept and before is not None:
                some = min(width, before.shape[2])
                made[to, :, :some] = before[source, :, :some]
            return made

        tails: Sequence[tuple[Tensor | None, Tensor | None]] = self._tails or [(None, None)] * model.depth
        self._tails = [(lay_out(k), lay_out(v)) for k, v in tails]

    def _index(self) -> None:
        """What a step needs to know of the arrangement: which rows stand on which stem, share which prompt, are how
        long.
        """
        device = self._model.device
        number = {id(p): i for i, p in enumerate(self._prompts)}
        of_row = [number[id(p)] for p in self._of_row]
        most = max(len(p.rows) for p in self._prompts)
        place = torch.zeros(len(self._prompts), most, dtype=torch.long)
        back, seen = [], [0] * len(self._prompts)
        for row, prompt in enumerate(of_row):
            place[prompt, seen[prompt]] = row
            back.append(prompt * most + seen[prompt])
            seen[prompt] += 1
        self._most = most
        self._place = place.flatten().to(device)
        self._back = torch.tensor(back, device=device)
        lengths = torch.tensor(self._own_lengths, device=device)[torch.tensor(of_row, device=device)]
        self._own_seen = torch.arange(max(self._own_lengths), device=device)[None] < lengths[:, None]
        self._slices: list[tuple[Stem, slice]] = []
        start = 0
        for stem in self.stems:
            size = sum(len(p.rows) for p in self._prompts if p.stem is stem)
            self._slices.append((stem, slice(start, start + size)))
            start += size
        self._stemless = len(self.rows) - start
        self._tokens = torch.tensor([row.ids[-1] for row in self.rows], device=device)
        self.drawn = np.array([len(row.ids) for row in self.rows])
        self._filled = torch.tensor(self.drawn - 1, device=device)
        self._positions = torch.tensor([len(r.request.prompt_ids) + len(r.ids) - 1 for r in self.rows], device=device)
        self._all = torch.arange(len(self.rows), device=device)
        self.drawer = _drawer(self.rows, self._model)

    def next_tokens(self, tokens: list[int]) -> None:
        """The tokens that were just drawn are the next step's input."""
        self._tokens = torch.tensor(tokens, device=self._model.device)
        self._positions = self._positions + 1
        self._filled = self._filled + 1
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
                columns += range(known, size)
        if not slots:
            return
        device = self._model.device
        r, c, s = (torch.tensor(values, device=device) for values in (rows, columns, slots))
        for layer, (keys, values) in enumerate(self._tails):
            prefixes.keys[layer][s] = keys[r, :, c]
            prefixes.values[layer][s] = values[r, :, c]

    # -------------------------------------------------------------------------------------------------------- forward

    def forward(self) -> Tensor:
        """The model's output for each row's newest token: [rows, hidden]."""
        used = int(self._filled.max()) + 1
        if used > self._tails[0][0].shape[2]:
            grow = lambda t: torch.cat([t, t.new_zeros(*t.shape[:2], TAIL, t.shape[3])], 2)  # noqa: E731
            self._tails = [(grow(k), grow(v)) for k, v in self._tails]
        tail_seen = torch.arange(used, device=self._model.device)[None] <= self._filled[:, None]
        seen = torch.cat([self._own_seen, tail_seen], 1)
        self._mask = torch.zeros(seen.shape, device=seen.device).masked_fill_(~seen, -torch.inf)[:, None, None]
        self._used = used
        return self._model.forward(self._tokens, self._positions, self._attend)

    def _attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        tail_k, tail_v = self._tails[layer]
        tail_k[self._all, :, self._filled] = k
        tail_v[self._all, :, self._filled] = v
        out, lse = self._attend_own(q, *self._own[layer], tail_k[:, :, : self._used], tail_v[:, :, : self._used])
        if self._slices:
            shared, shared_lse = self._attend_stems(layer, q)
            out = merge(shared, shared_lse, out, lse)
        return out.reshape(len(q), -1)

    def _attend_own(self, q: Tensor, k: Tensor, v: Tensor, tail_k: Tensor, tail_v: Tensor) -> tuple[Tensor, Tensor]:
        """Prompt's own part and tail in one softmax. Plain products beat fused attention at a handful of queries a
        key.
        """
        _, kv, per, d = q.shape
        prompts, width = k.shape[0], k.shape[2]
        shared = self._most > 1
        gathered = q[self._place].view(prompts, self._most, kv, per, d).transpose(1, 2) if shared else q
        gathered = gathered.reshape(prompts, kv, self._most * per, d)
        own = torch.matmul(gathered, k.transpose(-1, -2))
        if shared:
            own = own.view(prompts, kv, self._most, per, width).transpose(1, 2).reshape(-1, kv, per, width)[self._back]
        tail = torch.matmul(q, tail_k.transpose(-1, -2))
        scores = torch.cat([own, tail], -1).float() + self._mask
        lse = scores.logsumexp(-1)
        weights = (scores - lse[..., None]).exp_().to(q.dtype)
        own_weights = weights[..., :width]
        if shared:
            own_weights = own_weights[self._place].view(prompts, self._most, kv, per, width).transpose(1, 2)
        out = torch.matmul(own_weights.reshape(prompts, kv, self._most * per, width), v)
        if shared:
            out = out.view(prompts, kv, self._most, per, d).transpose(1, 2).reshape(-1, kv, per, d)[self._back]
        return out + torch.matmul(weights[..., width:], tail_v), lse

    def _attend_stems(self, layer: int, q: Tensor) -> tuple[Tensor, Tensor]:
        """Each stem once for all its rows. Rows without a stem get a weight of zero."""
        _, kv, per, d = q.shape
        outs, lses = [], []
        for stem, rows in self._slices:
            n = rows.stop - rows.start
            out, lse = attend(q[rows].transpose(0, 1).reshape(1, kv, n * per, d), stem.keys[layer], stem.values[layer])
            outs.append(out.view(kv, n, per, d).transpose(0, 1))
            lses.append(lse.reshape(kv, n, per).transpose(0, 1))
        if self._stemless:
            outs.append(q.new_zeros(self._stemless, kv, per, d))
            lses.append(torch.full((self._stemless, kv, per), -torch.inf, device=q.device))
        return (outs[0], lses[0]) if len(outs) == 1 else (torch.cat(outs), torch.cat(lses))


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


def _memory(device: torch.device) -> int:
    """Bytes of memory, of which keys and values may take a part."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
