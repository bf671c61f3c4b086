"""Estimators of a Kullback-Leibler divergence from samples of its first argument (joschu.net/blog/kl-approx.html).

With samples of p and d = log p - log q, each is an estimate of KL(p || q): k1 = d (unbiased, may be negative),
k2 = d^2 / 2 (biased, low variance), k3 = exp(-d) - 1 + d (unbiased, never negative).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def k1(difference: torch.Tensor) -> torch.Tensor:
    """d."""
    return difference


def k2(difference: torch.Tensor) -> torch.Tensor:
    """d^2 / 2."""
    return difference.square() / 2


def k3(difference: torch.Tensor) -> torch.Tensor:
    """exp(-d) - 1 + d."""
    return (-difference).expm1() + difference


def absolute(difference: torch.Tensor) -> torch.Tensor:
    """|d|: no divergence, but the size of the disagreement."""
    return difference.abs()


ESTIMATORS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"k1": k1, "k2": k2, "k3": k3, "abs": absolute}


def kl(logprobs: torch.Tensor, other: torch.Tensor, estimator: str = "k3", clamp: float | None = None) -> torch.Tensor:
    """Per-token estimate of KL(p || q), any shape: `logprobs` of the p that sampled, `other` of q.

    Not clamped by default (as miles): clamped at 10, as verl and SkyRL do, a divergence of 20000 reads 10 and its
    gradient is 0, just where it is needed most. `clamp` c cuts the result to [-c, c] for those who want that.
    """
    value = ESTIMATORS[estimator](logprobs - other)
    return value if clamp is None else value.clamp(-clamp, clamp)
