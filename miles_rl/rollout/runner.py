"""Plays one episode from lease to release, for training and for evaluation alike."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from miles_rl.engine.client import EngineClient
from miles_rl.rollout.agent import Agent
from miles_rl.rollout.chat import ChatRenderer
from miles_rl.rollout.policy import TokenPolicy
from miles_rl.rollout.recorder import EpisodeRecord
from miles_rl.types import Outcome, StopReason, Trajectory, Turn
from sandbox_env.episode import EpisodeResult, run_episode
from sandbox_env.pool import LeasedSandbox
from sandbox_env.sandbox import SandboxError
from sandbox_env.task import Task

log = logging.getLogger(__name__)
RELEASE_TIMEOUT_S = 60.0


@dataclass(slots=True)
class FinishedEpisode:
    """An episode that ended, with the conversation that was had. Times are seconds since the epoch."""

    task: Task
    sample_id: str
    result: EpisodeResult
    policy: TokenPolicy
    sandbox_id: str = ""
    started_s: float = 0.0
    ready_s: float | None = None
    finished_s: float = 0.0
    timings: dict[str, float] = field(default_factory=dict)

    def turns(self) -> tuple[Turn, ...]:
        """The turns with their spans of policy tokens."""
        pairs = zip(self.result.turns, self.policy.spans, strict=False)
        return tuple(
            Turn(t.text, t.command, t.observation, s.start, s.end, t.generate_s, t.exec_s, s.cached_tokens)
            for t, s in pairs
        )

    def trajectory(self, group_id: int) -> Trajectory:
        """The episode to learn from. `ValueError` unless it was scored and its arrays belong together."""
        token_ids, loss_mask, logprobs, versions = self.policy.arrays()
        reward = self.result.reward
        return Trajectory(
            sample_id=self.sample_id,
            group_id=group_id,
            task=self.task.name,
            token_ids=token_ids,
            loss_mask=loss_mask,
            logprobs=logprobs,
            versions=versions,
            reward=float("nan") if reward is None else reward,
            outcome=self.result.outcome,
            stop_reason=self.result.stop_reason,
            turns=self.turns(),
            timings=self.timings,
        )

    def record(
        self, *, kind: Literal["train", "eval"], version: int, group_id: int | None = None, attempt: int = 0
    ) -> EpisodeRecord:
        """The row of `episodes/*.parquet`."""
        token_ids, loss_mask, logprobs, versions = self.policy.arrays()
        return EpisodeRecord(
            kind=kind,
            task=self.task.name,
            group_id=group_id,
            sample_id=self.sample_id,
            attempt=attempt,
            version=version,
            outcome=self.result.outcome,
            stop_reason=self.result.stop_reason,
            reward=self.result.reward,
            detail=self.result.detail,
            prompt_text=self.policy.prompt_text,
            turns=self.turns(),
            token_ids=token_ids,
            loss_mask=loss_mask,
            logprobs=logprobs,
            versions=versions,
            started_s=self.started_s,
            ready_s=self.ready_s,
            finished_s=self.finished_s,
            timings=self.timings,
        )


@dataclass(frozen=True, slots=True)
class EpisodeRunner:
    """What every episode of a run shares. `sandboxes` is the pool or a handle of it."""

    sandboxes: Any
    client: EngineClient
    renderer: ChatRenderer
    agent: Agent

    async def run(
        self, task: Task, sample_id: str, on_ready: Callable[[str], None] = lambda sandbox_id: None
    ) -> FinishedEpisode:
        """Lease a sandbox, play, score, release. A failure of infrastructure is an outcome, not an exception.

        `on_ready` is called with the sandbox's id when it is there.
        """
        policy = TokenPolicy(self.client, self.renderer, self.agent, task.instruction, sample_id)
        episode = FinishedEpisode(task, sample_id, EpisodeResult(), policy, started_s=time.time())
        try:
            lease_id = await self.sandboxes.lease(task, self.agent.lease_timeout_s)
        except SandboxError as error:
            episode.result = EpisodeResult(StopReason.ABORTED, Outcome.SANDBOX_FAILED, detail=str(error))
        else:
            try:
                episode.ready_s, episode.sandbox_id = time.time(), lease_id
                on_ready(lease_id)
                sandbox = LeasedSandbox(self.sandboxes, lease_id)
                episode.result = await run_episode(task, sandbox, policy, self.agent.limits)
            finally:
                await asyncio.shield(self._release(lease_id))  # bounded: RELEASE_TIMEOUT_S
        episode.finished_s = time.time()
        self._time(episode)
        return episode

    async def _release(self, lease_id: str) -> None:
        """A sandbox that does not close stays on the pool's list, which fails the run when it stops."""
        try:
            async with asyncio.timeout(RELEASE_TIMEOUT_S):
                await self.sandboxes.release(lease_id)
        except SandboxError as error:
            log.error("sandbox %s was not closed: %s", lease_id, error)

    @staticmethod
    def _time(episode: FinishedEpisode) -> None:
        result, total = episode.result, episode.finished_s - episode.started_s
        ready_s = episode.finished_s if episode.ready_s is None else episode.ready_s
        parts = {
            "lease_s": ready_s - episode.started_s,
            "generate_s": sum(t.generate_s for t in result.turns),
            "exec_s": sum(t.exec_s for t in result.turns),
            "verify_s": result.timings.get("verify_s", 0.0),
        }
        episode.timings = {**parts, "total_s": total, "other_s": max(0.0, total - sum(parts.values()))}
