"""The proof that a published version is what rollouts are sampled from (records.md, invariant 5). No torch here.

Three things must agree: the hash of the adapter that was read back, the served weights (base + delta, up to rounding),
and the log-probabilities of a fixed text through the sampler's own path. Rounding to bf16 moves a single token's
log-probability by some 0.01 to 0.05, so the text is compared by what changed on each side since the base model, over
the text and token by token. A server's weights can't be read: there the changes themselves must be the trainer's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

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


SLACK = {"float32": Slack(0.002, 0.005, 0.02), "bfloat16": Slack(0.02, 0.1, 0.2)}

BAND = (0.5, 1.5)
"""How much of the adapter's change the served weights must hold."""
FELT = 1e-3
"""Trained change of a token's log-probability (root mean square) that no rounding swallows whole."""
SURE = 4.0
"""Standard errors of the share that is served which must fit into half of BAND before BAND is asked of it."""


def prove_probe(
    trainer: Sequence[float],
    rollout: Sequence[float],
    trainer_base: Sequence[float],
    rollout_base: Sequence[float],
    dtype: str,
) -> None:
    """Log-probabilities of the probe's tokens, [tokens], now and for the base model; dtype: what rollouts compute in.

    Raises PolicyFailure("publish-unproved").
    """
    slack = _slack(dtype)
    if not all(map(math.isfinite, (*trainer, *rollout))):
        raise PolicyFailure("publish-unproved", "the probe's log-probabilities are not finite")
    trained, served = _change(trainer, trainer_base), _change(rollout, rollout_base)
    size = _rms(trained)
    for what, apart, allowed in (
        ("on average", abs(mean(served) - mean(trained)), max(slack.mean, slack.share / 4 * size)),
        ("a token", _rms(_change(served, trained)), max(slack.token, slack.share * size)),
    ):
        if apart > allowed:
            raise PolicyFailure(
                "publish-unproved",
                f"probe: trainer {mean(trainer):.4f}, rollouts {mean(rollout):.4f}; "
                f"their changes differ by {apart:.4f} {what}, more than {allowed:.4f}",
            )


def prove_change(
    trainer: Sequence[float],
    rollout: Sequence[float],
    trainer_before: Sequence[float],
    rollout_before: Sequence[float],
    since: str,
) -> None:
    """For weights that can't be read: what moved the trainer's probe since an earlier version moved the server's too.

    What is loaded without effect, or not loaded at all, leaves the server's probe where it was: exactly, or up to a
    rounding that has nothing to do with the change. How precisely the share of the change can be told follows from what
    is left over. Raises PolicyFailure("publish-unproved").
    """
    trained, served = _change(trainer, trainer_before), _change(rollout, rollout_before)
    size = _rms(trained)
    if size <= FELT:
        return
    if not any(served):
        raise PolicyFailure(
            "publish-unproved",
            f"the server still gives exactly the log-probabilities of {since}: what it loaded has no effect",
        )
    held = sum(s * t for s, t in zip(served, trained, strict=True)) / sum(t * t for t in trained)
    left_over = _rms([s - held * t for s, t in zip(served, trained, strict=True)])
    if SURE * left_over / (size * math.sqrt(len(trained))) < 1.0 - BAND[0] and not BAND[0] <= held <= BAND[1]:
        raise PolicyFailure("publish-unproved", f"the server holds {held:.0%} of the change since {since}")


def prove_same_base(trainer: Sequence[float], rollout: Sequence[float], dtype: str) -> None:
    """Both sides' base models are the same one: the probe is apart by rounding alone.

    The two compute in other kernels, so that this is wider than what a change is held to. Raises
    PolicyFailure("server-unfit").
    """
    slack, apart = _slack(dtype), _change(rollout, trainer)
    if abs(mean(apart)) > 3 * slack.mean or _rms(apart) > 3 * slack.token:
        raise PolicyFailure(
            "server-unfit",
            f"the server's base model is not the trainer's: the probe has {mean(rollout):.4f} there and "
            f"{mean(trainer):.4f} here, a token apart by {_rms(apart):.4f}",
        )


def prove_weights(moved: float, asked: float) -> None:
    """moved: sum over weights of (served - base) * delta; asked: sum of delta squared. Rounding averages out of the
    ratio.
    """
    if asked == 0.0:
        return
    if not BAND[0] <= moved / asked <= BAND[1]:
        raise PolicyFailure("publish-unproved", f"the served weights hold {moved / asked:.0%} of the adapter's change")


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _change(now: Sequence[float], before: Sequence[float]) -> list[float]:
    return [a - b for a, b in zip(now, before, strict=True)]


def _rms(values: Sequence[float]) -> float:
    return math.sqrt(sum(v * v for v in values) / len(values))


def _slack(dtype: str) -> Slack:
    return SLACK.get(dtype, SLACK["bfloat16"])
