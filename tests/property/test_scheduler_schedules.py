import random

from hypothesis import given, settings
from hypothesis import strategies as st
from makers import make_trajectory

from miles_rl.rollout.scheduler import FailureLimits, Sample, Scheduler, TaskOrder
from miles_rl.types import Outcome


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    num_groups=st.integers(1, 4),
    group_size=st.integers(1, 4),
    max_staleness=st.integers(0, 3),
    concurrency=st.integers(1, 12),
    failure_rate=st.sampled_from([0.0, 0.05, 0.3]),
)
def test_any_schedule_ends_with_every_sample_accounted_for_once(
    seed: int, num_groups: int, group_size: int, max_staleness: int, concurrency: int, failure_rate: float
) -> None:
    """Random latencies, failures and publish delays: no starvation, no batch too old, nothing trained twice."""
    rng = random.Random(seed)
    tasks = [f"t{i}" for i in range(num_groups + rng.randrange(4))]
    s = Scheduler(
        TaskOrder(tasks, seed),
        num_groups=num_groups,
        group_size=group_size,
        max_staleness=max_staleness,
        limits=FailureLimits(10**6, 10**6),
    )
    running: list[tuple[Sample, int]] = []
    trained: list[str] = []
    dropped: list[str] = []
    version = 0
    for _ in range(100_000):
        while len(running) < concurrency and (sample := s.next_sample()) is not None:
            running.append((sample, s.engine_version))
        dropped += [t.sample_id for g in s.drop_stale() for t in g.trajectories]
        batch = s.take_batch() if version == s.engine_version else None
        if batch is not None:
            assert batch.version == version
            assert max(batch.staleness) <= max_staleness
            assert len(batch.groups) == num_groups
            trained += [t.sample_id for t in batch.trajectories]
            version += 1
            if version == 6:
                break
        if version > s.engine_version and (not running or rng.random() < 0.3):
            s.published(version)
        elif running:
            sample, admitted = running.pop(rng.randrange(len(running)))
            if rng.random() < failure_rate:
                s.fail(sample, Outcome.SANDBOX_FAILED, "injected")
            else:
                oldest = rng.randint(admitted, s.engine_version)
                s.succeed(sample, make_trajectory(sample.sample_id, sample.group_id, sample.task, oldest))
        else:
            assert batch is not None, f"nothing runs, nothing can be admitted, no batch: {dict(s.figures())}"
    assert version == 6
    assert len(trained) == len(set(trained)) == 6 * num_groups * group_size
    assert not set(trained) & set(dropped)
