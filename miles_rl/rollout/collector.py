"""The asynchronous core: keeps samples in flight, keeps the ledger, and hands out batches while samples run.

Knows neither engines nor sandboxes: `play` runs one sample and says how it ended. The stage `rollout` gives it real
episodes, the simulator stubs; what is decided, recorded and waited for is the same.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from miles_rl.rollout.groups import DroppedGroup, Sample
from miles_rl.rollout.ledger import Ledger
from miles_rl.rollout.scheduler import Scheduler
from miles_rl.types import Batch, Outcome, Trajectory, WeightVersion

log = logging.getLogger(__name__)
SHOWN_GROUPS = 3


@dataclass(frozen=True, slots=True)
class PlayedSample:
    """How a sample ended. `trajectory` is there exactly when `outcome` is `SCORED`; `detail` says why it failed."""

    outcome: Outcome
    trajectory: Trajectory | None = None
    detail: str = ""


Play = Callable[[Sample, Callable[[str], None]], Awaitable[PlayedSample]]
"""Runs one sample; calls its second argument with the sandbox's id once that is ready."""


class Collector:
    """Admission, ledger and batches over a `Scheduler`.

    `next_batch` waits at most `batch_timeout_s`; samples that are cancelled have `stop_timeout_s` to end. An exception
    of `play`, which is a fault of the program and not of a sample, ends admission and is raised by `raise_failure` and
    `next_batch`.
    """

    def __init__(
        self, scheduler: Scheduler, ledger: Ledger, play: Play, *, batch_timeout_s: float, stop_timeout_s: float
    ) -> None:
        self.scheduler, self._ledger, self._play = scheduler, ledger, play
        self._batch_timeout_s, self._stop_timeout_s = batch_timeout_s, stop_timeout_s
        self._running: dict[asyncio.Task[None], Sample] = {}
        self._since: dict[str, float] = {}
        self._may_admit, self._may_take = asyncio.Event(), asyncio.Event()
        self._admission: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None
        self.outcomes: Counter[Outcome] = Counter()

    def start(self) -> None:
        """Begin to admit samples."""
        self._admission = asyncio.create_task(self._admit_forever())

    async def next_batch(self) -> Batch:
        """The next batch for the trainer. `TimeoutError` after `batch_timeout_s` says what was waited for."""
        clock = asyncio.timeout(self._batch_timeout_s)
        try:
            async with clock:
                while (batch := self._take()) is None:
                    self.raise_failure()
                    self._may_take.clear()
                    await self._may_take.wait()
        except TimeoutError:
            if not clock.expired():
                raise
            raise TimeoutError(
                f"rollout.batch_timeout_s: {self._batch_timeout_s:g}; no batch for version"
                f" {self.scheduler.consume_version} in time: {self._what_is_missing()}; see the ledger and log.txt"
            ) from None
        groups = {g.group_id: [t.sample_id for t in g.trajectories] for g in batch.groups}
        self._ledger.train(groups, batch.version)
        self._may_admit.set()
        return batch

    def published(self, version: WeightVersion) -> None:
        """The engines run `version` now; admission goes by it."""
        self.scheduler.published(version)
        self._may_admit.set()

    def figures(self) -> Mapping[str, Any]:
        """Numbers for the display."""
        return {
            "running": len(self._running),
            "scored": self.outcomes[Outcome.SCORED],
            "outcomes": dict(self.outcomes),
            "waits_for_groups": len(self.scheduler.waits_for()),
            **self.scheduler.figures(),
        }

    def raise_failure(self) -> None:
        """Raise what ended admission, if anything did."""
        if self._failure is not None:
            raise self._failure

    async def finish(self) -> None:
        """No more batches are wanted: cancel what runs and account for it in the ledger."""
        if self._admission is None:
            return
        tasks, self._admission = [self._admission, *self._running], None
        for task in tasks:
            task.cancel()
        _, pending = await asyncio.wait(tasks, timeout=self._stop_timeout_s)
        self._ledger.end_run()
        if pending:
            names = ", ".join(sorted(self._running[t].sample_id for t in pending if t in self._running)[:5])
            raise TimeoutError(
                f"rollout.stop_timeout_s: {self._stop_timeout_s:g}; {len(pending)} samples did not end when cancelled"
                f" ({names}); see log.txt"
            )

    def _take(self) -> Batch | None:
        if stale := self.scheduler.drop_stale():
            with self._ledger.together():  # the data order has all their tasks queued again
                for group in stale:
                    self._drop(group)
        return self.scheduler.take_batch()

    async def _admit_forever(self) -> None:
        try:
            while self._failure is None:
                while (sample := self.scheduler.next_sample()) is not None:
                    self._admit(sample)
                self._may_admit.clear()
                await self._may_admit.wait()  # bounded: by next_batch, which gives up when no sample ends
        except Exception as error:
            self._fail(error)

    def _admit(self, sample: Sample) -> None:
        self._ledger.admit(
            sample,
            self.scheduler.engine_version,
            self.scheduler.size_of(sample.group_id),
            self.scheduler.order.cursor(),
        )
        task = asyncio.create_task(self._run(sample))
        self._running[task] = sample
        self._since[sample.sample_id] = time.monotonic()
        task.add_done_callback(self._ended)

    async def _run(self, sample: Sample) -> None:
        played = await self._play(sample, lambda sandbox_id: self._ledger.run(sample.sample_id, sandbox_id))
        self.outcomes[played.outcome] += 1
        if played.trajectory is not None:
            self._ledger.score(played.trajectory)
            self.scheduler.succeed(sample, played.trajectory)
            return
        log.warning("%s of %s: %s: %s", sample.sample_id, sample.task, played.outcome, played.detail)
        self._ledger.fail(sample.sample_id, played.outcome, played.detail)
        if (dropped := self.scheduler.fail(sample, played.outcome, played.detail)) is not None:
            self._drop(dropped)

    def _drop(self, group: DroppedGroup) -> None:
        """Forget a group, in the ledger first; what still runs of it is cancelled."""
        self._ledger.drop(group.group_id, group.reason, self.scheduler.order.cursor())
        for task, sample in self._running.items():
            if sample.group_id == group.group_id:
                task.cancel()
        self._may_admit.set()
        log.warning("group %d of %s dropped: %s", group.group_id, group.task, group.reason)
        stale, trained = self.scheduler.stale_by_task[group.task], self.scheduler.trained_by_task[group.task]
        if stale > max(1, trained):
            log.warning(
                "task %s starves: %d of its groups were too old to train on and %d were trained; raise"
                " rollout.max_staleness, or lower rollout.protect_after so that batches wait for it",
                group.task,
                stale,
                trained,
            )

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._since.pop(self._running.pop(task).sample_id, None)
        if task.cancelled():
            self.scheduler.left()
        elif (error := task.exception()) is not None:
            self._fail(error)
        self._may_admit.set()
        self._may_take.set()

    def _fail(self, error: BaseException) -> None:
        log.error("rollout failed: %s", error, exc_info=error)
        self._failure = self._failure or error
        self._may_take.set()

    def _what_is_missing(self) -> str:
        """The oldest open groups with the members that they wait for, and for how long those have run."""
        now = time.monotonic()
        parts = [", ".join(f"{value} {name}" for name, value in self.figures().items() if isinstance(value, int))]
        for group_id, (task, members) in list(self.scheduler.missing().items())[:SHOWN_GROUPS]:
            ages = {s.index: now - self._since[s.sample_id] for s in self._running.values() if s.group_id == group_id}
            states = [f"{i} runs {ages[i]:.0f} s" if i in ages else f"{i} not admitted" for i in members]
            parts.append(f"group {group_id} of {task} lacks members {', '.join(states)}")
        return "; ".join(parts)
