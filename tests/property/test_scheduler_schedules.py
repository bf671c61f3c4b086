"""The scheduler under schedules that hypothesis writes, against a model of its rules: see `schedules.Checked`."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from schedules import INFRA_FAILURES, Checked, Options

from miles_rl.batch.rows import Rows
from miles_rl.loss.advantages import GroupStatistics
from miles_rl.rollout.groups import Sample
from miles_rl.rollout.order import TaskOrder
from miles_rl.rollout.scheduler import FailureLimits, RolloutHalted
from miles_rl.types import Outcome

PICK = st.integers(0, 60)


@st.composite
def scheduler_options(draw: st.DrawFn) -> Options:
    group_size = draw(st.integers(1, 4))
    admission: Literal["sample", "group"] = draw(st.sampled_from(["sample", "group"]))
    limits = FailureLimits(draw(st.integers(2, 4)), draw(st.sampled_from([5, 10**6])))
    return Options(
        num_groups=draw(st.integers(1, 3)),
        group_size=group_size,
        max_staleness=draw(st.integers(0, 3)),
        concurrency=draw(st.integers(1 if admission == "sample" else group_size, 12)),
        admission=admission,
        protect_after=draw(st.sampled_from([None, 0, 1, 2])),
        short_groups=draw(st.sampled_from(["halt", "discard", "train"])),
        limits=limits,
        num_tasks=draw(st.integers(1, 6)),
    )


class Schedule(RuleBasedStateMachine):
    """Any order of events; at any moment all that runs can end well, and then the next batch has to come."""

    @initialize(options=scheduler_options())
    def begin(self, options: Options) -> None:
        self.core = Checked(options)

    @rule(count=st.integers(1, 12))
    def admit(self, count: int) -> None:
        for _ in range(count):
            if self.core.admit() is None:
                break

    @precondition(lambda self: self.core.running)
    @rule(pick=PICK, spans=st.lists(st.integers(0, 5), min_size=1, max_size=3))
    def succeed(self, pick: int, spans: list[int]) -> None:
        """The tokens are of any versions between admission and now."""
        sample = self.picked(pick)
        admitted = self.core.groups[sample.group_id].admitted[sample.index]
        self.core.succeed(sample, [admitted + span % (self.core.engine - admitted + 1) for span in spans])

    @precondition(lambda self: self.core.running)
    @rule(pick=PICK, outcome=st.sampled_from(INFRA_FAILURES))
    def fail(self, pick: int, outcome: Outcome) -> None:
        """A halt ends the run; another begins."""
        sample = self.picked(pick)
        if self.core.must_halt(sample):
            with pytest.raises(RolloutHalted, match=rf"failures in a row.*last {outcome}: injected"):
                self.core.fail(sample, outcome)
            self.core = Checked(self.core.options)
        else:
            self.core.fail(sample, outcome)

    @rule()
    def drop_stale(self) -> None:
        self.core.drop_stale()

    @precondition(lambda self: self.core.consume == self.core.engine)
    @rule()
    def take_batch(self) -> None:
        self.core.take()

    @precondition(lambda self: self.core.consume > self.core.engine)
    @rule()
    def publish(self) -> None:
        self.core.publish()

    @precondition(lambda self: self.core.running)
    @rule(pick=PICK, num_batches=st.integers(1, 4))
    def leave_one_behind(self, pick: int, num_batches: int) -> None:
        """One sample runs on while the others make batches, if they can without it."""
        slow, wanted = self.picked(pick), self.core.consume + num_batches
        for _ in range(200):
            if self.core.consume > self.core.engine:
                self.core.publish()
            self.core.take()
            while self.core.admit() is not None:
                pass
            others = [s for s in self.core.running.values() if s != slow]
            if self.core.consume >= wanted or not others:
                return
            self.core.succeed(others[0], [self.core.engine])

    @rule()
    def everything_ends_well(self) -> None:
        self.core.next_batch()

    def picked(self, pick: int) -> Sample:
        return list(self.core.running.values())[pick % len(self.core.running)]

    @invariant()
    def every_sample_is_accounted_for(self) -> None:
        if hasattr(self, "core"):
            self.core.check_accounts()

    def teardown(self) -> None:
        if hasattr(self, "core"):
            self.core.next_batch()
            self.core.check_accounts()


Schedule.TestCase.settings = settings(max_examples=400, stateful_step_count=40, deadline=None)
TestSchedule = Schedule.TestCase


@settings(max_examples=500, deadline=None)
@given(options=scheduler_options(), seed=st.integers(0, 10**6), failure_rate=st.sampled_from([0.0, 0.05, 0.3]))
def test_any_random_schedule_trains_six_versions_and_accounts_for_every_sample(
    options: Options, seed: int, failure_rate: float
) -> None:
    """Random latencies, with some tasks ten times as slow, failures, and a trainer that takes its time."""
    rng = random.Random(seed)
    if options.short_groups == "halt":
        options.limits = FailureLimits(10**6, 10**6)
    core, ends = Checked(options), dict[str, float]()
    publish_at, now = 0.0, 0.0
    while core.consume < 6:
        if core.consume > core.engine and now >= publish_at:
            core.publish()
        if core.consume == core.engine and core.take() is not None:
            publish_at = now + rng.random() * 2
        while (sample := core.admit()) is not None:
            ends[sample.sample_id] = now + rng.random() * (10 if sample.task == "t0" else 1)
        if not core.running:
            assert core.consume > core.engine, f"nothing runs and no batch comes: {core.scheduler.figures()}"
            now = max(now, publish_at)
            continue
        sample = min(core.running.values(), key=lambda s: ends[s.sample_id])
        now = max(now, ends[sample.sample_id])
        if core.consume > core.engine and publish_at < now:
            core.publish()
        if rng.random() < failure_rate and not core.must_halt(sample):
            core.fail(sample, rng.choice(INFRA_FAILURES))
        else:
            admitted = core.groups[sample.group_id].admitted[sample.index]
            core.succeed(sample, [rng.randint(admitted, core.engine) for _ in range(rng.randint(1, 4))])
    core.check_accounts()
    assert len(core.taken_groups) == 6 * options.num_groups


@dataclass
class SlowRun:
    """Groups trained by task, and the core at the end. `open_when_protected`: groups of the slow task then."""

    core: Checked
    trained: Counter[str]
    open_when_protected: int | None = None


def run_with_a_slow_task(options: Options, num_batches: int) -> SlowRun:
    """Each member of `t0` ends after more batches than the staleness allows, or when nothing else could end."""
    core, due = Checked(options), dict[str, int]()
    run = SlowRun(core, Counter())
    while core.consume < num_batches:
        if core.consume > core.engine:
            core.publish()
        batch = core.take()
        if run.open_when_protected is None and core.stale["t0"] >= (options.protect_after or 0):
            run.open_when_protected = sum(group.task == "t0" for group in core.groups.values())
        if batch is not None:
            run.trained.update(group.task for group in batch.groups)
            continue
        while (sample := core.admit()) is not None:
            due[sample.sample_id] = core.consume + (options.max_staleness + 2 if sample.task == "t0" else 0)
        sample = min(core.running.values(), key=lambda s: (due[s.sample_id] > core.consume, due[s.sample_id]))
        core.succeed(sample, [core.groups[sample.group_id].admitted[sample.index]])
    core.check_accounts()
    return run


SLOW = st.builds(
    Options,
    num_groups=st.integers(3, 4),
    group_size=st.integers(1, 3),
    max_staleness=st.integers(1, 3),
    concurrency=st.just(64),
    num_tasks=st.integers(10, 14),
    seed=st.integers(0, 50),
)


@settings(max_examples=50, deadline=None)
@given(options=SLOW, protect_after=st.integers(0, 2))
def test_a_task_slower_than_the_staleness_allows_is_trained_once_it_is_protected(
    options: Options, protect_after: int
) -> None:
    """What is open when protection begins may be too old already; no group that is opened later is ever dropped."""
    options.protect_after = protect_after
    run = run_with_a_slow_task(options, 24)
    assert set(run.trained) == set(options.tasks)
    assert run.open_when_protected is not None
    assert run.core.stale["t0"] <= protect_after + run.open_when_protected
    assert sum(run.core.stale.values()) == run.core.stale["t0"]


@settings(max_examples=50, deadline=None)
@given(max_staleness=st.integers(2, 3), group_size=st.integers(1, 3), seed=st.integers(0, 50))
def test_without_protection_a_task_slower_than_the_staleness_allows_starves(
    max_staleness: int, group_size: int, seed: int
) -> None:
    options = Options(
        num_groups=4,
        group_size=group_size,
        max_staleness=max_staleness,
        concurrency=64,
        protect_after=None,
        num_tasks=12,
        seed=seed,
    )
    run = run_with_a_slow_task(options, 9)
    assert set(run.trained) == set(options.tasks) - {"t0"}
    assert run.core.stale["t0"] >= 1


@settings(max_examples=100, deadline=None)
@given(
    num_tasks=st.integers(1, 8),
    seed=st.integers(0, 100),
    requeue_after=st.sets(st.integers(0, 40), max_size=8),
    restart_after=st.sets(st.integers(0, 40), max_size=4),
)
def test_every_epoch_visits_every_task_once_whatever_was_queued_again_and_however_often_it_is_resumed(
    num_tasks: int, seed: int, requeue_after: set[int], restart_after: set[int]
) -> None:
    tasks = [f"t{i}" for i in range(num_tasks)]
    order, fresh, again = TaskOrder(tasks, seed), list[str](), list[str]()
    for step in range(5 * num_tasks + len(requeue_after)):
        expected = order.requeued[0] if order.requeued else None
        task = order.next()
        (fresh if expected is None else again).append(task)
        assert expected in (None, task)
        if step in requeue_after:
            order.requeued.append(task)
        if step in restart_after:
            order = TaskOrder(tasks, seed, **order.cursor())
    assert len(again) + len(order.requeued) == len([s for s in requeue_after if s < 5 * num_tasks + len(requeue_after)])
    undisturbed = TaskOrder(tasks, seed)
    assert fresh == [undisturbed.next() for _ in fresh]
    for start in range(0, len(fresh) - num_tasks + 1, num_tasks):
        assert sorted(fresh[start : start + num_tasks]) == tasks


@settings(max_examples=100, deadline=None)
@given(group_size=st.integers(2, 5), seed=st.integers(0, 10**6), failure_rate=st.sampled_from([0.2, 0.5, 0.8]))
def test_statistics_of_a_group_are_over_its_valid_members_alone(
    group_size: int, seed: int, failure_rate: float
) -> None:
    """With short groups trained, what failed is in neither size nor mean; every group has at least two members."""
    rng = random.Random(seed)
    core = Checked(
        Options(
            num_groups=2,
            group_size=group_size,
            max_staleness=1,
            concurrency=32,
            short_groups="train",
            limits=FailureLimits(2, 10**6),
        )
    )
    rewards: dict[str, float] = {}
    while (batch := core.take()) is None:
        while core.admit() is not None:
            pass
        sample = rng.choice(list(core.running.values()))
        if rng.random() < failure_rate:
            core.fail(sample, rng.choice(INFRA_FAILURES))
        else:
            rewards[sample.sample_id] = rng.choice([0.0, 0.25, 1.0])
            core.succeed(sample, [0], rewards[sample.sample_id])
    rows = Rows.of(batch.trajectories)
    statistics = GroupStatistics.of(rows.rewards, rows.groups)
    for row, trajectory in enumerate(batch.trajectories):
        members = [
            rewards[t.sample_id] for g in batch.groups for t in g.trajectories if g.group_id == trajectory.group_id
        ]
        assert len(members) >= 2
        assert float(statistics.size[row]) == len(members)
        assert float(statistics.mean[row]) == pytest.approx(sum(members) / len(members))
