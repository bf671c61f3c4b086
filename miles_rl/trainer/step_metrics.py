"""The figures of a training step, under the names that the field uses. `conf` and docs name no others."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from miles_rl.loss.advantages import GroupStatistics
from miles_rl.loss.corrections import effective_sample_size
from miles_rl.loss.kl import k3
from miles_rl.types import Batch, StopReason

TRUNCATED = (StopReason.TURN_TRUNCATED, StopReason.SESSION_BUDGET)


def token_metrics(per_token: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Metrics over all n policy tokens of a step. `per_token` holds [n] each, see `Learner`.

    `train/train_rollout_kl` is k3 of KL(rollout || trainer), sampled by the rollout, never clamped; its quantiles tell
    a few wild tokens from a drift of all. `train/ess` is the effective sample size of the correction's weights.
    """
    values = {name: value.detach().double().cpu() for name, value in per_token.items()}
    difference = values["rollout_logprobs"] - values["logprobs"]
    divergence = k3(difference)
    metrics = {
        "train/entropy": _mean(values["entropy"]),
        "train/clip_ratio": _mean(values["clipped"]),
        "train/tis_weight_mean": _mean(values["weight"]),
        "train/tis_clip_ratio": _mean(values["weight_clipped"]),
        "train/ess": effective_sample_size(values["weight"]),
        "train/train_rollout_kl": _mean(divergence),
        "train/train_rollout_kl_p50": _quantile(divergence, 0.50),
        "train/train_rollout_kl_p99": _quantile(divergence, 0.99),
        "train/train_rollout_kl_max": float(divergence.max()),
        "train/train_rollout_logprob_abs_diff": _mean(difference.abs()),
        "train/train_rollout_logprob_abs_diff_max": float(difference.abs().max()),
        "train/num_policy_tokens": float(len(difference)),
    }
    if "rejected" in values:
        metrics["train/rejected_ratio"] = _mean(values["rejected"])
    if "reference_kl" in values:
        metrics["train/reference_kl"] = _mean(values["reference_kl"])
    return metrics


def batch_metrics(batch: Batch, rewards: torch.Tensor, groups: torch.Tensor) -> dict[str, float]:
    """Metrics of the batch itself: `rewards` [B] and `groups` [B] in the order of its trajectories.

    A group of equal rewards, and a group of one, have advantage 0 and teach nothing; both are counted, apart.
    """
    statistics = GroupStatistics.of(rewards, groups)
    share = 1 / statistics.size
    num_groups = float(share.sum())
    single = statistics.size == 1
    staleness = batch.staleness
    trajectories = batch.trajectories
    return {
        "train/zero_variance_group_ratio": float(share[statistics.flat & ~single].sum()) / num_groups,
        "train/singleton_group_ratio": float(share[single].sum()) / num_groups,
        "train/num_tokens": float(sum(len(t.token_ids) for t in trajectories)),
        "train/num_trajectories": float(len(trajectories)),
        "rollout/reward_mean": float(rewards.mean()),
        "rollout/truncated_ratio": sum(t.stop_reason in TRUNCATED for t in trajectories) / len(trajectories),
        "async/staleness_mean": sum(staleness) / len(staleness),
        "async/staleness_max": float(max(staleness)),
    }


def _mean(values: torch.Tensor) -> float:
    return float(values.mean())


def _quantile(values: torch.Tensor, share: float) -> float:
    """The smallest value that at least `share` of `values` do not exceed; `torch.quantile` refuses long tensors."""
    rank = max(1, min(len(values), -int(-share * len(values) // 1)))
    return float(values.kthvalue(rank).values)
