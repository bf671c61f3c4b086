"""The nouns that everything in the learner shares, in the order in which the data flows.

    Turn -> Trajectory -> Group -> Batch

A `Trajectory` is one episode as parallel per-token arrays. Worked example, one turn with prompt `p p`, policy
tokens `a b`, an observation `o`, and policy tokens `c`:

    token_ids  p  p  a  b  o  c
    loss_mask  0  0  1  1  0  1
    logprobs   0  0  la lb 0  lc     log-probability under the weights that sampled the token
    versions  -1 -1  3  3 -1  4      version of those weights
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from sandbox_env.outcome import Outcome, StopReason

__all__ = ["Batch", "Group", "Outcome", "StopReason", "Trajectory", "Turn", "WeightVersion"]

WeightVersion = int
"""Version of the policy's weights: 0 at the start, raised by one with every publish."""

NO_VERSION: WeightVersion = -1


@dataclass(frozen=True, slots=True)
class Turn:
    """One reply of the policy and what came back. `start:end` are its policy tokens in the trajectory's arrays."""

    text: str
    command: str | None
    observation: str
    start: int
    end: int
    generate_s: float = 0.0
    exec_s: float = 0.0
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """One scored episode. All arrays are [T]; `ValueError` at construction if they do not belong together."""

    sample_id: str
    group_id: int
    task: str
    token_ids: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    reward: float
    outcome: Outcome
    stop_reason: StopReason
    turns: tuple[Turn, ...] = ()
    timings: Mapping[str, float] = field(default_factory=dict[str, float])

    def __post_init__(self) -> None:
        length = len(self.token_ids)
        for name in ("loss_mask", "logprobs", "versions"):
            if (shape := getattr(self, name).shape) != (length,):
                raise ValueError(f"{self.sample_id}: {name} has shape {shape}, token_ids ({length},)")
        if not self.loss_mask.any():
            raise ValueError(f"{self.sample_id}: no token was written by the policy")
        if not np.isfinite(self.logprobs).all() or (self.logprobs > 1e-4).any():
            raise ValueError(f"{self.sample_id}: a log-probability is not finite or above 0")
        if (self.logprobs[~self.loss_mask] != 0).any():
            raise ValueError(f"{self.sample_id}: a token outside the loss mask carries a log-probability")
        if ((self.versions >= 0) != self.loss_mask).any():
            raise ValueError(f"{self.sample_id}: versions and loss_mask disagree about which tokens are the policy's")
        if self.outcome is not Outcome.SCORED or not np.isfinite(self.reward):
            raise ValueError(f"{self.sample_id}: outcome {self.outcome} with reward {self.reward} is not learnable")

    @property
    def oldest_version(self) -> WeightVersion:
        """Version of the oldest weights that wrote a token of this trajectory."""
        return int(self.versions[self.loss_mask].min())

    @property
    def newest_version(self) -> WeightVersion:
        """Version of the newest weights that wrote a token of this trajectory."""
        return int(self.versions[self.loss_mask].max())

    @property
    def num_policy_tokens(self) -> int:
        """Number of tokens that the policy wrote."""
        return int(self.loss_mask.sum())


@dataclass(frozen=True, slots=True)
class Group:
    """The episodes of one task that share a baseline, in sample order."""

    group_id: int
    task: str
    trajectories: tuple[Trajectory, ...]

    @property
    def oldest_version(self) -> WeightVersion:
        """Version of the oldest weights that wrote a token of this group."""
        return min(t.oldest_version for t in self.trajectories)


@dataclass(frozen=True, slots=True)
class Batch:
    """What one optimizer step consumes. `version` is the version of the weights that will consume it."""

    groups: tuple[Group, ...]
    version: WeightVersion

    @property
    def trajectories(self) -> tuple[Trajectory, ...]:
        """All trajectories, group by group."""
        return tuple(t for g in self.groups for t in g.trajectories)

    @property
    def staleness(self) -> tuple[int, ...]:
        """Per trajectory: version that consumes it minus the oldest version in it."""
        return tuple(self.version - t.oldest_version for t in self.trajectories)
