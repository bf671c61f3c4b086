from typing import Any

import pytest
from makers import make_trajectory

from miles_rl.rollout.groups import DroppedGroup, Sample, UnfinishedGroup
from miles_rl.rollout.order import TaskOrder
from miles_rl.rollout.scheduler import FailureLimits, RolloutHalted, Scheduler
from miles_rl.types import Outcome, Trajectory

TASKS = [f"task-{i}" for i in range(5)]


def trajectory(sample: Sample, version: int) -> Trajectory:
    return make_trajectory(sample.sample_id, sample.group_id, sample.task, version)


def scheduler(max_staleness: int = 1, per_task: int = 3, overall: int = 10, **options: Any) -> Scheduler:
    limits = FailureLimits(per_task, overall)
    sizes = {"num_groups": 2, "group_size": 2, "concurrency": 100, **options}
    return Scheduler(TaskOrder(TASKS, seed=0), max_staleness=max_staleness, limits=limits, **sizes)


def admit_all(s: Scheduler) -> list[Sample]:
    samples = []
    while (sample := s.next_sample()) is not None:
        samples.append(sample)
    return samples


def test_synchronous_rollouts_admit_exactly_one_batch_until_the_next_weights_are_out() -> None:
    s = scheduler(max_staleness=0)
    first = admit_all(s)
    assert [x.group_id for x in first] == [0, 0, 1, 1]
    for sample in first:
        s.succeed(sample, trajectory(sample, 0))
    assert s.take_batch() is not None
    assert admit_all(s) == []
    s.published(1)
    assert [x.group_id for x in admit_all(s)] == [2, 2, 3, 3]


def test_asynchronous_rollouts_run_max_staleness_batches_ahead_of_the_trainer() -> None:
    s = scheduler(max_staleness=2)
    samples = admit_all(s)
    assert len(samples) == 3 * 4
    for sample in samples[:4]:
        s.succeed(sample, trajectory(sample, 0))
    batch = s.take_batch()
    assert batch is not None
    assert batch.version == 0
    assert s.next_sample() is None, "the trainer still works on the batch: two more batches wait already"
    s.published(1)
    assert len(admit_all(s)) == 4


def test_a_failed_sample_is_refilled_alone_under_the_same_identity() -> None:
    s = scheduler()
    first = admit_all(s)
    s.fail(first[1], Outcome.SANDBOX_FAILED, "create timed out")
    again = s.next_sample()
    assert again is not None
    assert (again.group_id, again.index, again.attempt) == (first[1].group_id, first[1].index, 1)
    assert again.sample_id != first[1].sample_id
    for sample in (first[0], again):
        s.succeed(sample, trajectory(sample, 0))
    assert s.figures()["ready_groups"] == 1


def test_failures_in_a_row_of_one_task_halt_with_the_reason() -> None:
    s = scheduler(per_task=2)
    sample = s.next_sample()
    assert sample is not None
    s.fail(sample, Outcome.VERIFIER_FAILED, "no reward")
    again = s.next_sample()
    assert again is not None
    with pytest.raises(RolloutHalted, match=rf"{sample.task}: 2 failures in a row, last verifier_failed: no reward"):
        s.fail(again, Outcome.VERIFIER_FAILED, "no reward")


def test_a_success_ends_a_row_of_failures() -> None:
    s = scheduler(per_task=2, overall=2)
    first, second = admit_all(s)[:2]
    assert first.task == second.task
    s.fail(first, Outcome.ENGINE_FAILED, "x")
    s.succeed(second, trajectory(second, 0))
    refill = s.next_sample()
    assert refill is not None
    s.fail(refill, Outcome.ENGINE_FAILED, "x")
    assert s.failures == {(first.task, Outcome.ENGINE_FAILED): 2}


def fall_behind(s: Scheduler) -> list[Sample]:
    """Two batches are trained while the samples of the first group run on. Returns those."""
    samples = admit_all(s)
    late, rest = samples[:2], samples[2:6]
    for sample in rest:
        s.succeed(sample, trajectory(sample, 0))
    for version in (1, 2):
        assert s.take_batch() is not None
        s.published(version)
        for sample in admit_all(s):
            s.succeed(sample, trajectory(sample, version))
    return late


def test_a_group_too_old_for_the_next_batch_is_dropped_counted_and_its_task_queued_again() -> None:
    s = scheduler(max_staleness=1)
    late = fall_behind(s)
    s.succeed(late[0], trajectory(late[0], 0))
    running = s.num_running
    assert [(g.group_id, g.reason, g.num_scored) for g in s.drop_stale()] == [(0, "stale", 1)]
    assert s.stale_by_task == {late[0].task: 1}
    assert s.order.cursor()["requeued"] == [late[0].task]
    assert s.num_running == running, "the member that still runs is not waited for, but it holds its place"
    s.left()
    assert s.num_running == running - 1


