"""What a simulated run came to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from miles_rl.rollout.scheduler import Scheduler
from miles_rl.simulator.bound import RolloutAlone
from miles_rl.simulator.episode import PlayedEpisode
from miles_rl.simulator.fleet import SimulatedFleet
from miles_rl.simulator.trainer import Step
from miles_rl.types import Outcome

if TYPE_CHECKING:
    from miles_rl.simulator.simulation import Schedule

WARM_UP_SHARE = 0.2


@dataclass(frozen=True, slots=True)
class Result:
    """Times in seconds of the simulated clock. `step_s` is a mean without the first fifth of the steps, in which the
    places fill; `bound_s` is what a step takes at least: the longer of a batch at the rate of rollouts alone, and of
    training and publishing. `wasted_tokens_ratio` is of tokens in groups that were dropped as too old.
    A real run fails when `longest_wait_s`, of one batch, is above its `batch_timeout_s`.
    """

    steps: int
    wall_s: float
    error: str
    step_s: float
    bound_s: float
    rollout_s: float
    train_s: float
    samples_per_s: float
    tokens_per_s: float
    trainer_idle_ratio: float
    longest_wait_s: float
    batch_timeout_s: float
    places_used_ratio: float
    episode_s_mean: float
    episode_s_max: float
    staleness_mean: float
    staleness_max: int
    num_turns: int
    failed_samples: int
    stale_groups: Mapping[str, int]
    starving_tasks: Sequence[str]
    wasted_tokens_ratio: float
    tokens_after_truncation: int
    prefix_cache_hit_rate: float

    @property
    def of_bound(self) -> float:
        """How close a step comes to its bound; 1 is all that can be had."""
        return self.bound_s / self.step_s if self.step_s else 0.0

    def as_dict(self) -> dict[str, Any]:
        """All figures, for JSON."""
        return {**asdict(self), "of_bound": self.of_bound}

    @classmethod
    def of(
        cls,
        schedule: Schedule,
        steps: Sequence[Step],
        ended: Sequence[PlayedEpisode],
        dropped: set[str],
        scheduler: Scheduler,
        fleet: SimulatedFleet,
        alone: RolloutAlone | None,
        *,
        wall_s: float,
        error: str,
    ) -> Result:
        """Sum up a run, without its evaluations. `dropped` are the samples that were discarded as too old."""
        ended = [episode for episode in ended if episode.sample.group_id >= 0]
        later = steps[int(len(steps) * WARM_UP_SHARE) :] or steps
        step_s = sum(step.total_s for step in later) / max(1, len(later))
        train_s = sum(step.train_s + step.publish_s for step in later) / max(1, len(later))
        rollout_s = 0.0 if alone is None else schedule.batch_size / max(alone.samples_per_s, 1e-9)
        trained = [t for step in later for t in step.batch.trajectories]
        staleness = [lag for step in later for lag in step.batch.staleness]
        whole = [e for e in ended if e.outcome is not Outcome.CANCELLED]
        times = [e.total_s for e in whole]
        later_s = max(step_s * len(later), 1e-9)
        return cls(
            steps=len(steps),
            wall_s=wall_s,
            error=error,
            step_s=step_s,
            bound_s=max(rollout_s, train_s),
            rollout_s=rollout_s,
            train_s=train_s,
            samples_per_s=len(trained) / later_s,
            tokens_per_s=sum(t.timings["num_tokens"] for t in trained) / later_s,
            trainer_idle_ratio=sum(step.wait_s for step in later) / later_s,
            longest_wait_s=max((step.wait_s for step in steps), default=0.0),
            batch_timeout_s=schedule.batch_timeout_s,
            places_used_ratio=sum(e.total_s for e in ended) / max(wall_s * schedule.concurrency, 1e-9),
            episode_s_mean=sum(times) / max(1, len(times)),
            episode_s_max=max(times, default=0.0),
            staleness_mean=sum(staleness) / max(1, len(staleness)),
            staleness_max=max(staleness, default=0),
            num_turns=sum(len(e.turns) for e in ended),
            failed_samples=sum(e.outcome is not Outcome.SCORED for e in whole),
            stale_groups=dict(scheduler.stale_by_task),
            starving_tasks=_starving(scheduler),
            wasted_tokens_ratio=_wasted_tokens_ratio(ended, dropped),
            tokens_after_truncation=sum(e.tokens_after_truncation for e in ended),
            prefix_cache_hit_rate=fleet.cached_tokens / max(1, fleet.prompt_tokens),
        )


def _starving(scheduler: Scheduler) -> list[str]:
    """Tasks that the collector warns of: more of their groups were too old than were trained."""
    trained = scheduler.trained_by_task
    return sorted(task for task, stale in scheduler.stale_by_task.items() if stale > max(1, trained[task]))


def _wasted_tokens_ratio(ended: Sequence[PlayedEpisode], dropped: set[str]) -> float:
    wasted = sum(e.num_tokens for e in ended if e.sample.sample_id in dropped)
    return wasted / max(1, sum(e.num_tokens for e in ended))
