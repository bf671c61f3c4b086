"""Which request goes on with which, and that each token of the policy is learned from once."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_rl.engine.client import Generation
from miles_rl.rollout.chat import ChatRenderer
from miles_rl.rollout.openai_history import History
from miles_rl.rollout.openai_protocol import ApiError, ChatMessage, ChatRequest, ToolCall
from miles_rl.rollout.openai_tools import HermesToolCalls

MODEL = Path(__file__).parents[2] / "miles_rl/model/shipped/tiny"
RENDERER = ChatRenderer(str(MODEL))
USER = ChatMessage("user", "Look.")
SEEN = ChatMessage("tool", "a.txt")


def request_of(*messages: ChatMessage, tools: tuple[Any, ...] = ()) -> ChatRequest:
    return ChatRequest("policy", messages, tools, bool(tools), False, False, False)


def history_of(**options: Any) -> History:
    return History(RENDERER, HermesToolCalls(), **{"new_history": "branch", "max_branches": 8, **options})


def generation_of(text: str, num_prompt: int = 1) -> Generation:
    """A reply that is tokenised as no tokenizer would: byte by byte."""
    ids = [token for char in text for token in RENDERER.reply(char)[:-1]] + RENDERER.reply("")
    return Generation(ids, [-0.5] * len(ids), "stop", ids[-1], [3] * len(ids), 0, num_prompt, 0.1)


def answer(history: History, *messages: ChatMessage, text: str, calls: tuple[ToolCall, ...] = ()) -> ChatMessage:
    draft = history.draft(request_of(*messages))
    message = ChatMessage("assistant", text, calls)
    history.record(draft, generation_of(text, len(draft.ids)), text, message)
    history.close(draft)
    return message


def text_of(ids: list[int]) -> str:
    return RENDERER._native.backend_tokenizer.decode(ids, skip_special_tokens=False)


def test_a_reply_keeps_its_ids_when_it_comes_back() -> None:
    history = history_of()
    reply = answer(history, USER, text="ls -la")
    draft = history.draft(request_of(USER, reply, SEEN))
    written = generation_of("ls -la").output_ids
    prompt = RENDERER.prompt([USER.plain()])
    assert draft.ids[len(prompt) : len(prompt) + len(written)] == written
    assert written != RENDERER.reply("ls -la"), "and these are not what its text is tokenised to"
    assert draft.branch is history.branches[0]


def test_nothing_is_recorded_before_the_reply_is() -> None:
    history = history_of()
    reply = answer(history, USER, text="ls")
    before = list(history.branches[0].record.ids)
    for _ in range(2):
        draft = history.draft(request_of(USER, reply, SEEN))
        assert history.branches[0].record.ids == before
        history.close(draft)
    assert draft.branch is history.branches[0]
    assert history.num_open == 0


@pytest.mark.parametrize(
    "changed",
    [
        lambda reply: (ChatMessage("user", "Look!"), reply, SEEN),
        lambda reply: (ChatMessage("system", "Look."), reply, SEEN),
        lambda reply: (USER, ChatMessage("assistant", reply.content + " ", reply.calls), SEEN),
        lambda reply: (USER, ChatMessage("assistant", reply.content), SEEN),
        lambda reply: (USER, ChatMessage("assistant", reply.content, (ToolCall("x", "bash", "{}"),)), SEEN),
        lambda reply: (USER,),
        lambda reply: (USER, SEEN),
    ],
)
def test_a_history_that_differs_in_one_byte_begins_a_branch(changed: Any) -> None:
    history = history_of()
    reply = answer(history, USER, text="ls", calls=(ToolCall("call_0_0", "bash", '{"command": "ls"}'),))
    assert history.draft(request_of(*changed(reply))).branch is None
    refusing = history_of(new_history="refuse")
    answer(refusing, USER, text="ls", calls=reply.calls)
    with pytest.raises(ApiError, match="send back every message unchanged") as refused:
        refusing.draft(request_of(*changed(reply)))
    assert refused.value.code == "history_not_extended"


def test_a_history_goes_on_only_with_its_own_tools() -> None:
    history = history_of(new_history="refuse")
    reply = answer(history, USER, text="ls")
    tool = {"type": "function", "function": {"name": "bash"}}
    with pytest.raises(ApiError, match=r"^tools: they are not those of the request before"):
        history.draft(request_of(USER, reply, SEEN, tools=(tool,)))


def test_a_branch_reads_the_replies_of_others_with_the_ids_they_were_written_with() -> None:
    history = history_of()
    reply = answer(history, USER, text="ls -la")
    answer(history, USER, reply, ChatMessage("tool", "other"), text="one")
    draft = history.draft(request_of(ChatMessage("system", "In short."), USER, reply, SEEN))
    assert draft.branch is None
    assert text_of(draft.ids) == "<|system|>In short.<|user|>Look.<|assistant|>ls -la<|end|><|tool|>a.txt<|assistant|>"
    written = generation_of("ls -la").output_ids
    starts = [i for i in range(len(draft.ids)) if draft.ids[i : i + len(written)] == written]
    assert len(starts) == 1


def test_a_boundary_token_that_is_not_the_template_s_is_cut_with_all_that_belongs_to_it(tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL / name, tmp_path)
    opener = "{%- for m in messages %}{{ '<|' + m.role + '|>' + m.content }}{%- endfor %}"
    (tmp_path / "chat_template.jinja").write_text(opener + "{%- if add_generation_prompt %}<|assistant|>{%- endif %}")
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 512}))
    renderer = ChatRenderer(str(tmp_path))
    user, tool = (renderer._native.convert_tokens_to_ids(f"<|{role}|>") for role in ("user", "tool"))
    assert {user, tool} <= set(renderer.stop_token_ids), "the opener of the next message ends a reply"
    history = History(renderer, HermesToolCalls(), "branch", 8)
    ids = [*renderer.reply("ls")[:-1], user]
    reply = ChatMessage("assistant", "ls")
    for messages in ((USER,), (USER, reply, SEEN)):
        draft = history.draft(request_of(*messages))
        written = Generation(ids, [-0.5] * len(ids), "stop", user, [3] * len(ids), 0, len(draft.ids), 0.1)
        history.record(draft, written, "ls", reply)
        history.close(draft)
    token_ids, mask, _, versions = history.branches[0].record.arrays()
    first = history.branches[0].turns()[0]
    assert (token_ids[first.end], mask[first.end], versions[first.end]) == (tool, False, -1)
    assert token_ids[first.start : first.end].tolist() == ids[:-1]
    assert history.branches[0].record.ids == draft.ids + ids


def test_two_requests_at_once_do_not_share_a_branch() -> None:
    history = history_of()
    reply = answer(history, USER, text="ls")
    first, second = (history.draft(request_of(USER, reply, SEEN)) for _ in range(2))
    assert first.branch is history.branches[0]
    assert second.branch is None
    assert first.ids == second.ids
    refusing = history_of(new_history="refuse")
    refusing.draft(request_of(USER))
    with pytest.raises(ApiError, match="another request of this episode is being answered"):
        refusing.draft(request_of(USER))


def test_the_number_of_branches_is_bounded() -> None:
    history = history_of(max_branches=2)
    answer(history, USER, text="a")
    answer(history, USER, text="b")
    with pytest.raises(ApiError, match="the 2 histories") as refused:
        history.draft(request_of(USER))
    assert refused.value.code == "too_many_histories"


def test_a_reply_that_others_wrote_is_read_and_not_learned_from() -> None:
    history = history_of()
    foreign = ChatMessage("assistant", "cat", (ToolCall("x", "bash", '{"command": "cat a"}'),))
    reply = answer(history, USER, foreign, SEEN, text="done")
    assert text_of(history.branches[0].record.ids) == (
        '<|user|>Look.<|assistant|>cat\n<tool_call>\n{"name": "bash", "arguments": {"command": "cat a"}}\n</tool_call>'
        "<|end|><|tool|>a.txt<|assistant|>done<|end|>"
    )
    draft = history.draft(request_of(USER, foreign, SEEN, reply, USER, foreign, SEEN))
    assert draft.branch is history.branches[0]
    assert text_of(draft.ids).count("<tool_call>") == 2
    mask = history.branches[0].record.arrays()[1]
    assert int(mask.sum()) == len(generation_of("done").output_ids)


@pytest.mark.parametrize("arguments", ["{", "[]", "[" * 100_000])
def test_a_foreign_call_that_is_no_json_is_refused(arguments: str) -> None:
    foreign = ChatMessage("assistant", "", (ToolCall("x", "bash", arguments),))
    with pytest.raises(ApiError, match=r"^tool_calls: the arguments of a call are not"):
        history_of().draft(request_of(USER, foreign, SEEN))


def test_a_template_that_does_not_print_tools_is_told() -> None:
    tool = {"type": "function", "function": {"name": "bash"}}
    with pytest.raises(ApiError, match=r"^tools: bash; the chat template of .* does not print tools"):
        history_of().draft(request_of(USER, tools=(tool,)))


def test_turns_tell_what_was_called_and_what_came_back() -> None:
    history = history_of()
    call = ToolCall("call_0_0", "bash", '{"command": "ls"}')
    reply = answer(history, USER, text="I look.", calls=(call,))
    answer(history, USER, reply, SEEN, ChatMessage("user", "Well?"), text="done")
    first, second = history.branches[0].turns()
    assert (first.text, first.command, first.observation) == ("I look.", 'bash({"command": "ls"})', "a.txt\nWell?")
    assert (second.text, second.command, second.observation) == ("done", None, "")
    assert RENDERER.decode(history.branches[0].record.ids[second.start : second.end]) == "done"


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_however_an_agent_goes_about_its_histories_every_token_is_learned_from_once(data: st.DataObject) -> None:
    history = history_of(max_branches=50)
    known: list[tuple[ChatMessage, ...]] = [(USER,)]
    num_written = 0
    for step in range(data.draw(st.integers(1, 8))):
        messages = data.draw(st.sampled_from(known))
        edit = data.draw(st.sampled_from(["none", "none", "system", "foreign", "cut"]))
        if edit == "system":
            messages = (ChatMessage("system", f"s{step}"), *messages)
        elif edit == "foreign":
            messages = (*messages, ChatMessage("assistant", "other"), SEEN)
        elif edit == "cut":
            messages = messages[-1:]
        if data.draw(st.booleans()):
            history.close(history.draft(request_of(*messages)))
        text = data.draw(st.sampled_from(["a", "ls -la", ""]))
        reply = answer(history, *messages, text=text)
        num_written += len(generation_of(text).output_ids)
        known.append((*messages, reply, ChatMessage("tool", f"o{step}")))
    num_learned = 0
    for branch in history.branches:
        ids, mask, logprobs, versions = branch.record.arrays()
        assert len(ids) == len(mask) == len(logprobs) == len(versions) == branch.turns()[-1].end
        assert ((versions == 3) == mask).all()
        assert ((logprobs == np.float32(-0.5)) == mask).all()
        num_learned += int(mask.sum())
        rendered = RENDERER._native.apply_chat_template([m.plain() for m in branch.messages], tokenize=False)
        assert text_of(ids.tolist()) == rendered
    assert num_learned == num_written
