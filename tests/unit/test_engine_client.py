"""The client believes nothing: every answer is checked, every wait ends, every failure says where and what."""

from __future__ import annotations

import asyncio
import copy
import re
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from miles_rl.engine.base import EngineError
from miles_rl.engine.client import EngineClient

GOOD: dict[str, Any] = {
    "output_ids": [7, 8, 9],
    "meta_info": {
        "id": "r",
        "finish_reason": {"type": "stop", "matched": 9},
        "prompt_tokens": 2,
        "completion_tokens": 3,
        "cached_tokens": 1,
        "weight_version": "4",
        "weight_versions": [{"version": "3", "start": 0, "end": 2}, {"version": "4", "start": 2, "end": 3}],
        "output_token_logprobs": [[-0.5, 7, None], [-1.5, 8, None], [0.0, 9, None]],
    },
}


class Engine:
    """A server that gives a chosen answer and remembers what it was asked."""

    def __init__(self) -> None:
        self.answer: Callable[[], Any] = lambda: GOOD
        self.status = 200
        self.delay_s = 0.0
        self.bodies: list[Any] = []
        self.headers: list[Any] = []

    async def handle(self, request: web.Request) -> web.Response:
        self.bodies.append(await request.json() if request.can_read_body else None)
        self.headers.append(request.headers)
        await asyncio.sleep(self.delay_s)
        answer = self.answer()
        if isinstance(answer, str):
            return web.Response(text=answer, status=self.status)
        return web.json_response(answer, status=self.status)


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
async def client(engine: Engine) -> AsyncIterator[EngineClient]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", engine.handle)
    async with TestServer(app) as server, EngineClient(str(server.make_url("/")), vocab_size=10) as made:
        yield made


async def test_an_answer_becomes_aligned_lists(client: EngineClient, engine: Engine) -> None:
    result = await client.generate([1, 2], {"max_new_tokens": 3}, rid="r", routing_key="session")
    assert (result.output_ids, result.logprobs, result.versions) == ([7, 8, 9], [-0.5, -1.5, 0.0], [3, 3, 4])
    assert (result.finish_reason, result.stop_token) == ("stop", 9)
    assert (result.cached_tokens, result.prompt_tokens) == (1, 2)
    assert result.latency_s > 0
    expected = {"rid": "r", "input_ids": [1, 2], "sampling_params": {"max_new_tokens": 3}, "return_logprob": True}
    assert engine.bodies == [expected]
    assert engine.headers[0]["X-SMG-Routing-Key"] == "session"


async def test_without_spans_the_one_version_holds_for_all_tokens(client: EngineClient, engine: Engine) -> None:
    answer = copy.deepcopy(GOOD)
    del answer["meta_info"]["weight_versions"]
    engine.answer = lambda: answer
    assert (await client.generate([1, 2], {}, rid="r")).versions == [4, 4, 4]


def _set(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(answer: dict[str, Any]) -> None:
        *parents, last = path.split(".")
        for name in parents:
            answer = answer[name]
        answer[last] = value

    return change


LIES: dict[str, Callable[[dict[str, Any]], None]] = {
    "fewer logprobs": _set("meta_info.output_token_logprobs", [[-0.5, 7, None]]),
    "logprobs of other tokens": _set("meta_info.output_token_logprobs", [[-0.5, t, None] for t in (7, 8, 8)]),
    "NaN": _set("meta_info.output_token_logprobs", [[float("nan"), t, None] for t in (7, 8, 9)]),
    "infinite": _set("meta_info.output_token_logprobs", [[float("-inf"), t, None] for t in (7, 8, 9)]),
    "above zero": _set("meta_info.output_token_logprobs", [[0.5, t, None] for t in (7, 8, 9)]),
    "null logprob": _set("meta_info.output_token_logprobs", [[None, t, None] for t in (7, 8, 9)]),
    "no logprobs": _set("meta_info.output_token_logprobs", None),
    "spans with a gap": _set("meta_info.weight_versions", [{"version": "1", "start": 1, "end": 3}]),
    "spans too short": _set("meta_info.weight_versions", [{"version": "1", "start": 0, "end": 2}]),
    "a version that is no number": _set("meta_info.weight_versions", [{"version": "default", "start": 0, "end": 3}]),
    "a prompt that was cut": _set("meta_info.prompt_tokens", 1),
    "more cached than sent": _set("meta_info.cached_tokens", 3),
    "an unknown reason": _set("meta_info.finish_reason", {"type": "bored"}),
    "no reason": _set("meta_info.finish_reason", None),
    "no meta": _set("meta_info", None),
}


@pytest.mark.parametrize("lie", LIES)
async def test_an_answer_that_does_not_fit_together_is_an_error(client: EngineClient, engine: Engine, lie: str) -> None:
    answer = copy.deepcopy(GOOD)
    LIES[lie](answer)
    engine.answer = lambda: answer
    with pytest.raises(EngineError, match=r"/generate: request r: bad answer: "):
        await client.generate([1, 2], {}, rid="r")
    assert len(engine.bodies) == 1


@pytest.mark.parametrize("ids", [[], [-1], [10], [1, 2, 2**70]])
async def test_bad_ids_never_reach_the_engine(client: EngineClient, engine: Engine, ids: list[int]) -> None:
    with pytest.raises(EngineError, match="input_ids"):
        await client.generate(ids, {}, rid="r")
    assert engine.bodies == []


async def test_an_error_names_the_address_the_status_and_the_first_line(client: EngineClient, engine: Engine) -> None:
    engine.status, engine.answer = 500, lambda: "first line\nsecond line"
    with pytest.raises(EngineError) as caught:
        await client.generate([1], {}, rid="r")
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/generate: status 500: first line", str(caught.value))
    assert len(engine.bodies) == 1, "a generation was sent twice"


async def test_every_call_ends_at_its_deadline(client: EngineClient, engine: Engine) -> None:
    engine.delay_s = 30.0
    calls = [
        client.generate([1], {}, rid="r", timeout_s=0.1),
        client.pause(timeout_s=0.1),
        client.update_weights_from_disk("x", 1, timeout_s=0.1),
        client.health(timeout_s=0.1),
        client.loads(timeout_s=0.1),
    ]
    results = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), timeout=10)
    assert all(isinstance(result, EngineError) and "within 0.1 s" in str(result) for result in results)


async def test_an_update_that_reports_failure_is_an_error(client: EngineClient, engine: Engine) -> None:
    engine.answer = lambda: {"success": False, "message": "no such folder"}
    with pytest.raises(EngineError, match="no such folder"):
        await client.update_weights_from_disk("x", 1)
    assert engine.bodies[0]["abort_all_requests"] is False
    with pytest.raises(EngineError, match="no such folder"):
        await client.checksum()


async def test_a_server_that_is_not_there_is_an_error() -> None:
    async with EngineClient("http://127.0.0.1:9", timeout_s=5) as client:
        with pytest.raises(EngineError, match=r"http://127\.0\.0\.1:9/health"):
            await client.health()
        assert not await client.is_healthy()


async def test_connections_are_reused(client: EngineClient, engine: Engine) -> None:
    ports: set[Any] = set()
    handle = engine.handle

    async def remember(request: web.Request) -> web.Response:
        ports.add(request.transport.get_extra_info("peername") if request.transport else None)
        return await handle(request)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", remember)
    async with TestServer(app) as server, EngineClient(str(server.make_url("/"))) as other:
        for _ in range(5):
            await other.generate([1, 2], {}, rid="r")
    assert len(ports) == 1
