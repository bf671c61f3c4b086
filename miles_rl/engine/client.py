"""The one HTTP client of every engine: token ids in, token ids with log-probabilities and versions out.

An answer is checked before anybody learns from it. Nothing is retried: a generation sent twice would be two samples.
Every call has a deadline. All failures are `EngineError`: address, status and the first line of what came back.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import aiohttp

from miles_rl.engine.base import EngineError, EngineRefusal

ROUTING_HEADER = "X-SMG-Routing-Key"
_MAX_DETAIL_CHARS = 300
_MAX_LOGPROB = 1e-4
_KEEPALIVE_S = 15.0


@dataclass(frozen=True, slots=True)
class Generation:
    """One reply. `output_ids`, `logprobs` and `versions` have one entry for each generated token.

    `finish_reason` is `stop` (then `stop_token` is the last of `output_ids`), `length` or `abort`. `cached_tokens` of
    the `prompt_tokens` came from the engine's prefix cache. `versions` are those of the weights that sampled.
    """

    output_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    stop_token: int | None
    versions: list[int]
    cached_tokens: int
    prompt_tokens: int
    latency_s: float


class EngineClient:
    """Speaks to a replica, or to a router for `generate`. Made anywhere, used within one event loop.

    `vocab_size`, where known, lets bad ids fail here. `timeout_s` is the deadline of a call that states none.
    """

    def __init__(self, base_url: str, *, vocab_size: int | None = None, timeout_s: float = 120.0) -> None:
        self.base_url, self._vocab_size, self._timeout_s = base_url.rstrip("/"), vocab_size, timeout_s
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> EngineClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections; what is in flight is aborted on the engine. Safe to call twice."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def generate(
        self,
        input_ids: Sequence[int],
        sampling: Mapping[str, Any],
        *,
        rid: str,
        routing_key: str | None = None,
        timeout_s: float | None = None,
        on_progress: Callable[[list[int], list[float]], None] | None = None,
    ) -> Generation:
        """One reply to `input_ids`. `sampling` has SGLang's names; `routing_key` keeps a session on one replica.

        `on_progress` is called with all ids and log-probabilities so far, as they come; the reply begins with them.
        """
        self._check_ids(input_ids)
        body = {"rid": rid, "input_ids": list(input_ids), "sampling_params": dict(sampling), "return_logprob": True}
        headers = {ROUTING_HEADER: routing_key} if routing_key is not None else None
        started = time.monotonic()
        progress = None if on_progress is None else _Progress(on_progress)
        if progress is not None:
            body["stream"] = True
        answer = await self._call("POST", "/generate", body, timeout_s, headers, progress)
        try:
            reply = _parse_generation(answer, time.monotonic() - started)
            if reply.prompt_tokens != len(input_ids):
                raise ValueError(f"it replied to {reply.prompt_tokens} prompt tokens, {len(input_ids)} were sent")
            return reply
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise EngineError(f"{self.base_url}/generate: request {rid}: bad answer: {error}") from error

    async def pause(self, mode: str = "in_place", *, timeout_s: float | None = None) -> None:
        """Stop generating: `in_place` freezes requests, `retract` queues them again, `abort` ends them."""
        await self._call("POST", "/pause_generation", {"mode": mode}, timeout_s)

    async def resume(self, *, timeout_s: float | None = None) -> None:
        """Go on generating."""
        await self._call("POST", "/continue_generation", {}, timeout_s)

    async def update_weights_from_disk(
        self, model_dir: str, version: int, *, flush_cache: bool = False, timeout_s: float | None = None
    ) -> None:
        """Load the weights in `model_dir` and stamp them `version`.

        On `EngineRefusal` the old ones stay in force; on another `EngineError` nobody knows which are.
        """
        body = {
            "model_path": model_dir,
            "weight_version": str(version),
            "flush_cache": flush_cache,
            "abort_all_requests": False,
        }
        await self._succeed("/update_weights_from_disk", body, timeout_s)

    async def checksum(self, *, timeout_s: float | None = None) -> str:
        """Checksum of the weights in force."""
        answer = await self._succeed("/weights_checker", {"action": "checksum"}, timeout_s)
        digest = answer.get("per_engine_checksum")
        if not isinstance(digest, str):
            raise EngineError(f"{self.base_url}/weights_checker: the answer has no per_engine_checksum")
        return digest

    async def flush_cache(self, *, timeout_s: float | None = None) -> None:
        """Forget all prefixes. `EngineError` while requests are in the engine."""
        await self._call("POST", "/flush_cache", {}, timeout_s)

    async def abort(self, rid: str, *, timeout_s: float | None = None) -> None:
        """End every request whose id begins with `rid`; each answers with what it has."""
        await self._call("POST", "/abort_request", {"rid": rid}, timeout_s)

    async def abort_all(self, *, timeout_s: float | None = None) -> None:
        """End every request; each answers with what it has."""
        await self._call("POST", "/abort_request", {"rid": "", "abort_all": True}, timeout_s)

    async def health(self, *, timeout_s: float | None = None) -> None:
        """Returns if the engine can serve, else raises `EngineError` with what it says."""
        await self._call("GET", "/health", None, timeout_s)

    async def is_healthy(self) -> bool:
        """Whether the engine can serve."""
        try:
            await self.health()
        except EngineError:
            return False
        return True

    async def server_info(self, *, timeout_s: float | None = None) -> dict[str, Any]:
        """The engine's settings and counters."""
        return await self.get_object("/server_info", timeout_s=timeout_s)

    async def loads(self, *, timeout_s: float | None = None) -> list[dict[str, Any]]:
        """Requests and memory in use, one entry for each data-parallel rank."""
        return list((await self.get_object("/v1/loads", timeout_s=timeout_s)).get("loads", []))

    async def get_object(self, path: str, *, timeout_s: float | None = None) -> dict[str, Any]:
        """The JSON object at `path`."""
        answer = await self._call("GET", path, None, timeout_s)
        if not isinstance(answer, dict):
            raise EngineError(f"{self.base_url}{path}: the answer is no JSON object")
        return answer

    async def _succeed(self, path: str, body: Mapping[str, Any], timeout_s: float | None) -> dict[str, Any]:
        answer = await self._call("POST", path, body, timeout_s)
        if not isinstance(answer, dict) or answer.get("success") is not True:
            kind = EngineRefusal if isinstance(answer, dict) and answer.get("success") is False else EngineError
            raise kind(f"{self.base_url}{path}: {_first_line(str(answer))}")
        return answer

    async def _call(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        timeout_s: float | None,
        headers: Mapping[str, str] | None = None,
        progress: _Progress | None = None,
    ) -> Any:
        """Status 200 or `EngineError`, for 400 `EngineRefusal`. JSON where the answer says so, else text."""
        url, limit_s = self.base_url + path, self._timeout_s if timeout_s is None else timeout_s
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S)
            self._session = aiohttp.ClientSession(connector=connector)
        try:
            async with (
                asyncio.timeout(limit_s),
                self._session.request(
                    method, url, json=body, headers=headers, timeout=aiohttp.ClientTimeout(total=None)
                ) as response,
            ):
                if response.status != 200:
                    kind = EngineRefusal if response.status == 400 else EngineError
                    raise kind(f"{url}: status {response.status}: {_first_line(await response.text())}")
                if progress is not None:
                    return await progress.follow(response)
                is_json = response.content_type == "application/json"
                return await response.json() if is_json else await response.text()
        except TimeoutError as error:
            raise EngineError(f"{url}: no answer within {limit_s:g} s") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise EngineError(f"{url}: {type(error).__name__}: {_first_line(str(error))}") from error

    def _check_ids(self, input_ids: Sequence[int]) -> None:
        if not input_ids:
            raise EngineError("input_ids: empty; an engine needs at least one token")
        top = self._vocab_size or math.inf
        for index, token in enumerate(input_ids):
            if not 0 <= token < top:
                raise EngineError(f"input_ids: id {token} at position {index} is outside the vocabulary of {top}")


