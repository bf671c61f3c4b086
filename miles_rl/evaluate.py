"""The eval stage: how many tasks of the held-out split the policy solves, with an interval.

Every task is played `num_samples` times. Episodes of one task are alike, so the interval takes tasks as clusters:
a Student t interval over the per-task solve rates (Miller 2024, "Adding Error Bars to Evals", section 3). A change
between two evaluations is paired by task. Failures of infrastructure are played again, within a count for each
episode and a budget for each evaluation, and are excluded and counted when they persist. Weights may move while an
evaluation runs; the versions that wrote its tokens are stated.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from scipy.special import stdtrit

from miles_rl.deadline import deadline
from miles_rl.engine.client import EngineClient
from miles_rl.rollout.agent import Agent
from miles_rl.rollout.chat import ChatRenderer
from miles_rl.rollout.recorder import EpisodeRecorder
from miles_rl.rollout.runner import EpisodeRunner, FinishedEpisode
from miles_rl.types import Outcome
from sandbox_env.task import Task

log = logging.getLogger(__name__)
SOLVED_REWARD = 1.0
NAMED_TASKS = 3


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Result of one evaluation. `solve_rates` maps task to its rate; `failed` counts excluded episodes."""

    version: int
    solve_rates: Mapping[str, float]
    solve_rate: float
    ci95: tuple[float, float]
    oldest_version: int
    newest_version: int
    failed: int
    started_s: float
    finished_s: float

    def as_dict(self) -> dict[str, Any]:
        """The evaluation as plain values, for a checkpoint."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Evaluation:
        """What `as_dict` gave, also after a way through JSON. `TypeError` if a value is missing or unknown."""
        low, high = values["ci95"]
        return cls(**{**values, "ci95": (low, high)})

    def metrics(self) -> dict[str, float]:
        """The evaluation under its metric names."""
        return {
            "eval/solve_rate": self.solve_rate,
            "eval/solve_rate_ci95_low": self.ci95[0],
            "eval/solve_rate_ci95_high": self.ci95[1],
            "eval/failed": self.failed,
            "eval/num_tasks": len(self.solve_rates),
            "eval/version_lag": self.newest_version - self.oldest_version,
            "time/eval_start_s": self.started_s,
            "time/eval_end_s": self.finished_s,
        }


def mean_ci95(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean and 95 % Student t interval of independent values; unbounded for fewer than two."""
    mean = sum(values) / len(values)
    if len(values) < 2:
        return mean, -math.inf, math.inf
    variance = sum((v - mean) ** 2 for v in values) / (len(values) - 1)
    half = float(stdtrit(len(values) - 1, 0.975)) * math.sqrt(variance / len(values))
    return mean, mean - half, mean + half


def paired_change(before: Evaluation, after: Evaluation) -> tuple[float, float, float]:
    """Mean change of the solve rate with its 95 % interval, paired over the tasks that both evaluations have."""
    shared = sorted(set(before.solve_rates) & set(after.solve_rates))
    if not shared:
        raise ValueError("eval: the two evaluations share no task")
    return mean_ci95([after.solve_rates[t] - before.solve_rates[t] for t in shared])


