"""Policy-gradient losses per token. All take and give [B, P]; nothing is averaged over tokens here.

`logprobs` carries the gradient; `old_logprobs` and `advantages` do not. Log-ratios are cut to [-20, 20] before exp
(as verl) so that one wild token overflows neither float32 nor the gradient of a sum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

MAX_LOG_RATIO = 20.0


@dataclass(frozen=True, slots=True, eq=False)
class PolicyTerms:
    """`loss` [B, P], and `clipped` [B, P] bool: where the clip acted; `dual_clipped` likewise for the dual clip."""

    loss: torch.Tensor
    clipped: torch.Tensor
    dual_clipped: torch.Tensor


def ppo_clip(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> PolicyTerms:
    """max(-rA, -clip(r, 1 - low, 1 + high) A) (arXiv 1707.06347, with a high bound of its own, arXiv 2503.14476).

    With `dual_clip` c, a negative advantage costs at most -cA (arXiv 1912.09729): without it a token that became
    much likelier although it was bad has no bound.
    """
    ratio = _ratio(logprobs - old_logprobs)
    plain, cut = -ratio * advantages, -ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    loss, clipped = plain.maximum(cut), (cut > plain).detach()
    if dual_clip is None:
        return PolicyTerms(loss, clipped, clipped & ~clipped)
    bound = -dual_clip * advantages
    over = ((loss > bound) & (advantages < 0)).detach()
    return PolicyTerms(bound.where(over, loss), clipped, over)


def gspo(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    clip_low: float,
    clip_high: float,
) -> PolicyTerms:
    """PPO's clip on one ratio per sequence, exp of the mean log-ratio over its tokens in `mask` (arXiv 2507.18071).

    The value at each token is the sequence's; the gradient of a token goes through its own log-probability (the
    paper's GSPO-token, as verl). With one advantage per sequence and a mean over its tokens that is exactly the
    gradient of the sequence's ratio.
    """
    difference = (logprobs - old_logprobs) * mask
    mean = difference.detach().sum(dim=-1, keepdim=True) / mask.sum(dim=-1, keepdim=True).clamp(min=1)
    ratio = _ratio(mean + logprobs - logprobs.detach())
    plain, cut = -ratio * advantages, -ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    clipped = (cut > plain).detach() & mask
    return PolicyTerms(plain.maximum(cut), clipped, clipped & ~clipped)


def cispo(
    logprobs: torch.Tensor, old_logprobs: torch.Tensor, advantages: torch.Tensor, clip_low: float, clip_high: float
) -> PolicyTerms:
    """-sg(clip(r, 1 - low, 1 + high)) A log pi (arXiv 2506.13585): the weight is bounded, the gradient survives."""
    ratio = _ratio((logprobs - old_logprobs).detach())
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    clipped = weight != ratio
    return PolicyTerms(-weight * advantages * logprobs, clipped, clipped & ~clipped)


def dppo(
    logprobs: torch.Tensor,
    rollout_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    clip_low: float,
    clip_high: float,
    kl_coef: float,
) -> PolicyTerms:
    """Importance-weighted loss inside a trust region of probabilities, with a penalty on leaving it (as prime-rl).

    The trust region is a binary total variation: with d = pi_train - pi_rollout of the sampled token, a token is left
    out when its advantage would drive it further out, A > 0 with d > `clip_high` or A < 0 with d < -`clip_low`. Every
    token pays `kl_coef` * (log r)^2. `clipped` marks the tokens left out.
    """
    log_ratio = (logprobs - rollout_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    moved = (logprobs.exp() - rollout_logprobs.exp()).detach()
    out = ((advantages > 0) & (moved > clip_high)) | ((advantages < 0) & (moved < -clip_low))
    loss = (-advantages * log_ratio.exp()).masked_fill(out, 0.0) + kl_coef * log_ratio.square()
    return PolicyTerms(loss, out, out & ~out)


def _ratio(log_ratio: torch.Tensor) -> torch.Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