class _Progress:
    """Follows a streamed generation, each event of which holds all before it."""

    def __init__(self, tell: Callable[[list[int], list[float]], None]) -> None:
        self._tell = tell
        self._seen: list[tuple[float, int]] = []

    async def follow(self, response: aiohttp.ClientResponse) -> Any:
        """The last event. Of events that came together only the last is read. `ValueError` if they do not go on."""
        rest, last = b"", None
        async for chunk in response.content.iter_any():  # bounded: the deadline of the call
            *events, rest = (rest + chunk).split(b"\n\n")
            data = [event.removeprefix(b"data: ") for event in events if event.startswith(b"data: ")]
            is_done = bool(data) and data[-1] == b"[DONE]"
            if len(data) > is_done:
                last = json.loads(data[-1 - is_done])
                self._check(last)
            if is_done:
                return last
        raise ValueError("the stream ended before the reply did")

    def _check(self, event: Any) -> None:
        try:
            if "error" in event:
                raise ValueError(str(event["error"]))
            pairs = [(float(entry[0]), int(entry[1])) for entry in event["meta_info"]["output_token_logprobs"]]
        except (KeyError, TypeError, IndexError) as error:
            raise ValueError(f"bad event: {error}") from error
        if pairs[: len(self._seen)] != self._seen:
            raise ValueError("the stream changed tokens that it had given")
        self._seen = pairs
        self._tell([token for _, token in pairs], [logprob for logprob, _ in pairs])


