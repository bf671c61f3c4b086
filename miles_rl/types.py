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
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sandbox_env.outcome import Outcome, StopReason

__all__ = ["Batch", "Group", "Outcome", "StopReason", "Trajectory", "Turn", "WeightVersion"]

WeightVersion = int
"""Version of the policy's weights: 0 at the start, raised by one with every publish."""

NO_VERSION: WeightVersion = -1
"""In `versions`, and nothing else: no weights wrote this token. Prompts and observations have it."""

_KINDS = {
    "token_ids": ({"i", "u"}, "integers"),
    "loss_mask": ({"b"}, "booleans"),
    "logprobs": ({"f"}, "floats"),
    "versions": ({"i"}, "signed integers"),
}
_MAX_TOKEN_ID = 2**31 - 1
_MAX_LOGPROB = 1e-4
"""What rounding may leave above 0."""


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
    """One scored episode. All arrays are [T], of integers, booleans, floats and integers.

    Policy tokens, those in `loss_mask`, have a finite log-probability of at most 0 and a version of at least 0; all
    others have exactly 0 and `NO_VERSION`. `ValueError` at construction, with the sample and the first token that is
    wrong, where that does not hold, where no token is the policy's, or where the episode was not scored.
    """

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
        self._check_arrays()
        mask, logprobs, versions = self.loss_mask, self.logprobs, self.versions
        others = ~mask
        if not mask.any():
            raise ValueError(f"{self.sample_id}: no token was written by the policy")
        self._refuse((self.token_ids < 0) | (self.token_ids > _MAX_TOKEN_ID), "token_ids", "no token has such an id")
        right = np.isfinite(logprobs) & (logprobs <= _MAX_LOGPROB)
        self._refuse(~right, "logprobs", "a log-probability that is not finite or above 0")
        self._refuse((logprobs != 0) & others, "logprobs", "a log-probability, but the token is not the policy's")
        self._refuse((versions < 0) & mask, "versions", "a token that the policy wrote needs one of at least 0")
        self._refuse((versions != NO_VERSION) & others, "versions", f"one that is not the policy's has {NO_VERSION}")
        if self.outcome is not Outcome.SCORED or not np.isfinite(self.reward):
            raise ValueError(f"{self.sample_id}: outcome {self.outcome} with reward {self.reward} is not learnable")

    def _check_arrays(self) -> None:
        for name, (kinds, what) in _KINDS.items():
            array: Any = getattr(self, name)
            found = getattr(array, "dtype", type(array).__name__)
            if getattr(found, "kind", None) not in kinds:
                raise ValueError(f"{self.sample_id}: {name} is {found}; give an array of {what}")
            if array.ndim != 1:
                raise ValueError(f"{self.sample_id}: {name} has {array.ndim} dimensions; give one, a value per token")
            if array.shape != self.token_ids.shape:
                shapes = f"{array.shape}, token_ids {self.token_ids.shape}"
                raise ValueError(f"{self.sample_id}: {name} has shape {shapes}")

    def _refuse(self, wrong: NDArray[np.bool_], name: str, why: str) -> None:
        """Raise if a token is `wrong`, with the first of them."""
        if wrong.any():
            index = int(wrong.argmax())
            raise ValueError(f"{self.sample_id}: {name}[{index}] is {getattr(self, name)[index]}: {why}")

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
