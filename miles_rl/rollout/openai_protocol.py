"""The chat completions API of OpenAI: what of a request is taken, and what each mistake is told.

Nothing that an agent asks for and that would change its reply is left out in silence, except how tokens are sampled:
that is the run's, because what is learned from has to be sampled as the run says.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from miles_rl.rollout.agent import Agent

Rule = Literal["ignore", "refuse"]
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "stop": (None, []),
    "logit_bias": (None, {}),
    "top_logprobs": (None, 0),
    "tool_choice": (None, "auto", "none"),
    "functions": (None, []),
    "function_call": (None, "auto", "none"),
    "response_format": (None, {"type": "text"}),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "web_search_options": (None,),
}
"""What this endpoint lacks, with the values that ask for nothing. Always refused, as agents rely on it."""


class ApiError(Exception):
    """An answer in OpenAI's form. Those that a retry cannot mend say so to the client."""

    def __init__(
        self, message: str, *, status: int = 400, code: str | None = None, kind: str = "invalid_request_error"
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.kind = status, code, kind

    @property
    def body(self) -> dict[str, Any]:
        """`{"error": {...}}`."""
        return {"error": {"message": str(self), "type": self.kind, "param": None, "code": self.code}}


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call with its id. `arguments` is text, which has to come back as it was given."""

    id: str
    name: str
    arguments: str

    def shown(self) -> dict[str, Any]:
        """OpenAI's form."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """A message as far as it matters to the policy. No content is the same as an empty one."""

    role: str
    content: str
    calls: tuple[ToolCall, ...] = ()

    def plain(self) -> dict[str, str]:
        """What the chat template is given."""
        return {"role": self.role, "content": self.content}


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A checked request. `uses_tools` says whether calls are read from the reply."""

    model: str
    messages: tuple[ChatMessage, ...]
    tools: tuple[Mapping[str, Any], ...]
    uses_tools: bool
    streams: bool
    wants_usage: bool
    wants_logprobs: bool

    @property
    def tools_key(self) -> str:
        """Equal for equal tools."""
        return json.dumps(self.tools, sort_keys=True)


def parse_request(body: Any, agent: Agent, sampling: Rule) -> ChatRequest:
    """Raises `ApiError` that names the field."""
    if not isinstance(body, dict):
        raise ApiError("the body must be a JSON object")
    for name, neutral in _NEUTRAL.items():
        if body.get(name) not in neutral:
            raise ApiError(f"{name}: {_short(body[name])} is not supported; leave it out", code="unsupported_parameter")
    if sampling == "refuse":
        _refuse_sampling(body, agent)
    tools = tuple(_tool(tool, f"tools[{i}]") for i, tool in enumerate(_list(body, "tools")))
    options = body.get("stream_options") or {}
    if not isinstance(options, dict):
        raise ApiError("stream_options: give an object")
    return ChatRequest(
        model=_text(body, "model", ""),
        messages=_messages(body),
        tools=tools,
        uses_tools=bool(tools) and body.get("tool_choice") != "none",
        streams=_flag(body, "stream"),
        wants_usage=_flag(options, "include_usage"),
        wants_logprobs=_flag(body, "logprobs"),
    )


def _refuse_sampling(body: Mapping[str, Any], agent: Agent) -> None:
    """Raises `ApiError` unless what is given of sampling is what the run does."""
    run: dict[str, Any] = {
        "temperature": agent.temperature,
        "top_p": agent.top_p,
        "top_k": agent.top_k,
        "min_p": 0,
        "max_tokens": agent.turn_tokens,
        "max_completion_tokens": agent.turn_tokens,
        "presence_penalty": 0,
        "frequency_penalty": 0,
        "repetition_penalty": 1,
        "seed": None,
    }
    for name, value in run.items():
        if body.get(name) not in (None, value):
            raise ApiError(
                f"{name}: {_short(body[name])}; the run samples with {name} {value}, leave it out",
                code="unsupported_value",
            )


def _messages(body: Mapping[str, Any]) -> tuple[ChatMessage, ...]:
    messages: list[ChatMessage] = []
    known: set[str] = set()
    for i, value in enumerate(_list(body, "messages")):
        message = _message(value, known, f"messages[{i}]")
        if message.role == "assistant" and (not messages or messages[-1].role == "assistant"):
            raise ApiError(f"messages[{i}]: an assistant's message can only follow one of another role")
        messages.append(message)
    if not messages or messages[-1].role == "assistant":
        raise ApiError("messages: the last must not be the assistant's, which is what the reply will be")
    return tuple(messages)


def _message(value: Any, known_calls: set[str], path: str) -> ChatMessage:
    if not isinstance(value, dict):
        raise ApiError(f"{path}: give an object with role and content")
    role = value.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise ApiError(f"{path}.role: {_short(role)}; give one of {', '.join(_ROLES)}")
    calls: list[ToolCall] = []
    for i, call in enumerate(_list(value, "tool_calls", path)):
        calls.append(_tool_call(call, f"{path}.tool_calls[{i}]"))
    if calls and role != "assistant":
        raise ApiError(f"{path}.tool_calls: only an assistant's message has them")
    known_calls |= {call.id for call in calls}
    answers = value.get("tool_call_id")
    if role == "tool" and answers is not None and not (isinstance(answers, str) and answers in known_calls):
        raise ApiError(f"{path}.tool_call_id: {_short(answers)} is the id of no call before it")
    content = _content(value.get("content"), f"{path}.content")
    if not content and role != "assistant" and value.get("content") is None:
        raise ApiError(f"{path}.content: missing; give a text")
    return ChatMessage(_ROLES[role], content, tuple(calls))


def _content(value: Any, path: str) -> str:
    """A text, or texts in parts, as one."""
    if isinstance(value, list):
        return "".join(_content_part(part, f"{path}[{i}]") for i, part in enumerate(value))
    if value is not None and not isinstance(value, str):
        raise ApiError(f"{path}: {_short(value)}; give a text")
    return _unicode(value or "", path)


def _content_part(part: Any, path: str) -> str:
    if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        raise ApiError(f"{path}: {_short(part)}; only parts of type text are supported")
    return _unicode(part["text"], f"{path}.text")


def _tool_call(value: Any, path: str) -> ToolCall:
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(function, dict):
        raise ApiError(f"{path}: {_short(value)}; give an object with id, type and function")
    texts = [value.get("id"), function.get("name"), function.get("arguments")]
    if not all(isinstance(text, str) for text in texts):
        raise ApiError(f"{path}: id, function.name and function.arguments must be texts")
    return ToolCall(*(_unicode(text, path) for text in texts))


def _tool(value: Any, path: str) -> Mapping[str, Any]:
    function = value.get("function") if isinstance(value, dict) and value.get("type") == "function" else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise ApiError(f"{path}: {_short(value)}; only functions with a name are supported")
    _unicode(json.dumps(value, ensure_ascii=False), path)
    return value


def _list(body: Mapping[str, Any], name: str, path: str = "") -> list[Any]:
    value = body.get(name)
    if value is not None and not isinstance(value, list):
        raise ApiError(f"{path}{'.' if path else ''}{name}: {_short(value)}; give a list")
    return value or []


def _flag(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise ApiError(f"{name}: {_short(value)}; give true or false")
    return bool(value)


def _text(body: Mapping[str, Any], name: str, default: str) -> str:
    value = body.get(name, default)
    if not isinstance(value, str):
        raise ApiError(f"{name}: {_short(value)}; give a text")
    return value


def _unicode(text: str, path: str) -> str:
    """JSON can hold halves of surrogate pairs, which no tokenizer reads."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ApiError(f"{path}: it is not valid Unicode") from error
    return text


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