def _first_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[0][:_MAX_DETAIL_CHARS] if lines else "(empty)"


def _parse_generation(answer: Any, latency_s: float) -> Generation:
    """Raises `ValueError` where parts of the answer do not belong together."""
    meta, output_ids = answer["meta_info"], [int(token) for token in answer["output_ids"]]
    logprobs = [float(entry[0]) for entry in meta["output_token_logprobs"]]
    logprob_ids = [entry[1] for entry in meta["output_token_logprobs"]]
    if logprob_ids != output_ids:
        raise ValueError(f"log-probabilities of {len(logprob_ids)} tokens do not match {len(output_ids)} output ids")
    if not all(-math.inf < logprob <= _MAX_LOGPROB for logprob in logprobs):
        raise ValueError("a log-probability is not finite, or above 0")
    reason = meta["finish_reason"]
    if reason["type"] not in ("stop", "length", "abort"):
        raise ValueError(f"finish_reason {reason['type']!r} is not known")
    prompt_tokens, cached_tokens = int(meta["prompt_tokens"]), int(meta.get("cached_tokens") or 0)
    if not 0 <= cached_tokens <= prompt_tokens:
        raise ValueError(f"cached_tokens {cached_tokens} of {prompt_tokens} prompt tokens")
    matched = reason.get("matched")
    return Generation(
        output_ids=output_ids,
        logprobs=logprobs,
        finish_reason=reason["type"],
        stop_token=matched if isinstance(matched, int) else None,
        versions=_versions(meta, len(output_ids)),
        cached_tokens=cached_tokens,
        prompt_tokens=prompt_tokens,
        latency_s=latency_s,
    )


def _versions(meta: Mapping[str, Any], count: int) -> list[int]:
    """One version for each token, from the spans where the engine gives them."""
    spans = meta.get("weight_versions")
    if spans is None:
        spans = [{"version": meta["weight_version"], "start": 0, "end": count}]
    versions: list[int] = []
    for span in spans:
        if span["start"] != len(versions) or span["end"] < span["start"]:
            raise ValueError(f"weight_versions do not follow one another: {spans}")
        versions += [int(span["version"])] * (span["end"] - span["start"])
    if len(versions) != count:
        raise ValueError(f"weight_versions cover {len(versions)} of {count} tokens")
    return versions
