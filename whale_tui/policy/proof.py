"""The proof that a published version is what rollouts are sampled from (records.md, invariant 5).

Three things must agree: the hash of the adapter that was read back, the served weights (base + delta, up to rounding), and the
log-probabilities of a fixed text through the sampler's own path. bf16 rounding moves a single token's log-probability by some
0.01 to 0.05, so the mean over the text is compared, relative to what both sides gave for the base model; and wherever training
moved the text by more than rounding does, the rollout side must have moved the same way.
"""

from __future__ import annotations

import torch
from torch import Tensor

from whale_tui.policy.protocol import PolicyFailure

TEXT = (
    "Question: Which river runs through the town where the clockmaker Ilse Varn was born? Answer: the Tamber.\n"
    "A baker fills 12 trays with 18 rolls each and sells 150 of them; 12 * 18 - 150 = 66 rolls are left.\n"
    "<answer>Port Ellery</answer> The result is \\boxed{42}."
)

TOLERANCE = 0.02
"""Largest difference between the mean log-probabilities of both sides, beyond the difference that the base model shows."""

VISIBLE = 0.1
"""Root mean square change of a token's log-probability from which on its direction can be told from rounding."""

BAND = (0.5, 1.5)
"""How much of the trained change the rollout side must show, where it can be seen at all."""


def prove_probe(trainer: Tensor, rollout: Tensor, trainer_base: Tensor, rollout_base: Tensor) -> None:
    """All four: log-probabilities of the probe's tokens, [tokens]. Raises PolicyFailure("publish-unproved")."""
    trained, served = trainer - trainer_base, rollout - rollout_base
    if not bool(torch.isfinite(rollout).all() and torch.isfinite(trainer).all()):
        raise PolicyFailure("publish-unproved", "the probe's log-probabilities are not finite")
    size = float(trained.square().mean().sqrt())
    allowed = max(TOLERANCE, 0.1 * size)
    apart = abs(float(served.mean() - trained.mean()))
    if apart > allowed:
        raise PolicyFailure(
            "publish-unproved",
            f"probe: trainer {float(trainer.mean()):.4f}, rollouts {float(rollout.mean()):.4f}; "
            f"their changes differ by {apart:.4f}, more than {allowed:.4f}",
        )
    if size >= VISIBLE:
        share = float(served @ trained / (trained @ trained))
        if not BAND[0] <= share <= BAND[1]:
            raise PolicyFailure(
                "publish-unproved", f"rollouts show {share:.0%} of the change that training made to the probe"
            )


def prove_weights(moved: float, asked: float) -> None:
    """moved: sum over weights of (served - base) * delta; asked: sum of delta squared. Rounding averages out of the ratio."""
    if asked == 0.0:
        return
    if not BAND[0] <= moved / asked <= BAND[1]:
        raise PolicyFailure("publish-unproved", f"the served weights hold {moved / asked:.0%} of the adapter's change")
