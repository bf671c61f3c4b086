"""What the property tests of scheduler and ledger share: samples with true versions, a model of the rules."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from miles_rl.rollout.groups import DroppedGroup, Sample
from miles_rl.rollout.order import TaskOrder
from miles_rl.rollout.scheduler import FailureLimits, Scheduler
from miles_rl.types import Batch, Outcome, StopReason, Trajectory, WeightVersion

NO_LIMITS = FailureLimits(10**6, 10**6)
INFRA_FAILURES = [outcome for outcome in Outcome if outcome.is_infra_failure]


def written_by(sample: Sample, versions: Sequence[WeightVersion], reward: float = 1.0) -> Trajectory:
    """The trajectory of `sample`: a prompt token, then one policy token for each of `versions`, in this order."""
    mask = np.array([False] + [True] * len(versions))
    return Trajectory(
        sample_id=sample.sample_id,
        group_id=sample.group_id,
        task=sample.task,
        token_ids=np.arange(len(mask), dtype=np.int32),
        loss_mask=mask,
        logprobs=np.where(mask, -0.5, 0.0).astype(np.float32),
        versions=np.array([-1, *versions], np.int32),
        reward=reward,
        outcome=Outcome.SCORED,
        stop_reason=StopReason.COMPLETED,
    )


def staleness_of(trajectory: Trajectory, version: WeightVersion) -> int:
    """Token by token, from the raw arrays."""
    pairs = zip(trajectory.versions.tolist(), trajectory.loss_mask.tolist(), strict=True)
    return max(version - written for written, is_policy in pairs if is_policy)


@dataclass(slots=True)
class GroupModel:
    """What must be true of an open group, from what was done to it. `admitted` is of the members that run."""

    task: str
    size: int
    attempts: dict[int, int] = field(default_factory=dict[int, int])
    admitted: dict[int, WeightVersion] = field(default_factory=dict[int, WeightVersion])
    scored: dict[int, Trajectory] = field(default_factory=dict[int, Trajectory])
    given_up: set[int] = field(default_factory=set[int])

    @property
    def is_whole(self) -> bool:
        return len(self.scored) + len(self.given_up) == self.size

    def deadline(self, max_staleness: int) -> WeightVersion | None:
        """Version of the last batch that may hold the group; None while nothing of it has begun."""
        versions = [*self.admitted.values(), *(t.oldest_version for t in self.scored.values())]
        return min(versions) + max_staleness if versions else None


@dataclass(slots=True, kw_only=True)
class Options:
    """Options of a scheduler, and the tasks that it draws from."""

    num_groups: int
    group_size: int
    max_staleness: int
    concurrency: int
    admission: Literal["sample", "group"] = "sample"
    protect_after: int | None = 1
    short_groups: Literal["halt", "discard", "train"] = "halt"
    limits: FailureLimits = NO_LIMITS
    num_tasks: int = 5
    seed: int = 0

    @property
    def tasks(self) -> list[str]:
        return [f"t{i}" for i in range(self.num_tasks)]

    def order(self, **cursor: Any) -> TaskOrder:
        return TaskOrder(self.tasks, self.seed, **cursor)

    def scheduler(self, **state: Any) -> Scheduler:
        names = ("num_groups", "group_size", "max_staleness", "concurrency", "admission")
        names += ("protect_after", "short_groups", "limits")
        return Scheduler(state.pop("order", None) or self.order(), **{n: getattr(self, n) for n in names}, **state)


class Checked:
    """A scheduler, and next to it a model of the rules in the plainest words, which every answer must agree with."""

    def __init__(self, options: Options) -> None:
        self.options, self.scheduler = options, options.scheduler()
        self.groups: dict[int, GroupModel] = {}
        self.running: dict[str, Sample] = {}
        self.ended: Counter[str] = Counter()
        self.opened: list[str] = []
        self.stale: Counter[str] = Counter()
        self.trained: list[str] = []
        self.taken_groups: set[int] = set()
        self.in_a_row: Counter[str] = Counter()
        self.all_in_a_row = 0
        self.seen: set[str] = set()
        self.failed: set[str] = set()

    @property
    def engine(self) -> WeightVersion:
        return self.scheduler.engine_version

    @property
    def consume(self) -> WeightVersion:
        return self.scheduler.consume_version

    def admit(self) -> Sample | None:
        sample = self.scheduler.next_sample()
        if sample is None:
            return None
        assert sample.sample_id not in self.seen, "an id is used once"
        self.seen.add(sample.sample_id)
        if sample.group_id not in self.groups:
            assert sample.group_id == len(self.opened), "groups are numbered as they are opened"
            self.opened.append(sample.task)
            self.groups[sample.group_id] = GroupModel(sample.task, self.options.group_size)
        group = self.groups[sample.group_id]
        assert 0 <= sample.index < group.size
        assert sample.task == group.task
        assert sample.index not in group.admitted
        assert sample.index not in group.scored
        assert sample.index not in group.given_up
        assert sample.attempt == group.attempts.get(sample.index, 0), "a refill is the next attempt of the same member"
        group.admitted[sample.index] = self.engine
        self.running[sample.sample_id] = sample
        assert len(self.running) == self.scheduler.num_running <= self.options.concurrency
        if self.options.admission == "group":
            held = sum(g.size for g in self.groups.values() if not g.is_whole)
            assert held <= self.options.concurrency, "whole groups hold the places"
        assert len(self.groups) <= self.options.num_groups * (self.options.max_staleness + 1)
        return sample

    def succeed(self, sample: Sample, versions: Sequence[WeightVersion], reward: float = 1.0) -> None:
        group = self._end(sample)
        group.scored[sample.index] = trajectory = written_by(sample, versions, reward)
        self.in_a_row[sample.task] = self.all_in_a_row = 0
        self.scheduler.succeed(sample, trajectory)

    def must_halt(self, sample: Sample) -> bool:
        """Whether one more failure of this sample has to end the run."""
        limits = self.options.limits
        of_task = self.in_a_row[sample.task] + 1 >= limits.per_task and self.options.short_groups == "halt"
        return of_task or self.all_in_a_row + 1 >= limits.overall

    def fail(self, sample: Sample, outcome: Outcome) -> None:
        group = self._end(sample)
        self.failed.add(sample.sample_id)
        self.in_a_row[sample.task] += 1
        self.all_in_a_row += 1
        gives_up = self.in_a_row[sample.task] >= self.options.limits.per_task
        dropped = self.scheduler.fail(sample, outcome, "injected")
        if not gives_up:
            assert dropped is None
            group.attempts[sample.index] = sample.attempt + 1
            return
        self.in_a_row[sample.task] = 0
        group.given_up.add(sample.index)
        if self.options.short_groups == "train" and group.size - len(group.given_up) >= 2:
            assert dropped is None
        else:
            expected = DroppedGroup(sample.group_id, sample.task, "short", len(group.scored))
            assert dropped == expected
            self._forget(sample.group_id)

    def drop_stale(self) -> list[DroppedGroup]:
        too_old = {
            group_id
            for group_id, group in self.groups.items()
            if any(staleness_of(t, self.consume) > self.options.max_staleness for t in group.scored.values())
        }
        dropped = self.scheduler.drop_stale()
        assert {d.group_id for d in dropped} == too_old
        for group in dropped:
            assert (group.reason, group.num_scored) == ("stale", len(self.groups[group.group_id].scored))
            self.stale[group.task] += 1
            self._forget(group.group_id)
        return dropped

    def take(self) -> Batch | None:
        """As the collector does it: what is too old goes first."""
        self.drop_stale()
        version, protected = self.consume, self._protected_deadlines()
        whole = {group_id for group_id, group in self.groups.items() if group.is_whole}
        batch = self.scheduler.take_batch()
        if batch is None:
            assert len(whole) < self.options.num_groups or self._waits_rightly(), "nothing is waited for"
            return None
        assert batch.version == version == self.consume - 1
        ids = [group.group_id for group in batch.groups]
        assert len(set(ids)) == len(ids) == self.options.num_groups
        assert set(ids) <= whole
        assert not set(ids) & self.taken_groups
        for group in batch.groups:
            self._check_members(self.groups[group.group_id], [t.sample_id for t in group.trajectories], group.task)
        assert batch.staleness == tuple(staleness_of(t, version) for t in batch.trajectories)
        assert max(batch.staleness) <= self.options.max_staleness
        self.taken_groups |= set(ids)
        self.trained += [t.sample_id for t in batch.trajectories]
        for group_id in ids:
            self._forget(group_id)
        if _can_all_be_trained(protected, version, self.options.num_groups):
            rest = self._protected_deadlines()
            assert _can_all_be_trained(rest, version + 1, self.options.num_groups), "a protected group is given away"
        return batch

    def publish(self) -> None:
        assert self.consume == self.engine + 1
        self.scheduler.published(self.consume)

    def next_batch(self) -> Batch:
        """Everything that runs ends well, oldest first, until a batch comes. It must."""
        for _ in range(1000):
            if self.consume > self.engine:
                self.publish()
            if (batch := self.take()) is not None:
                return batch
            while self.admit() is not None:
                pass
            assert self.running, f"nothing runs and no batch comes: {self.scheduler.figures()}"
            sample = next(iter(self.running.values()))
            self.succeed(sample, [self.groups[sample.group_id].admitted[sample.index]])
        raise AssertionError("no batch after a thousand samples")

    def check_accounts(self) -> None:
        """Every sample that was admitted runs, or ended once; the data order is kept but for what was queued again."""
        assert set(self.ended.values()) <= {1}
        assert self.seen == set(self.running) | set(self.ended)
        assert not set(self.running) & set(self.ended)
        assert len(self.trained) == len(set(self.trained))
        assert not set(self.trained) & self.failed
        assert set(self.groups) == set(self.scheduler._groups)
        assert self.scheduler.stale_by_task == +self.stale
        cursor = self.scheduler.order.cursor()
        fresh = self.options.order()
        drawn = Counter(fresh.next() for _ in range(cursor["drawn"]))
        assert Counter(self.opened) + Counter(cursor["requeued"]) == drawn + self.stale

    def _check_members(self, group: GroupModel, sample_ids: list[str], task: str) -> None:
        assert task == group.task
        assert sample_ids == [group.scored[index].sample_id for index in sorted(group.scored)]
        if self.options.short_groups == "train":
            assert len(sample_ids) == group.size - len(group.given_up)
            assert len(sample_ids) >= min(2, group.size)
        else:
            assert len(sample_ids) == group.size

    def _protected_deadlines(self) -> list[WeightVersion]:
        after = self.options.protect_after
        deadlines = (
            group.deadline(self.options.max_staleness)
            for group in self.groups.values()
            if after is not None and self.stale[group.task] >= after
        )
        return [deadline for deadline in deadlines if deadline is not None]

    def _waits_rightly(self) -> bool:
        """Whether a whole batch may be held back: a protected group of those in `waits_for` is not whole."""
        awaited = [self.groups[group_id] for group_id in self.scheduler.waits_for()]
        after = self.options.protect_after
        return bool(awaited) and all(
            after is not None and self.stale[group.task] >= after and not group.is_whole for group in awaited
        )

    def _end(self, sample: Sample) -> GroupModel:
        del self.running[sample.sample_id]
        self.ended[sample.sample_id] += 1
        group = self.groups[sample.group_id]
        del group.admitted[sample.index]
        return group

    def _forget(self, group_id: int) -> None:
        del self.groups[group_id]
        for sample in [s for s in self.running.values() if s.group_id == group_id]:
            assert self.scheduler.num_running == len(self.running), "it holds its place until it has ended"
            self.scheduler.left()
            del self.running[sample.sample_id]
            self.ended[sample.sample_id] += 1


def _can_all_be_trained(deadlines: Sequence[WeightVersion], version: WeightVersion, num_groups: int) -> bool:
    """Whether batches of `num_groups` from `version` on can hold groups with these deadlines in time."""
    due: dict[WeightVersion, int] = defaultdict(int)
    for deadline in deadlines:
        due[deadline] += 1
    return all(
        sum(count for d, count in due.items() if d <= deadline) <= num_groups * (deadline - version + 1)
        for deadline in due
    )