def test_batches_wait_for_a_group_of_a_task_that_was_dropped_before() -> None:
    s = scheduler(max_staleness=1, protect_after=1)
    late = fall_behind(s)
    s.succeed(late[0], trajectory(late[0], 0))
    s.drop_stale()
    again = next(sample for sample in iter(s.next_sample, None) if sample.task == late[0].task)
    slow = [again, next(sample for sample in iter(s.next_sample, None) if sample.group_id == again.group_id)]
    for sample in admit_all(s):
        s.succeed(sample, trajectory(sample, s.engine_version))
    while (batch := s.take_batch()) is not None:
        assert again.group_id not in [g.group_id for g in batch.groups]
        s.published(batch.version + 1)
        for sample in admit_all(s):
            s.succeed(sample, trajectory(sample, s.engine_version))
    assert s.waits_for() == [again.group_id]
    for sample in slow:
        s.succeed(sample, trajectory(sample, 2))
    batch = s.take_batch()
    assert batch is not None
    assert batch.groups[0].group_id == again.group_id, "it goes first"
    assert s.drop_stale() == []


def test_without_protection_no_batch_waits() -> None:
    s = scheduler(max_staleness=1, protect_after=None)
    late = fall_behind(s)
    s.succeed(late[0], trajectory(late[0], 0))
    s.drop_stale()
    assert s.waits_for() == []


def test_places_bound_what_runs_and_group_admission_holds_them_until_the_group_is_whole() -> None:
    s = scheduler(max_staleness=3, concurrency=3)
    first = admit_all(s)
    assert len(first) == 3
    s.succeed(first[0], trajectory(first[0], 0))
    assert len(admit_all(s)) == 1
    s = scheduler(max_staleness=3, concurrency=3, admission="group")
    first = admit_all(s)
    assert [x.group_id for x in first] == [0, 0]
    s.succeed(first[0], trajectory(first[0], 0))
    assert admit_all(s) == []
    s.succeed(first[1], trajectory(first[1], 0))
    assert [x.group_id for x in admit_all(s)] == [1, 1]


def failed_for_good(s: Scheduler, sample: Sample) -> DroppedGroup | None:
    """Fail one member until it is given up; what the scheduler says of its group then."""
    for _ in range(10):
        verdict = s.fail(sample, Outcome.SANDBOX_FAILED, "x")
        if verdict is not None or sample.group_id not in s.missing():
            return verdict
        again = s.next_sample()
        assert again is not None
        assert (again.group_id, again.index) == (sample.group_id, sample.index)
        sample = again
    raise AssertionError("never given up")


def test_a_group_that_ends_short_is_discarded_or_trained_with_its_valid_members_as_the_config_says() -> None:
    s = scheduler(per_task=2, short_groups="discard")
    (first, second), *_ = [admit_all(s)[:2]]
    s.succeed(second, trajectory(second, 0))
    dropped = failed_for_good(s, first)
    assert dropped is not None
    assert (dropped.group_id, dropped.reason, dropped.num_scored) == (0, "short", 1)
    s = scheduler(per_task=2, short_groups="train", group_size=3)
    members = [sample for sample in admit_all(s) if sample.group_id in (0, 1)]
    for sample in members[1:]:
        s.succeed(sample, trajectory(sample, 0))
    assert failed_for_good(s, members[0]) is None
    batch = s.take_batch()
    assert batch is not None
    assert [[t.sample_id for t in g.trajectories] for g in batch.groups] == [
        ["g0.1.0", "g0.2.0"],
        ["g1.0.0", "g1.1.0", "g1.2.0"],
    ]


def test_groups_left_open_go_on_where_they_were() -> None:
    done = {1: make_trajectory("g4.1.2", 4, "task-1", 6)}
    left = [UnfinishedGroup(7, "task-2", (0, 1), {}), UnfinishedGroup(4, "task-1", (3, 2), done)]
    s = scheduler(max_staleness=1, version=6, groups=left, next_group_id=8)
    samples = admit_all(s)
    assert [x.sample_id for x in samples] == ["g4.0.3", "g7.0.0", "g7.1.1", "g8.0.0", "g8.1.0", "g9.0.0", "g9.1.0"]
    for sample in samples[:3]:
        s.succeed(sample, trajectory(sample, 6))
    batch = s.take_batch()
    assert batch is not None
    assert [t.sample_id for t in batch.trajectories] == ["g4.0.3", "g4.1.2", "g7.0.0", "g7.1.1"]


def test_a_batch_states_the_staleness_of_each_trajectory() -> None:
    s = scheduler(max_staleness=3, version=5)
    for sample in admit_all(s)[:4]:
        s.succeed(sample, trajectory(sample, 3))
    batch = s.take_batch()
    assert batch is not None
    assert batch.version == 5
    assert batch.staleness == (2, 2, 2, 2)


def test_every_epoch_visits_every_task_once_in_an_order_fixed_by_the_seed() -> None:
    order = TaskOrder(TASKS, seed=7)
    epochs = [[order.next() for _ in TASKS] for _ in range(3)]
    assert all(sorted(epoch) == TASKS for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1
    again = TaskOrder(TASKS, seed=7)
    assert [again.next() for _ in TASKS] == epochs[0]


def test_the_cursor_goes_on_with_the_order_without_skipping_or_repeating() -> None:
    order = TaskOrder(TASKS, seed=0)
    first = [order.next() for _ in range(3)]
    order.requeued.append(first[0])
    rest = TaskOrder(TASKS, 0, **order.cursor())
    seen = [rest.next() for _ in range(3)]
    assert seen[0] == first[0]
    assert sorted(first + seen[1:]) == TASKS
