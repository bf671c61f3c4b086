"""Tool calls in the policy's text: where they stand, how they are read, how those of others are written.

One class here adds a form; it is named by `_target_` in the config. Reading never changes what is recorded: the tokens
stay as the policy wrote them, and the agent is given what they say.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from sandbox_env.episode import FENCE


@dataclass(frozen=True, slots=True)
class Call:
    """A call as the policy wrote it. `arguments` is the text of a JSON object."""

    name: str
    arguments: str


class ToolCallParser(Protocol):
    """One form of writing tool calls."""

    def parse(self, text: str) -> tuple[str, list[Call]]:
        """The content of a whole reply, and its calls. A reply with a malformed call is all content, with no calls."""
        ...

    def settled(self, text: str) -> int:
        """How many characters of an unfinished reply are the beginning of its content, whatever follows."""
        ...

    def write(self, content: str, calls: Sequence[Call]) -> tuple[list[str | int], list[str]]:
        """A reply that the policy did not write: structural text and indices of contents in turn, and the contents."""
        ...


class HermesToolCalls:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of them, after the content."""

    _OPEN, _CLOSE = "<tool_call>", "</tool_call>"
    _BLOCK = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)

    def parse(self, text: str) -> tuple[str, list[Call]]:
        """See `ToolCallParser`. What stands between and after the calls is no content."""
        calls = [_hermes_call(block) for block in self._BLOCK.findall(text)]
        good = [call for call in calls if call is not None]
        if not good or len(good) != len(calls) or self._OPEN in self._BLOCK.sub("", text):
            return text, []
        return text[: text.index(self._OPEN)], good

    def settled(self, text: str) -> int:
        """See `ToolCallParser`."""
        return _before(text, self._OPEN)

    def write(self, content: str, calls: Sequence[Call]) -> tuple[list[str | int], list[str]]:
        """See `ToolCallParser`."""
        pieces: list[str | int] = [0]
        contents = [content]
        for call in calls:
            lead = "\n" if content or len(contents) > 1 else ""
            body = f'{{"name": {json.dumps(call.name, ensure_ascii=False)}, "arguments": {call.arguments}}}'
            pieces += [f"{lead}{self._OPEN}\n", len(contents), f"\n{self._CLOSE}"]
            contents.append(body)
        return pieces, contents


class FencedToolCall:
    """The first fenced shell block is a call of `tool` with its text as `argument`; all around it is content.

    For policies that act by fenced commands and not by JSON, as that of the laptop default does.
    """

    def __init__(self, tool: str = "bash", argument: str = "command") -> None:
        self._tool, self._argument = tool, argument

    def parse(self, text: str) -> tuple[str, list[Call]]:
        """See `ToolCallParser`."""
        match = FENCE.search(text)
        command = match.group(1).strip() if match else ""
        if match is None or not command:
            return text, []
        arguments = json.dumps({self._argument: command}, ensure_ascii=False)
        return text[: match.start()] + text[match.end() :], [Call(self._tool, arguments)]

    def settled(self, text: str) -> int:
        """See `ToolCallParser`."""
        return _before(text, "```")

    def write(self, content: str, calls: Sequence[Call]) -> tuple[list[str | int], list[str]]:
        """See `ToolCallParser`. `ValueError` for a call that is not of this form."""
        for call in calls:
            command = json.loads(call.arguments).get(self._argument)
            if call.name != self._tool or not isinstance(command, str):
                raise ValueError(f"a call of {call.name!r}; this policy can only have called {self._tool!r}")
            content += f"```bash\n{command}\n```"
        return [0], [content]


def _hermes_call(block: str) -> Call | None:
    try:
        value: Any = json.loads(block)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return None
    if not isinstance(value.get("arguments"), dict):
        return None
    # Written as most agents write it back: theirs has to be equal to ours.
    return Call(value["name"], json.dumps(value["arguments"], ensure_ascii=False))


def _before(text: str, mark: str) -> int:
    """Where `mark` begins in `text`, also one that is not complete at the end of it."""
    found = text.find(mark)
    if found >= 0:
        return found
    partial = (size for size in range(len(mark) - 1, 0, -1) if text.endswith(mark[:size]))
    return len(text) - next(partial, 0)
