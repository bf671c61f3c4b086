"""One conversation of the policy on token ids. What the policy wrote is never re-tokenised.

The conversation is one growing list of ids with aligned mask, log-probabilities and versions. Only new messages are
rendered; where a template and the policy both write the same boundary token, it is trimmed once, and mask,
log-probability and version are cut with it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from miles_rl.engine.base import EngineError
from miles_rl.engine.client import EngineClient
from miles_rl.rollout.agent import Agent
from miles_rl.rollout.chat import ChatRenderer
from miles_rl.types import NO_VERSION
from sandbox_env.episode import PolicyError, Reply


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """The policy tokens `start:end` of one reply, and how many prompt tokens the engine took from its cache."""

    start: int
    end: int
    cached_tokens: int
    prompt_tokens: int


class TokenPolicy:
    """A `sandbox_env.episode.Policy` over one engine session, sticky to one replica by `session`."""

    def __init__(
        self, client: EngineClient, renderer: ChatRenderer, agent: Agent, instruction: str, session: str
    ) -> None:
        self._client, self._renderer, self._agent, self._session = client, renderer, agent, session
        self._ids: list[int] = list(renderer.prompt(agent.messages(instruction)))
        self.prompt_length = len(self._ids)
        self._mask = [False] * len(self._ids)
        self._logprobs = [0.0] * len(self._ids)
        self._versions = [NO_VERSION] * len(self._ids)
        self.spans: list[TokenSpan] = []

    async def reply(self, timeout_s: float) -> Reply:
        """Generate one turn. "budget" when the session has no room, or cut the turn shorter than its own limit."""
        room = self._agent.session_tokens - len(self._ids)
        if room < 1:
            return Reply("", "budget")
        limit = min(self._agent.turn_tokens, room)
        request_id = f"{self._session}/{len(self.spans)}"
        try:
            generation = await self._client.generate(
                self._ids,
                self._agent.sampling_params(request_id, limit, self._renderer.stop_token_ids),
                rid=request_id,
                routing_key=self._session,
                timeout_s=min(timeout_s, self._agent.request_timeout_s),
            )
        except EngineError as error:
            raise PolicyError(str(error)) from error
        if generation.finish_reason == "abort" or not generation.output_ids:
            raise PolicyError(f"request {self._session}: the engine ended it with {generation.finish_reason}")
        start = len(self._ids)
        self._extend(generation.output_ids, True, generation.logprobs, generation.versions)
        self.spans.append(TokenSpan(start, len(self._ids), generation.cached_tokens, start))
        text = self._renderer.decode(generation.output_ids)
        if generation.finish_reason == "length":
            return Reply(text, "length" if limit == self._agent.turn_tokens else "budget")
        return Reply(text, "stop")

    def observe(self, text: str) -> None:
        """Append what the terminal printed and the opener of the next reply, as new ids only."""
        span = self.spans[-1]
        reply_ids = self._ids[span.start : span.end]
        keep, new_ids = self._renderer.continuation(reply_ids, [{"role": "tool", "content": text}])
        end = span.start + keep
        for array in (self._ids, self._mask, self._logprobs, self._versions):
            del array[end:]
        self.spans[-1] = TokenSpan(span.start, end, span.cached_tokens, span.prompt_tokens)
        self._extend(new_ids, False, [0.0] * len(new_ids), [NO_VERSION] * len(new_ids))

    def arrays(
        self,
    ) -> tuple[NDArray[np.int32], NDArray[np.bool_], NDArray[np.float32], NDArray[np.int32]]:
        """`token_ids, loss_mask, logprobs, versions`, each [T], ending with the policy's last token."""
        end = self.spans[-1].end if self.spans else len(self._ids)
        return (
            np.asarray(self._ids[:end], dtype=np.int32),
            np.asarray(self._mask[:end], dtype=np.bool_),
            np.asarray(self._logprobs[:end], dtype=np.float32),
            np.asarray(self._versions[:end], dtype=np.int32),
        )

    @property
    def prompt_text(self) -> str:
        """The prompt as text, for people."""
        return self._renderer.decode(self._ids[: self.prompt_length])

    def _extend(self, ids: list[int], mask: bool, logprobs: list[float], versions: list[int]) -> None:
        self._ids += ids
        self._mask += [mask] * len(ids)
        self._logprobs += logprobs
        self._versions += versions
