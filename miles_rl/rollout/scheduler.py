"""Which sample runs next, and which groups make the next batch. Pure: no clock, no I/O, no tasks.

Versions. `consume_version` is the version at which the trainer will take its next batch; `engine_version` is what the
engines run. While the trainer works on the batch it took at version v, the next one is consumed at v + 1 and the
engines still run v, so everything generated meanwhile is at least one version old.

Admission. A group waits behind the groups opened before it, so the batch it will be in is known when one of its
samples is admitted: `consume_version + rank // num_groups`. The sample is admitted only if that is at most
`max_staleness` above `engine_version`. With `max_staleness=0` this is synchronous training: a batch is generated with
the very weights that will consume it. At consumption the rule is checked again, on the oldest token.

Stale groups. Fast groups may overtake a slow one. A group that is too old for the next batch is dropped and its task
queued again, first. Left at that, slow tasks would starve; so a task that was dropped `protect_after` times is
protected: no batch is taken that would make its open group too old, and its samples are admitted before all others.

Short groups. A member that infrastructure failed is refilled. If a task fails `limits.per_task` times in a row, then by
`short_groups` the run halts, or the group is discarded, or (`train`) the member is given up and the group goes on with
the others, whose statistics are then over fewer; with less than two it is discarded.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from miles_rl.rollout.groups import DroppedGroup, OpenGroup, Sample, UnfinishedGroup
from miles_rl.rollout.order import TaskOrder
from miles_rl.types import Batch, Outcome, Trajectory, WeightVersion

MIN_GROUP = 2


class RolloutHalted(Exception):
    """Failures look deterministic: going on would only repeat them. The message says what failed."""


@dataclass(frozen=True, slots=True)
class FailureLimits:
    """How many infrastructure failures in a row end the run: of one task, and of all tasks together."""

    per_task: int
    overall: int


class Scheduler:
    """Admits samples, assembles groups by task, hands out batches, refills failures sample by sample.

    At most `concurrency` samples run. With `admission="sample"` a place is free again as soon as its sample ended;
    with `group` a group holds the places of all its members until its last one ended, so that whole groups move.
    """

    def __init__(
        self,
        order: TaskOrder,
        *,
        num_groups: int,
        group_size: int,
        max_staleness: int,
        limits: FailureLimits,
        concurrency: int,
        admission: Literal["sample", "group"] = "sample",
        protect_after: int | None = 1,
        short_groups: Literal["halt", "discard", "train"] = "halt",
        version: WeightVersion = 0,
        groups: Iterable[UnfinishedGroup] = (),
        next_group_id: int = 0,
    ) -> None:
        self.order, self._limits = order, limits
        self._num_groups, self._group_size, self._max_staleness = num_groups, group_size, max_staleness
        self._concurrency, self._by_group = concurrency, admission == "group"
        self._protect_after, self._short_groups = protect_after, short_groups
        self._groups: dict[int, OpenGroup] = {}
        self._num_waiting = self._num_ready = 0
        self._next_group_id = next_group_id
        self.engine_version = self.consume_version = version
        self.num_running = 0
        self.failures: Counter[tuple[str, Outcome]] = Counter()
        self.stale_by_task: Counter[str] = Counter()
        self.trained_by_task: Counter[str] = Counter()
        self._in_a_row: Counter[str] = Counter()
        self._all_in_a_row = 0
        for group in sorted(groups, key=lambda g: g.group_id):
            self._restore(group)

    def next_sample(self) -> Sample | None:
        """The sample to start now; None if places or staleness forbid any. Refills come before new groups."""
        if self.num_running >= self._concurrency:
            return None
        if self._num_waiting:
            for rank, group in enumerate(self._in_order()):
                if not self._admissible(rank):
                    break
                if group.waiting:
                    return self._start(group)
        if not self._admissible(len(self._groups)):
            return None
        if self._by_group and (self.num_open + 1) * self._group_size > self._concurrency:
            return None
        group_id, self._next_group_id = self._next_group_id, self._next_group_id + 1
        group = OpenGroup(group_id, self.order.next(), [0] * self._group_size, deque(range(self._group_size)))
        self._groups[group_id] = group
        self._num_waiting += self._group_size
        return self._start(group)

    @property
    def num_open(self) -> int:
        """Groups of which a member is not scored."""
        return len(self._groups) - self._num_ready

    def size_of(self, group_id: int) -> int:
        """Number of members of an open group."""
        return len(self._groups[group_id].attempts)

    def succeed(self, sample: Sample, trajectory: Trajectory) -> None:
        """The sample was scored. The last one of a group makes the group ready."""
        self._in_a_row.pop(sample.task, None)
        self._all_in_a_row = 0
        group = self._ended(sample)
        group.scored[sample.index] = trajectory
        oldest = trajectory.oldest_version
        group.oldest = oldest if group.oldest is None else min(group.oldest, oldest)
        self._num_ready += group.is_ready

    def fail(self, sample: Sample, outcome: Outcome, detail: str) -> DroppedGroup | None:
        """Infrastructure failed the sample: it is refilled. Raises `RolloutHalted` when too many fail in a row.

        Returns the group if it ends short by this.
        """
        self.failures[sample.task, outcome] += 1
        self._in_a_row[sample.task] += 1
        self._all_in_a_row += 1
        group = self._ended(sample)
        if self._all_in_a_row >= self._limits.overall:
            raise RolloutHalted(f"{self._all_in_a_row} failures in a row over all tasks, last {outcome}: {detail}")
        if self._in_a_row[sample.task] < self._limits.per_task:
            group.attempts[sample.index] += 1
            group.waiting.append(sample.index)
            self._num_waiting += 1
            return None
        if self._short_groups == "halt":
            in_a_row = self._in_a_row[sample.task]
            raise RolloutHalted(f"task {sample.task}: {in_a_row} failures in a row, last {outcome}: {detail}")
        del self._in_a_row[sample.task]
        group.given_up.add(sample.index)
        self._num_ready += group.is_ready
        if self._short_groups == "train" and len(group.attempts) - len(group.given_up) >= MIN_GROUP:
            return None
        return self._drop(group, "short")

    def left(self) -> None:
        """A sample of a dropped group has ended; it held its place until now."""
        self.num_running -= 1

    def drop_stale(self) -> list[DroppedGroup]:
        """Take out the groups that are too old for the next batch; their tasks are queued again."""
        horizon = self.consume_version - self._max_staleness
        stale = [g for g in self._groups.values() if g.oldest is not None and g.oldest < horizon]
        for group in stale:
            self.stale_by_task[group.task] += 1
            self.order.requeued.append(group.task)
        return [self._drop(group, "stale") for group in stale]

    def take_batch(self) -> Batch | None:
        """The oldest `num_groups` ready groups as a batch for `consume_version`.

        None if there are too few, or if a protected group must be in this batch and is not ready.
        """
        if self._num_ready < self._num_groups or self.waits_for():
            return None
        ready = [group for group in self._in_order() if group.is_ready]
        chosen = ready[: self._num_groups]
        self._num_ready -= len(chosen)
        for group in chosen:
            del self._groups[group.group_id]
            self.trained_by_task[group.task] += 1
        batch = Batch(tuple(group.assembled() for group in chosen), self.consume_version)
        self.consume_version += 1
        return batch

    def waits_for(self) -> list[int]:
        """Protected groups without which no batch is taken, and that are not ready."""
        return [group.group_id for group in self._urgent() if not group.is_ready]

    def published(self, version: WeightVersion) -> None:
        """The engines now run `version`."""
        self.engine_version = version

    def figures(self) -> dict[str, int]:
        """Numbers for the display and for error messages."""
        return {
            "open_groups": self.num_open,
            "ready_groups": len(self._groups) - self.num_open,
            "stale": sum(self.stale_by_task.values()),
            "failed": sum(self.failures.values()),
        }

    def missing(self) -> dict[int, tuple[str, list[int]]]:
        """Open groups, oldest first: task, and the members that are not scored."""
        return {
            g.group_id: (g.task, [i for i in range(len(g.attempts)) if i not in g.scored and i not in g.given_up])
            for g in self._groups.values()
            if not g.is_ready
        }

    def count_earlier(
        self,
        failures: Mapping[tuple[str, Outcome], int],
        stale_by_task: Mapping[str, int],
        trained_by_task: Mapping[str, int],
    ) -> None:
        """Go on counting from what an earlier run counted; so protected tasks stay protected."""
        self.failures.update(failures)
        self.stale_by_task.update(stale_by_task)
        self.trained_by_task.update(trained_by_task)

    def _restore(self, group: UnfinishedGroup) -> None:
        waiting = deque(index for index in range(len(group.attempts)) if index not in group.scored)
        versions = [t.oldest_version for t in group.scored.values()]
        restored = OpenGroup(group.group_id, group.task, list(group.attempts), waiting, dict(group.scored))
        restored.oldest = min(versions, default=None)
        self._groups[group.group_id] = restored
        self._num_ready += restored.is_ready
        self._num_waiting += len(waiting)

    def _start(self, group: OpenGroup) -> Sample:
        index = group.waiting.popleft()
        group.admitted[index] = self.engine_version
        self._num_waiting -= 1
        self.num_running += 1
        return Sample(group.group_id, index, group.attempts[index], group.task)

    def _ended(self, sample: Sample) -> OpenGroup:
        self.num_running -= 1
        group = self._groups[sample.group_id]
        del group.admitted[sample.index]
        return group

    def _drop(self, group: OpenGroup, reason: Literal["stale", "short"]) -> DroppedGroup:
        del self._groups[group.group_id]
        self._num_ready -= group.is_ready
        self._num_waiting -= len(group.waiting)
        return DroppedGroup(group.group_id, group.task, reason, len(group.scored))

    def _in_order(self) -> Iterable[OpenGroup]:
        """Groups in the order in which they are trained: by id, but those that must not wait longer first."""
        if not (urgent := self._urgent()):
            return self._groups.values()
        first = {group.group_id for group in urgent}
        return [*urgent, *(group for group in self._groups.values() if group.group_id not in first)]

    def _urgent(self) -> list[OpenGroup]:
        """Protected groups that the next batch must hold, or one of them would be too old before it finds room.

        Earliest deadline first: of the groups due up to any later batch, the batches after the next one have room for
        `num_groups` each, and the next one has to hold the rest.
        """
        if self._protect_after is None or (self._protect_after > 0 and not self.stale_by_task):
            return []
        horizon = self.consume_version - self._max_staleness
        due: list[tuple[int, int]] = []
        for group in self._groups.values():
            if self.stale_by_task[group.task] < self._protect_after or (oldest := group.oldest_possible()) is None:
                continue
            if oldest >= horizon:
                due.append((oldest - horizon, group.group_id))
        due.sort()
        num_now = max((n - batches * self._num_groups for n, (batches, _) in enumerate(due, 1)), default=0)
        return [self._groups[group_id] for _, group_id in due[: max(0, min(num_now, self._num_groups))]]

    def _admissible(self, rank: int) -> bool:
        return self.consume_version + rank // self._num_groups - self.engine_version <= self._max_staleness
