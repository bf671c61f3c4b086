"""A run without engines, sandboxes and weights: the real scheduler, collector and ledger against stubs.

What is decided when, which sample is recorded how, and what waits for what are the code of a run; only what takes time
is drawn from distributions. In virtual time a day takes seconds, for planning and for tests of liveness; in real time
it measures what the core itself costs.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from miles_rl.rollout.collector import Collector
from miles_rl.rollout.ledger import LEDGER_FILE, Ledger
from miles_rl.rollout.order import TaskOrder
from miles_rl.rollout.scheduler import FailureLimits, RolloutHalted, Scheduler
from miles_rl.simulator import clock
from miles_rl.simulator.bound import RolloutAlone, rollout_alone
from miles_rl.simulator.episode import EpisodeModel, PlayedEpisode, StubEpisodes
from miles_rl.simulator.fleet import SimulatedFleet
from miles_rl.simulator.replica import ReplicaModel
from miles_rl.simulator.result import Result
from miles_rl.simulator.trainer import EvaluationPlan, Step, StubTrainer, TrainerModel

STOP_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """What a run is told about scheduling: the options of `rollout`, and the sizes around it."""

    num_groups: int
    group_size: int
    concurrency: int
    max_staleness: int
    num_tasks: int
    steps: int
    num_replicas: int = 1
    admission: Literal["sample", "group"] = "sample"
    protect_after: int | None = 1
    short_groups: Literal["halt", "discard", "train"] = "halt"
    max_failures_per_task: int = 5
    max_failures_in_a_row: int = 32
    batch_timeout_s: float = 600.0
    router_policy: str = "manual"
    evaluation: EvaluationPlan = field(default_factory=EvaluationPlan)
    seed: int = 0

    @property
    def batch_size(self) -> int:
        """Samples of a batch, if none ends short."""
        return self.num_groups * self.group_size

    @classmethod
    def of(cls, config: Mapping[str, Any], steps: int | None = None) -> Schedule:
        """The schedule of a resolved config, for `steps` steps if given."""
        rollout, stages = config["rollout"], config["stages"]
        names = ("num_groups", "group_size", "concurrency", "max_staleness", "admission", "protect_after")
        names += ("short_groups", "max_failures_per_task", "max_failures_in_a_row", "batch_timeout_s")
        evaluation = stages["eval"]["run"]
        return cls(
            **{name: rollout[name] for name in names},
            num_tasks=config["dataset"]["train_size"],
            steps=config["steps"] if steps is None else steps,
            num_replicas=stages["fleet"]["run"]["num_replicas"],
            router_policy=config["router"]["policy"],
            evaluation=EvaluationPlan(
                every=stages["trainer"]["run"]["eval_every"],
                num_tasks=config["dataset"]["eval_size"],
                num_samples=evaluation["num_samples"],
                concurrency=evaluation["concurrency"],
            ),
            seed=config["seed"],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """How long things take. `steps`: of the run if null. `bound_episodes`: played to find what rollouts alone allow,
    0 for not. `give_up_s`: without a batch for so long the simulation ends; the run itself gives up after
    `rollout.batch_timeout_s`: the result has that and the longest wait.
    """

    episode: EpisodeModel
    replica: ReplicaModel
    trainer: TrainerModel
    time: clock.Time = "virtual"
    steps: int | None = None
    bound_episodes: int = 1000
    give_up_s: float = 86400.0

    def of(self, config: Mapping[str, Any]) -> Result:
        """Simulate the run of a resolved config."""
        return self.run(Schedule.of(config, self.steps))

    def run(self, schedule: Schedule) -> Result:
        """Simulate `schedule`. The result's `error` says what ended it early, if anything did."""
        alone = self.rollout_alone(schedule)
        with tempfile.TemporaryDirectory(prefix="miles-simulation-") as folder:
            return clock.run(_Run(self, schedule, Path(folder), alone).run(), self.time)

    def rollout_alone(self, schedule: Schedule) -> RolloutAlone | None:
        """What the places and engines of `schedule` yield when nothing is waited for or dropped, in virtual time."""
        if self.bound_episodes == 0:
            return None
        played = rollout_alone(self.episode, self.replica, schedule, self.bound_episodes)
        return clock.run(played, "virtual")


class _Run:
    """One simulated run, and what is seen of it."""

    def __init__(self, simulation: Simulation, schedule: Schedule, folder: Path, alone: RolloutAlone | None) -> None:
        self._simulation, self._schedule, self._alone = simulation, schedule, alone
        self._ledger = Ledger(folder / LEDGER_FILE)
        self._ended: list[PlayedEpisode] = []
        self._steps: list[Step] = []

    async def run(self) -> Result:
        loop = asyncio.get_running_loop()
        schedule, simulation = self._schedule, self._simulation
        fleet = SimulatedFleet(simulation.replica, schedule.num_replicas, schedule.router_policy)
        episodes = StubEpisodes(simulation.episode, fleet, schedule.seed, self._ended.append)
        scheduler = make_scheduler(schedule)
        collector = Collector(
            scheduler,
            self._ledger,
            episodes.play,
            batch_timeout_s=simulation.give_up_s,
            stop_timeout_s=STOP_TIMEOUT_S,
        )
        trainer = StubTrainer(simulation.trainer, schedule.evaluation, collector, fleet, episodes, schedule.seed)
        started = loop.time()
        collector.start()
        error = ""
        try:
            async for step in trainer.steps(schedule.steps):  # bounded: give_up_s of each batch
                self._steps.append(step)
        except RolloutHalted as halted:
            error = f"halted: {halted}"
        except TimeoutError as timeout:
            error = f"{'gave up' if collector.figures()['running'] else 'deadlock'}: {timeout}"
        wall_s = loop.time() - started
        with contextlib.closing(self._ledger):
            try:
                await trainer.stop()
            finally:
                await collector.finish()
            dropped = self._dropped()
        return Result.of(
            schedule, self._steps, self._ended, dropped, scheduler, fleet, self._alone, wall_s=wall_s, error=error
        )

    def _dropped(self) -> set[str]:
        """Samples of groups that were too old to train on."""
        with contextlib.closing(sqlite3.connect(self._ledger.path)) as ledger:
            query = "SELECT sample_id FROM samples JOIN groups USING (group_id) WHERE ended = 'stale'"
            return {sample_id for (sample_id,) in ledger.execute(query)}


def make_scheduler(schedule: Schedule) -> Scheduler:
    """The scheduler that a run with these options has."""
    return Scheduler(
        TaskOrder([f"task-{number:02d}" for number in range(schedule.num_tasks)], schedule.seed),
        num_groups=schedule.num_groups,
        group_size=schedule.group_size,
        max_staleness=schedule.max_staleness,
        limits=FailureLimits(schedule.max_failures_per_task, schedule.max_failures_in_a_row),
        concurrency=schedule.concurrency,
        admission=schedule.admission,
        protect_after=schedule.protect_after,
        short_groups=schedule.short_groups,
    )
