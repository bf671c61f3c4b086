"""Engines as processes, for tests."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import aiohttp

from miles_rl.engine.base import Replica
from miles_rl.engine.embedded.core import EngineCore
from miles_rl.engine.embedded.engine import EmbeddedEngine
from miles_rl.engine.embedded.request import Request

FOREVER = {"max_new_tokens": 1900, "ignore_eos": True}
"""Sampling of a request that outlasts whatever a test does to it."""


@contextmanager
def running_engine(model_dir: str, log_dir: str, **options: Any) -> Iterator[Replica]:
    """An embedded engine serving `model_dir` as version 0."""
    replica = asyncio.run(EmbeddedEngine(**options).launch(0, model_dir, 0, log_dir))
    try:
        yield replica
    finally:
        asyncio.run(replica.stop())


class Http:
    """Raw calls to an engine or a router, as (status, JSON or text)."""

    def __init__(self, url: str) -> None:
        self.url = url

    async def post(self, path: str, body: Any = None, *, data: bytes | None = None, **headers: str) -> tuple[int, Any]:
        """POST `body` as JSON, or `data` as it is."""
        if data is not None:
            headers = {"Content-Type": "application/json", **headers}
        return await self._call("POST", path, json=body, data=data, headers=headers)

    async def get(self, path: str) -> tuple[int, Any]:
        """GET."""
        return await self._call("GET", path)

    async def generate(self, input_ids: Any, **more: Any) -> Any:
        """A generation that must succeed; keys that are no field of the body go to the sampling parameters."""
        fields = ("rid", "stream", "return_logprob", "logprob_start_len", "extra_key", "return_prompt_token_ids")
        body = {"return_logprob": True, **{key: more.pop(key) for key in fields if key in more}}
        status, answer = await self.post("/generate", {"input_ids": input_ids, "sampling_params": more, **body})
        assert status == 200, answer
        return answer

    async def num_running(self) -> int:
        """Requests in the running batch."""
        _, answer = await self.get("/v1/loads")
        return answer["loads"][0]["num_running_reqs"]

    async def until_running(self, count: int) -> None:
        """Wait until `count` requests run."""
        async with asyncio.timeout(20):
            while await self.num_running() != count:
                await asyncio.sleep(0.01)

    async def _call(self, method: str, path: str, **options: Any) -> tuple[int, Any]:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session,
            session.request(method, self.url + path, **options) as response,
        ):
            is_json = response.content_type == "application/json"
            return response.status, await (response.json() if is_json else response.text())


def random_ids(count: int, seed: int, vocab_size: int = 524) -> list[int]:
    """`count` ids that are not the end of text."""
    generator = random.Random(seed)
    return [generator.randrange(2, vocab_size) for _ in range(count)]


def run_to_end(core: EngineCore, requests: list[Request]) -> list[Request]:
    """Drive a core whose thread was not started until `requests` and all others are done."""
    core.waiting.extend(requests)
    while core.step():
        pass
    return requests
