"""An engine without a model, as a process: SGLang's HTTP, a real prefix cache, and times like an engine's.

    python -m miles_rl.simulator.stub_engine --port 30000

A router cannot tell it from an engine. Prompt tokens that are not cached are computed one request after another; then
a request gains a token at a time, slower the more requests run. Replies follow from the prompt alone.
"""

from __future__ import annotations

import argparse
import asyncio
import socket
from typing import Any

from aiohttp import web

from miles_rl.engine.embedded.prefix_cache import PrefixCache

VOCAB_SIZE = 1000
LOGPROB = -0.5
MAX_BODY_BYTES = 64 << 20


class StubEngine:
    """State of the engine. Times in seconds, `prefill_rate` in tokens a second, `cache_tokens` in blocks of 16."""

    def __init__(self, cache_tokens: int, prefill_rate: float, token_s: float, token_s_per_request: float) -> None:
        self._cache = PrefixCache(cache_tokens // 16, 16)
        self._prefill_rate, self._token_s, self._token_s_per_request = prefill_rate, token_s, token_s_per_request
        self._prefilling = asyncio.Lock()
        self.num_running = self.prompt_tokens = self.cached_tokens = self.generated_tokens = 0

    async def generate(self, request: web.Request) -> web.Response:
        """POST `/generate`, for one request of token ids."""
        body: dict[str, Any] = await request.json()
        ids, num_new = list(body["input_ids"]), int(body["sampling_params"]["max_new_tokens"])
        self.num_running += 1
        try:
            async with self._prefilling:  # bounded: by the caller, whose deadline closes the connection
                cached = len(self._cache.match(ids, len(ids) - 1)) * 16
                await asyncio.sleep((len(ids) - cached) / self._prefill_rate)
                self._cache.insert(ids, len(ids))
            await asyncio.sleep(num_new * (self._token_s + self._token_s_per_request * self.num_running))
        finally:
            self.num_running -= 1
        output = [(sum(ids[-8:]) + offset) % VOCAB_SIZE for offset in range(num_new)]
        self._cache.insert([*ids, *output], len(ids) + num_new)
        self.prompt_tokens += len(ids)
        self.cached_tokens += cached
        self.generated_tokens += num_new
        meta = {
            "id": body.get("rid", ""),
            "finish_reason": {"type": "length", "length": num_new},
            "prompt_tokens": len(ids),
            "completion_tokens": num_new,
            "cached_tokens": cached,
            "weight_version": "0",
            "output_token_logprobs": [[LOGPROB, token, None] for token in output],
        }
        return web.json_response({"output_ids": output, "meta_info": meta})

    async def health(self, request: web.Request) -> web.Response:
        """GET `/health`, `/ready`, `/health_generate`."""
        return web.Response(text="ok")

    async def model_info(self, request: web.Request) -> web.Response:
        """GET `/model_info`."""
        return web.json_response({"model_path": "stub", "is_generation": True, "weight_version": "0"})

    async def server_info(self, request: web.Request) -> web.Response:
        """GET `/server_info`, with counters."""
        counters = {
            "num_prompt_tokens": self.prompt_tokens,
            "num_cached_tokens": self.cached_tokens,
            "num_generated_tokens": self.generated_tokens,
        }
        return web.json_response({"model_path": "stub", "dp_size": 1, "internal_states": [counters]})

    async def loads(self, request: web.Request) -> web.Response:
        """GET `/v1/loads`."""
        load = {"dp_rank": 0, "num_running_reqs": self.num_running, "num_waiting_reqs": 0}
        return web.json_response({"loads": [load]})

    def application(self) -> web.Application:
        """The server's routes."""
        application = web.Application(client_max_size=MAX_BODY_BYTES)
        application.router.add_post("/generate", self.generate)
        for path in ("/health", "/ready", "/health_generate"):
            application.router.add_get(path, self.health)
        for path in ("/model_info", "/get_model_info"):
            application.router.add_get(path, self.model_info)
        for path in ("/server_info", "/get_server_info"):
            application.router.add_get(path, self.server_info)
        application.router.add_get("/v1/loads", self.loads)
        return application


def main() -> None:
    """Serve until the process is ended."""
    parser = argparse.ArgumentParser(prog="python -m miles_rl.simulator.stub_engine", description=__doc__)
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--port", type=int, default=0, help="on loopback; 0 takes a free one; printed either way")
    where.add_argument("--fd", type=int, help="an inherited bound socket")
    parser.add_argument("--cache-tokens", type=int, default=200_000)
    parser.add_argument("--prefill-rate", type=float, default=50_000.0, help="tokens a second")
    parser.add_argument("--token-s", type=float, default=0.005, help="seconds a token")
    parser.add_argument("--token-s-per-request", type=float, default=0.0001, help="more of it for each that runs")
    options = parser.parse_args()
    if options.fd is None:
        listening = socket.create_server(("127.0.0.1", options.port))
    else:
        listening = socket.socket(fileno=options.fd)
    print(f"http://127.0.0.1:{listening.getsockname()[1]}", flush=True)

    async def make() -> web.Application:
        engine = StubEngine(options.cache_tokens, options.prefill_rate, options.token_s, options.token_s_per_request)
        return engine.application()

    # A caller who leaves ends its request, as an engine's abort does.
    web.run_app(make(), sock=listening, print=None, access_log=None, handler_cancellation=True)


if __name__ == "__main__":
    main()
