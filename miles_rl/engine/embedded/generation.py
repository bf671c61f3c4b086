"""`/generate` over HTTP: one task per call waits for its sequences, or streams them as they grow."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

from aiohttp import web

from miles_rl.engine.embedded.core import EngineCore, EngineDead
from miles_rl.engine.embedded.protocol import GenerateCall, Limits, RequestError, parse_generate
from miles_rl.engine.embedded.request import Request


def error_response(message: str, status: int = 400) -> web.Response:
    """SGLang's form of an error."""
    return web.json_response({"error": {"message": message}}, status=status)


async def read_json(http: web.Request) -> Any:
    """The body as JSON; an empty body is `{}`. Raises `RequestError`."""
    raw = await http.read()  # bounded: the caller, whose deadline closes the connection
    try:
        return json.loads(raw) if raw.strip() else {}
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is not JSON: {error}") from error


class GenerationHandler:
    """Handles `/generate` for one core. At most `max_queued` sequences may be in the engine at once."""

    def __init__(self, core: EngineCore, limits: Limits, max_queued: int) -> None:
        self._core, self._limits, self._max_queued = core, limits, max_queued
        self._num_open = 0

    async def handle(self, http: web.Request) -> web.StreamResponse:
        """Parse, submit, and answer; a caller that goes away aborts its own sequences and no other."""
        call = parse_generate(await read_json(http), self._limits)
        if self._num_open + len(call.requests) > self._max_queued:
            return error_response(f"the engine holds {self._num_open} requests; try again later", 503)
        progress: asyncio.Queue[Request] = asyncio.Queue()
        for request in call.requests:
            request.listener = progress.put_nowait
        self._num_open += len(call.requests)
        try:
            self._core.submit(call.requests)
            if call.streams:
                return await self._stream(http, call, progress)
            return await self._collect(call, progress)
        finally:
            self._num_open -= len(call.requests)
            self._abandon(call.requests)

    async def _collect(self, call: GenerateCall, progress: asyncio.Queue[Request]) -> web.Response:
        for _ in call.requests:
            request = await progress.get()  # bounded: the caller, whose deadline closes the connection
            if request.error is not None:
                return error_response(request.error, 500)
        answers = [answer(request, call, self._core.weight_version) for request in call.requests]
        return web.json_response(answers if call.is_list else answers[0])

    async def _stream(
        self, http: web.Request, call: GenerateCall, progress: asyncio.Queue[Request]
    ) -> web.StreamResponse:
        """Each event holds all tokens so far; a step that came while one was being sent is merged into the next."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(http)
        index = {id(request): number for number, request in enumerate(call.requests)}
        remaining = len(call.requests)
        while remaining:
            batch = {id(request): request for request in await _drain(progress)}
            for key, request in batch.items():
                is_last = request.finish_reason is not None
                if is_last and index.pop(key, None) is not None:
                    remaining -= 1
                event: dict[str, Any]
                if request.error is not None:
                    event = {"error": {"message": request.error}}
                else:
                    event = answer(request, call, self._core.weight_version, is_last)
                    if call.is_list:
                        event["index"] = call.requests.index(request)
                await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    def _abandon(self, requests: list[Request]) -> None:
        left = {id(request) for request in requests if request.finish_reason is None}
        if left:
            with contextlib.suppress(EngineDead):
                self._core.call(lambda: self._core.abort(lambda request: id(request) in left, "the caller went away"))


async def _drain(progress: asyncio.Queue[Request]) -> list[Request]:
    items = [await progress.get()]  # bounded: the caller, whose deadline closes the connection
    while not progress.empty():
        items.append(progress.get_nowait())
    return items


def answer(request: Request, call: GenerateCall, version: str, is_last: bool = True) -> dict[str, Any]:
    """One sequence as SGLang reports it; `version` is in force now. While it streams, only what is known so far."""
    # The model thread appends to these lists: take one length for all of them.
    count = min(len(request.logprobs), len(request.versions))
    output_ids = request.ids[request.num_prompt : request.num_prompt + count]
    meta: dict[str, Any] = {
        "id": request.rid,
        "finish_reason": request.finish_reason if is_last else None,
        "prompt_tokens": request.num_prompt,
        "completion_tokens": count,
        "cached_tokens": request.num_cached,
        "cached_tokens_details": None,
        "weight_version": request.versions[count - 1] if count else version,
        "num_retractions": request.num_retractions,
        "dp_rank": None,
        "reasoning_tokens": 0,
    }
    if is_last:
        meta["weight_versions"] = request.version_spans()
        meta["e2e_latency"] = request.finished_s - request.created_s
    if call.return_logprob:
        pairs = zip(request.logprobs, output_ids, strict=False)
        meta["output_token_logprobs"] = [[logprob, token, None] for logprob, token in pairs]
        meta["output_token_logprobs_length"] = count
        meta["input_token_logprobs"] = _input_logprobs(request)
    result: dict[str, Any] = {"output_ids": output_ids, "meta_info": meta}
    if call.return_prompt_token_ids:
        result["prompt_token_ids"] = request.ids[: request.num_prompt]
    return result


def _input_logprobs(request: Request) -> list[list[Any]]:
    """From the asked position on; the first has none, as its own context was not scored."""
    start = request.prompt_logprob_start
    if start is None or len(request.prompt_logprobs) < request.num_prompt - 1 - start:
        return []
    values = [None, *request.prompt_logprobs]
    return [[value, token, None] for value, token in zip(values, request.ids[start : request.num_prompt], strict=True)]
