"""Advantage estimators: how much better an episode was than what its group, or the batch, would lead one to expect.

The estimators over groups take `rewards` [B], one per trajectory, and `groups` [B], numbers 0..G-1 that say which
trajectories share a task, and return one advantage per trajectory [B]. They run once per batch of rollouts, in
float64, before the batch is split into anything. Only trajectories that were really scored may come here: a failure
of the infrastructure is no member of its group, and one counted as a reward of 0 biases every other member
(NVIDIA-NeMo/Gym#3351, allenai/open-instruct#1887).

Two cases decided on purpose, the same in all of them:

- A group of one has no baseline: its advantage is 0. verl and its descendants take the raw reward instead (mean 0,
  deviation 1), so that a lone success pushes at full strength; once failed samples are dropped such groups are common.
- A group of equal rewards teaches nothing: its advantage is exactly 0, not the rounding error of a mean divided by
  a small epsilon.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

EPSILON = 1e-6
WHITEN_EPSILON = 1e-8


@dataclass(frozen=True, slots=True, eq=False)
class GroupStatistics:
    """Per trajectory, of its group: `size`, `mean`, `std` (over n - 1; 0 for a group of one), and `flat` [B] bool.

    `flat` marks groups whose rewards are all the same, groups of one included.
    """

    size: torch.Tensor
    mean: torch.Tensor
    std: torch.Tensor
    flat: torch.Tensor

    @classmethod
    def of(cls, rewards: torch.Tensor, groups: torch.Tensor) -> GroupStatistics:
        """Statistics of `rewards` [B] over `groups` [B] with numbers 0..G-1."""
        num = int(groups.max()) + 1

        def total(values: torch.Tensor) -> torch.Tensor:
            return values.new_zeros(num).index_add(0, groups, values)

        def extreme(how: str) -> torch.Tensor:
            start = rewards.new_zeros(num)
            return start.scatter_reduce(0, groups, rewards, how, include_self=False)

        size = total(rewards.new_ones(rewards.shape))
        mean = total(rewards) / size.clamp(min=1)
        squares = total((rewards - mean[groups]).square())
        std = (squares / (size - 1).clamp(min=1)).sqrt()
        flat = extreme("amin") == extreme("amax")
        return cls(size[groups], mean[groups], std[groups], flat[groups])


def grpo(rewards: torch.Tensor, groups: torch.Tensor, *, divide_by_std: bool = True) -> torch.Tensor:
    """(R - mean) / (std + 1e-6) over the group, std over n - 1 (arXiv 2402.03300); without the division, Dr.GRPO.

    Dr.GRPO (arXiv 2503.20783) leaves out the division because it weighs a group by how easy or hard its task is.
    """
    group = GroupStatistics.of(rewards, groups)
    centred = (rewards - group.mean).masked_fill(group.flat, 0.0)
    return centred / (group.std + EPSILON) if divide_by_std else centred


def rloo(rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """R minus the mean of the other members: n / (n - 1) * (R - mean) (arXiv 2402.14740)."""
    group = GroupStatistics.of(rewards, groups)
    centred = (rewards - group.mean).masked_fill(group.flat, 0.0)
    return centred * group.size / (group.size - 1).clamp(min=1)


def maxrl(rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """(R - mean) / (mean + 1e-6): weighs a task by how seldom it is solved (as SkyRL).

    The mean is a solve rate, so rewards below 0 are refused with `ValueError`.
    """
    if bool((rewards < 0).any()):
        raise ValueError("loss.advantage: maxrl; it divides by the mean reward: give rewards of 0 or more, or grpo")
    group = GroupStatistics.of(rewards, groups)
    return (rewards - group.mean).masked_fill(group.flat, 0.0) / (group.mean + EPSILON)


def at_last_token(rewards: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Rewards per token [B, P]: the trajectory's reward [B] at the last token of its row in `mask` [B, P], else 0."""
    last = mask & (mask.flip(-1).cumsum(dim=-1).flip(-1) == 1)
    return last * rewards.unsqueeze(-1)


def whiten(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """(values - mean) / sqrt(variance + 1e-8), both over the tokens in `mask`, the variance over n - 1.

    0 everywhere if fewer than two tokens, or only equal ones, are in the mask. Tokens outside it are shifted alike.
    """
    chosen = values[mask]
    if chosen.numel() < 2 or bool(chosen.max() == chosen.min()):
        return values * 0.0
    mean = chosen.mean()
    variance = (chosen - mean).square().sum() / (chosen.numel() - 1)
    return (values - mean) / (variance + WHITEN_EPSILON).sqrt()


def reinforce_pp(
    token_rewards: torch.Tensor, mask: torch.Tensor, *, discount: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """REINFORCE++ (arXiv 2501.03262): whitened discounted returns. Returns advantages and returns, [B, P] each.

    G_t = r_t + discount * G_(t+1), whitened over the policy tokens of the batch; needs no groups. A token outside
    `mask` is stepped over: the return of the tokens after it reaches those before it undiscounted. verl sets the
    return to 0 there instead, which is meant for the padding after the end, and in an episode of several turns takes
    the reward away from every turn but the last.
    """
    following = token_rewards.new_zeros(token_rewards.shape[0])
    returns = token_rewards.new_zeros(token_rewards.shape)
    for t in reversed(range(token_rewards.shape[1])):
        here = token_rewards[:, t] + discount * following
        following = here.where(mask[:, t], following)
        returns[:, t] = here * mask[:, t]
    return whiten(returns, mask) * mask, returns


def gae(
    token_rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, *, discount: float, decay: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Generalised advantage estimation (arXiv 1506.02438) over policy tokens. Returns advantages and returns, [B, P].

    delta_t = r_t + discount * V_next - V_t and A_t = delta_t + discount * decay * A_next, where next is the next token
    inside `mask`: a token that the policy did not write is no action, so it is stepped over inside the recursion
    (as verl and miles). SkyRL runs the recursion through such tokens, which makes an observation a transition of the
    process and takes credit away from the action before it; passing a mask of ones reproduces that. Outside the mask
    the advantage of the next policy token is repeated. Returns are A + V. Not whitened; see `whiten`.
    """
    next_value = next_advantage = token_rewards.new_zeros(token_rewards.shape[0])
    advantages = token_rewards.new_zeros(token_rewards.shape)
    for t in reversed(range(token_rewards.shape[1])):
        delta = token_rewards[:, t] + discount * next_value - values[:, t]
        next_advantage = (delta + discount * decay * next_advantage).where(mask[:, t], next_advantage)
        next_value = values[:, t].where(mask[:, t], next_value)
        advantages[:, t] = next_advantage
    return advantages, advantages + values
