"""A streamed generation is believed no more than a whole one: it grows, it ends, and its end is checked."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from miles_rl.engine.base import EngineError
from miles_rl.engine.client import EngineClient, Generation

PAIRS = [[-0.5, 7, None], [-1.5, 8, None], [-0.25, 9, None]]
DONE = b"data: [DONE]\n\n"


def event(count: int, *, is_last: bool = False, pairs: list[list[Any]] = PAIRS) -> bytes:
    """All that an engine has said after `count` tokens."""
    meta: dict[str, Any] = {
        "finish_reason": {"type": "stop", "matched": 9} if is_last else None,
        "prompt_tokens": 2,
        "cached_tokens": 0,
        "weight_version": "4",
        "output_token_logprobs": pairs[:count],
    }
    if is_last:
        meta["weight_versions"] = [{"version": "3", "start": 0, "end": 2}, {"version": "4", "start": 2, "end": 3}]
    answer = {"output_ids": [pair[1] for pair in pairs[:count]], "meta_info": meta}
    return b"data: " + json.dumps(answer).encode() + b"\n\n"


@asynccontextmanager
async def engine_that_sends(*parts: bytes, then_s: float = 0.0) -> AsyncIterator[EngineClient]:
    """An engine whose stream comes in these parts, one packet each, and ends after `then_s`."""

    async def handle(request: web.Request) -> web.StreamResponse:
        assert (await request.json())["stream"] is True
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for part in parts:
            await response.write(part)
            await asyncio.sleep(0.02)
        await asyncio.sleep(then_s)
        return response

    app = web.Application()
    app.router.add_post("/generate", handle)
    async with TestServer(app) as server, EngineClient(str(server.make_url("/"))) as client:
        yield client


async def follow(client: EngineClient, told: list[Any], timeout_s: float = 5.0) -> Generation:
    def tell(ids: list[int], logprobs: list[float]) -> None:
        told.append((ids, logprobs))

    return await client.generate([1, 2], {}, rid="r", timeout_s=timeout_s, on_progress=tell)


async def test_a_stream_tells_what_there_is_and_ends_as_a_whole_answer() -> None:
    told: list[Any] = []
    async with engine_that_sends(event(1), event(2), event(3, is_last=True) + DONE) as client:
        reply = await follow(client, told)
    assert told == [([7], [-0.5]), ([7, 8], [-0.5, -1.5]), ([7, 8, 9], [-0.5, -1.5, -0.25])]
    assert (reply.output_ids, reply.logprobs, reply.versions) == ([7, 8, 9], [-0.5, -1.5, -0.25], [3, 3, 4])


async def test_events_may_be_cut_anywhere_and_come_together() -> None:
    whole = event(1) + event(2) + event(3, is_last=True) + DONE
    for cut in range(1, len(whole), 97):
        told: list[Any] = []
        async with engine_that_sends(whole[:cut], whole[cut:]) as client:
            assert (await follow(client, told)).output_ids == [7, 8, 9]
        assert told[-1][0] == [7, 8, 9]


@pytest.mark.parametrize(
    ("parts", "told"),
    [
        ([event(2)], "the stream ended before the reply did"),
        ([event(2), event(3, is_last=True)], "the stream ended before the reply did"),
        ([event(2), b'data: {"error": {"message": "out of memory"}}\n\n', DONE], "out of memory"),
        ([event(2), event(1), DONE], "the stream changed tokens that it had given"),
        ([event(2), event(3, is_last=True, pairs=[[-0.5, 6, None], *PAIRS[1:]]), DONE], "the stream changed tokens"),
        ([event(2), event(3, is_last=True, pairs=[[-0.6, 7, None], *PAIRS[1:]]), DONE], "the stream changed tokens"),
        ([event(3), DONE], "bad answer"),
        ([DONE], "bad answer"),
        ([b"data: {}\n\n", DONE], "bad event"),
        ([b"data: 3\n\n", DONE], "bad event"),
        ([b"data: {\n\n", DONE], "ValueError|JSONDecodeError"),
    ],
)
async def test_a_stream_that_does_not_hold_together_is_the_engine_s_failure(parts: list[bytes], told: str) -> None:
    async with engine_that_sends(*parts) as client:
        with pytest.raises(EngineError, match=told):
            await follow(client, [])


async def test_a_stream_that_stalls_ends_by_the_deadline() -> None:
    async with engine_that_sends(event(1), then_s=3.0) as client:
        with pytest.raises(EngineError, match="no answer within"):
            await follow(client, [], timeout_s=0.2)
