"""The policy-gradient loss: an advantage, a policy term, an off-policy correction, an aggregation, by name.

One class spans the family, because its members differ in these choices and nothing else; a file in `conf/loss` names
them. Order of the computation, per token: policy term, times the correction's weight, plus `kl_coef` times the
divergence from the reference, minus `entropy_coef` times the entropy, set to 0 where rejected, then aggregated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, get_args

from miles_rl.loss import advantages, corrections, policy_terms
from miles_rl.loss.aggregation import Aggregation, aggregate
from miles_rl.loss.base import Denominators, LossNeeds, LossOutput, OldLogprobs, PolicyTokens
from miles_rl.loss.checks import OptionError, check_choice, check_number, check_order
from miles_rl.loss.kl import kl
from miles_rl.loss.policy_terms import PolicyTerms

if TYPE_CHECKING:
    import torch

Advantage = Literal["grpo", "dr_grpo", "rloo", "maxrl", "reinforce_pp"]
Policy = Literal["ppo_clip", "gspo", "cispo", "dppo"]
Correction = Literal["none", "tis_token", "tis_sequence", "icepop"]
Rejection = Literal["none", "token", "sequence_geometric", "sequence_product"]
KlEstimator = Literal["k1", "k2", "k3", "abs"]

_CORRECTIONS: dict[Correction, Callable[..., tuple[torch.Tensor, torch.Tensor]]] = {
    "none": corrections.no_correction,
    "tis_token": corrections.tis_token,
    "tis_sequence": corrections.tis_sequence,
    "icepop": corrections.icepop,
}
_REJECTIONS: dict[Rejection, Callable[..., torch.Tensor]] = {
    "none": corrections.keep_all,
    "token": corrections.token_mask,
    "sequence_geometric": corrections.sequence_mask_geometric,
    "sequence_product": corrections.sequence_mask_product,
}


class PolicyLoss:
    """See `conf/loss` for the members of the family.

    `clip_low`, `clip_high` bound the policy ratio to [1 - low, 1 + high]; for `dppo` they bound the change of a
    probability. `dual_clip` None is off. The correction's ratio is pi_old / pi_rollout, cut to [`correction_low`,
    `correction_high`]; the rejection tests the same ratio. `discount` is REINFORCE++'s, per policy token. `norm_tokens`
    is the constant of seq-mean-token-sum-norm. `dppo_kl_coef` is dppo's own penalty. Masked importance sampling (MIS)
    is a TIS correction together with a rejection. Raises `OptionError`, one line, for a value that cannot be meant.
    """

    def __init__(
        self,
        *,
        advantage: Advantage = "grpo",
        policy: Policy = "ppo_clip",
        aggregation: Aggregation = "seq-mean-token-mean",
        old_logprobs: OldLogprobs = "recomputed",
        clip_low: float = 0.2,
        clip_high: float = 0.28,
        dual_clip: float | None = None,
        correction: Correction = "tis_token",
        correction_low: float = 0.0,
        correction_high: float = 2.0,
        rejection: Rejection = "none",
        rejection_low: float = 0.5,
        rejection_high: float = 2.0,
        kl_coef: float = 0.0,
        kl_estimator: KlEstimator = "k3",
        kl_clamp: float | None = None,
        entropy_coef: float = 0.0,
        discount: float = 1.0,
        norm_tokens: int | None = None,
        dppo_kl_coef: float = 0.001,
    ) -> None:
        self._advantage: Advantage = advantage
        self._policy: Policy = policy
        self._aggregation: Aggregation = aggregation
        self._old_logprobs: OldLogprobs = old_logprobs
        self._clip_low, self._clip_high, self._dual_clip = clip_low, clip_high, dual_clip
        self._correction: Correction = correction
        self._correction_bounds = (correction_low, correction_high)
        self._rejection: Rejection = rejection
        self._rejection_bounds = (rejection_low, rejection_high)
        self._kl_coef, self._kl_estimator, self._kl_clamp = kl_coef, kl_estimator, kl_clamp
        self._entropy_coef, self._discount = entropy_coef, discount
        self._norm_tokens, self._dppo_kl_coef = norm_tokens, dppo_kl_coef
        self._check_names()
        self._check_numbers()
        self._check_together()

    @property
    def needs(self) -> LossNeeds:
        """What the trainer has to provide."""
        extra = self._kl_coef or self._entropy_coef or (self._policy == "dppo" and self._dppo_kl_coef)
        return LossNeeds(
            old_logprobs=self._old_logprobs,
            reference=self._kl_coef > 0,
            entropy_gradient=self._entropy_coef > 0,
            zero_advantage_is_constant=not extra,
        )

    def advantages(self, rewards: torch.Tensor, groups: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Advantages [B, P] in the dtype of `rewards` [B]; see `miles_rl.loss.base.Loss`."""
        if self._advantage == "reinforce_pp":
            token_rewards = advantages.at_last_token(rewards, mask)
            return advantages.reinforce_pp(token_rewards, mask, discount=self._discount)[0]
        if self._advantage == "rloo":
            per_trajectory = advantages.rloo(rewards, groups)
        elif self._advantage == "maxrl":
            per_trajectory = advantages.maxrl(rewards, groups)
        else:
            per_trajectory = advantages.grpo(rewards, groups, divide_by_std=self._advantage == "grpo")
        return per_trajectory.unsqueeze(-1) * mask

    def compute(self, tokens: PolicyTokens, denominators: Denominators) -> LossOutput:
        """The share of `tokens` in the loss of the step, and figures per token."""
        mask = tokens.mask
        old = tokens.logprobs.detach() if tokens.old_logprobs is None else tokens.old_logprobs
        log_ratio = (old - tokens.rollout_logprobs) * mask
        weights, weight_clipped = _CORRECTIONS[self._correction](log_ratio, mask, *self._correction_bounds)
        keep = _REJECTIONS[self._rejection](log_ratio, mask, *self._rejection_bounds)
        terms = self._policy_terms(tokens, old)
        losses = terms.loss * weights
        per_token = {
            "clipped": terms.clipped | terms.dual_clipped,
            "weight": weights,
            "weight_clipped": weight_clipped,
        }
        if self._rejection != "none":
            per_token["rejected"] = ~keep
        if self._kl_coef:
            divergence = self._reference_kl(tokens)
            losses = losses + self._kl_coef * divergence
            per_token["reference_kl"] = divergence.detach()
        if self._entropy_coef:
            losses = losses - self._entropy_coef * tokens.entropy
        loss = aggregate(losses * keep, mask, self._aggregation, denominators, self._norm_tokens)
        return LossOutput(loss, {name: value[mask].float() for name, value in per_token.items()})

    def _policy_terms(self, tokens: PolicyTokens, old: torch.Tensor) -> PolicyTerms:
        new, adv, low, high = tokens.logprobs, tokens.advantages, self._clip_low, self._clip_high
        if self._policy == "gspo":
            return policy_terms.gspo(new, old, adv, tokens.mask, low, high)
        if self._policy == "cispo":
            return policy_terms.cispo(new, old, adv, low, high)
        if self._policy == "dppo":
            return policy_terms.dppo(new, old, adv, low, high, self._dppo_kl_coef)
        return policy_terms.ppo_clip(new, old, adv, low, high, self._dual_clip)

    def _reference_kl(self, tokens: PolicyTokens) -> torch.Tensor:
        if tokens.reference_logprobs is None:
            raise ValueError("loss.kl_coef: the trainer gave no reference log-probabilities")
        return kl(tokens.logprobs, tokens.reference_logprobs, self._kl_estimator, self._kl_clamp)

    def _check_names(self) -> None:
        check_choice("loss.advantage", self._advantage, get_args(Advantage))
        check_choice("loss.policy", self._policy, get_args(Policy))
        check_choice("loss.aggregation", self._aggregation, get_args(Aggregation))
        check_choice("loss.old_logprobs", self._old_logprobs, get_args(OldLogprobs))
        check_choice("loss.correction", self._correction, get_args(Correction))
        check_choice("loss.rejection", self._rejection, get_args(Rejection))
        check_choice("loss.kl_estimator", self._kl_estimator, get_args(KlEstimator))

    def _check_numbers(self) -> None:
        check_number("loss.clip_low", self._clip_low, low=0, high=1)
        check_number("loss.clip_high", self._clip_high, low=0)
        check_order("loss.clip_low", self._clip_low, "loss.clip_high", self._clip_high)
        check_number("loss.dual_clip", self._dual_clip, low=1, above=True)
        for name, (low, high) in (("correction", self._correction_bounds), ("rejection", self._rejection_bounds)):
            check_number(f"loss.{name}_low", low, low=0)
            check_number(f"loss.{name}_high", high, low=0, above=True)
            check_order(f"loss.{name}_low", low, f"loss.{name}_high", high)
        check_number("loss.kl_coef", self._kl_coef, low=0)
        check_number("loss.kl_clamp", self._kl_clamp, low=0, above=True)
        check_number("loss.entropy_coef", self._entropy_coef, low=0)
        check_number("loss.discount", self._discount, low=0, high=1)
        check_number("loss.norm_tokens", self._norm_tokens, low=1)
        check_number("loss.dppo_kl_coef", self._dppo_kl_coef, low=0)

    def _check_together(self) -> None:
        normed = self._aggregation == "seq-mean-token-sum-norm"
        if normed and self._norm_tokens is None:
            remedy = "give a constant, like batch size times the tokens of an episode"
            raise OptionError("loss.norm_tokens", None, remedy)
        if not normed and self._norm_tokens is not None:
            remedy = "it acts only with loss.aggregation=seq-mean-token-sum-norm; leave it null"
            raise OptionError("loss.norm_tokens", self._norm_tokens, remedy)
        if self._policy == "dppo" and self._old_logprobs != "rollout":
            remedy = "dppo's trust region is around the engine: give rollout"
            raise OptionError("loss.old_logprobs", self._old_logprobs, remedy)
        for knob, value in (("correction", self._correction), ("rejection", self._rejection)):
            if self._old_logprobs == "rollout" and value != "none":
                remedy = "with old_logprobs=rollout its ratio is always 1: give none, or old_logprobs=recomputed"
                raise OptionError(f"loss.{knob}", value, remedy)
