"""One conversation of the policy on token ids. What the policy wrote is never re-tokenised.

The conversation is one growing list of ids with aligned mask, log-probabilities and versions. Only new messages are
rendered; where a template and the policy both write the same boundary token, it is trimmed once, and mask,
log-probability and version are cut with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from miles_rl.engine.base import EngineError
from miles_rl.engine.client import EngineClient, Generation
from miles_rl.rollout.agent import Agent
from miles_rl.rollout.chat import ChatRenderer
from miles_rl.types import NO_VERSION
from sandbox_env.episode import PolicyError, Reply

Arrays = tuple[NDArray[np.int32], NDArray[np.bool_], NDArray[np.float32], NDArray[np.int32]]


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """The policy tokens `start:end` of one reply, and how many prompt tokens the engine took from its cache."""

    start: int
    end: int
    cached_tokens: int
    prompt_tokens: int


class TokenRecord:
    """The ids of one conversation with the mask, log-probability and version of each; `spans` are its replies."""

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        self.ids: list[int] = []
        self._mask: list[bool] = []
        self._logprobs: list[float] = []
        self._versions: list[int] = []
        self.spans: list[TokenSpan] = []
        self.read(prompt_ids)

    def read(self, ids: Sequence[int]) -> None:
        """Append what the policy is given."""
        self._extend(ids, False, [0.0] * len(ids), [NO_VERSION] * len(ids))

    def write(self, generation: Generation) -> None:
        """Append what the policy wrote."""
        start = len(self.ids)
        self._extend(generation.output_ids, True, generation.logprobs, generation.versions)
        self.spans.append(TokenSpan(start, len(self.ids), generation.cached_tokens, start))

    @property
    def last_reply(self) -> list[int]:
        """What the policy wrote last."""
        return self.ids[self.spans[-1].start : self.spans[-1].end]

    def go_on(self, keep: int, new_ids: Sequence[int]) -> None:
        """Keep so many tokens of the last reply, with all that belongs to them, and append what is read after it."""
        span = self.spans[-1]
        end = span.start + keep
        for array in (self.ids, self._mask, self._logprobs, self._versions):
            del array[end:]
        self.spans[-1] = TokenSpan(span.start, end, span.cached_tokens, span.prompt_tokens)
        self.read(new_ids)

    def arrays(self) -> Arrays:
        """`token_ids, loss_mask, logprobs, versions`, each [T], ending with the policy's last token."""
        end = self.spans[-1].end if self.spans else len(self.ids)
        return (
            np.asarray(self.ids[:end], dtype=np.int32),
            np.asarray(self._mask[:end], dtype=np.bool_),
            np.asarray(self._logprobs[:end], dtype=np.float32),
            np.asarray(self._versions[:end], dtype=np.int32),
        )

    def _extend(self, ids: Sequence[int], mask: bool, logprobs: Sequence[float], versions: Sequence[int]) -> None:
        self.ids += ids
        self._mask += [mask] * len(ids)
        self._logprobs += logprobs
        self._versions += versions


class TokenPolicy:
    """A `sandbox_env.episode.Policy` over one engine session, sticky to one replica by `session`."""

    def __init__(
        self, client: EngineClient, renderer: ChatRenderer, agent: Agent, instruction: str, session: str
    ) -> None:
        self._client, self._renderer, self._agent, self._session = client, renderer, agent, session
        self._record = TokenRecord(renderer.prompt(agent.messages(instruction)))
        self.prompt_length = len(self._record.ids)

    async def reply(self, timeout_s: float) -> Reply:
        """Generate one turn. "budget" when the session has no room, or cut the turn shorter than its own limit."""
        room = self._agent.session_tokens - len(self._record.ids)
        if room < 1:
            return Reply("", "budget")
        limit = min(self._agent.turn_tokens, room)
        request_id = f"{self._session}/{len(self.spans)}"
        try:
            generation = await self._client.generate(
                self._record.ids,
                self._agent.sampling_params(request_id, limit, self._renderer.stop_token_ids),
                rid=request_id,
                routing_key=self._session,
                timeout_s=min(timeout_s, self._agent.request_timeout_s),
            )
        except EngineError as error:
            raise PolicyError(str(error)) from error
        if generation.finish_reason == "abort" or not generation.output_ids:
            raise PolicyError(f"request {self._session}: the engine ended it with {generation.finish_reason}")
        self._record.write(generation)
        text = self._renderer.decode(generation.output_ids)
        if generation.finish_reason == "length":
            return Reply(text, "length" if limit == self._agent.turn_tokens else "budget")
        return Reply(text, "stop")

    def observe(self, text: str) -> None:
        """Append what the terminal printed and the opener of the next reply, as new ids only."""
        self._record.go_on(*self._renderer.continuation(self._record.last_reply, [{"role": "tool", "content": text}]))

    def instruct(self, text: str) -> None:
        """Append the instruction of the next step, and the opener of the next reply, as new ids only."""
        message = {"role": "user", "content": text.strip()}
        self._record.go_on(*self._renderer.continuation(self._record.last_reply, [message]))

    def arrays(self) -> Arrays:
        """`token_ids, loss_mask, logprobs, versions`, each [T], ending with the policy's last token."""
        return self._record.arrays()

    @property
    def spans(self) -> list[TokenSpan]:
        """The policy tokens of each reply."""
        return self._record.spans

    @property
    def prompt_text(self) -> str:
        """The prompt as text, for people."""
        return self._renderer.decode(self._record.ids[: self.prompt_length])
