"""What the places and engines of a run yield at most, when nothing is waited for and nothing is dropped."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from miles_rl.rollout.groups import Sample
from miles_rl.simulator.episode import EpisodeModel, PlayedEpisode, StubEpisodes
from miles_rl.simulator.fleet import SimulatedFleet
from miles_rl.simulator.replica import ReplicaModel
from miles_rl.types import Outcome

if TYPE_CHECKING:
    from miles_rl.simulator.simulation import Schedule


@dataclass(frozen=True, slots=True)
class RolloutAlone:
    """Scored samples a second of `concurrency` places that are never empty; 0 if too few were."""

    samples_per_s: float


async def rollout_alone(
    episode: EpisodeModel, replica: ReplicaModel, schedule: Schedule, num_episodes: int
) -> RolloutAlone:
    """Play `num_episodes` of the schedule's tasks through its places, and count from the first to the last third.

    The first third fills the places with episodes of all ages, the last would leave them empty.
    """
    ended: list[PlayedEpisode] = []
    fleet = SimulatedFleet(replica, schedule.num_replicas, schedule.router_policy)
    episodes = StubEpisodes(episode, fleet, schedule.seed, ended.append)
    size, tasks = schedule.group_size, schedule.num_tasks
    numbers = itertools.count()
    total = max(num_episodes, 3 * schedule.concurrency)

    async def keep_playing() -> None:
        while len(ended) < total:
            group, index = divmod(next(numbers), size)
            await episodes.play(Sample(group, index, 0, f"task-{group % tasks:02d}"), lambda sandbox_id: None)

    places = [asyncio.create_task(keep_playing()) for _ in range(schedule.concurrency)]
    # bounded: the latencies that were drawn; the first place that leaves saw the last episode end, or failed
    await asyncio.wait(places, return_when=asyncio.FIRST_COMPLETED)
    for place in places:
        place.cancel()
    results = await asyncio.gather(*places, return_exceptions=True)  # bounded: they were cancelled
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, asyncio.CancelledError):
            raise result
    scored = sorted(e.ended_s for e in ended if e.outcome is Outcome.SCORED and e.ended_s is not None)
    if not scored:
        return RolloutAlone(0.0)
    begin, end = scored[len(scored) // 3], scored[2 * len(scored) // 3]
    counted = sum(begin < ended_s <= end for ended_s in scored)  # many end together where latencies are equal
    return RolloutAlone(counted / max(end - begin, 1e-9))
