"""The rollout stage: keeps episodes in flight, and hands out batches while they run.

Fully asynchronous: a sample is admitted whenever one of `concurrency` places is free and staleness allows it, apart
from what the trainer does. See `scheduler` for the rule.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from miles_rl.engine.client import EngineClient
from miles_rl.rollout.agent import Agent
from miles_rl.rollout.chat import ChatRenderer
from miles_rl.rollout.ledger import Ledger
from miles_rl.rollout.recorder import EpisodeRecorder
from miles_rl.rollout.runner import EpisodeRunner, FinishedEpisode
from miles_rl.rollout.scheduler import FailureLimits, Sample, Scheduler, TaskOrder
from miles_rl.types import Batch, Outcome, StopReason, WeightVersion
from sandbox_env.task import Task

log = logging.getLogger(__name__)
RECENT_EPISODES = 256


class Rollout:
    """Component of the stage `rollout`. See `conf/rollout` for what the options mean."""

    def __init__(
        self,
        data: Any,
        sandboxes: Any,
        fleet: Any,
        *,
        mode: Literal["async", "sync"],
        num_groups: int,
        group_size: int,
        concurrency: int,
        max_staleness: int,
        batch_timeout_s: float,
        max_failures_per_task: int,
        max_failures_in_a_row: int,
        run_dir: str,
        seed: int,
        agent: Agent,
    ) -> None:
        self._data, self._sandboxes, self._fleet = data, sandboxes, fleet
        self._mode, self._concurrency, self._batch_timeout_s = mode, concurrency, batch_timeout_s
        for name, value in (("num_groups", num_groups), ("group_size", group_size), ("concurrency", concurrency)):
            if value < 1:
                raise ValueError(f"rollout.{name}: {value}; give at least 1")
        if batch_timeout_s <= 0:
            raise ValueError(f"rollout.batch_timeout_s: {batch_timeout_s}; give more than 0")
        self._num_groups, self._group_size, self._max_staleness = num_groups, group_size, max_staleness
        self._failure_limits = FailureLimits(max_failures_per_task, max_failures_in_a_row)
        self._run_dir, self._seed, self._agent = Path(run_dir), seed, agent
        self._running: dict[asyncio.Task[None], Sample] = {}
        self._may_admit, self._may_take = asyncio.Event(), asyncio.Event()
        self._admission: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None
        self._outcomes: Counter[str] = Counter()
        self._recent: deque[FinishedEpisode] = deque(maxlen=RECENT_EPISODES)
        self._since_batch: list[FinishedEpisode] = []

    @staticmethod
    def describe(options: Mapping[str, Any]) -> dict[str, Any]:
        """Sizes for the plan."""
        groups, size = options["num_groups"], options["group_size"]
        return {
            "batch": f"{groups} tasks x {size} episodes = {groups * size}",
            "in flight": options["concurrency"],
            "max_staleness": options["max_staleness"],
            "turns": options["agent"]["max_turns"],
            "session_tokens": options["agent"]["session_tokens"],
        }

    async def start(self) -> None:
        """Connect to engines and sandboxes, open the ledger, and begin to admit samples."""
        initial, endpoints = await self._data.initial_policy(), await self._fleet.endpoints()
        cursor: Mapping[str, Any] = initial.get("cursor") or {}
        self._tasks: dict[str, Task] = {t.name: t for t in await self._data.tasks("train")}
        self._client = EngineClient(endpoints["router"], timeout_s=self._agent.request_timeout_s)
        renderer = ChatRenderer(initial["model_dir"])
        self._runner = EpisodeRunner(self._sandboxes, self._client, renderer, self._agent)
        self._ledger = Ledger(self._run_dir / "ledger.sqlite")
        self._recorder = EpisodeRecorder(self._run_dir / "episodes")
        self._scheduler = Scheduler(
            TaskOrder(list(self._tasks), self._seed, cursor.get("drawn", 0), cursor.get("requeued", ())),
            num_groups=self._num_groups,
            group_size=self._group_size,
            max_staleness=self._max_staleness,
            limits=self._failure_limits,
            version=initial["version"],
            next_group_id=cursor.get("next_group_id", 0),
        )
        self._admission = asyncio.create_task(self._admit_forever())

    async def next_batch(self) -> Batch:
        """The next batch for the trainer. `TimeoutError` after `batch_timeout_s` says what was waited for."""
        try:
            async with asyncio.timeout(self._batch_timeout_s):
                while (batch := self._take()) is None:
                    self._raise_failure()
                    self._may_take.clear()
                    await self._may_take.wait()
        except TimeoutError:
            figures = dict(self._scheduler.figures())
            raise TimeoutError(
                f"rollout.batch_timeout_s: {self._batch_timeout_s:g}; no batch of {self._num_groups} groups in time"
                f" ({figures}, {len(self._running)} samples running); see the ledger and log.txt"
            ) from None
        self._ledger.train([t.sample_id for t in batch.trajectories], batch.version)
        self._may_admit.set()
        return batch

    async def published(self, version: WeightVersion) -> None:
        """The engines run `version` now; admission goes by it."""
        self._scheduler.published(version)
        self._may_admit.set()

    async def cursor(self) -> dict[str, Any]:
        """Where the data stands, for a checkpoint."""
        return self._scheduler.cursor()

    async def batch_metrics(self) -> dict[str, float]:
        """Metrics of the episodes that ended since the last call."""
        episodes, self._since_batch = self._since_batch, []
        figures = self._scheduler.figures()
        totals = {"async/stale_samples": figures["stale"], "rollout/failed": figures["failed"]}
        return {**episode_metrics(episodes), **totals}

    async def status(self) -> Mapping[str, Any]:
        """Figures for the display; raises what broke the admission of samples."""
        self._raise_failure()
        if not hasattr(self, "_scheduler"):
            return {}
        rewards = [e.result.reward for e in self._recent if e.result.reward is not None]
        return {
            "running": len(self._running),
            "scored": self._outcomes[Outcome.SCORED],
            "reward_mean": sum(rewards) / len(rewards) if rewards else None,
            "outcomes": dict(self._outcomes),
            **self._scheduler.figures(),
        }

    async def finish(self) -> None:
        """No more batches are wanted: cancel what runs, account for it in the ledger, flush the episodes."""
        if self._admission is None:
            return
        tasks, self._admission = [self._admission, *self._running], None
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._ledger.discard_unfinished("the run ended")
        self._recorder.close()

    async def stop(self) -> None:
        """Finish, and close the ledger and the connections."""
        await self.finish()
        if hasattr(self, "_client"):
            self._ledger.close()
            await self._client.close()

    def _take(self) -> Batch | None:
        for group in self._scheduler.drop_stale():
            self._ledger.discard([t.sample_id for t in group.trajectories], "stale")
            log.warning("group %d of %s dropped: older than max_staleness", group.group_id, group.task)
        return self._scheduler.take_batch()

    async def _admit_forever(self) -> None:
        try:
            while self._failure is None:
                while len(self._running) < self._concurrency and (sample := self._scheduler.next_sample()):
                    self._ledger.admit(
                        sample.sample_id,
                        sample.group_id,
                        sample.index,
                        sample.attempt,
                        sample.task,
                        self._scheduler.engine_version,
                    )
                    task = asyncio.create_task(self._play(sample))
                    self._running[task] = sample
                    task.add_done_callback(self._ended)
                self._may_admit.clear()
                await self._may_admit.wait()
        except Exception as error:
            self._fail(error)

    async def _play(self, sample: Sample) -> None:
        episode = await self._runner.run(self._tasks[sample.task], sample.sample_id)
        result = episode.result
        self._recent.append(episode)
        self._since_batch.append(episode)
        self._outcomes[result.outcome] += 1
        self._recorder.record(
            episode.record(
                kind="train",
                group_id=sample.group_id,
                attempt=sample.attempt,
                version=self._scheduler.engine_version,
            )
        )
        if result.outcome is Outcome.SCORED and result.reward is not None:
            trajectory = episode.trajectory(sample.group_id)
            self._ledger.score(sample.sample_id, result.reward, trajectory.oldest_version, episode.sandbox_id)
            self._scheduler.succeed(sample, trajectory)
        else:
            self._ledger.fail(sample.sample_id, f"{result.outcome}: {result.detail}")
            log.warning("%s of %s: %s: %s", sample.sample_id, sample.task, result.outcome, result.detail)
            self._scheduler.fail(sample, result.outcome, result.detail)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)
        self._may_admit.set()
        self._may_take.set()

    def _fail(self, error: BaseException) -> None:
        log.error("rollout failed: %s", error, exc_info=error)
        self._failure = self._failure or error
        self._may_take.set()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure


def episode_metrics(episodes: list[FinishedEpisode]) -> dict[str, float]:
    """Means over ended episodes: turns, tokens, truncation, cache hits, seconds. Empty for none."""
    scored = [e for e in episodes if e.result.outcome is Outcome.SCORED]
    if not scored:
        return {}
    num = len(scored)
    spans = [s for e in scored for s in e.policy.spans]
    total_s = sum(e.timings["total_s"] for e in scored)
    prompt_tokens = sum(s.prompt_tokens for s in spans)
    truncated = (StopReason.TURN_TRUNCATED, StopReason.SESSION_BUDGET)
    metrics = {
        "rollout/num_turns_mean": sum(len(e.result.turns) for e in scored) / num,
        "rollout/response_tokens_mean": sum(s.end - s.start for s in spans) / num,
        "rollout/completed_ratio": sum(e.result.stop_reason is StopReason.COMPLETED for e in scored) / num,
        "rollout/episode_truncated_ratio": sum(e.result.stop_reason in truncated for e in scored) / num,
        "rollout/prefix_cache_hit_rate": sum(s.cached_tokens for s in spans) / max(1, prompt_tokens),
        "rollout/episode_s_mean": total_s / num,
        "rollout/episode_s_max": max(e.timings["total_s"] for e in scored),
        "rollout/episode_overhead_ratio": sum(e.timings["other_s"] for e in scored) / max(total_s, 1e-9),
    }
    for part in ("lease_s", "generate_s", "exec_s", "verify_s"):
        metrics[f"rollout/{part.removesuffix('_s')}_s_mean"] = sum(e.timings[part] for e in scored) / num
    return metrics
