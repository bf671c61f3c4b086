"""What is taken of a chat completion's request, and that each mistake names its field."""

import json
from typing import Any

import pytest

from miles_rl.rollout.agent import Agent
from miles_rl.rollout.openai_protocol import ApiError, ChatMessage, ToolCall, parse_request

AGENT = Agent(
    temperature=0.8,
    top_p=1.0,
    top_k=-1,
    turn_tokens=64,
    session_tokens=512,
    max_turns=4,
    wall_clock_s=60.0,
    command_timeout_s=5.0,
    observation_chars=400,
    request_timeout_s=30.0,
    lease_timeout_s=30.0,
    seed=0,
)
USER = {"role": "user", "content": "Look."}
CALL = {"id": "call_0_0", "type": "function", "function": {"name": "bash", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "bash"}}


def body(*messages: Any, **more: Any) -> dict[str, Any]:
    return {"model": "policy", "messages": list(messages or [USER]), **more}


def test_messages_that_mean_the_same_are_the_same() -> None:
    forms: list[Any] = [
        {"role": "assistant", "content": None, "tool_calls": [CALL], "refusal": None, "function_call": None},
        {"role": "assistant", "tool_calls": [{**CALL, "index": 0}]},
        {"role": "assistant", "content": [], "tool_calls": [CALL]},
        {"role": "assistant", "content": [{"type": "text", "text": ""}], "tool_calls": [CALL]},
    ]
    answer = {"role": "tool", "tool_call_id": "call_0_0", "content": "a.txt"}
    taken = [parse_request(body(USER, form, answer), AGENT, "refuse").messages for form in forms]
    assert taken == [taken[0]] * 4
    assert taken[0][1] == ChatMessage("assistant", "", (ToolCall("call_0_0", "bash", "{}"),))


def test_a_developer_s_message_is_the_system_s_and_parts_of_text_are_one() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    request = parse_request(body({"role": "developer", "content": parts}, USER), AGENT, "ignore")
    assert request.messages == (ChatMessage("system", "ab"), ChatMessage("user", "Look."))


@pytest.mark.parametrize("field", ["temperature", "top_p", "top_k", "max_tokens", "seed", "presence_penalty"])
def test_sampling_is_the_run_s(field: str) -> None:
    parse_request(body(**{field: 0.25}), AGENT, "ignore")
    with pytest.raises(ApiError, match=f"^{field}: 0.25; the run samples with") as refused:
        parse_request(body(**{field: 0.25}), AGENT, "refuse")
    assert refused.value.code == "unsupported_value"


def test_sampling_as_the_run_does_it_is_taken() -> None:
    same = {"temperature": 0.8, "top_p": 1, "max_tokens": 64, "max_completion_tokens": 64, "seed": None, "n": 1}
    parse_request(body(**same, frequency_penalty=0.0), AGENT, "refuse")


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ([], "the body must be a JSON object"),
        (body(n=2), "n: 2 is not supported"),
        (body(stop="x"), 'stop: "x" is not supported'),
        (body(response_format={"type": "json_object"}), "response_format: "),
        (body(tool_choice="required"), "tool_choice: "),
        (body(top_logprobs=3), "top_logprobs: 3 is not supported"),
        (body(stream="yes"), 'stream: "yes"; give true or false'),
        (body(stream_options=[1]), "stream_options: give an object"),
        (body(model=3), "model: 3; give a text"),
        (body(tools={}), "tools: {}; give a list"),
        (body(tools=[{"type": "web_search"}]), r"tools\[0\]: .* only functions with a name"),
        ({"model": "policy"}, "messages: the last must not be the assistant's"),
        (body(USER, {"role": "assistant", "content": "x"}), "messages: the last must not be the assistant's"),
        (body({"role": "assistant", "content": "x"}, USER), r"messages\[0\]: an assistant's message can only follow"),
        (body("x"), r"messages\[0\]: give an object"),
        (body({"role": "robot", "content": "x"}), r'messages\[0\]\.role: "robot"; give one of system, developer'),
        (body({"role": ["user"], "content": "x"}), r"messages\[0\]\.role: "),
        (body({"role": "user"}), r"messages\[0\]\.content: missing"),
        (body({"role": "user", "content": 3}), r"messages\[0\]\.content: 3; give a text"),
        (body({"role": "user", "content": ["x"]}), r"messages\[0\]\.content\[0\]: "),
        (body({"role": "user", "content": "\ud800"}), r"messages\[0\]\.content: it is not valid Unicode"),
        (body({**USER, "tool_calls": [CALL]}), r"messages\[0\]\.tool_calls: only an assistant's"),
        (body(USER, {"role": "assistant", "tool_calls": [{}]}, USER), r"messages\[1\]\.tool_calls\[0\]: "),
        (
            body({"role": "tool", "tool_call_id": "other", "content": "x"}),
            r'messages\[0\]\.tool_call_id: "other" is the id of no call',
        ),
        (body({"role": "tool", "tool_call_id": ["x"], "content": "x"}), r"messages\[0\]\.tool_call_id: "),
    ],
)
def test_a_mistake_is_told_with_its_field(value: Any, told: str) -> None:
    with pytest.raises(ApiError, match=told) as refused:
        parse_request(value, AGENT, "ignore")
    assert refused.value.status == 400
    assert refused.value.body["error"]["type"] == "invalid_request_error"
    assert len(str(refused.value)) < 300


def test_tools_are_used_unless_the_agent_says_not_to() -> None:
    assert parse_request(body(tools=[TOOL]), AGENT, "ignore").uses_tools
    unused = parse_request(body(tools=[TOOL], tool_choice="none"), AGENT, "ignore")
    assert not unused.uses_tools
    assert unused.tools == (TOOL,)
    assert not parse_request(body(), AGENT, "ignore").uses_tools


def test_the_order_of_a_tool_s_keys_does_not_matter() -> None:
    turned = json.loads(json.dumps(TOOL, sort_keys=True))
    first, second = (parse_request(body(tools=[tool]), AGENT, "ignore") for tool in (TOOL, turned))
    assert first.tools_key == second.tools_key
