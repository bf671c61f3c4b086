"""How tool calls are read from the policy's text, and that no more of it is shown early than stays true."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_rl.rollout.chat import ChatRenderer
from miles_rl.rollout.openai_tools import Call, FencedToolCall, HermesToolCalls, ToolCallParser

ONE = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'
PARSERS = [HermesToolCalls(), FencedToolCall()]
MODEL = Path(__file__).parents[2] / "miles_rl/model/shipped/tiny"


def test_hermes_calls_come_after_the_content() -> None:
    content, calls = HermesToolCalls().parse(f"I look.\n{ONE}\n{ONE}\n")
    assert content == "I look.\n"
    assert calls == [Call("bash", '{"command": "ls"}')] * 2


def test_arguments_are_written_as_agents_write_them_back() -> None:
    _, (call,) = HermesToolCalls().parse('<tool_call>{"name":"f","arguments":{"a":[1,2],"b":"\u00fc"}}</tool_call>')
    assert call.arguments == json.dumps({"a": [1, 2], "b": "\u00fc"}, ensure_ascii=False)


@pytest.mark.parametrize(
    "text",
    [
        "no call",
        '<tool_call>{"name": "bash"',
        "<tool_call>not JSON</tool_call>",
        '<tool_call>["bash"]</tool_call>',
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "bash", "arguments": "ls"}</tool_call>',
        '<tool_call>{"name": "bash", "arguments": ' + "[" * 100_000 + "</tool_call>",
        f"{ONE}\n<tool_call>cut",
        f"{ONE}\n<tool_call>no JSON</tool_call>",
    ],
)
def test_a_reply_with_a_malformed_call_is_all_content(text: str) -> None:
    assert HermesToolCalls().parse(text) == (text, [])


def test_a_fenced_command_is_a_call_and_the_rest_is_content() -> None:
    parser = FencedToolCall(tool="shell", argument="line")
    text = "Look:\n```bash\nls 'a b'\n```\nTASK_COMPLETE"
    assert parser.parse(text) == ("Look:\n\nTASK_COMPLETE", [Call("shell", '{"line": "ls \'a b\'"}')])
    for plain in ("no fence", "```python\nx\n```", "```bash\n\n```", "```bash\nls"):
        assert parser.parse(plain) == (plain, [])


PARTS = ["<tool_call>", "</tool_call>", ONE, "<tool", "```", "```bash\n", "\nls\n```", "a", "\n", "{}", "`", "<"]


@given(parts=st.lists(st.sampled_from(PARTS), max_size=6), cut=st.floats(0, 1), which=st.sampled_from([0, 1]))
def test_what_is_shown_early_is_how_the_content_begins(parts: list[str], cut: float, which: int) -> None:
    parser: ToolCallParser = PARSERS[which]
    text = "".join(parts)
    begun = text[: round(cut * len(text))]
    content, _ = parser.parse(text)
    assert content.startswith(begun[: parser.settled(begun)])


def test_a_call_that_others_wrote_is_rendered_as_the_policy_would_write_it() -> None:
    calls = [Call("bash", '{"command": "ls"}')]
    pieces, contents = HermesToolCalls().write("I look.", calls)
    text = "".join(piece if isinstance(piece, str) else contents[piece] for piece in pieces)
    assert HermesToolCalls().parse(text) == ("I look.\n", calls)
    renderer = ChatRenderer(str(MODEL))
    fenced = FencedToolCall()
    ids = renderer.written(*fenced.write("", calls), "tool")
    assert ids == renderer.reply("```bash\nls\n```")
    assert fenced.parse(renderer.decode(ids)) == ("", calls)
    with pytest.raises(ValueError, match="can only have called 'bash'"):
        fenced.write("", [Call("python", "{}")])
