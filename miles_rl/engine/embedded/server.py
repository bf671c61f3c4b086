"""The engine's HTTP interface: the subset of SGLang's that a reinforcement learning run uses."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from miles_rl.engine.embedded.core import EngineCore, EngineDead
from miles_rl.engine.embedded.generation import GenerationHandler, error_response, read_json
from miles_rl.engine.embedded.protocol import Limits, RequestError
from miles_rl.engine.embedded.request import Request
from miles_rl.engine.embedded.weights import WeightsError

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_log = logging.getLogger(__name__)
_KEEPALIVE_S = 3600.0


class EngineServer:
    """One core behind HTTP. A model step longer than `max_step_s` makes `/health` fail."""

    def __init__(
        self,
        core: EngineCore,
        *,
        model_dir: str,
        info: dict[str, Any],
        max_body_bytes: int = 16 << 20,
        max_queued: int = 4096,
        max_step_s: float = 120.0,
    ) -> None:
        self._core, self._model_dir, self._info, self._max_step_s = core, model_dir, info, max_step_s
        backend = core.backend
        limits = Limits(backend.vocab_size, backend.context_length, backend.eos_token_ids)
        self._generation = GenerationHandler(core, limits, max_queued)
        self._update_lock = asyncio.Lock()
        self.app = web.Application(client_max_size=max_body_bytes, middlewares=[_errors])
        self.app.add_routes(
            [
                web.post("/generate", self._generation.handle),
                web.post("/abort_request", self._abort_request),
                web.post("/pause_generation", self._pause_generation),
                web.post("/continue_generation", self._continue_generation),
                web.post("/update_weights_from_disk", self._update_weights_from_disk),
                web.post("/update_weight_version", self._update_weight_version),
                web.post("/weights_checker", self._weights_checker),
                web.route("*", "/flush_cache", self._flush_cache),
                web.get("/health", self._health),
                web.get("/health_generate", self._health),
                web.get("/ready", self._health),
                web.get("/server_info", self._server_info),
                web.get("/get_server_info", self._server_info),
                web.get("/model_info", self._model_info),
                web.get("/get_model_info", self._model_info),
                web.get("/v1/loads", self._loads),
                web.get("/v1/models", self._models),
            ]
        )

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Deliver what the model thread produces to the listeners, on `loop`."""

        def deliver(requests: list[Request]) -> None:
            for request in requests:
                if request.listener is not None:
                    request.listener(request)

        def notify(requests: list[Request]) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(deliver, requests)

        self._core.notify = notify

    async def _on_model_thread(self, function: Callable[[], Any]) -> Any:
        # bounded: the caller, whose deadline closes the connection, which cancels this
        return await asyncio.wrap_future(self._core.call(function))

    async def _abort_request(self, http: web.Request) -> web.Response:
        body = await _object(http)
        rid, everything = str(body.get("rid") or ""), bool(body.get("abort_all"))
        if not rid and not everything:
            raise RequestError("rid: missing; name a request, or set abort_all")
        await self._on_model_thread(
            lambda: self._core.abort(lambda request: everything or request.rid.startswith(rid), "Abort by request")
        )
        return web.Response()

    async def _pause_generation(self, http: web.Request) -> web.Response:
        mode = (await _object(http)).get("mode", "abort")
        if mode not in ("abort", "retract", "in_place"):
            raise RequestError(f"mode: {mode!r}; choose abort, retract or in_place")
        await self._on_model_thread(lambda: self._core.pause(mode))
        return web.json_response({"message": "Generation paused successfully.", "status": "ok"})

    async def _continue_generation(self, http: web.Request) -> web.Response:
        await self._on_model_thread(self._core.resume)
        return web.json_response({"message": "Generation continued successfully.", "status": "ok"})

    async def _update_weights_from_disk(self, http: web.Request) -> web.Response:
        """Stage beside the running model, then swap between two steps.

        Reusable keys and values of the old weights are dropped whatever `flush_cache` says; requests in flight keep
        theirs, unless they were retracted. A generation that was paused stays paused.
        """
        body = await _object(http)
        model_dir, version = body.get("model_path"), body.get("weight_version")
        if not isinstance(model_dir, str) or not model_dir:
            raise RequestError("model_path: missing; name a folder with the new weights")
        if version is not None and not isinstance(version, str):
            raise RequestError(f"weight_version must be a string, got {version!r}")
        if body.get("load_format") not in (None, "auto", "safetensors", "pt"):
            raise RequestError(f"load_format: {body['load_format']!r} is not supported by this engine")
        abort_all = bool(body.get("abort_all_requests"))

        def swap(staged: Any) -> int:
            if abort_all:
                self._core.abort(lambda request: True, "Abort because of update_weights_from_disk")
            return self._core.install(staged, version)

        async with self._update_lock:  # bounded: publish_timeout_s of the fleet that asks
            try:
                # bounded: publish_timeout_s of the fleet that asks
                staged = await asyncio.to_thread(self._core.backend.stage, model_dir)
            except WeightsError as error:
                return _outcome(False, f"the old weights stay in force: {error}", num_paused_requests=0)
            num_open = await self._on_model_thread(lambda: swap(staged))
            self._model_dir = model_dir
        num_paused = num_open if self._core.is_paused else 0
        return _outcome(True, "Succeeded to update model weights.", num_paused_requests=num_paused)

    async def _update_weight_version(self, http: web.Request) -> web.Response:
        body = await _object(http)
        version = body.get("new_version")
        if not isinstance(version, str):
            raise RequestError(f"new_version must be a string, got {version!r}")
        abort_all = body.get("abort_all_requests", True)

        def change() -> None:
            if abort_all:
                self._core.abort(lambda request: True, "Abort because of update_weight_version")
            self._core.weight_version = version

        await self._on_model_thread(change)
        return _outcome(True, f"Weight version updated to {version}", new_version=version)

    async def _weights_checker(self, http: web.Request) -> web.Response:
        action = (await _object(http)).get("action", "checksum")
        if action != "checksum":
            raise RequestError(f"action: {action!r} is not supported by this engine; use checksum")
        async with self._update_lock:  # bounded: publish_timeout_s of the fleet that asks
            try:
                # bounded: publish_timeout_s of the fleet that asks
                digest = await asyncio.to_thread(self._core.backend.checksum)
            except ValueError as error:
                return _outcome(False, str(error))
        ranks = [{"rank": 0, "per_gpu_checksum": digest}]
        return _outcome(True, "Success.", ranks=ranks, per_engine_checksum=digest)

    async def _flush_cache(self, http: web.Request) -> web.Response:
        def flush() -> bool:
            if self._core.running or self._core.waiting:
                return False
            self._core.backend.clear_cache()
            return True

        if await self._on_model_thread(flush):
            return web.Response(text="Cache flushed.\n")
        return web.Response(text="Cache not flushed: there are pending requests.\n", status=400)

    async def _health(self, http: web.Request) -> web.Response:
        started = self._core.step_started_s
        if self._core.failure is not None:
            return error_response(self._core.failure, 503)
        if started is not None and time.monotonic() - started > self._max_step_s:
            return error_response(f"a model step has taken {time.monotonic() - started:.0f} s", 503)
        return web.Response()

    async def _server_info(self, http: web.Request) -> web.Response:
        core = self._core
        figures = {
            "num_generated_tokens": core.num_generated_tokens,
            "num_prompt_tokens": core.num_prompt_tokens,
            "num_cached_tokens": core.num_cached_tokens,
            "num_finished_requests": core.num_finished,
        }
        state = {**figures, "is_paused": core.is_paused, "weight_version": core.weight_version}
        return web.json_response({**self._info, **self._described(), "internal_states": [state]})

    async def _model_info(self, http: web.Request) -> web.Response:
        return web.json_response(
            {**self._described(), "is_generation": True, "preferred_sampling_params": None, "tokenizer_path": ""}
        )

    async def _models(self, http: web.Request) -> web.Response:
        length = self._core.backend.context_length
        card = {"id": self._model_dir, "object": "model", "owned_by": "embedded", "max_model_len": length}
        return web.json_response({"object": "list", "data": [{**card, "root": self._model_dir, "parent": None}]})

    async def _loads(self, http: web.Request) -> web.Response:
        core, cache = self._core, self._core.backend.cache_figures()
        used = sum(request.num_computed for request in list(core.running)) + cache.num_used_tokens
        load = {
            "dp_rank": 0,
            "num_running_reqs": len(core.running),
            "num_waiting_reqs": len(core.waiting),
            "num_total_reqs": len(core.running) + len(core.waiting),
            "num_used_tokens": used,
            "max_total_num_tokens": cache.max_tokens,
            "token_usage": cache.num_used_tokens / max(1, cache.max_tokens),
            "cache_hit_rate": core.num_cached_tokens / max(1, core.num_prompt_tokens),
            "max_running_requests": core.max_running,
        }
        return web.json_response({"dp_rank_count": 1, "loads": [load]})

    def _described(self) -> dict[str, Any]:
        backend = self._core.backend
        return {
            "model_path": self._model_dir,
            "weight_version": self._core.weight_version,
            "vocab_size": backend.vocab_size,
            "context_length": backend.context_length,
            "eos_token_ids": sorted(backend.eos_token_ids),
        }


