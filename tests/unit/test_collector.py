import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from makers import make_trajectory

from miles_rl.rollout.collector import Collector, PlayedSample
from miles_rl.rollout.groups import Sample
from miles_rl.rollout.ledger import Ledger
from miles_rl.rollout.order import TaskOrder
from miles_rl.rollout.scheduler import FailureLimits, RolloutHalted, Scheduler
from miles_rl.types import Outcome

Ready = Callable[[str], None]


class Episodes:
    """Plays samples: `held` tasks wait until they are let go, `failing` ones fail, others are scored at once."""

    def __init__(self) -> None:
        self.version = 0
        self.held: set[str] = set()
        self.failing: set[str] = set()
        self.stubborn = False
        self.cancelled: list[str] = []

    async def __call__(self, sample: Sample, on_ready: Ready) -> PlayedSample:
        version = self.version
        on_ready(f"box-{sample.sample_id}")
        try:
            while sample.task in self.held:
                await asyncio.sleep(0.001)
        except asyncio.CancelledError:
            self.cancelled.append(sample.sample_id)
            while self.stubborn:
                await asyncio.sleep(0.001)
            raise
        if sample.task in self.failing:
            return PlayedSample(Outcome.SANDBOX_FAILED, detail="no room")
        return PlayedSample(Outcome.SCORED, make_trajectory(sample.sample_id, sample.group_id, sample.task, version))


def collector(tmp_path: Path, play: Any, batch_timeout_s: float = 5.0, **options: Any) -> Collector:
    defaults: dict[str, Any] = {"num_groups": 2, "group_size": 2, "max_staleness": 1, "concurrency": 8}
    limits = FailureLimits(3, 100)
    scheduler = Scheduler(TaskOrder(["a", "b", "c", "d"], 0), limits=limits, **{**defaults, **options})
    ledger = Ledger(tmp_path / "ledger.sqlite")
    return Collector(scheduler, ledger, play, batch_timeout_s=batch_timeout_s, stop_timeout_s=0.3)


async def test_batches_come_while_samples_run_and_every_sample_is_in_the_ledger(tmp_path: Path) -> None:
    play = Episodes()
    c = collector(tmp_path, play)
    c.start()
    for version in range(5):
        batch = await c.next_batch()
        assert batch.version == version
        play.version = version + 1
        c.published(version + 1)
    await c.finish()
    counts = c._ledger.counts()
    assert counts["trained"] == 5 * 4
    assert set(counts) <= {"trained", "discarded"}


async def test_a_batch_that_does_not_come_says_what_is_missing(tmp_path: Path) -> None:
    play = Episodes()
    play.held = {"a", "b", "c", "d"}
    c = collector(tmp_path, play, batch_timeout_s=0.2)
    c.start()
    with pytest.raises(TimeoutError, match=re.escape("rollout.batch_timeout_s: 0.2; no batch for version 0")) as caught:
        await c.next_batch()
    assert re.search(r"group 0 of \w lacks members 0 runs \d+ s, 1 runs \d+ s", str(caught.value))
    await c.finish()


async def test_failures_in_a_row_end_the_run_with_their_reason(tmp_path: Path) -> None:
    play = Episodes()
    play.failing = {"a", "b", "c", "d"}
    c = collector(tmp_path, play)
    c.start()
    with pytest.raises(RolloutHalted, match="3 failures in a row, last sandbox_failed: no room"):
        await c.next_batch()
    await c.finish()
    assert "scored" not in c._ledger.counts()


async def test_what_still_runs_of_a_dropped_group_is_cancelled(tmp_path: Path) -> None:
    play = Episodes()
    c = collector(tmp_path, play, protect_after=None)
    slow = TaskOrder(["a", "b", "c", "d"], 0).next()
    played: list[str] = []

    async def hold_one_member(sample: Sample, on_ready: Ready) -> PlayedSample:
        if sample.task == slow and sample.index == 1 and sample.group_id == 0:
            play.held.add(slow)
            try:
                return await play(sample, on_ready)
            finally:
                played.append(sample.sample_id)
        return PlayedSample(
            Outcome.SCORED, make_trajectory(sample.sample_id, sample.group_id, sample.task, play.version)
        )

    c._play = hold_one_member
    c.start()
    for version in range(3):
        await c.next_batch()
        play.version = version + 1
        c.published(version + 1)
    await asyncio.sleep(0.05)
    assert played == ["g0.1.0"]
    assert play.cancelled == ["g0.1.0"]
    assert c.scheduler.num_running == len(c._running), "its place is free again, once"
    await c.finish()
    assert c.scheduler.stale_by_task == {slow: 1}


async def test_samples_that_do_not_end_when_cancelled_are_named(tmp_path: Path) -> None:
    play = Episodes()
    play.held, play.stubborn = {"a", "b", "c", "d"}, True
    c = collector(tmp_path, play)
    c.start()
    await asyncio.sleep(0.05)
    with pytest.raises(TimeoutError, match=r"rollout\.stop_timeout_s: 0\.3; 8 samples did not end .*g0\.0\.0"):
        await c.finish()
    play.stubborn = False


async def test_an_error_of_the_program_is_not_taken_for_a_failed_sample(tmp_path: Path) -> None:
    async def play(sample: Sample, on_ready: Ready) -> PlayedSample:
        raise ZeroDivisionError("a fault of the program")

    c = collector(tmp_path, play)
    c.start()
    with pytest.raises(ZeroDivisionError):
        await c.next_batch()
    await c.finish()
    assert "failed" not in c._ledger.counts()
