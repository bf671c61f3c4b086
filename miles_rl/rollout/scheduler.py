"""Which sample runs next, and which groups make the next batch. Pure: no clock, no I/O, no tasks.

Versions. `consume_version` is the version at which the trainer will take its next batch; `engine_version` is what the
engines run. While the trainer works on the batch it took at version v, the next one is consumed at v + 1 and the
engines still run v, so everything generated meanwhile is at least one version old.

Admission. A group waits behind the groups opened before it, so the batch it will be in is known when one of its
samples is admitted: `consume_version + rank // num_groups`. The sample is admitted only if that is at most
`max_staleness` above `engine_version`. With `max_staleness=0` this is synchronous training: a batch is generated with
the very weights that will consume it. At consumption the rule is checked again, on the oldest token.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from miles_rl.types import Batch, Group, Outcome, Trajectory, WeightVersion


class RolloutHalted(Exception):
    """Failures look deterministic: going on would only repeat them. The message says what failed."""


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


class TaskOrder:
    """Tasks for ever, epoch by epoch, each epoch shuffled by the seed alone. Re-queued tasks come first."""

    def __init__(self, tasks: Sequence[str], seed: int, drawn: int = 0, requeued: Sequence[str] = ()) -> None:
        if not tasks:
            raise ValueError("dataset: no tasks to train on")
        self._tasks, self._seed = list(tasks), seed
        self._epoch, self._shuffled = -1, list[str]()
        self.drawn = drawn
        self.requeued = deque(requeued)

    def next(self) -> str:
        """Name of the next task."""
        if self.requeued:
            return self.requeued.popleft()
        epoch, position = divmod(self.drawn, len(self._tasks))
        if epoch != self._epoch:
            self._epoch, self._shuffled = epoch, list(self._tasks)
            random.Random(f"{self._seed}/{epoch}").shuffle(self._shuffled)
        self.drawn += 1
        return self._shuffled[position]


@dataclass(slots=True)
class _OpenGroup:
    task: str
    attempts: list[int]
    waiting: deque[int]
    scored: dict[int, Trajectory] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FailureLimits:
    """How many infrastructure failures in a row end the run: of one task, and of all tasks together."""

    per_task: int
    overall: int


class Scheduler:
    """Admits samples, assembles groups by task, hands out batches, refills failures sample by sample."""

    def __init__(
        self,
        order: TaskOrder,
        *,
        num_groups: int,
        group_size: int,
        max_staleness: int,
        limits: FailureLimits,
        version: WeightVersion = 0,
        next_group_id: int = 0,
    ) -> None:
        self._order, self._limits = order, limits
        self._num_groups, self._group_size, self._max_staleness = num_groups, group_size, max_staleness
        self._open: dict[int, _OpenGroup] = {}
        self._ready: dict[int, Group] = {}
        self._next_group_id = next_group_id
        self.engine_version = self.consume_version = version
        self.failures_by_outcome: Counter[Outcome] = Counter()
        self.stale_by_task: Counter[str] = Counter()
        self._in_a_row: Counter[str] = Counter()
        self._all_in_a_row = 0

    def next_sample(self) -> Sample | None:
        """The sample to start now, or None if staleness forbids to start any. Refills come before new groups."""
        for rank, group_id in enumerate(sorted([*self._open, *self._ready])):
            group = self._open.get(group_id)
            if group is not None and group.waiting and self._admissible(rank):
                index = group.waiting.popleft()
                return Sample(group_id, index, group.attempts[index], group.task)
        if not self._admissible(len(self._open) + len(self._ready)):
            return None
        group_id, self._next_group_id = self._next_group_id, self._next_group_id + 1
        group = _OpenGroup(self._order.next(), [0] * self._group_size, deque(range(1, self._group_size)))
        self._open[group_id] = group
        return Sample(group_id, 0, 0, group.task)

    def succeed(self, sample: Sample, trajectory: Trajectory) -> None:
        """The sample was scored. The last one of a group makes the group ready."""
        self._in_a_row.pop(sample.task, None)
        self._all_in_a_row = 0
        group = self._open[sample.group_id]
        group.scored[sample.index] = trajectory
        if len(group.scored) == self._group_size:
            del self._open[sample.group_id]
            members = tuple(group.scored[i] for i in range(self._group_size))
            self._ready[sample.group_id] = Group(sample.group_id, sample.task, members)

    def fail(self, sample: Sample, outcome: Outcome, detail: str) -> None:
        """Infrastructure failed the sample: it is refilled. Raises `RolloutHalted` when too many fail in a row."""
        self.failures_by_outcome[outcome] += 1
        self._in_a_row[sample.task] += 1
        self._all_in_a_row += 1
        if self._in_a_row[sample.task] >= self._limits.per_task:
            raise RolloutHalted(
                f"task {sample.task}: {self._in_a_row[sample.task]} failures in a row, last {outcome}: {detail}"
            )
        if self._all_in_a_row >= self._limits.overall:
            raise RolloutHalted(f"{self._all_in_a_row} failures in a row over all tasks, last {outcome}: {detail}")
        group = self._open[sample.group_id]
        group.attempts[sample.index] += 1
        group.waiting.append(sample.index)

    def drop_stale(self) -> list[Group]:
        """Take out the ready groups that are too old for the next batch; their tasks are queued again."""
        stale = [g for g in self._ready.values() if self.consume_version - g.oldest_version > self._max_staleness]
        for group in stale:
            del self._ready[group.group_id]
            self.stale_by_task[group.task] += len(group.trajectories)
            self._order.requeued.append(group.task)
        return stale

    def take_batch(self) -> Batch | None:
        """The oldest `num_groups` ready groups as a batch for `consume_version`, or None if there are too few."""
        if len(self._ready) < self._num_groups:
            return None
        chosen = [self._ready.pop(group_id) for group_id in sorted(self._ready)[: self._num_groups]]
        batch = Batch(tuple(chosen), self.consume_version)
        self.consume_version += 1
        return batch

    def published(self, version: WeightVersion) -> None:
        """The engines now run `version`."""
        self.engine_version = version

    def cursor(self) -> dict[str, Any]:
        """Where the data stands, so that resume skips nothing: groups not yet trained are drawn again, first."""
        unfinished = {gid: g.task for gid, g in [*self._open.items(), *self._ready.items()]}
        return {
            "drawn": self._order.drawn,
            "requeued": [unfinished[gid] for gid in sorted(unfinished)] + list(self._order.requeued),
            "next_group_id": self._next_group_id,
        }

    def figures(self) -> Mapping[str, int]:
        """Numbers for the display and for error messages."""
        return {
            "open_groups": len(self._open),
            "ready_groups": len(self._ready),
            "stale": sum(self.stale_by_task.values()),
            "failed": sum(self.failures_by_outcome.values()),
        }

    def _admissible(self, rank: int) -> bool:
        return self.consume_version + rank // self._num_groups - self.engine_version <= self._max_staleness
