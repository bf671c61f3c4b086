"""The loss contract: what a batch teaches the policy. One class here and one YAML in `conf/loss` add a loss.

The trainer owns the model and the micro-batches; the loss owns the mathematics. All tensors hold the policy's tokens
only, one trajectory per row, left-aligned: [B, P] with P the most policy tokens of any row. Prompts and observations
are not there at all, so no estimator can mistake them for actions. Positions beyond a row's tokens are outside `mask`
and hold 0.

A trainer calls `advantages` once per batch of rollouts, then `compute` once per micro-batch, and sums the losses that
it returns: the sum over micro-batches is the loss of the optimizer step, whatever the split, because every
denominator is counted beforehand over the whole step (`Denominators`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    import torch

OldLogprobs = Literal["recomputed", "rollout"]
"""The denominator of the policy ratio: the trainer's own log-probabilities before the first optimizer step of the
batch, or those that the engine reported when it sampled."""


@dataclass(frozen=True, slots=True)
class Denominators:
    """What sums over one optimizer step are divided by, counted over all its rows before any token is rejected."""

    num_tokens: int
    num_sequences: int

    @classmethod
    def of(cls, mask: torch.Tensor) -> Denominators:
        """Count `mask` [B, P]. A row without any token is not a sequence."""
        return cls(int(mask.sum()), int(mask.any(dim=-1).sum()))


@dataclass(frozen=True, slots=True)
class LossNeeds:
    """What a loss asks of the trainer.

    `old_logprobs` says which ones it wants; `reference` asks for log-probabilities of the policy that training
    started from; `entropy_gradient` for an entropy that can be differentiated. `zero_advantage_is_constant` tells
    that a row whose advantages are all 0 has no gradient, so that the trainer may skip its backward pass.
    """

    old_logprobs: OldLogprobs
    reference: bool
    entropy_gradient: bool
    zero_advantage_is_constant: bool


@dataclass(frozen=True, slots=True, eq=False)
class PolicyTokens:
    """The policy's tokens of some trajectories, [B, P] each. Only `logprobs` (and `entropy`) carry a gradient.

    All log-probabilities are natural logarithms after the sampling temperature. `old_logprobs` None means that they
    equal `logprobs`: the trainer takes one optimizer step per batch and saves itself the second forward pass.
    """

    mask: torch.Tensor
    logprobs: torch.Tensor
    entropy: torch.Tensor
    rollout_logprobs: torch.Tensor
    advantages: torch.Tensor
    old_logprobs: torch.Tensor | None = None
    reference_logprobs: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class LossOutput:
    """A micro-batch's share of the loss, a scalar with a gradient, and figures per policy token for the metrics.

    Each value of `per_token` is [n], n the number of tokens in the mask, in row-major order, without a gradient.
    Names: `clipped` (0 or 1), `weight` (of the off-policy correction), `weight_clipped` (0 or 1), and where they
    apply `rejected` (0 or 1) and `reference_kl`.
    """

    loss: torch.Tensor
    per_token: Mapping[str, torch.Tensor]


class Loss(Protocol):
    """Constructed from config; holds no state and no tensors."""

    @property
    def needs(self) -> LossNeeds:
        """What the trainer has to provide."""
        ...

    def advantages(self, rewards: torch.Tensor, groups: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Advantages [B, P] of a whole batch: `rewards` [B] float64, `groups` [B] with numbers 0..G-1, `mask` [B, P].

        Called once per batch of rollouts, before it is split. Raises `ValueError` for rewards that the estimator
        cannot use.
        """
        ...

    def compute(self, tokens: PolicyTokens, denominators: Denominators) -> LossOutput:
        """The share of these tokens in the loss of the optimizer step that `denominators` were counted over."""
        ...
