"""Agents that speak OpenAI's API, with its own client, before a real engine: what they are told is what is recorded."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import pytest_asyncio
import torch
from engines import Http
from fleets import running_fleet
from tiny_policy import write_policy
from transformers import AutoModelForCausalLM

from miles_rl.engine.client import EngineClient
from miles_rl.engine.embedded.engine import EmbeddedEngine
from miles_rl.model.tokenizer import CHAT_TEMPLATE, train_tokenizer
from miles_rl.rollout.agent import Agent
from miles_rl.rollout.chat import ChatRenderer
from miles_rl.rollout.openai_endpoint import OpenAIEndpoint
from miles_rl.rollout.openai_episode import EndpointEpisode
from miles_rl.rollout.openai_tools import Call, FencedToolCall, HermesToolCalls
from miles_rl.rollout.policy import TokenPolicy
from miles_rl.types import Outcome, StopReason, Trajectory
from sandbox_env.episode import parse_reply

openai = pytest.importorskip("openai")

MODEL = Path(__file__).parents[2] / "miles_rl/model/shipped/tiny"
INSTRUCTION = "lotas.md tells a secret word. Write only that word to zurin.csv."
ASKED = [{"role": "user", "content": INSTRUCTION}]
BASH = {
    "type": "function",
    "function": {
        "name": "bash",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}
AGENT = Agent(
    temperature=1.0,
    top_p=1.0,
    top_k=-1,
    turn_tokens=64,
    session_tokens=512,
    max_turns=16,
    wall_clock_s=60.0,
    command_timeout_s=5.0,
    observation_chars=400,
    request_timeout_s=30.0,
    lease_timeout_s=30.0,
    seed=0,
)
LONG = replace(AGENT, temperature=3.0, turn_tokens=300)
"""Replies that outlast whatever a test does to them: at this temperature the policy hardly ever stops."""

pytestmark = pytest.mark.asyncio(loop_scope="module")


@dataclass(slots=True)
class Served:
    """A running engine and who speaks to it."""

    engine: EngineClient
    http: Http
    renderer: ChatRenderer


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    replica = await EmbeddedEngine().launch(0, str(MODEL), 7, str(tmp_path_factory.mktemp("logs")))
    async with EngineClient(replica.url) as engine:
        yield Served(engine, Http(replica.url), ChatRenderer(str(MODEL)))
    await replica.stop()


@pytest.fixture(scope="module")
def tool_renderer(tmp_path_factory: pytest.TempPathFactory) -> ChatRenderer:
    """The shipped policy with a chat template that names the tools."""
    folder = tmp_path_factory.mktemp("tools")
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL / name, folder)
    names = "{%- if tools %}{% for tool in tools %}{{ tool.function.name }}\n{% endfor %}{% endif %}"
    (folder / "chat_template.jinja").write_text(names + CHAT_TEMPLATE)
    return ChatRenderer(str(folder))


@asynccontextmanager
async def endpoint_of(
    served: Served, agent: Agent = AGENT, renderer: ChatRenderer | None = None, **options: Any
) -> AsyncIterator[OpenAIEndpoint]:
    chat = renderer or served.renderer
    async with OpenAIEndpoint(served.engine, chat, agent, FencedToolCall(), **options) as endpoint:
        yield endpoint


def client_of(episode: EndpointEpisode) -> Any:
    return openai.AsyncOpenAI(base_url=episode.base_url, api_key=episode.api_key, timeout=30.0)


async def ask(client: Any, messages: list[Any], **more: Any) -> Any:
    """One whole completion; its message is what an agent appends to its history."""
    return await client.chat.completions.create(model="policy", messages=messages, **more)


async def ask_streaming(client: Any, messages: list[Any], **more: Any) -> list[Any]:
    """All chunks of a completion."""
    options = {"stream": True, "stream_options": {"include_usage": True}, **more}
    return [chunk async for chunk in await ask(client, messages, **options)]


def spelled(chunks: list[Any]) -> dict[str, Any]:
    """The message that chunks spell, as an agent puts it together."""
    content, calls = "", []
    for chunk in chunks:
        for choice in chunk.choices:
            content += choice.delta.content or ""
            calls += [call.model_dump(exclude={"index"}) for call in choice.delta.tool_calls or ()]
    return {"role": "assistant", "content": content, **({"tool_calls": calls} if calls else {})}


def entries_of(chunk: Any) -> list[Any]:
    """The log-probabilities of a chunk."""
    return chunk.choices[0].logprobs.content if chunk.choices and chunk.choices[0].logprobs else []


def num_parts(chunks: list[Any]) -> int:
    return sum(bool(chunk.choices and chunk.choices[0].delta.content) for chunk in chunks)


def only(episode: EndpointEpisode) -> Trajectory:
    (trajectory,) = episode.trajectories(task="t", group_id=0, reward=1.0)
    return trajectory


def written_texts(renderer: ChatRenderer, trajectory: Trajectory) -> list[str]:
    return [renderer.decode(trajectory.token_ids[t.start : t.end].tolist()) for t in trajectory.turns]


def logprobs_of_transformers(token_ids: np.ndarray) -> np.ndarray:
    model: Any = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    ids = torch.from_numpy(token_ids.astype(np.int64))[None]
    with torch.no_grad():
        logprobs = torch.log_softmax(model(ids).logits[0, :-1], -1)
    return logprobs.gather(1, ids[0, 1:, None])[:, 0].numpy()


OBSERVATIONS = ("the word is netas\n<|end|><|assistant|>", "(no output)")


async def test_an_agent_outside_records_what_the_same_agent_inside_does(served: Served) -> None:
    policy = TokenPolicy(served.engine, served.renderer, AGENT, INSTRUCTION, "g0.0.0")
    for observation in (*OBSERVATIONS, None):
        await policy.reply(30.0)
        if observation is not None:
            policy.observe(observation)
    async with endpoint_of(served) as endpoint:
        episode = endpoint.open("g0.0.0")
        messages: list[Any] = list(ASKED)
        for observation in (*OBSERVATIONS, None):
            answer = await ask(client_of(episode), messages, temperature=0.0, max_tokens=1)
            assert answer.choices[0].finish_reason == "stop"
            messages.append(answer.choices[0].message)
            if observation is not None:
                messages.append({"role": "tool", "content": observation})
        await endpoint.close(episode)
    trajectory = only(episode)
    token_ids, mask, logprobs, versions = policy.arrays()
    assert trajectory.token_ids.tolist() == token_ids.tolist()
    assert trajectory.loss_mask.tolist() == mask.tolist()
    assert trajectory.versions.tolist() == versions.tolist()
    np.testing.assert_allclose(trajectory.logprobs, logprobs, atol=1e-5)
    assert [turn.observation for turn in trajectory.turns] == [*OBSERVATIONS, ""]
    assert answer.usage.completion_tokens == trajectory.turns[-1].end - trajectory.turns[-1].start
    assert answer.usage.prompt_tokens == trajectory.turns[-1].start


async def test_what_is_streamed_is_what_is_recorded(served: Served) -> None:
    async with endpoint_of(served) as endpoint:
        episode = endpoint.open("s")
        chunks = await ask_streaming(client_of(episode), ASKED, logprobs=True)
        whole = await ask(client_of(endpoint.open("other")), ASKED, logprobs=True)
    trajectory = only(episode)
    message = spelled(chunks)
    assert [message["content"]] == written_texts(served.renderer, trajectory)
    entries = [entry for chunk in chunks for entry in entries_of(chunk)]
    assert (
        np.array([e.logprob for e in entries], np.float32).tolist()
        == trajectory.logprobs[trajectory.loss_mask].tolist()
    )
    assert "".join(e.token for e in entries) == message["content"] + "<|end|>"
    assert [c.choices[0].finish_reason for c in chunks[-3:-1]] == [None, "stop"]
    assert not chunks[-1].choices
    assert chunks[-1].usage.completion_tokens == trajectory.num_policy_tokens
    assert chunks[-1].usage.prompt_tokens == int((~trajectory.loss_mask).sum())
    assert len({c.id for c in chunks}) == 1
    content = whole.choices[0].logprobs.content
    assert bytes(b for e in content[:-1] for b in e.bytes).decode() == whole.choices[0].message.content


async def test_a_long_reply_comes_in_parts_also_where_it_is_no_text(served: Served) -> None:
    async with endpoint_of(served, LONG) as endpoint:
        for seed in range(4):
            episode = endpoint.open(f"s{seed}")
            chunks = await ask_streaming(client_of(episode), ASKED, logprobs=True)
            trajectory = only(episode)
            message = spelled(chunks)
            assert [message["content"]] == written_texts(served.renderer, trajectory)
            assert "\ufffd" in message["content"], "bytes that are no text"
            assert num_parts(chunks) > 2
            logprobs = [entry.logprob for chunk in chunks for entry in entries_of(chunk)]
            assert np.array(logprobs, np.float32).tolist() == trajectory.logprobs[trajectory.loss_mask].tolist()


async def test_the_bytes_of_a_stream_are_server_sent_events_that_end_with_done(served: Served) -> None:
    async with endpoint_of(served) as endpoint, aiohttp.ClientSession() as session:
        episode = endpoint.open("s")
        headers = {"Authorization": f"Bearer {episode.api_key}"}
        body = {"model": "policy", "messages": ASKED, "stream": True}
        async with session.post(f"{episode.base_url}/chat/completions", json=body, headers=headers) as response:
            assert response.content_type == "text/event-stream"
            events = (await response.text()).split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert all("usage" not in chunk for chunk in chunks)


@pytest.mark.parametrize("streams", [False, True])
async def test_tool_calls_go_out_and_come_back_and_the_tokens_stay(
    served: Served, tool_renderer: ChatRenderer, streams: bool
) -> None:
    async with endpoint_of(served, renderer=tool_renderer) as endpoint:
        episode = endpoint.open("g0.3.0")
        client = client_of(episode)
        messages: list[Any] = list(ASKED)
        given: list[Any] = []
        for observation in OBSERVATIONS:
            if streams:
                chunks = await ask_streaming(client, messages, tools=[BASH])
                message, reason = spelled(chunks), chunks[-2].choices[0].finish_reason
            else:
                choice = (await ask(client, messages, tools=[BASH])).choices[0]
                message, reason = choice.message.model_dump(exclude_none=True), choice.finish_reason
            calls = message.get("tool_calls", [])
            assert reason == ("tool_calls" if calls else "stop")
            given += calls
            answers = [{"role": "tool", "tool_call_id": call["id"], "content": observation} for call in calls]
            messages += [message, *(answers or [{"role": "user", "content": observation}])]
    trajectory = only(episode)
    texts = written_texts(tool_renderer, trajectory)
    commands = [parse_reply(text)[0] for text in texts]
    assert given, "the policy acts by commands"
    assert [json.loads(call["function"]["arguments"])["command"] for call in given] == [c for c in commands if c]
    assert len(episode.branches) == 1
    assert trajectory.turns[0].command == f"bash({given[0]['function']['arguments']})"
    ours = logprobs_of_transformers(trajectory.token_ids)
    np.testing.assert_allclose(
        trajectory.logprobs[1:][trajectory.loss_mask[1:]], ours[trajectory.loss_mask[1:]], atol=1e-4
    )


async def test_eight_episodes_at_once_do_not_mix(served: Served) -> None:
    async def play(episode: EndpointEpisode, number: int) -> list[str]:
        messages: list[Any] = [{"role": "user", "content": f"Write the number {number} to zurin.csv."}]
        texts: list[str] = []
        async with client_of(episode) as client:
            for turn in range(3):
                message = spelled(await ask_streaming(client, messages))
                texts.append(message["content"])
                messages += [message, {"role": "tool", "content": f"seen {number} {turn}"}]
        return texts

    async with endpoint_of(served) as endpoint:
        episodes = [endpoint.open(f"g0.{i}.0") for i in range(8)]
        given = await asyncio.gather(*(play(episode, 100 + i) for i, episode in enumerate(episodes)))
        crossed = openai.AsyncOpenAI(base_url=episodes[0].base_url, api_key=episodes[1].api_key)
        with pytest.raises(openai.AuthenticationError):
            await ask(crossed, ASKED)
    for i, (episode, texts) in enumerate(zip(episodes, given, strict=True)):
        trajectory = only(episode)
        assert trajectory.sample_id == f"g0.{i}.0"
        assert written_texts(served.renderer, trajectory) == texts
        whole = served.renderer.decode(trajectory.token_ids.tolist())
        assert f"number {100 + i} " in whole
        assert not any(str(100 + other) in whole.replace("".join(texts), "") for other in range(8) if other != i)
        ours = logprobs_of_transformers(trajectory.token_ids)
        mask = trajectory.loss_mask[1:]
        np.testing.assert_allclose(trajectory.logprobs[1:][mask], ours[mask], atol=1e-4)


async def test_a_history_that_was_edited_is_a_trajectory_of_its_own(served: Served) -> None:
    async with endpoint_of(served) as endpoint:
        episode = endpoint.open("g0.0.0")
        client = client_of(episode)
        first = (await ask(client, ASKED)).choices[0].message
        seen = [*ASKED, first, {"role": "tool", "content": "one"}]
        second = (await ask(client, seen)).choices[0].message
        await ask(client, [*ASKED, first, {"role": "tool", "content": "two"}])
        await ask(client, [{"role": "user", "content": "In short: " + INSTRUCTION}])
        await ask(client, [*seen, second, {"role": "tool", "content": "three"}])
    found = episode.trajectories(task="t", group_id=0, reward=1.0)
    assert [t.sample_id for t in found] == ["g0.0.0", "g0.0.0/1", "g0.0.0/2"]
    assert [len(t.turns) for t in found] == [3, 1, 1], "the first went on after the others had begun"
    main, fork = found[0], found[1]
    turn = main.turns[0]
    assert fork.token_ids[: turn.end].tolist() == main.token_ids[: turn.end].tolist(), "its ids as they were written"
    assert not fork.loss_mask[: turn.end].any(), "learned from where it was written, once"
    for trajectory in found:
        ours = logprobs_of_transformers(trajectory.token_ids)
        mask = trajectory.loss_mask[1:]
        np.testing.assert_allclose(trajectory.logprobs[1:][mask], ours[mask], atol=1e-4)


async def test_a_history_that_was_edited_is_refused_where_the_run_says_so(served: Served) -> None:
    async with endpoint_of(served, new_history="refuse") as endpoint:
        episode = endpoint.open("s")
        client = client_of(episode)
        first = (await ask(client, ASKED)).choices[0].message
        edited = {"role": "assistant", "content": first.content + " "}
        for messages, where in (
            ([*ASKED, edited, {"role": "tool", "content": "one"}], r"messages\[1\]: it is not what stood there"),
            (ASKED, "messages: they end before message 2"),
        ):
            with pytest.raises(openai.BadRequestError, match=where) as refused:
                await ask(client, messages)
            assert refused.value.code == "history_not_extended"
        await ask(client, [*ASKED, first, {"role": "tool", "content": "one"}])
    assert len(only(episode).turns) == 2


async def until_dropped(episode: EndpointEpisode, count: int) -> None:
    async with asyncio.timeout(10):
        while episode.num_dropped < count:
            await asyncio.sleep(0.01)


async def test_a_client_that_goes_away_in_mid_stream_aborts_its_reply_which_is_dropped(served: Served) -> None:
    async with endpoint_of(served, LONG) as endpoint:
        episode = endpoint.open("s")
        stream = await ask(client_of(episode), ASKED, stream=True)
        await anext(aiter(stream))
        await served.engine.pause()
        await served.http.until_running(1)
        await stream.close()
        await until_dropped(episode, 1)
        await served.engine.resume()
        await served.http.until_running(0)
        assert not episode.branches
        chunks = await ask_streaming(client_of(episode), ASKED)
    assert [spelled(chunks)["content"]] == written_texts(served.renderer, only(episode))


async def test_a_dropped_reply_leaves_its_history_as_it_was(served: Served) -> None:
    async with endpoint_of(served) as endpoint:
        episode = endpoint.open("s")
        client = client_of(episode)
        first = (await ask(client, ASKED)).choices[0].message
        messages = [*ASKED, first, {"role": "tool", "content": "one"}]
        before = [array.tolist() for array in episode.branches[0].record.arrays()]
        await served.engine.pause()
        task = asyncio.create_task(ask(client, messages))
        await asyncio.sleep(0.2)
        task.cancel()
        await until_dropped(episode, 1)
        await served.engine.resume()
        assert [array.tolist() for array in episode.branches[0].record.arrays()] == before
        await ask(client, messages)
    assert len(only(episode).turns) == 2


async def test_the_session_budget_is_told_to_the_agent_and_ends_the_episode(served: Served) -> None:
    prompt = len(served.renderer.prompt(ASKED))
    async with endpoint_of(served, replace(AGENT, session_tokens=prompt + 3)) as endpoint:
        episode = endpoint.open("s")
        answer = (await ask(client_of(episode), ASKED)).choices[0]
        assert answer.finish_reason == "length"
        for messages in ([*ASKED, answer.message, {"role": "tool", "content": "x"}], ASKED):
            with pytest.raises(openai.BadRequestError) as refused:
                await ask(client_of(episode), messages)
            assert refused.value.code == "context_length_exceeded"
        long = endpoint.open("long")
        with pytest.raises(openai.BadRequestError, match="maximum context length") as refused:
            await ask(client_of(long), [{"role": "user", "content": "word " * 600}])
        assert refused.value.code == "context_length_exceeded"
    assert only(episode).stop_reason is StopReason.SESSION_BUDGET
    assert len(only(episode).token_ids) == prompt + 3
    assert long.stop_reason is StopReason.SESSION_BUDGET


async def test_an_episode_ends_at_a_reply_that_was_cut_and_at_its_last_turn(served: Served) -> None:
    async with endpoint_of(served, replace(AGENT, turn_tokens=3)) as endpoint:
        cut = endpoint.open("cut")
        answer = (await ask(client_of(cut), ASKED)).choices[0]
        assert answer.finish_reason == "length"
        with pytest.raises(openai.BadRequestError) as refused:
            await ask(client_of(cut), [*ASKED, answer.message, {"role": "user", "content": "Go on."}])
        assert refused.value.code == "episode_ended"
    async with endpoint_of(served, replace(AGENT, max_turns=1)) as endpoint:
        last = endpoint.open("last")
        await ask(client_of(last), ASKED)
        with pytest.raises(openai.BadRequestError) as refused:
            await ask(client_of(last), ASKED)
        assert refused.value.code == "max_turns_exceeded"
    assert only(cut).stop_reason is StopReason.TURN_TRUNCATED
    assert only(last).stop_reason is StopReason.MAX_TURNS


async def test_weights_that_change_in_mid_reply_are_stamped_token_by_token(served: Served) -> None:
    async with endpoint_of(served, LONG) as endpoint:
        episode = endpoint.open("s")
        stream = await ask(client_of(episode), ASKED, stream=True)
        chunks = [await anext(aiter(stream))]
        await served.engine.pause()
        await served.engine.update_weights_from_disk(str(MODEL), 8)
        await served.engine.resume()
        chunks += [chunk async for chunk in stream]
    trajectory = only(episode)
    versions = trajectory.versions[trajectory.loss_mask].tolist()
    assert versions == sorted(versions)
    assert set(versions) == {7, 8}
    assert [spelled(chunks)["content"]] == written_texts(served.renderer, trajectory)


async def test_an_engine_that_fails_is_no_reward(served: Served) -> None:
    async with (
        EngineClient("http://127.0.0.1:9") as gone,
        OpenAIEndpoint(gone, served.renderer, AGENT, FencedToolCall()) as endpoint,
    ):
        dead = endpoint.open("dead")
        for _ in range(2):
            with pytest.raises(openai.InternalServerError) as failed:
                await ask(client_of(dead), ASKED)
            assert (failed.value.status_code, failed.value.code) == (502, "engine_failed")
    async with endpoint_of(served, LONG) as endpoint:
        ended = endpoint.open("ended")
        stream = await ask(client_of(ended), ASKED, stream=True)
        await anext(aiter(stream))
        await served.engine.pause("abort")
        await served.engine.resume()
        with pytest.raises(openai.APIError, match="the engine ended it with abort"):
            [chunk async for chunk in stream]
    for episode in (dead, ended):
        assert (episode.outcome, episode.stop_reason) == (Outcome.ENGINE_FAILED, StopReason.ABORTED)
        with pytest.raises(ValueError, match="engine_failed"):
            episode.trajectories(task="t", group_id=0, reward=1.0)


async def test_mistakes_are_told_in_openai_s_form(served: Served, tool_renderer: ChatRenderer) -> None:
    async with endpoint_of(served, sampling="refuse", max_body_bytes=20_000) as endpoint:
        episode = endpoint.open("s")
        client = client_of(episode)
        assert [model.id async for model in await client.models.list()] == ["policy"]
        assert (await client.models.retrieve("policy")).id == "policy"
        for options, status, code in (
            ({"n": 2}, 400, "unsupported_parameter"),
            ({"stop": ["x"]}, 400, "unsupported_parameter"),
            ({"tool_choice": "required", "tools": [BASH]}, 400, "unsupported_parameter"),
            ({"temperature": 0.5}, 400, "unsupported_value"),
            ({"tools": [BASH]}, 400, None),
            ({"model": "gpt-9"}, 404, "model_not_found"),
            ({"messages": [*ASKED, {"role": "user", "content": "x" * 30_000}]}, 413, None),
            ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, 400, None),
        ):
            with pytest.raises(openai.APIStatusError) as refused:
                await client.chat.completions.create(**{"model": "policy", "messages": ASKED, **options})
            assert (refused.value.status_code, refused.value.code) == (status, code), options
            assert set(refused.value.body) == {"message", "type", "param", "code"}
        await ask(client, ASKED, temperature=1.0, max_tokens=64, n=1)
        url = episode.base_url
        await endpoint.close(episode)
        with pytest.raises(openai.NotFoundError):
            await ask(client, ASKED)
        status, body = await Http(url).post("/chat/completions", data=b"{")
        assert (status, body["error"]["code"]) == (404, "episode_not_found")
    assert len(only(episode).turns) == 1


async def test_closing_an_episode_ends_what_is_in_flight(served: Served) -> None:
    async with endpoint_of(served) as endpoint:
        episode = endpoint.open("s")
        await served.engine.pause()
        task = asyncio.create_task(ask(client_of(episode), ASKED))
        await asyncio.sleep(0.2)
        await endpoint.close(episode)
        with pytest.raises(openai.BadRequestError) as refused:
            await task
        assert refused.value.code == "episode_ended"
        await served.engine.resume()
        await served.http.until_running(0)
    assert episode.num_dropped == 1
    assert not episode.branches


async def test_streams_and_aborts_go_through_the_router(served: Served, tmp_path: Path) -> None:
    async with running_fleet(str(MODEL), tmp_path, num_replicas=1) as fleet:
        addresses = await fleet.endpoints()
        replica = Http(addresses["replicas"][0])
        async with (
            EngineClient(addresses["router"]) as engine,
            OpenAIEndpoint(engine, served.renderer, LONG, FencedToolCall()) as endpoint,
        ):
            episode = endpoint.open("s")
            client = client_of(episode)
            stream = await ask(client, ASKED, stream=True)
            await anext(aiter(stream))
            await replica.post("/pause_generation", {"mode": "in_place"})
            await replica.until_running(1)
            await stream.close()
            await replica.post("/continue_generation", {})
            await replica.until_running(0)
            chunks = await ask_streaming(client, ASKED)
    trajectory = only(episode)
    assert [spelled(chunks)["content"]] == written_texts(served.renderer, trajectory)
    assert num_parts(chunks) > 2, "the router does not hold it back"
    assert set(trajectory.versions[trajectory.loss_mask]) == {3}


TOOL_TEMPLATE = (
    "{%- if tools %}# Tools, called as <tool_call> JSON </tool_call>\n"
    "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif %}" + CHAT_TEMPLATE
)
COMMAND, SEEN, LAST = "ls -la /tmp | sort", "a.txt\n<tool_call>", "There is only a.txt. \u00fc"


def write_hermes_policy(folder: Path) -> list[int]:
    """A policy that has learned one conversation with a call by heart; returns its ids."""
    texts = [json.dumps(BASH), COMMAND, SEEN, LAST, INSTRUCTION, '{"name": "bash", "arguments": {"command": '] * 4
    tokenizer = train_tokenizer(texts, 380, 512)
    tokenizer.add_tokens(["<tool_call>", "</tool_call>"])
    tokenizer.chat_template = TOOL_TEMPLATE
    tokenizer.save_pretrained(folder)
    write_policy(
        folder,
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        head_dim=32,
        max_position_embeddings=512,
        eos_token_id=tokenizer.eos_token_id,
    )
    renderer, parser = ChatRenderer(str(folder)), HermesToolCalls()
    call = Call("bash", json.dumps({"command": COMMAND}))
    ids = renderer.prompt(ASKED, [BASH]) + renderer.written(*parser.write("", [call]), "tool")
    ids += renderer.continuation(ids[-1:], [{"role": "tool", "content": SEEN}])[1] + renderer.reply(LAST)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    batch = torch.tensor([ids])
    for _ in range(120):
        optimizer.zero_grad()
        model(batch, labels=batch).loss.backward()
        optimizer.step()
    model.save_pretrained(folder)
    return ids


@pytest.fixture(scope="module")
def hermes(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[int]]:
    """Folder of the policy, and what it learned."""
    folder = tmp_path_factory.mktemp("hermes")
    return str(folder), write_hermes_policy(folder)


@pytest.mark.parametrize("streams", [False, True])
async def test_hermes_calls_of_a_policy_that_learned_them_keep_every_token(
    hermes: tuple[str, list[int]], tmp_path: Path, streams: bool
) -> None:
    folder, learned = hermes
    agent = replace(AGENT, temperature=0.01)
    replica = await EmbeddedEngine().launch(0, folder, 1, str(tmp_path))
    try:
        async with (
            EngineClient(replica.url) as engine,
            OpenAIEndpoint(engine, ChatRenderer(folder), agent, HermesToolCalls(), new_history="refuse") as endpoint,
        ):
            episode = endpoint.open("s")
            messages: list[Any] = list(ASKED)
            for turn in range(2):
                if streams:
                    message = spelled(await ask_streaming(client_of(episode), messages, tools=[BASH]))
                else:
                    answer = await ask(client_of(episode), messages, tools=[BASH])
                    message = answer.choices[0].message.model_dump(exclude_none=True)
                messages.append(message)
                if turn == 0:
                    (call,) = message["tool_calls"]
                    assert not message.get("content"), "nothing of a call is shown as text"
                    assert json.loads(call["function"]["arguments"]) == {"command": COMMAND}
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": SEEN})
    finally:
        await replica.stop()
    assert messages[-1]["content"] == LAST
    assert only(episode).token_ids.tolist() == learned
