"""A stub of the training loop: take a batch, be busy, publish at once, evaluate beside the training."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass

from miles_rl.rollout.collector import Collector
from miles_rl.rollout.groups import Sample
from miles_rl.simulator.distribution import Distribution
from miles_rl.simulator.episode import StubEpisodes
from miles_rl.simulator.fleet import SimulatedFleet
from miles_rl.types import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerModel:
    """Seconds of an optimizer step, and of a publish, in which the engines stand still."""

    train_s: Distribution
    publish_s: Distribution


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationPlan:
    """Every `every` steps (0: never), `num_tasks` x `num_samples` episodes, `concurrency` at a time."""

    every: int = 0
    num_tasks: int = 0
    num_samples: int = 1
    concurrency: int = 1


@dataclass(frozen=True, slots=True)
class Step:
    """What one step took, in seconds, and what it trained on."""

    wait_s: float
    train_s: float
    publish_s: float
    batch: Batch

    @property
    def total_s(self) -> float:
        """Seconds from asking for the batch until the weights were out."""
        return self.wait_s + self.train_s + self.publish_s


class StubTrainer:
    """Drives a `Collector` as `TrainingLoop` does. One evaluation at a time; one that would be a second is skipped."""

    def __init__(
        self,
        model: TrainerModel,
        evaluation: EvaluationPlan,
        collector: Collector,
        fleet: SimulatedFleet,
        episodes: StubEpisodes,
        seed: int,
    ) -> None:
        self._model, self._plan, self._collector = model, evaluation, collector
        self._fleet, self._episodes, self._seed = fleet, episodes, seed
        self._evaluation: asyncio.Task[None] | None = None

    async def steps(self, num_steps: int) -> AsyncIterator[Step]:
        """The steps, each when its weights are out. Raises what `Collector.next_batch` raises."""
        now = asyncio.get_running_loop().time
        for version in range(1, num_steps + 1):
            rng = random.Random(f"{self._seed}/step/{version}")
            train_s, publish_s = self._model.train_s.draw(rng), self._model.publish_s.draw(rng)
            asked = now()
            batch = await self._collector.next_batch()
            wait_s = now() - asked
            await asyncio.sleep(train_s)
            await self._fleet.publish(version, publish_s)
            self._collector.published(version)
            yield Step(wait_s, train_s, publish_s, batch)
            if self._plan.every and version % self._plan.every == 0 and version < num_steps:
                self._evaluate(version)

    async def stop(self) -> None:
        """Give up an evaluation that still runs. Raises what one failed of."""
        if self._evaluation is not None:
            self._evaluation.cancel()
            await asyncio.wait([self._evaluation])  # bounded: it is cancelled
            self._check_evaluation()

    def _check_evaluation(self) -> None:
        evaluation = self._evaluation
        if evaluation is not None and evaluation.done() and not evaluation.cancelled():
            evaluation.result()  # bounded: it is done

    def _evaluate(self, version: int) -> None:
        self._check_evaluation()
        if self._evaluation is None or self._evaluation.done():
            self._evaluation = asyncio.create_task(self._play_all(version))

    async def _play_all(self, version: int) -> None:
        places = asyncio.Semaphore(self._plan.concurrency)

        async def play(sample: Sample) -> None:
            async with places:  # bounded: the latencies that were drawn
                await self._episodes.play(sample, lambda sandbox_id: None)

        async with asyncio.TaskGroup() as group:  # bounded: the latencies that were drawn
            for task in range(self._plan.num_tasks):
                for index in range(self._plan.num_samples):
                    group.create_task(play(Sample(-version, task * 1000 + index, 0, f"eval-{task}")))