async def _object(http: web.Request) -> dict[str, Any]:
    body = await read_json(http)
    if not isinstance(body, dict):
        raise RequestError("the body must be a JSON object")
    return body


def _outcome(success: bool, message: str, **more: Any) -> web.Response:
    return web.json_response({"success": success, "message": message, **more}, status=200 if success else 400)


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every failure is an answer to its own call and leaves the server as it was."""
    try:
        return await handler(request)
    except RequestError as error:
        return error_response(str(error))
    except EngineDead as error:
        return error_response(str(error), 503)
    except web.HTTPException as error:
        return error_response(error.text or error.reason, error.status)
    except (ConnectionError, asyncio.CancelledError):
        raise
    except Exception as error:
        _log.exception("%s %s failed", request.method, request.path)
        return error_response(f"{type(error).__name__}: {error}", 500)


async def serve(server: EngineServer, core: EngineCore, sockets: list[Any], stop: asyncio.Event) -> None:
    """Serve on bound `sockets` until `stop`, then end open requests with an error."""
    server.attach(asyncio.get_running_loop())
    core.start()
    runner = web.AppRunner(
        server.app, access_log=None, handler_cancellation=True, keepalive_timeout=_KEEPALIVE_S, shutdown_timeout=2.0
    )
    await runner.setup()
    try:
        for bound in sockets:
            await web.SockSite(runner, bound, backlog=1024).start()
            _log.info("listening on %s", json.dumps(bound.getsockname()))
        await stop.wait()  # bounded: the life of the fleet, which ends this process
    finally:
        await asyncio.to_thread(core.stop)  # bounded: the fleet, which kills this process after a grace
        await runner.cleanup()
