"""The fast sampling path: what prompts share is computed once and attended once, finished rows leave, new ones join.

A row's context has three parts: a stem that many prompts begin with (system text, demonstrations), its prompt's own
part (one copy for all samples of the prompt), and its tail, the tokens sampled so far. Attention over the parts is
merged exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from whale_tui.policy.attention import attend, by_head
from whale_tui.policy.deck import Deck, drawer_of
from whale_tui.policy.llama import Llama, memory_bytes
from whale_tui.policy.prefill import Prefill, Prompt
from whale_tui.policy.prefixes import Prefixes, new_tokens
from whale_tui.policy.protocol import Sampled
from whale_tui.policy.rows import Row, Stops
from whale_tui.policy.trainer import Interrupted

ADMIT_ROWS = 8
ADMIT_SHARE = 4
ADMIT_STEPS = 12
"""Few prompts at a time compute badly: rows wait until there are 8 and a fourth of those in flight, at most 12
steps.
"""

COMPACT = 0.85
"""Finished rows are taken out of the buffers once fewer than this share are alive."""


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
            out, _ = attend(by_head(q.reshape(n, -1, q.shape[-1])), by_head(k), by_head(v), causal=True)
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
        prefill = Prefill(self.model, self._prefixes, self._interrupted)
        prefill.place_on_stems(prompts, stems)
        prefill.compute(prompts)

        ordered = [row for prompt in prompts for row in prompt.rows]
        per_prompt = torch.tensor([len(p.rows) for p in prompts], device=self.model.device)
        hidden = torch.stack([p.hidden for p in prompts if p.hidden is not None])
        drawer = drawer_of(ordered, self.model)
        logits, ids = self.model.candidates(hidden, drawer.candidates())
        spread = torch.repeat_interleave(torch.arange(len(prompts), device=self.model.device), per_prompt)
        tokens, logprobs = drawer(logits[spread], ids[spread], np.zeros(len(ordered)))
        for row, token, logprob in zip(ordered, tokens, logprobs, strict=True):
            row.take(token, logprob, self._stops)
        for prompt in prompts:
            prompt.rows = [row for row in prompt.rows if not row.finished]
        self._deck.arrange([p for p in prompts if p.rows], self._prefixes)
        return [row for row in ordered if row.finished]

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
