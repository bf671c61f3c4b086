"""A real HTTP proxy before one engine, that delays generations and answers some with an error."""

from __future__ import annotations

import asyncio
import random

import aiohttp
from aiohttp import web

from miles_rl.engine.base import Replica
from miles_rl.faults.strike import struck

MAX_BODY_BYTES = 64 << 20
START_TIMEOUT_S = 10.0
CLOSE_TIMEOUT_S = 5.0
HOP_HEADERS = {"host", "content-length", "transfer-encoding", "connection"}


class ProxiedReplica:
    """A `Replica` whose address is the proxy's. All calls pass; only `/generate` is tampered with."""

    def __init__(self, inner: Replica, draws: random.Random, delay_s: float, error_rate: float) -> None:
        self._inner, self._draws, self._delay_s, self._error_rate = inner, draws, delay_s, error_rate
        self._url, self._is_slow = "", False
        application = web.Application(client_max_size=MAX_BODY_BYTES)
        application.router.add_route("*", "/{path:.*}", self._pass_on)
        self._runner = web.AppRunner(application, access_log=None, shutdown_timeout=CLOSE_TIMEOUT_S)
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None))

    @classmethod
    async def before(cls, inner: Replica, draws: random.Random, delay_s: float, error_rate: float) -> ProxiedReplica:
        """Start a proxy on loopback before `inner`."""
        proxy = cls(inner, draws, delay_s, error_rate)
        async with asyncio.timeout(START_TIMEOUT_S):
            await proxy._runner.setup()
            await web.TCPSite(proxy._runner, "127.0.0.1", 0).start()
        proxy._url = f"http://127.0.0.1:{proxy._runner.addresses[0][1]}"
        return proxy

    @property
    def url(self) -> str:
        """The proxy's address."""
        return self._url

    @property
    def pid(self) -> int:
        """Process id of the engine."""
        return self._inner.pid

    @property
    def log_path(self) -> str:
        """See `Replica`."""
        return self._inner.log_path

    def exit_code(self) -> int | None:
        """See `Replica`."""
        return self._inner.exit_code()

    async def stop(self) -> None:
        """Close the proxy, then stop the engine."""
        try:
            async with asyncio.timeout(2 * CLOSE_TIMEOUT_S):
                await self._runner.cleanup()
                await self._session.close()
        finally:
            await self._inner.stop()

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/generate":
            if self._draws.random() < self._error_rate:
                struck("status 500 to a generation")
                return web.json_response({"error": {"message": "injected"}}, status=500)
            if self._delay_s > 0 and not self._is_slow:
                self._is_slow = True
                struck(f"each generation comes {self._delay_s:g} s late from now on")
            await asyncio.sleep(self._delay_s)
        headers = {name: value for name, value in request.headers.items() if name.lower() not in HOP_HEADERS}
        body = await request.read()  # bounded: the caller, whose deadline closes the connection
        call = self._session.request(request.method, self._inner.url + request.path_qs, data=body, headers=headers)
        async with call as answer:  # bounded: by the caller, whose deadline closes the connection
            return web.Response(
                # bounded: the caller, whose deadline closes the connection
                body=await answer.read(),
                status=answer.status,
                content_type=answer.content_type,
                charset=answer.charset,
            )
