"""An OpenAI-compatible endpoint for each episode, so that any agent that speaks that API can be trained.

    base_url  http://127.0.0.1:<port>/episodes/<sample id>/v1      api_key  a secret of the episode
    GET  /models             POST /chat/completions, streamed or not

The server listens on the loopback device only. An episode is known from `open` to `close`; requests of one never see
another's histories, and none is answered without its key.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any

from aiohttp import web

from miles_rl.deadline import deadline
from miles_rl.engine.client import EngineClient
from miles_rl.rollout import openai_reply
from miles_rl.rollout.agent import Agent
from miles_rl.rollout.chat import ChatRenderer
from miles_rl.rollout.openai_episode import Completion, EndpointEpisode
from miles_rl.rollout.openai_history import NewHistory
from miles_rl.rollout.openai_protocol import ApiError, ChatRequest, Rule, parse_request
from miles_rl.rollout.openai_tools import ToolCallParser

_HOST = "127.0.0.1"
_SAMPLE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_STOP_TIMEOUT_S = 10.0
_FINAL = {"x-should-retry": "false"}
"""Heeded by OpenAI's clients, which otherwise send a failed request again by themselves."""
_log = logging.getLogger(__name__)
Work = asyncio.Task[Completion]


class OpenAIEndpoint:
    """Serves the episodes of one process. Used as an asynchronous context manager.

    `new_history`: a history that goes on with none before it begins a `branch`, or is `refuse`d. `sampling`: what an
    agent asks of sampling is `ignore`d, or `refuse`d unless it is what the run does. `model_name` is the model that
    agents must ask for. `port` 0 takes a free one. Tokens and turns are bounded by `agent`.
    """

    def __init__(
        self,
        client: EngineClient,
        renderer: ChatRenderer,
        agent: Agent,
        tool_parser: ToolCallParser,
        *,
        model_name: str = "policy",
        new_history: NewHistory = "branch",
        sampling: Rule = "ignore",
        max_branches: int = 16,
        max_body_bytes: int = 16 << 20,
        read_timeout_s: float = 30.0,
        write_timeout_s: float = 30.0,
        port: int = 0,
    ) -> None:
        _one_of("new_history", new_history, ("branch", "refuse"))
        _one_of("sampling", sampling, ("ignore", "refuse"))
        sizes = {"max_branches": max_branches, "max_body_bytes": max_body_bytes}
        for name, value in {**sizes, "read_timeout_s": read_timeout_s, "write_timeout_s": write_timeout_s}.items():
            if value <= 0:
                raise ValueError(f"rollout.endpoint.{name}: {value}; give more than 0")
        self._client, self._renderer, self._agent, self._parser = client, renderer, agent, tool_parser
        self._model = model_name
        self._new_history: NewHistory = new_history
        self._sampling: Rule = sampling
        self._max_branches, self._max_body_bytes, self._port = max_branches, max_body_bytes, port
        self._read_timeout_s, self._write_timeout_s = read_timeout_s, write_timeout_s
        self._episodes: dict[str, EndpointEpisode] = {}
        self._work: dict[str, set[Work]] = {}
        self._runner: web.AppRunner | None = None
        self._url = ""

    async def __aenter__(self) -> OpenAIEndpoint:
        app = web.Application(client_max_size=self._max_body_bytes, middlewares=[_errors])
        path = "/episodes/{sample_id}/v1"
        app.add_routes(
            [
                web.post(f"{path}/chat/completions", self._completions),
                web.get(f"{path}/models", self._models),
                web.get(f"{path}/models/{{model}}", self._models),
            ]
        )
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=_STOP_TIMEOUT_S)
        await self._runner.setup()
        site = web.TCPSite(self._runner, _HOST, self._port, backlog=1024)
        await site.start()
        self._url = f"http://{_HOST}:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for episode in list(self._episodes.values()):
            await self.close(episode)
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def open(self, sample_id: str) -> EndpointEpisode:
        """Begin an episode. `ValueError` if one of that id is open, or the id is unfit for an address."""
        if self._runner is None:
            raise ValueError(f"{sample_id}: the endpoint does not serve; enter it first")
        if sample_id in self._episodes or not _SAMPLE_ID.fullmatch(sample_id):
            raise ValueError(f"{sample_id}: an episode of that id is open, or it is no id for an address")
        episode = EndpointEpisode(
            sample_id,
            f"{self._url}/episodes/{sample_id}/v1",
            self._client,
            self._renderer,
            self._agent,
            self._parser,
            self._new_history,
            self._max_branches,
        )
        self._episodes[sample_id], self._work[sample_id] = episode, set()
        return episode

    async def close(self, episode: EndpointEpisode) -> None:
        """End an episode: what is in flight is aborted and dropped, its address is gone. Safe to call twice."""
        if self._episodes.get(episode.sample_id) is not episode:
            return
        del self._episodes[episode.sample_id]
        work = self._work.pop(episode.sample_id)
        for task in work:
            task.cancel()
        if work:
            await asyncio.wait(work, timeout=_STOP_TIMEOUT_S)

    async def _models(self, http: web.Request) -> web.Response:
        self._episode(http)
        self._check_model(http.match_info.get("model", self._model))
        model = {"id": self._model, "object": "model", "created": 0, "owned_by": "miles-rl"}
        return web.json_response(model if "model" in http.match_info else {"object": "list", "data": [model]})

    async def _completions(self, http: web.Request) -> web.StreamResponse:
        self._episode(http)
        request = parse_request(await self._body(http), self._agent, self._sampling)
        self._check_model(request.model)
        episode = self._episode(http)  # it may have been closed while the body came
        feed = openai_reply.Feed()
        async with self._working(episode, request, feed) as work:
            await feed.wait()  # bounded: rollout.agent.request_timeout_s, which ends the work
            if request.streams and (not feed.is_done or _result(work)):
                return await self._stream(http, episode, request, work, feed)
            completion = _result(work)
            head = openai_reply.head_of(self._model)
            body = openai_reply.whole(completion, self._renderer, head, request.wants_logprobs)
            response = web.json_response(body)
            async with self._writing():
                await response.prepare(http)
                await response.write_eof()
            return response

    async def _stream(
        self, http: web.Request, episode: EndpointEpisode, request: ChatRequest, work: Work, feed: openai_reply.Feed
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})

        async def send(value: Mapping[str, Any]) -> None:
            async with self._writing():
                await response.write(b"data: " + json.dumps(value).encode() + b"\n\n")

        writer = openai_reply.ChunkWriter(
            self._renderer,
            self._parser if request.uses_tools else None,
            openai_reply.head_of(self._model),
            wants_logprobs=request.wants_logprobs,
            wants_usage=request.wants_usage,
        )
        async with self._writing():
            await response.prepare(http)
        await send(writer.begin())
        try:
            while not feed.is_done:
                for chunk in writer.progress(*feed.take()):
                    await send(chunk)
                await feed.wait()  # bounded: rollout.agent.request_timeout_s, which ends the work
            for chunk in writer.finish(_result(work)):
                await send(chunk)
        except ApiError as error:
            await send(error.body)
        except ValueError as error:
            await send(episode.fail(str(error)).body)
        else:
            async with self._writing():
                await response.write(b"data: [DONE]\n\n")
        async with self._writing():
            await response.write_eof()
        return response

    @asynccontextmanager
    async def _working(
        self, episode: EndpointEpisode, request: ChatRequest, feed: openai_reply.Feed
    ) -> AsyncIterator[Work]:
        """The reply as a task that ends with the body: an agent that goes away aborts it."""
        work = asyncio.create_task(episode.complete(request, feed.put if request.streams else None))
        work.add_done_callback(lambda _: feed.end())
        open_work = self._work[episode.sample_id]
        open_work.add(work)
        try:
            yield work
        finally:
            work.cancel()
            await asyncio.wait([work], timeout=_STOP_TIMEOUT_S)
            open_work.discard(work)

    def _episode(self, http: web.Request) -> EndpointEpisode:
        episode = self._episodes.get(http.match_info["sample_id"])
        if episode is None:
            raise ApiError("no such episode is open", status=404, code="episode_not_found")
        scheme, _, key = http.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(key.strip().encode(), episode.api_key.encode()):
            raise ApiError("Incorrect API key provided for this episode.", status=401, code="invalid_api_key")
        return episode

    def _check_model(self, model: str) -> None:
        if model != self._model:
            message = f"model: {model!r} does not exist; ask for {self._model!r}"
            raise ApiError(message, status=404, code="model_not_found")

    async def _body(self, http: web.Request) -> Any:
        try:
            async with deadline("rollout.endpoint.read_timeout_s", self._read_timeout_s, "the body of a request"):
                raw = await http.read()
        except TimeoutError as error:
            raise ApiError(str(error), status=408, code="request_timeout") from error
        try:
            return json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise ApiError(f"the body is not JSON: {error}", code="invalid_json") from error

    @asynccontextmanager
    async def _writing(self) -> AsyncIterator[None]:
        """An agent that does not read is one that has gone."""
        try:
            async with deadline("rollout.endpoint.write_timeout_s", self._write_timeout_s, "a write to an agent"):
                yield
        except TimeoutError as error:
            raise ConnectionResetError(str(error)) from error


def _result(work: Work) -> Completion:
    """Of a task that is done."""
    if work.cancelled():
        raise ApiError("the episode was closed", code="episode_ended")
    return work.result()  # bounded: it is done


def _one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"rollout.endpoint.{name}: {value}; choose {' or '.join(choices)}")


@web.middleware
async def _errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Every failure is an answer to its own request, in OpenAI's form."""
    try:
        return await handler(request)
    except ApiError as error:
        return web.json_response(error.body, status=error.status, headers=_FINAL)
    except web.HTTPException as error:
        told = ApiError(error.text or error.reason, status=error.status)
        return web.json_response(told.body, status=told.status, headers=_FINAL)
    except (ConnectionError, asyncio.CancelledError):
        raise
    except Exception as error:
        _log.exception("%s %s failed", request.method, request.path)
        told = ApiError(f"{type(error).__name__}: {error}", status=500, kind="server_error")
        return web.json_response(told.body, status=told.status, headers=_FINAL)
