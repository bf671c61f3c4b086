"""Samples and the groups that they belong to, while they are on their way to a batch."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from miles_rl.types import Group, Trajectory, WeightVersion


@dataclass(frozen=True, slots=True)
class Sample:
    """One attempt at one member of a group."""

    group_id: int
    index: int
    attempt: int
    task: str

    @property
    def sample_id(self) -> str:
        """Unique within the run: `g<group>.<index>.<attempt>`."""
        return f"g{self.group_id}.{self.index}.{self.attempt}"


@dataclass(frozen=True, slots=True)
class UnfinishedGroup:
    """A group that an earlier run left open. `attempts` has, for each member, the one that was scored or runs next."""

    group_id: int
    task: str
    attempts: tuple[int, ...]
    scored: Mapping[int, Trajectory]


@dataclass(frozen=True, slots=True)
class DroppedGroup:
    """A group that will not be trained, for `reason`."""

    group_id: int
    task: str
    reason: Literal["stale", "short"]
    num_scored: int


@dataclass(slots=True, eq=False)
class OpenGroup:
    """A group that is not trained yet. A member waits, is admitted (at a version), then is scored or given up."""

    group_id: int
    task: str
    attempts: list[int]
    waiting: deque[int]
    scored: dict[int, Trajectory] = field(default_factory=dict[int, Trajectory])
    given_up: set[int] = field(default_factory=set[int])
    admitted: dict[int, WeightVersion] = field(default_factory=dict[int, WeightVersion])
    oldest: WeightVersion | None = None
    """Oldest version that wrote a token of a scored member."""

    @property
    def is_ready(self) -> bool:
        """Whether no member is still awaited."""
        return len(self.scored) + len(self.given_up) == len(self.attempts)

    def oldest_possible(self) -> WeightVersion | None:
        """No token of the group is older, nor will one be if what runs ends well; None if nothing has begun."""
        versions = [*self.admitted.values()] + ([] if self.oldest is None else [self.oldest])
        return min(versions, default=None)

    def assembled(self) -> Group:
        """The group to train on: its scored members, in sample order."""
        return Group(self.group_id, self.task, tuple(self.scored[index] for index in sorted(self.scored)))
