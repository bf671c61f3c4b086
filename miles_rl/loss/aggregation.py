"""From losses per token to one number. The weights of tokens differ, so the choice decides what a long episode counts.

Every denominator comes from `Denominators`, counted over the whole optimizer step before any token was rejected:
summed over micro-batches, the result does not depend on how the step was split, and rejecting a token sets its term
to 0 without making the others heavier.

A sequence without any policy token is not counted (as verl; SkyRL divides by the batch size). A sequence whose tokens
were all rejected is counted, because it was sampled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from miles_rl.loss.base import Denominators

if TYPE_CHECKING:
    import torch

Aggregation = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


def aggregate(
    losses: torch.Tensor,
    mask: torch.Tensor,
    mode: Aggregation,
    denominators: Denominators,
    norm_tokens: int | None = None,
) -> torch.Tensor:
    """The share of `losses` [B, P] in the loss of the step, a scalar. `mask` [B, P] is the one before rejection.

    - `token-mean`: every token counts the same, so a long episode counts more (arXiv 2503.14476).
    - `seq-mean-token-sum`: sums over tokens, mean over sequences: the plain policy gradient.
    - `seq-mean-token-mean`: every episode counts the same, however long (GRPO, arXiv 2402.03300).
    - `seq-mean-token-sum-norm`: the sum over all tokens by the constant `norm_tokens` (Dr.GRPO, arXiv 2503.20783).
      As in verl the sum is not divided by the number of sequences too, so `norm_tokens` stands for batch size times
      the token budget of an episode. verl takes the padded width by default, which changes with every micro-batch.
    """
    per_sequence = (losses * mask).sum(dim=-1)
    if mode == "token-mean":
        return per_sequence.sum() / max(1, denominators.num_tokens)
    if mode == "seq-mean-token-sum-norm":
        if norm_tokens is None:
            raise ValueError("loss.norm_tokens: null; seq-mean-token-sum-norm divides by it, give a constant")
        return per_sequence.sum() / norm_tokens
    if mode == "seq-mean-token-mean":
        per_sequence = per_sequence / mask.sum(dim=-1).clamp(min=1)
    return per_sequence.sum() / max(1, denominators.num_sequences)
