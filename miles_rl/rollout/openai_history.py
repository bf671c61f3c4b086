"""The histories of one episode: which request goes on with which, and the exact ids of each.

An agent sends its whole history every time. A request goes on with a branch when it begins with every message of it,
byte for byte, and adds some: then the branch's ids stay as they are and only what is new is rendered. Any other
history (edited, shortened, a sub-agent's) begins a branch, recorded as a trajectory of its own: all its ids are what
the policy is given, also replies of other branches, which keep the ids they were generated with and are learned from
once, where they were written.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from miles_rl.engine.client import Generation
from miles_rl.rollout.chat import ChatRenderer
from miles_rl.rollout.openai_protocol import ApiError, ChatMessage, ChatRequest
from miles_rl.rollout.openai_tools import Call, ToolCallParser
from miles_rl.rollout.policy import TokenRecord
from miles_rl.types import Turn

NewHistory = Literal["branch", "refuse"]


@dataclass(slots=True, eq=False)
class Branch:
    """One append-only history. `messages` ends with a reply, and `texts` are the replies as they were written."""

    tools_key: str
    messages: tuple[ChatMessage, ...]
    record: TokenRecord
    texts: list[str] = field(default_factory=list[str])
    latencies_s: list[float] = field(default_factory=list[float])
    ends: list[int] = field(default_factory=list[int])
    """Number of messages up to and with each reply."""
    is_open: bool = False
    """Whether a request that goes on with it is being answered."""

    def turns(self) -> tuple[Turn, ...]:
        """The replies, what they called, and what came back."""
        turns: list[Turn] = []
        following = [*self.ends[1:], len(self.messages) + 1]
        parts = zip(self.texts, self.record.spans, self.latencies_s, self.ends, following, strict=True)
        for text, span, latency_s, end, next_end in parts:
            calls = [f"{call.name}({call.arguments})" for call in self.messages[end - 1].calls]
            came_back = "\n".join(message.content for message in self.messages[end : next_end - 1])
            command = "\n".join(calls) or None
            turns.append(
                Turn(text, command, came_back, span.start, span.end, latency_s, cached_tokens=span.cached_tokens)
            )
        return tuple(turns)


@dataclass(slots=True, eq=False)
class Draft:
    """A request with its ids. Nothing is recorded before its reply is. `branch` is None where it begins one."""

    request: ChatRequest
    ids: list[int]
    branch: Branch | None
    keep: int = 0
    new_ids: Sequence[int] = ()


class History:
    """All branches of one episode, in the order in which they began. At most `max_branches`."""

    def __init__(
        self, renderer: ChatRenderer, parser: ToolCallParser, new_history: NewHistory, max_branches: int
    ) -> None:
        self._renderer, self._parser = renderer, parser
        self._max_branches = 1 if new_history == "refuse" else max_branches
        self._refuses = new_history == "refuse"
        self.branches: list[Branch] = []
        self.num_open = 0
        """Drafts that are not closed."""
        self._num_beginning = 0
        self._written: dict[ChatMessage, list[int]] = {}

    def draft(self, request: ChatRequest) -> Draft:
        """The ids of a request. `ApiError` where it cannot be. Every draft must be closed."""
        branch = self._continued(request)
        try:
            if branch is None:
                self._check_may_begin(request)
                draft = Draft(request, self._whole(request), None)
                self._num_beginning += 1
                self.num_open += 1
                return draft
            keep, new_ids = self._after(branch.record.last_reply, request.messages[len(branch.messages) :])
        except ValueError as error:
            raise ApiError(str(error)) from error
        branch.is_open = True
        self.num_open += 1
        ids = [*branch.record.ids[: branch.record.spans[-1].start + keep], *new_ids]
        return Draft(request, ids, branch, keep, new_ids)

    def close(self, draft: Draft) -> None:
        """The draft was answered or will not be."""
        self.num_open -= 1
        if draft.branch is None:
            self._num_beginning -= 1
        else:
            draft.branch.is_open = False

    def record(self, draft: Draft, generation: Generation, text: str, message: ChatMessage) -> None:
        """Append what was asked and what the policy wrote. `message` is what the agent is given."""
        branch = draft.branch
        if branch is None:
            branch = Branch(draft.request.tools_key, (), TokenRecord(draft.ids))
            self.branches.append(branch)
        else:
            branch.record.go_on(draft.keep, draft.new_ids)
        branch.record.write(generation)
        branch.messages = (*draft.request.messages, message)
        branch.texts.append(text)
        branch.latencies_s.append(generation.latency_s)
        branch.ends.append(len(branch.messages))
        self._written[message] = generation.output_ids

    def _continued(self, request: ChatRequest) -> Branch | None:
        for branch in reversed(self.branches):
            size = len(branch.messages)
            if branch.is_open or branch.tools_key != request.tools_key or len(request.messages) <= size:
                continue
            if request.messages[:size] == branch.messages:
                return branch
        return None

    def _check_may_begin(self, request: ChatRequest) -> None:
        if len(self.branches) + self._num_beginning < self._max_branches:
            return
        if self._refuses:
            raise ApiError(self._difference(request), code="history_not_extended")
        raise ApiError(
            f"messages: they go on with none of the {self._max_branches} histories of this episode, which may have no "
            "more",
            code="too_many_histories",
        )

    def _difference(self, request: ChatRequest) -> str:
        """Where a request leaves the one history that there may be."""
        if not self.branches or self.branches[0].is_open:
            return "messages: another request of this episode is being answered, wait for it"
        branch = self.branches[0]
        if branch.tools_key != request.tools_key:
            return "tools: they are not those of the request before; an episode has one history, which only grows"
        pairs = zip(request.messages, branch.messages, strict=False)
        same = next((i for i, (new, old) in enumerate(pairs) if new != old), len(request.messages))
        where = f"messages[{same}]: it is not what stood" if same < len(request.messages) else "messages: they end"
        rest = "there" if same < len(request.messages) else f"before message {len(branch.messages)}"
        return f"{where} {rest}; an episode has one history, which only grows: send back every message unchanged"

    def _whole(self, request: ChatRequest) -> list[int]:
        """The ids of a history that goes on with none."""
        start = _next_reply(request.messages)
        opening, rest = request.messages[:start], request.messages[start:]
        ids = self._renderer.prompt([message.plain() for message in opening], request.tools)
        if rest:
            reply = self._reply_ids(rest[0], rest[1].role)
            keep, new_ids = self._after(reply, rest[1:])
            ids += [*reply[:keep], *new_ids]
        return ids

    def _after(self, reply: Sequence[int], messages: Sequence[ChatMessage]) -> tuple[int, list[int]]:
        """What follows a reply: `(keep, ids)`, as of `ChatRenderer.continuation`. There may be replies in it."""
        start = _next_reply(messages)
        keep, ids = self._renderer.continuation(reply, [message.plain() for message in messages[:start]])
        while start < len(messages):
            inner = self._reply_ids(messages[start], messages[start + 1].role)
            end = start + 1 + _next_reply(messages[start + 1 :])
            inner_keep, new_ids = self._renderer.continuation(inner, [m.plain() for m in messages[start + 1 : end]])
            ids += [*inner[:inner_keep], *new_ids]
            start = end
        return keep, ids

    def _reply_ids(self, message: ChatMessage, next_role: str) -> list[int]:
        """As the policy wrote it in this episode, else as it would write it."""
        if message in self._written:
            return self._written[message]
        for call in message.calls:
            _check_arguments(call.arguments)
        calls = [Call(call.name, call.arguments) for call in message.calls]
        return self._renderer.written(*self._parser.write(message.content, calls), next_role)


def _check_arguments(text: str) -> None:
    """Raises `ValueError` unless it is a JSON object."""
    try:
        value: Mapping[str, Any] | Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError("tool_calls: the arguments of a call are not JSON") from error
    if not isinstance(value, dict):
        raise ValueError("tool_calls: the arguments of a call are not a JSON object")


def _next_reply(messages: Sequence[ChatMessage]) -> int:
    """Index of the first reply, or the number of messages."""
    return next((i for i, message in enumerate(messages) if message.role == "assistant"), len(messages))
