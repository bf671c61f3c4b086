"""The rollout stage: keeps episodes in flight, and hands out batches while they run.

Fully asynchronous: a sample is admitted whenever one of `concurrency` places is free and staleness allows it, apart
from what the trainer does. See `scheduler` for the rule.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from miles_rl.engine.client import EngineClient
from miles_rl.rollout.agent import Agent
from miles_rl.rollout.chat import ChatRenderer
from miles_rl.rollout.collector import Collector, PlayedSample
from miles_rl.rollout.episode_metrics import episode_metrics
from miles_rl.rollout.groups import Sample
from miles_rl.rollout.ledger import LEDGER_FILE, Ledger, Resumed
from miles_rl.rollout.order import TaskOrder
from miles_rl.rollout.recorder import EpisodeRecorder
from miles_rl.rollout.runner import EpisodeRunner, FinishedEpisode
from miles_rl.rollout.scheduler import FailureLimits, Scheduler
from miles_rl.types import Batch, Outcome, Trajectory, WeightVersion
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
        admission: Literal["sample", "group"] = "sample",
        protect_after: int | None = 1,
        short_groups: Literal["halt", "discard", "train"] = "halt",
        stop_timeout_s: float = 15.0,
    ) -> None:
        self._data, self._sandboxes, self._fleet = data, sandboxes, fleet
        counts = {"num_groups": num_groups, "group_size": group_size, "concurrency": concurrency}
        limits = {"max_failures_per_task": max_failures_per_task, "max_failures_in_a_row": max_failures_in_a_row}
        for name, value in {**counts, **limits}.items():
            if value < 1:
                raise ValueError(f"rollout.{name}: {value}; give at least 1")
        for name, seconds in (("batch_timeout_s", batch_timeout_s), ("stop_timeout_s", stop_timeout_s)):
            if seconds <= 0:
                raise ValueError(f"rollout.{name}: {seconds}; give more than 0")
        if protect_after is not None and protect_after < 0:
            raise ValueError(f"rollout.protect_after: {protect_after}; give 0 or more, or null to protect no task")
        self._mode, self._batch_timeout_s, self._stop_timeout_s = mode, batch_timeout_s, stop_timeout_s
        self._scheduling: dict[str, Any] = {
            **counts,
            "max_staleness": max_staleness,
            "admission": admission,
            "protect_after": protect_after,
            "short_groups": short_groups,
            "limits": FailureLimits(max_failures_per_task, max_failures_in_a_row),
        }
        self._run_dir, self._seed, self._agent = Path(run_dir), seed, agent
        self._recent: deque[FinishedEpisode] = deque(maxlen=RECENT_EPISODES)
        self._last_batch: tuple[Trajectory, ...] = ()
        self._collector: Collector | None = None

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
        self._tasks: dict[str, Task] = {t.name: t for t in await self._data.tasks("train")}
        self._client = EngineClient(endpoints["router"], timeout_s=self._agent.request_timeout_s)
        renderer = ChatRenderer(initial["model_dir"])
        self._runner = EpisodeRunner(self._sandboxes, self._client, renderer, self._agent)
        self._recorder = EpisodeRecorder(self._run_dir / "episodes")
        self._ledger, resumed = self._open_ledger(initial)
        scheduler = Scheduler(
            TaskOrder(list(self._tasks), self._seed, **resumed.cursor),
            version=initial["version"],
            groups=resumed.groups,
            next_group_id=resumed.next_group_id,
            **self._scheduling,
        )
        scheduler.count_earlier(resumed.failures, resumed.stale_by_task, resumed.trained_by_task)
        self._collector = Collector(
            scheduler,
            self._ledger,
            self._play,
            batch_timeout_s=self._batch_timeout_s,
            stop_timeout_s=self._stop_timeout_s,
        )
        self._collector.start()

    async def next_batch(self) -> Batch:
        """The next batch for the trainer. `TimeoutError` after `batch_timeout_s` says what was waited for."""
        batch = await self._started.next_batch()
        self._last_batch = batch.trajectories
        return batch

    async def published(self, version: WeightVersion) -> None:
        """The engines run `version` now; admission goes by it."""
        self._started.published(version)

    async def save(self, folder: str) -> None:
        """Write the ledger, with all that a resume needs of it, into the folder of a checkpoint."""
        await asyncio.to_thread(self._ledger.save, Path(folder))  # bounded: step_timeout_s of the loop that saves

    async def committed(self, version: WeightVersion, kept: list[WeightVersion]) -> None:
        """The checkpoint of `version` is complete; those of `kept` are still there."""
        self._ledger.committed(version, kept)

    async def batch_metrics(self) -> dict[str, float]:
        """Metrics of the batch handed out last, and counts since the start of failures by outcome and task, and of
        groups too old to train on by task.
        """
        scheduler = self._started.scheduler
        figures = scheduler.figures()
        totals: dict[str, float] = {"async/stale_groups": figures["stale"], "rollout/failed": figures["failed"]}
        for (task, outcome), count in scheduler.failures.items():
            for name in (f"rollout/{outcome}", f"rollout/failed_by_task/{task}"):
                totals[name] = totals.get(name, 0) + count
        stale = {f"async/stale_by_task/{task}": float(count) for task, count in scheduler.stale_by_task.items()}
        return {**episode_metrics(self._last_batch), **totals, **stale}

    async def status(self) -> Mapping[str, Any]:
        """Figures for the display; raises what broke the admission of samples."""
        if self._collector is None:
            return {}
        self._collector.raise_failure()
        rewards = [e.result.reward for e in self._recent if e.result.reward is not None]
        return {"reward_mean": sum(rewards) / len(rewards) if rewards else None, **self._collector.figures()}

    async def finish(self) -> None:
        """No more batches are wanted: cancel what runs, account for it in the ledger, flush the episodes."""
        if self._collector is not None:
            try:
                await self._collector.finish()
            finally:
                # bounded: by the recorder's own deadline
                await asyncio.to_thread(self._recorder.close)

    async def stop(self) -> None:
        """Finish, and close the ledger and the connections."""
        try:
            await self.finish()
        finally:
            if self._collector is not None:
                self._ledger.close()
            if hasattr(self, "_client"):
                await self._client.close()

    @property
    def _started(self) -> Collector:
        if self._collector is None:
            raise RuntimeError("rollout: used before start")
        return self._collector

    def _open_ledger(self, initial: Mapping[str, Any]) -> tuple[Ledger, Resumed]:
        path = self._run_dir / LEDGER_FILE
        if "checkpoint_dir" not in initial:
            return Ledger(path), Resumed()
        sources = [Path(initial[name]) / LEDGER_FILE for name in ("run_dir", "checkpoint_dir")]
        ledger, resumed = Ledger.resume(sources, path, initial["version"])
        num_scored = sum(len(group.scored) for group in resumed.groups)
        log.info("resumed with %d open groups, %d of their samples scored", len(resumed.groups), num_scored)
        return ledger, resumed

    async def _play(self, sample: Sample, on_ready: Callable[[str], None]) -> PlayedSample:
        episode = await self._runner.run(self._tasks[sample.task], sample.sample_id, on_ready)
        result, version = episode.result, self._started.scheduler.engine_version
        self._recent.append(episode)
        self._recorder.record(
            episode.record(kind="train", group_id=sample.group_id, attempt=sample.attempt, version=version)
        )
        if result.outcome is not Outcome.SCORED:
            return PlayedSample(result.outcome, detail=result.detail)
        if not episode.policy.spans:
            raise ValueError(
                f"rollout.agent.session_tokens: {self._agent.session_tokens}; the prompt of {sample.task} alone has"
                f" {episode.policy.prompt_length} tokens and leaves no room for a reply; give more"
            )
        return PlayedSample(Outcome.SCORED, episode.trajectory(sample.group_id))
