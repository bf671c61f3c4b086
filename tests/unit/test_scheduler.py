import pytest
from makers import make_trajectory

from miles_rl.rollout.scheduler import FailureLimits, RolloutHalted, Sample, Scheduler, TaskOrder
from miles_rl.types import Outcome, Trajectory

TASKS = [f"task-{i}" for i in range(5)]


def trajectory(sample: Sample, version: int) -> Trajectory:
    return make_trajectory(sample.sample_id, sample.group_id, sample.task, version)


def scheduler(max_staleness: int = 1, **options: int) -> Scheduler:
    limits = FailureLimits(options.pop("per_task", 3), options.pop("overall", 10))
    return Scheduler(
        TaskOrder(TASKS, seed=0),
        num_groups=2,
        group_size=2,
        max_staleness=max_staleness,
        limits=limits,
        **options,
    )


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
    assert len(admit_all(s)) == 3 * 4
    samples = [Sample(g, i, 0, s._open[g].task) for g in (0, 1) for i in (0, 1)]
    for sample in samples:
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
    assert s.failures_by_outcome == {Outcome.ENGINE_FAILED: 2}


def test_a_group_too_old_for_the_next_batch_is_dropped_counted_and_its_task_queued_again() -> None:
    s = scheduler(max_staleness=1)
    samples = admit_all(s)
    late, rest = samples[:2], samples[2:6]
    for sample in rest:
        s.succeed(sample, trajectory(sample, 0))
    for version in (1, 2):
        batch = s.take_batch()
        assert batch is not None
        s.published(version)
        for sample in admit_all(s):
            s.succeed(sample, trajectory(sample, version))
    for sample in late:
        s.succeed(sample, trajectory(sample, 0))
    dropped = s.drop_stale()
    assert [g.group_id for g in dropped] == [0]
    assert s.stale_by_task == {late[0].task: 2}
    assert s.cursor()["requeued"][-1] == late[0].task


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


def test_the_cursor_resumes_the_order_without_skipping_or_repeating_what_was_trained() -> None:
    s = scheduler(max_staleness=1)
    samples = admit_all(s)
    for sample in samples[:4]:
        s.succeed(sample, trajectory(sample, 0))
    trained = s.take_batch()
    assert trained is not None
    cursor = s.cursor()
    rest = TaskOrder(TASKS, 0, cursor["drawn"], cursor["requeued"])
    seen = [g.task for g in trained.groups] + [rest.next() for _ in range(3)]
    assert sorted(seen) == TASKS, "one epoch: what was trained and what comes after resume"
