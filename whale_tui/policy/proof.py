"""The proof that a published version is what rollouts are sampled from (records.md, invariant 5).

Three things must agree: the hash of the adapter that was read back, the served weights (base + delta, up to rounding),
and the log-probabilities of a fixed text through the sampler's own path. Rounding to bf16 moves a single token's
log-probability by some 0.01 to 0.05, so the text is compared by what changed on each side since the base model, over
the text and token by token.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from whale_tui.policy.protocol import PolicyFailure

TEXT = (
    "Question: Which river runs through the town where the clockmaker Ilse Varn was born? Answer: the Tamber.\n"
    "A baker fills 12 trays with 18 rolls each and sells 150 of them; 12 * 18 - 150 = 66 rolls are left.\n"
    "<answer>Port Ellery</answer> The result is \\boxed{42}."
)


class Slack(NamedTuple):
    """How far the two sides' changes may be apart: on the mean over the text, and a token (root mean square)."""

    mean: float
    token: float
    share: float
    """Of the size of the trained change, where that is more."""


SLACK = {torch.float32: Slack(0.002, 0.005, 0.02), torch.bfloat16: Slack(0.02, 0.1, 0.2)}

BAND = (0.5, 1.5)
"""How much of the adapter's change the served weights must hold."""


def prove_probe(
    trainer: Tensor, rollout: Tensor, trainer_base: Tensor, rollout_base: Tensor, dtype: torch.dtype
) -> None:
    """Log-probabilities of the probe's tokens, [tokens], now and for the base model; dtype: what rollouts compute in.

    Raises PolicyFailure("publish-unproved").
    """
    slack = SLACK.get(dtype, SLACK[torch.bfloat16])
    trained, served = trainer - trainer_base, rollout - rollout_base
    if not bool(torch.isfinite(rollout).all() and torch.isfinite(trainer).all()):
        raise PolicyFailure("publish-unproved", "the probe's log-probabilities are not finite")
    size = _rms(trained)
    for what, apart, allowed in (
        ("on average", abs(float(served.mean() - trained.mean())), max(slack.mean, slack.share / 4 * size)),
        ("a token", _rms(served - trained), max(slack.token, slack.share * size)),
    ):
        if apart > allowed:
            raise PolicyFailure(
                "publish-unproved",
                f"probe: trainer {float(trainer.mean()):.4f}, rollouts {float(rollout.mean()):.4f}; "
                f"their changes differ by {apart:.4f} {what}, more than {allowed:.4f}",
            )


def _rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt())


def prove_weights(moved: float, asked: float) -> None:
    """moved: sum over weights of (served - base) * delta; asked: sum of delta squared. Rounding averages out of the
    ratio.
    """
    if asked == 0.0:
        return
    if not BAND[0] <= moved / asked <= BAND[1]:
        raise PolicyFailure("publish-unproved", f"the served weights hold {moved / asked:.0%} of the adapter's change")
