"""One episode of an agent that speaks OpenAI's API: from a checked request to a reply that is recorded.

A reply counts from the moment the engine ended it. One that its agent did not wait for is aborted and dropped: the
versions of its tokens are known only at its end, and no history can go on from it. The same request sent again goes
on where that one did, as another sample. Dropped replies are counted.

The episode itself ends at a reply cut at its own limit (`TURN_TRUNCATED`), at the token budget (`SESSION_BUDGET`), at
the last turn (`MAX_TURNS`) and with the engine's failure; every later request is told so, and what was written before
stays as it is.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from miles_rl.engine.base import EngineError
from miles_rl.engine.client import EngineClient, Generation
from miles_rl.rollout.agent import Agent
from miles_rl.rollout.chat import ChatRenderer
from miles_rl.rollout.openai_history import Branch, Draft, History, NewHistory
from miles_rl.rollout.openai_protocol import ApiError, ChatMessage, ChatRequest, ToolCall
from miles_rl.rollout.openai_tools import ToolCallParser
from miles_rl.types import Outcome, StopReason, Trajectory

_STREAM_INTERVAL = 8
"""Tokens from one event to the next where the engine heeds it: an event holds all tokens of the reply so far."""
OnProgress = Callable[[list[int], list[float]], None]


@dataclass(frozen=True, slots=True)
class Completion:
    """A recorded reply, as the agent is told of it."""

    message: ChatMessage
    finish_reason: Literal["stop", "length", "tool_calls"]
    generation: Generation


class EndpointEpisode:
    """What one agent says and is told. `base_url` and `api_key` are what its client needs; requests may overlap.

    `stop_reason` and `outcome` are None until the episode ended by itself; `detail` says more.
    """

    def __init__(
        self,
        sample_id: str,
        base_url: str,
        client: EngineClient,
        renderer: ChatRenderer,
        agent: Agent,
        parser: ToolCallParser,
        new_history: NewHistory,
        max_branches: int,
    ) -> None:
        self.sample_id, self.base_url, self.api_key = sample_id, base_url, secrets.token_urlsafe(24)
        self._client, self._renderer, self._agent, self._parser = client, renderer, agent, parser
        self._history = History(renderer, parser, new_history, max_branches)
        self.stop_reason: StopReason | None = None
        self.outcome: Outcome | None = None
        self.detail = ""
        self.num_replies = self.num_dropped = 0
        self._num_requests = 0
        self._refusal: ApiError | None = None

    @property
    def branches(self) -> list[Branch]:
        """The histories in the order in which they began, each with its `record` of tokens."""
        return self._history.branches

    async def complete(self, request: ChatRequest, on_progress: OnProgress | None = None) -> Completion:
        """The next reply. `ApiError` for what the agent is told instead. Cancelled, the reply is dropped."""
        if self._refusal is not None:
            raise self._refusal
        if self.num_replies + self._history.num_open >= self._agent.max_turns:
            told = ApiError(f"the episode has its {self._agent.max_turns} replies", code="max_turns_exceeded")
            is_over = self.num_replies >= self._agent.max_turns
            raise self._end(StopReason.MAX_TURNS, told) if is_over else told
        draft = self._history.draft(request)
        try:
            limit = min(self._agent.turn_tokens, self._room(draft))
            return self._record(draft, await self._generate(draft.ids, limit, on_progress), limit)
        except asyncio.CancelledError:
            self.num_dropped += 1
            raise
        finally:
            self._history.close(draft)

    def trajectories(
        self,
        *,
        task: str,
        group_id: int,
        reward: float,
        stop_reason: StopReason = StopReason.COMPLETED,
        timings: Mapping[str, float] | None = None,
    ) -> list[Trajectory]:
        """One for each branch, all with the episode's reward; the first has the sample's id, the others `/1` and on.

        `stop_reason` is why the agent stopped, where the episode did not end by itself. `ValueError` if it failed or
        nothing was written.
        """
        if self.outcome is not None:
            raise ValueError(f"{self.sample_id}: {self.outcome}: {self.detail}")
        if not self.branches:
            raise ValueError(f"{self.sample_id}: no token was written by the policy")
        found: list[Trajectory] = []
        for index, branch in enumerate(self.branches):
            token_ids, loss_mask, logprobs, versions = branch.record.arrays()
            trajectory = Trajectory(
                sample_id=f"{self.sample_id}/{index}" if index else self.sample_id,
                group_id=group_id,
                task=task,
                token_ids=token_ids,
                loss_mask=loss_mask,
                logprobs=logprobs,
                versions=versions,
                reward=reward,
                outcome=Outcome.SCORED,
                stop_reason=self.stop_reason or stop_reason,
                turns=branch.turns(),
                timings=dict(timings or {}),
            )
            found.append(trajectory)
        return found

    def _room(self, draft: Draft) -> int:
        """Tokens that the reply may have. Without any, the episode is at its end."""
        budget = self._agent.session_tokens
        room = budget - len(draft.ids)
        if room < 1:
            message = (
                f"This model's maximum context length is {budget} tokens. However, your messages resulted in "
                f"{len(draft.ids)} tokens."
            )
            raise self._end(StopReason.SESSION_BUDGET, ApiError(message, code="context_length_exceeded"))
        return room

    async def _generate(self, ids: list[int], limit: int, on_progress: OnProgress | None) -> Generation:
        request_id = f"{self.sample_id}/{self._num_requests}"
        self._num_requests += 1
        sampling = self._agent.sampling_params(request_id, limit, self._renderer.stop_token_ids)
        if on_progress is not None:
            sampling = {**sampling, "stream_interval": _STREAM_INTERVAL}
        try:
            generation = await self._client.generate(
                ids,
                sampling,
                rid=request_id,
                routing_key=self.sample_id,
                timeout_s=self._agent.request_timeout_s,
                on_progress=on_progress,
            )
        except EngineError as error:
            raise self.fail(str(error)) from error
        if generation.finish_reason == "abort" or not generation.output_ids:
            raise self.fail(f"request {request_id}: the engine ended it with {generation.finish_reason}")
        return generation

    def _record(self, draft: Draft, generation: Generation, limit: int) -> Completion:
        """Commit the reply. Of one that was cut no call is given, so that nothing after the cut is run."""
        text = self._renderer.decode(generation.output_ids)
        is_cut = generation.finish_reason == "length"
        content, calls = (text, []) if is_cut or not draft.request.uses_tools else self._parser.parse(text)
        number = self.num_replies
        named = tuple(ToolCall(f"call_{number}_{index}", call.name, call.arguments) for index, call in enumerate(calls))
        message = ChatMessage("assistant", content, named)
        self._history.record(draft, generation, text, message)
        self.num_replies += 1
        if is_cut and limit == self._agent.turn_tokens:
            told = ApiError("the episode ended with a reply that was cut at its limit", code="episode_ended")
            self._end(StopReason.TURN_TRUNCATED, told)
        elif is_cut:
            budget = f"This model's maximum context length is {self._agent.session_tokens} tokens, and it is used up."
            self._end(StopReason.SESSION_BUDGET, ApiError(budget, code="context_length_exceeded"))
        reason = "length" if is_cut else "tool_calls" if named else "stop"
        return Completion(message, reason, generation)

    def _end(self, reason: StopReason, told: ApiError) -> ApiError:
        """The episode is over; every later request is `told` so. The first reason stays."""
        if self._refusal is None:
            self._refusal, self.stop_reason = told, reason
        return self._refusal

    def fail(self, detail: str) -> ApiError:
        """The engine failed, whatever else ended the episode before: it is no reward. What the agent is told."""
        if self.outcome is None:
            self.outcome, self.stop_reason, self.detail = Outcome.ENGINE_FAILED, StopReason.ABORTED, detail
            message = f"the inference engine failed: {detail}"
            self._refusal = ApiError(message, status=502, code="engine_failed", kind="server_error")
        assert self._refusal is not None
        return self._refusal
