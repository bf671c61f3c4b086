"""Stub episodes: everything that takes time in a real one, drawn from distributions, and true versions on the tokens.

All numbers of an episode come from a generator that is seeded by the run's seed and the sample's id, so they do not
depend on the order in which samples run: two schedules can be compared on the same episodes.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from miles_rl.rollout.collector import PlayedSample
from miles_rl.rollout.groups import Sample
from miles_rl.simulator.distribution import Distribution
from miles_rl.simulator.fleet import SimulatedFleet
from miles_rl.types import NO_VERSION, Outcome, StopReason, Trajectory, Turn, WeightVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeModel:
    """What episodes look like. Lengths in tokens; the last four are the limits of the agent.

    `task_factor` is drawn once a task: it multiplies the replies, the commands and the verifier of all its episodes,
    so that some tasks are slow. Failure rates are per sandbox, per request and per verifier.
    """

    turns: Distribution
    prompt_tokens: Distribution
    reply_tokens: Distribution
    observation_tokens: Distribution
    sandbox_s: Distribution
    command_s: Distribution
    verify_s: Distribution
    task_factor: Distribution
    sandboxes_at_once: int | None = None
    sandbox_failure_rate: float = 0.0
    request_failure_rate: float = 0.0
    verifier_failure_rate: float = 0.0
    max_turns: int
    turn_tokens: int
    session_tokens: int
    wall_clock_s: float

    def __post_init__(self) -> None:
        for name in ("max_turns", "turn_tokens", "session_tokens", "wall_clock_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}: {getattr(self, name)}; give more than 0")
        for name in ("sandbox_failure_rate", "request_failure_rate", "verifier_failure_rate"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)}; give at least 0 and less than 1")
        if self.sandboxes_at_once is not None and self.sandboxes_at_once < 1:
            raise ValueError(f"sandboxes_at_once: {self.sandboxes_at_once}; give at least 1, or null for no limit")


@dataclass(slots=True)
class PlayedEpisode:
    """One stub episode, ended or not. Times are of the loop's clock."""

    sample: Sample
    started_s: float
    lease_s: float = 0.0
    generate_s: float = 0.0
    command_s: float = 0.0
    ended_s: float | None = None
    context: int = 0
    spans: list[tuple[WeightVersion, int]] = field(default_factory=list[tuple[WeightVersion, int]])
    turns: list[Turn] = field(default_factory=list[Turn])
    stop_reason: StopReason = StopReason.ABORTED
    outcome: Outcome = Outcome.CANCELLED
    tokens_after_truncation: int = 0

    @property
    def total_s(self) -> float:
        """Seconds from admission to the end; 0 while it runs."""
        return 0.0 if self.ended_s is None else self.ended_s - self.started_s

    @property
    def num_tokens(self) -> int:
        """Tokens that the policy wrote."""
        return sum(tokens for _, tokens in self.spans)


class _Failed(Exception):
    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome)
        self.outcome = outcome


