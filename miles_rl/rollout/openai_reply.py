"""A recorded reply in OpenAI's form: as one object, or as chunks that spell the same object."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from miles_rl.rollout.chat import ChatRenderer
from miles_rl.rollout.openai_episode import Completion
from miles_rl.rollout.openai_tools import ToolCallParser

_BROKEN = "\ufffd"
"""What bytes are decoded to that are no text, or not yet."""


def head_of(model: str) -> dict[str, Any]:
    """What all parts of one answer have in common."""
    return {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}


def whole(
    completion: Completion, renderer: ChatRenderer, head: Mapping[str, Any], wants_logprobs: bool
) -> dict[str, Any]:
    """A `chat.completion`."""
    message: dict[str, Any] = {"role": "assistant", "content": completion.message.content, "refusal": None}
    if completion.message.calls:
        message["content"] = completion.message.content or None
        message["tool_calls"] = [call.shown() for call in completion.message.calls]
    generation = completion.generation
    shown = logprobs_of(renderer, generation.output_ids, generation.logprobs) if wants_logprobs else None
    choice = {"index": 0, "message": message, "logprobs": shown, "finish_reason": completion.finish_reason}
    return {**head, "object": "chat.completion", "choices": [choice], "usage": usage_of(completion)}


def usage_of(completion: Completion) -> dict[str, Any]:
    """Tokens of the prompt and of the reply."""
    generation = completion.generation
    written = len(generation.output_ids)
    return {
        "prompt_tokens": generation.prompt_tokens,
        "completion_tokens": written,
        "total_tokens": generation.prompt_tokens + written,
        "prompt_tokens_details": {"cached_tokens": generation.cached_tokens},
    }


def logprobs_of(renderer: ChatRenderer, ids: Sequence[int], logprobs: Sequence[float]) -> dict[str, Any]:
    """The tokens that were sampled, also the one that ended the reply."""
    entries: list[dict[str, Any]] = []
    for token, logprob in zip(ids, logprobs, strict=True):
        text = renderer.token_text(token)
        # A token that is a part of a character has bytes that its text does not tell.
        encoded = None if _BROKEN in text else list(text.encode())
        entries.append({"token": text, "logprob": logprob, "bytes": encoded, "top_logprobs": []})
    return {"content": entries, "refusal": None}


class Feed:
    """The newest of what there is of a reply, for one who waits for it. What was not taken in time is left out."""

    def __init__(self) -> None:
        self._newest: tuple[list[int], list[float]] = ([], [])
        self._changed = asyncio.Event()
        self.is_done = False

    def put(self, ids: list[int], logprobs: list[float]) -> None:
        """All of the reply so far."""
        self._newest = ids, logprobs
        self._changed.set()

    def end(self) -> None:
        """There will be no more."""
        self.is_done = True
        self._changed.set()

    async def wait(self) -> None:
        """Until something changes."""
        await self._changed.wait()  # bounded: the caller
        self._changed.clear()

    def take(self) -> tuple[list[int], list[float]]:
        """The newest ids and log-probabilities."""
        return self._newest


class ChunkWriter:
    """The `chat.completion.chunk`s of one reply.

    Text is held back as long as it could still become something else: half a character, or the begin of a tool call.
    The chunks together spell the recorded message, with every token's log-probability once.
    """

    def __init__(
        self,
        renderer: ChatRenderer,
        parser: ToolCallParser | None,
        head: Mapping[str, Any],
        *,
        wants_logprobs: bool,
        wants_usage: bool,
    ) -> None:
        self._renderer, self._parser = renderer, parser
        self._head = {**head, "object": "chat.completion.chunk"}
        self._wants_logprobs, self._wants_usage = wants_logprobs, wants_usage
        self._sent, self._num_tokens = "", 0

    def begin(self) -> dict[str, Any]:
        """The first chunk."""
        return self._chunk({"role": "assistant", "content": ""})

    def progress(self, ids: list[int], logprobs: list[float]) -> Iterator[dict[str, Any]]:
        """What can be said of a reply that has begun with `ids`."""
        text = self._renderer.decode(ids).rstrip(_BROKEN)
        content = text if self._parser is None else text[: self._parser.settled(text)]
        if content.startswith(self._sent) and content != self._sent:
            yield self._content(content, ids, logprobs)

    def finish(self, completion: Completion) -> Iterator[dict[str, Any]]:
        """The rest. `ValueError` if what was sent is not how the recorded reply begins."""
        content, generation = completion.message.content, completion.generation
        if not content.startswith(self._sent):
            raise ValueError("what was streamed is not what was recorded")
        if content != self._sent or (self._wants_logprobs and self._num_tokens < len(generation.output_ids)):
            yield self._content(content, generation.output_ids, generation.logprobs)
        for index, call in enumerate(completion.message.calls):
            yield self._chunk({"tool_calls": [{"index": index, **call.shown()}]})
        yield self._chunk({}, finish_reason=completion.finish_reason)
        if self._wants_usage:
            yield {**self._head, "choices": [], "usage": usage_of(completion)}

    def _content(self, content: str, ids: list[int], logprobs: list[float]) -> dict[str, Any]:
        delta, start = content[len(self._sent) :], self._num_tokens
        self._sent, self._num_tokens = content, len(ids)
        return self._chunk({"content": delta}, logprobs_of(self._renderer, ids[start:], logprobs[start:]))

    def _chunk(
        self, delta: dict[str, Any], logprobs: dict[str, Any] | None = None, finish_reason: str | None = None
    ) -> dict[str, Any]:
        shown = logprobs if self._wants_logprobs else None
        choice = {"index": 0, "delta": delta, "logprobs": shown, "finish_reason": finish_reason}
        chunk = {**self._head, "choices": [choice]}
        return {**chunk, "usage": None} if self._wants_usage else chunk
