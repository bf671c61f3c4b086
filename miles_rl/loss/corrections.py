"""Off-policy corrections: what to do when the trainer and the engine that sampled give a token different probability.

Every function takes `log_ratio` [B, P], log pi_train - log pi_rollout, and `mask` [B, P], the policy's tokens. A
weight multiplies a token's loss and carries no gradient. Bounds are always bounds of the ratio pi_train / pi_rollout
itself. Neither weights nor rejections ever change a denominator.

Choices where the field differs:

- The weight of a token outside the mask is 0 (as verl), so that a sum over weights needs no second mask. SkyRL leaves
  exp(log_ratio) there.
- Bounds of a sequence's geometric mean test the ratio (as SkyRL). verl tests 1 / ratio: with bounds that are not
  symmetric in the logarithm the same numbers then give the opposite decision.
- The effective sample size is of the weights that were applied. verl raises them to at least 1 / high first, which
  reports a healthier sample than the one that was used.
- A lower bound above 0 for a truncated weight lifts a ratio that has collapsed, and keeps pushing on tokens that the
  policy has already left (radixark/miles#2588): 0 is the default.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

Pair = tuple["torch.Tensor", "torch.Tensor"]


def tis_token(log_ratio: torch.Tensor, mask: torch.Tensor, low: float, high: float) -> Pair:
    """Truncated importance sampling per token: the ratio cut to [low, high].

    Returns the weights [B, P] and which of them were cut [B, P] bool.
    """
    ratio = log_ratio.detach().exp()
    return ratio.clamp(low, high) * mask, ((ratio < low) | (ratio > high)) & mask


def tis_sequence(log_ratio: torch.Tensor, mask: torch.Tensor, low: float, high: float) -> Pair:
    """Truncated importance sampling per sequence: exp of the summed log-ratio cut to [low, high], for all its tokens.

    Returns the weights [B, P] and which of them were cut [B, P] bool.
    """
    total = (log_ratio.detach() * mask).sum(dim=-1, keepdim=True)
    return tis_token(total.expand_as(log_ratio), mask, low, high)


def icepop(log_ratio: torch.Tensor, mask: torch.Tensor, low: float, high: float) -> Pair:
    """IcePop (ring-1T report): the ratio where it lies in [low, high], else 0: such a token is left out, not cut.

    Returns the weights [B, P] and which of them were set to 0 [B, P] bool.
    """
    outside = ~_inside(log_ratio.detach(), low, high) & mask
    return log_ratio.detach().exp().masked_fill(outside | ~mask, 0.0), outside


def no_correction(log_ratio: torch.Tensor, mask: torch.Tensor, low: float, high: float) -> Pair:
    """Weight 1 for every token of the mask; `low` and `high` do nothing."""
    return mask.to(log_ratio.dtype), mask & ~mask


def token_mask(log_ratio: torch.Tensor, mask: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """Keep [B, P] bool: False for a policy token whose ratio lies outside [low, high]. Outside the mask, True."""
    return _inside(log_ratio.detach(), low, high) | ~mask


def sequence_mask_geometric(log_ratio: torch.Tensor, mask: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """Keep [B, P] bool: a sequence whole or not at all, by the geometric mean of its ratios, in [low, high] to stay."""
    count = mask.sum(dim=-1, keepdim=True).clamp(min=1)
    mean = (log_ratio.detach() * mask).sum(dim=-1, keepdim=True) / count
    return _inside(mean, low, high).expand_as(mask)


def sequence_mask_product(log_ratio: torch.Tensor, mask: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """Keep [B, P] bool: a sequence whole or not at all, by the product of its ratios, in [low, high] to stay."""
    total = (log_ratio.detach() * mask).sum(dim=-1, keepdim=True)
    return _inside(total, low, high).expand_as(mask)


def keep_all(log_ratio: torch.Tensor, mask: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """Keep [B, P] bool, all True; `low` and `high` do nothing."""
    return mask | ~mask


def effective_sample_size(weights: torch.Tensor) -> float:
    """Kish's share of a sample that its weights leave: (sum w)^2 / (n * sum w^2), of `weights` [n]; 0 if all are 0."""
    total, squares = float(weights.double().sum()), float(weights.double().square().sum())
    return total * total / (weights.numel() * squares) if squares > 0 else 0.0


def _inside(log_ratio: torch.Tensor, low: float, high: float) -> torch.Tensor:
    ratio = log_ratio.exp()
    return (ratio >= low) & (ratio <= high)