class StubEpisodes:
    """Plays samples for a `Collector`. `running` are the episodes in flight; `on_end` is told of each that ended.

    A trajectory holds one prompt token, and for each turn one token per version that wrote in it.
    """

    def __init__(
        self, model: EpisodeModel, fleet: SimulatedFleet, seed: int, on_end: Callable[[PlayedEpisode], None]
    ) -> None:
        self._model, self._fleet, self._seed, self._on_end = model, fleet, seed, on_end
        limit = model.sandboxes_at_once
        self._creating = contextlib.nullcontext() if limit is None else asyncio.Semaphore(limit)
        self._factors: dict[str, float] = {}
        self.running: set[str] = set()
        self.outcomes: Counter[Outcome] = Counter()

    async def play(self, sample: Sample, on_ready: Callable[[str], None]) -> PlayedSample:
        """One episode. An infrastructure failure is its outcome; cancellation passes through."""
        loop = asyncio.get_running_loop()
        rng = random.Random(f"{self._seed}/{sample.sample_id}")
        episode = PlayedEpisode(sample, loop.time())
        self.running.add(sample.sample_id)
        try:
            await self._lease(rng, episode)
            on_ready(f"stub-{sample.sample_id}")
            await self._act(rng, episode)
            await self._verify(rng, episode)
        except _Failed as failure:
            episode.outcome = failure.outcome
            return PlayedSample(failure.outcome, detail="drawn by the simulation")
        finally:
            self.running.discard(sample.sample_id)
            episode.ended_s = loop.time()
            self.outcomes[episode.outcome] += 1
            self._on_end(episode)
        return PlayedSample(Outcome.SCORED, self._trajectory(episode, reward=float(rng.random() < 0.5)))

    async def _lease(self, rng: random.Random, episode: PlayedEpisode) -> None:
        sandbox_s = self._model.sandbox_s.draw(rng)
        async with self._creating:  # bounded: the latencies that were drawn
            await asyncio.sleep(sandbox_s)
        episode.lease_s = asyncio.get_running_loop().time() - episode.started_s
        if rng.random() < self._model.sandbox_failure_rate:
            raise _Failed(Outcome.SANDBOX_FAILED)

    async def _act(self, rng: random.Random, episode: PlayedEpisode) -> None:
        """The agent's turns; its clock begins now, as the sandbox is ready."""
        clock = asyncio.timeout(self._model.wall_clock_s)
        try:
            async with clock:
                await self._turns(rng, episode)
        except TimeoutError:
            if not clock.expired():
                raise
            episode.stop_reason = StopReason.WALL_CLOCK
        if not episode.spans:
            raise _Failed(Outcome.ENGINE_FAILED)  # not one reply in the time of a whole episode

    async def _turns(self, rng: random.Random, episode: PlayedEpisode) -> None:
        model, factor = self._model, self._factor(episode.sample.task)
        now = asyncio.get_running_loop().time
        wanted_turns = max(1, round(model.turns.draw(rng)))
        episode.context = max(1, round(model.prompt_tokens.draw(rng)))
        truncated = False
        for _ in range(min(wanted_turns, model.max_turns)):
            wanted = max(1, round(model.reply_tokens.draw(rng) * factor))
            command_s, observation = model.command_s.draw(rng) * factor, round(model.observation_tokens.draw(rng))
            fails = rng.random() < model.request_failure_rate
            room = model.session_tokens - episode.context
            if room < 1:
                episode.stop_reason = StopReason.SESSION_BUDGET
                return
            num_tokens, begun = min(wanted, model.turn_tokens, room), now()
            generated = await self._fleet.generate(episode.sample.sample_id, episode.context, num_tokens)
            if fails:
                raise _Failed(Outcome.ENGINE_FAILED)
            episode.tokens_after_truncation += num_tokens if truncated else 0
            truncated = num_tokens < wanted
            self._note(
                episode, generated.spans, now() - begun, 0.0 if truncated else command_s, generated.cached_tokens
            )
            if truncated:  # nothing after a cut is run, so nothing more is generated
                cut_by_turn = num_tokens == model.turn_tokens
                episode.stop_reason = StopReason.TURN_TRUNCATED if cut_by_turn else StopReason.SESSION_BUDGET
                return
            await asyncio.sleep(command_s)
            episode.command_s += command_s
            episode.context += num_tokens + observation
        episode.stop_reason = StopReason.COMPLETED if wanted_turns <= model.max_turns else StopReason.MAX_TURNS

    @staticmethod
    def _note(
        episode: PlayedEpisode,
        spans: Sequence[tuple[WeightVersion, int]],
        generate_s: float,
        command_s: float,
        cached_tokens: int,
    ) -> None:
        start = 1 + len(episode.spans)
        episode.spans += spans
        episode.generate_s += generate_s
        end = start + len(spans)
        episode.turns.append(Turn("", None, "", start, end, generate_s, command_s, cached_tokens))

    async def _verify(self, rng: random.Random, episode: PlayedEpisode) -> None:
        if episode.stop_reason is not StopReason.WALL_CLOCK:  # the real one scores 0 without a verifier
            await asyncio.sleep(self._model.verify_s.draw(rng) * self._factor(episode.sample.task))
            if rng.random() < self._model.verifier_failure_rate:
                raise _Failed(Outcome.VERIFIER_FAILED)
        episode.outcome = Outcome.SCORED

    def _factor(self, task: str) -> float:
        if task not in self._factors:
            self._factors[task] = self._model.task_factor.draw(random.Random(f"{self._seed}/task/{task}"))
        return self._factors[task]

    @staticmethod
    def _trajectory(episode: PlayedEpisode, reward: float) -> Trajectory:
        versions = np.array([NO_VERSION, *(version for version, _ in episode.spans)], np.int32)
        mask = versions >= 0
        return Trajectory(
            sample_id=episode.sample.sample_id,
            group_id=episode.sample.group_id,
            task=episode.sample.task,
            token_ids=np.arange(len(versions), dtype=np.int32),
            loss_mask=mask,
            logprobs=np.where(mask, -0.5, 0.0).astype(np.float32),
            versions=versions,
            reward=reward,
            outcome=Outcome.SCORED,
            stop_reason=episode.stop_reason,
            turns=tuple(episode.turns),
            timings={"total_s": (episode.ended_s or 0.0) - episode.started_s, "num_tokens": episode.num_tokens},
        )
