"""From trajectories to the policy's tokens, one row per trajectory. The shift by one happens here and nowhere else.

A causal model reads tokens 0..t-1 and predicts token t at position t - 1. For a trajectory `p p a b o c` with policy
tokens `a b c` at 2, 3, 5:

    input      p p a b o      up to the last policy token, which is predicted and never read
    positions    1 2   4      where the logits that predict a, b, c stand in the input
    targets      a b   c

An end-of-turn token that the policy wrote is in `loss_mask` like any other and is trained; what follows the last
policy token is not computed at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from miles_rl.types import Trajectory


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """A batch of B trajectories, P the most policy tokens of one.

    `inputs` and `positions` are per trajectory, see above. `mask` [B, P] bool; `targets` [B, P] int64 and
    `rollout_logprobs` [B, P] float32, 0 outside the mask; `rewards` [B] float64; `groups` [B] int64, numbers 0..G-1.
    """

    sample_ids: tuple[str, ...]
    inputs: tuple[NDArray[np.int64], ...]
    positions: tuple[NDArray[np.int64], ...]
    mask: torch.Tensor
    targets: torch.Tensor
    rollout_logprobs: torch.Tensor
    rewards: torch.Tensor
    groups: torch.Tensor

    @property
    def lengths(self) -> list[int]:
        """Number of input tokens of each trajectory."""
        return [len(tokens) for tokens in self.inputs]

    @classmethod
    def of(cls, trajectories: Sequence[Trajectory]) -> Rows:
        """Raises `ValueError` naming the sample if its first token is the policy's: nothing could predict it."""
        if not trajectories:
            raise ValueError("a batch without trajectories")
        where = [np.flatnonzero(t.loss_mask) for t in trajectories]
        for trajectory, chosen in zip(trajectories, where, strict=True):
            if chosen[0] == 0:
                raise ValueError(f"{trajectory.sample_id}: the first token is the policy's; nothing predicts it")
        shape = (len(trajectories), max(len(chosen) for chosen in where))
        mask = np.zeros(shape, np.bool_)
        targets = np.zeros(shape, np.int64)
        logprobs = np.zeros(shape, np.float32)
        for row, (trajectory, chosen) in enumerate(zip(trajectories, where, strict=True)):
            mask[row, : len(chosen)] = True
            targets[row, : len(chosen)] = trajectory.token_ids[chosen]
            logprobs[row, : len(chosen)] = trajectory.logprobs[chosen]
        group_ids = np.array([t.group_id for t in trajectories], np.int64)
        return cls(
            sample_ids=tuple(t.sample_id for t in trajectories),
            inputs=tuple(
                t.token_ids[: chosen[-1]].astype(np.int64) for t, chosen in zip(trajectories, where, strict=True)
            ),
            positions=tuple(chosen.astype(np.int64) - 1 for chosen in where),
            mask=torch.as_tensor(mask),
            targets=torch.as_tensor(targets),
            rollout_logprobs=torch.as_tensor(logprobs),
            rewards=torch.tensor([t.reward for t in trajectories], dtype=torch.float64),
            groups=torch.as_tensor(np.unique(group_ids, return_inverse=True)[1].reshape(-1).astype(np.int64)),
        )
