"""The endpoint's HTTP before any engine is asked: who is let in, and in which form failures come."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from miles_rl.engine.client import EngineClient
from miles_rl.rollout.agent import Agent
from miles_rl.rollout.chat import ChatRenderer
from miles_rl.rollout.openai_endpoint import OpenAIEndpoint
from miles_rl.rollout.openai_tools import HermesToolCalls
from miles_rl.types import Outcome

RENDERER = ChatRenderer(str(Path(__file__).parents[2] / "miles_rl/model/shipped/tiny"))
AGENT = Agent(
    temperature=1.0,
    top_p=1.0,
    top_k=-1,
    turn_tokens=64,
    session_tokens=512,
    max_turns=4,
    wall_clock_s=60.0,
    command_timeout_s=5.0,
    observation_chars=400,
    request_timeout_s=5.0,
    lease_timeout_s=30.0,
    seed=0,
)
ASK = {"model": "policy", "messages": [{"role": "user", "content": "Look."}]}


@asynccontextmanager
async def serving(**options: Any) -> AsyncIterator[OpenAIEndpoint]:
    """An endpoint whose engine does not exist."""
    async with (
        EngineClient("http://127.0.0.1:9") as engine,
        OpenAIEndpoint(engine, RENDERER, AGENT, HermesToolCalls(), **options) as endpoint,
    ):
        yield endpoint


async def call(
    url: str, key: str | None = None, body: Any = None, data: Any = None, method: str = "POST"
) -> tuple[int, Any, Any]:
    """Status, JSON and headers."""
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20)) as session,
        session.request(method, url, json=body, data=data, headers=headers) as response,
    ):
        return response.status, await response.json(), response.headers


async def test_only_the_episode_s_own_key_is_let_in() -> None:
    async with serving() as endpoint:
        episode, other = endpoint.open("g0.0.0"), endpoint.open("g0.1.0")
        for key in (None, "", "x", other.api_key, "\u00fc"):
            status, body, _ = await call(f"{episode.base_url}/models", key, method="GET")
            assert (status, body["error"]["code"]) == (401, "invalid_api_key")
            status, body, _ = await call(f"{episode.base_url}/chat/completions", key, ASK)
            assert (status, body["error"]["code"]) == (401, "invalid_api_key")
        status, body, _ = await call(f"{episode.base_url}/models", episode.api_key, method="GET")
        assert (status, [model["id"] for model in body["data"]]) == (200, ["policy"])
        assert episode.base_url.startswith("http://127.0.0.1:")


@pytest.mark.parametrize(
    ("path", "method", "status"),
    [
        ("/episodes/none/v1/models", "GET", 404),
        ("/v1/models", "GET", 404),
        ("/episodes/e/v1/chat/completions", "GET", 405),
        ("/episodes/e/v1/models/gpt-9", "GET", 404),
        ("/episodes/e/v1/embeddings", "POST", 404),
    ],
)
async def test_every_failure_has_openai_s_form(path: str, method: str, status: int) -> None:
    async with serving() as endpoint:
        episode = endpoint.open("e")
        base = episode.base_url.removesuffix("/episodes/e/v1")
        got, body, headers = await call(base + path, episode.api_key, method=method)
        assert got == status
        assert set(body["error"]) == {"message", "type", "param", "code"}
        assert headers["x-should-retry"] == "false"


async def test_a_body_that_is_no_json_or_too_large_or_never_comes_is_refused() -> None:
    async def slowly() -> AsyncIterator[bytes]:
        yield b'{"model": '
        await asyncio.sleep(10)

    async with serving(max_body_bytes=1000, read_timeout_s=0.2) as endpoint:
        episode = endpoint.open("e")
        url = f"{episode.base_url}/chat/completions"
        for data, wanted in (
            (b"{", (400, "invalid_json")),
            (b"[" * 900, (400, "invalid_json")),
            (json.dumps(ASK | {"user": "x" * 1000}).encode(), (413, None)),
            (slowly(), (408, "request_timeout")),
        ):
            status, body, _ = await call(url, episode.api_key, data=data)
            assert (status, body["error"]["code"]) == wanted


@pytest.mark.parametrize("streams", [False, True])
async def test_a_missing_engine_is_a_bad_gateway_and_no_reward(streams: bool) -> None:
    async with serving() as endpoint:
        episode = endpoint.open("e")
        for _ in range(2):
            body = ASK | {"stream": streams}
            status, body, _ = await call(f"{episode.base_url}/chat/completions", episode.api_key, body)
            assert (status, body["error"]["code"], body["error"]["type"]) == (502, "engine_failed", "server_error")
        assert episode.outcome is Outcome.ENGINE_FAILED
        with pytest.raises(ValueError, match=r"^e: engine_failed: http://127\.0\.0\.1:9/generate: "):
            episode.trajectories(task="t", group_id=0, reward=1.0)


async def test_an_episode_without_a_reply_has_nothing_to_learn_from() -> None:
    async with serving() as endpoint:
        episode = endpoint.open("e")
        with pytest.raises(ValueError, match=r"^e: no token was written by the policy"):
            episode.trajectories(task="t", group_id=0, reward=1.0)


async def test_an_id_is_open_once_and_fit_for_an_address() -> None:
    async with serving() as endpoint:
        episode = endpoint.open("g0.0.0")
        for sample_id in ("g0.0.0", "", "a/b", "a b", "a\n", ".."):
            with pytest.raises(ValueError, match="an episode of that id is open, or it is no id"):
                endpoint.open(sample_id)
        await endpoint.close(episode)
        again = endpoint.open("g0.0.0")
        await endpoint.close(episode)
        status, _, _ = await call(f"{again.base_url}/models", again.api_key, method="GET")
        assert status == 200, "closing the one before does not end it"
        assert again.api_key != episode.api_key
    with pytest.raises(ValueError, match="the endpoint does not serve"):
        endpoint.open("g0.1.0")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"new_history": "fork"}, r"^rollout\.endpoint\.new_history: fork; choose branch or refuse"),
        ({"sampling": "obey"}, r"^rollout\.endpoint\.sampling: obey; choose ignore or refuse"),
        ({"max_branches": 0}, r"^rollout\.endpoint\.max_branches: 0; give more than 0"),
        ({"write_timeout_s": 0.0}, r"^rollout\.endpoint\.write_timeout_s: 0\.0; give more than 0"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        OpenAIEndpoint(EngineClient("http://127.0.0.1:9"), RENDERER, AGENT, HermesToolCalls(), **options)