class Progress:
    """How far an evaluation that still runs has come: episodes that ended, for the display."""

    def __init__(self, version: int, total: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.version, self._total, self._clock = version, total, clock
        self._begin_s = clock()
        self._done, self._scored, self._solved, self._infra_failures = 0, 0, 0, 0

    def attempt_failed(self) -> None:
        """Infrastructure failed an episode, which may be played again."""
        self._infra_failures += 1

    def ended(self, episode: FinishedEpisode) -> None:
        """The last attempt of an episode is over."""
        self._done += 1
        if episode.result.outcome is Outcome.SCORED and episode.result.reward is not None:
            self._scored += 1
            self._solved += episode.result.reward >= SOLVED_REWARD

    def figures(self, running: int) -> dict[str, Any]:
        """With `running` episodes in flight, each taken as half done; `left_s` is None until one has ended."""
        played = self._done + running / 2
        pace_s = (self._clock() - self._begin_s) / played if self._done else None
        return {
            "version": self.version,
            "done": self._done,
            "total": self._total,
            "solve_rate": self._solved / self._scored if self._scored else None,
            "infra_failures": self._infra_failures,
            "left_s": None if pace_s is None else pace_s * (self._total - played),
        }


class Evaluator:
    """Component of the stage `eval`."""

    def __init__(
        self,
        data: Any,
        sandboxes: Any,
        fleet: Any,
        *,
        num_samples: int,
        concurrency: int,
        max_attempts: int,
        max_retries: int,
        timeout_s: float,
        agent: Agent,
        run_dir: str,
    ) -> None:
        for name, value in (("num_samples", num_samples), ("concurrency", concurrency), ("max_attempts", max_attempts)):
            if value < 1:
                raise ValueError(f"stages.eval.run.{name}: {value}; give at least 1")
        if max_retries < 0:
            raise ValueError(f"stages.eval.run.max_retries: {max_retries}; give 0 for none, or more")
        if timeout_s <= 0:
            raise ValueError(f"stages.eval.run.timeout_s: {timeout_s}; give more than 0")
        self._data, self._sandboxes, self._fleet = data, sandboxes, fleet
        self._num_samples, self._timeout_s = num_samples, timeout_s
        self._max_attempts, self._max_retries = max_attempts, max_retries
        self._slots = asyncio.Semaphore(concurrency)
        self._agent, self._run_dir = agent, Path(run_dir)
        self._running = 0
        self._progress: Progress | None = None
        self._last: Evaluation | None = None

    @staticmethod
    def describe(options: Mapping[str, Any]) -> dict[str, Any]:
        """Sizes for the plan."""
        return {"episodes per task": options["num_samples"], "in flight": options["concurrency"]}

    async def start(self) -> None:
        """Connect to engines and sandboxes."""
        initial, endpoints = await self._data.initial_policy(), await self._fleet.endpoints()
        self._tasks: list[Task] = await self._data.tasks("eval")
        self._client = EngineClient(endpoints["router"], timeout_s=self._agent.request_timeout_s)
        renderer = ChatRenderer(initial["model_dir"])
        self._runner = EpisodeRunner(self._sandboxes, self._client, renderer, self._agent)
        self._recorder = EpisodeRecorder(self._run_dir / "episodes")

    async def evaluate(self, version: int) -> Evaluation:
        """Play every task `num_samples` times. `version` is the one the evaluation speaks for.

        An episode's id, and with it its sampling seed, is made of the version, the task and a number: evaluated again
        after a resume, the same weights get the same seeds.

        Raises `TimeoutError` after `timeout_s`, and `RuntimeError` if a task has no episode that was scored.
        """
        started = time.time()
        self._progress = progress = Progress(version, len(self._tasks) * self._num_samples)
        try:
            episodes = await self._play_all(progress)
            self._recorder.flush()
            self._last = self._summarise(episodes, version, started)
        finally:
            self._progress = None
        return self._last

    async def status(self) -> Mapping[str, Any]:
        """Figures for the display: the last evaluation and, as `now`, how far one has come that still runs."""
        figures: dict[str, Any] = {"running": self._running}
        if self._last is not None:
            figures |= {
                "solve_rate": self._last.solve_rate,
                "ci95": self._last.ci95,
                "version": self._last.version,
                "took_s": self._last.finished_s - self._last.started_s,
                "episodes": len(self._tasks) * self._num_samples,
                "failed": self._last.failed,
            }
        if self._progress is not None:
            figures["now"] = self._progress.figures(self._running)
        return figures

    async def stop(self) -> None:
        """Flush the episodes and close the connections."""
        if hasattr(self, "_recorder"):
            await asyncio.to_thread(self._recorder.close)  # bounded: by the recorder's own deadline
            await self._client.close()

    async def _play_all(self, progress: Progress) -> list[FinishedEpisode]:
        retries = iter(range(self._max_retries))
        limit = deadline("stages.eval.run.timeout_s", self._timeout_s, "the evaluation")
        async with limit, asyncio.TaskGroup() as group:
            plays = [
                group.create_task(self._play(task, i, progress, retries))
                for task in self._tasks
                for i in range(self._num_samples)
            ]
        return [play.result() for play in plays]  # bounded: they are done

    async def _play(self, task: Task, index: int, progress: Progress, retries: Iterator[int]) -> FinishedEpisode:
        """One episode, played again while infrastructure fails it, the count allows it and `retries` has one left."""
        async with self._slots:  # bounded: timeout_s of the evaluation
            self._running += 1
            try:
                for attempt in range(self._max_attempts):
                    sample_id = f"e{progress.version}.{task.name}.{index}.{attempt}"
                    episode = await self._runner.run(task, sample_id)
                    self._recorder.record(episode.record(kind="eval", version=progress.version, attempt=attempt))
                    if not episode.result.outcome.is_infra_failure:
                        break
                    progress.attempt_failed()
                    log.warning("%s: %s: %s", sample_id, episode.result.outcome, episode.result.detail)
                    if attempt + 1 < self._max_attempts and next(retries, None) is None:
                        break
                progress.ended(episode)
                return episode
            finally:
                self._running -= 1

    def _summarise(self, episodes: Sequence[FinishedEpisode], version: int, started_s: float) -> Evaluation:
        solved: dict[str, list[float]] = {t.name: [] for t in self._tasks}
        versions: list[int] = []
        for episode in episodes:
            reward = episode.result.reward
            if episode.result.outcome is Outcome.SCORED and reward is not None:
                solved[episode.task.name].append(float(reward >= SOLVED_REWARD))
                policy_versions = episode.policy.arrays()[3]
                versions += [int(v) for v in policy_versions[policy_versions >= 0]]
        if missing := [name for name, values in solved.items() if not values]:
            causes = Counter(f"{e.result.outcome}: {e.result.detail}" for e in episodes if e.task.name in missing)
            ((cause, count),) = causes.most_common(1)
            num_more = len(missing) - NAMED_TASKS
            named = ", ".join(missing[:NAMED_TASKS]) + (f" and {num_more} more" if num_more > 0 else "")
            raise RuntimeError(
                f"eval: version {version}: no episode was scored of {len(missing)} of {len(solved)} tasks ({named});"
                f" {count} of {causes.total()} episodes ended with {cause}; see log.txt"
            )
        rates = {name: sum(values) / len(values) for name, values in solved.items()}
        mean, low, high = mean_ci95(list(rates.values()))
        return Evaluation(
            version=version,
            solve_rates=rates,
            solve_rate=mean,
            ci95=(max(0.0, low), min(1.0, high)),
            oldest_version=min(versions),
            newest_version=max(versions),
            failed=len(episodes) - sum(len(values) for values in solved.values()),
            started_s=started_s,
            finished_s=time.time(),
        )
