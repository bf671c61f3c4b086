"""New weights on one replica: pause, update, checksum, continue. A failure says which of them it was."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from miles_rl.engine.base import EngineError
from miles_rl.engine.client import EngineClient


@dataclass(frozen=True, slots=True)
class Weights:
    """A Hugging Face folder, the version that its weights get, and the trainer's checksum of them."""

    model_dir: str
    version: int
    checksum: str


@dataclass(frozen=True, slots=True)
class PublishOptions:
    """`pause_mode` and `flush_cache` as SGLang has them; config keys begin with `path`.

    All of a publish has `publish_timeout_s`, but for the continuation, which comes whatever happened before and has
    `resume_timeout_s`.
    """

    pause_mode: str
    flush_cache: bool
    publish_timeout_s: float
    resume_timeout_s: float
    path: str


async def publish(client: EngineClient, weights: Weights, options: PublishOptions, ends_at: float) -> dict[str, float]:
    """Put `weights` in force on one replica by `ends_at`, on the event loop's clock.

    Returns seconds: `pause_s` from the pause to the continuation, of which `update_s` loading and `verify_s` the
    checksum. Raises `EngineError`; generation goes on in any case, or the error says that it does not. Weights of a
    wrong checksum stay in force: nothing may be learned from what they write.
    """
    began: dict[str, float] = {}
    failed: BaseException | None = None
    try:
        await _put_in_force(client, weights, options, ends_at, began)
    except BaseException as error:
        failed = error
        raise
    finally:
        # Also when the caller is cancelled: an engine that stays paused would hang every rollout.
        # bounded: resume_timeout_s, in `_resume`
        await asyncio.shield(asyncio.ensure_future(_resume(client, options, failed)))
    return {
        "pause_s": asyncio.get_running_loop().time() - began["pause"],
        "update_s": began["checksum"] - began["update"],
        "verify_s": began["continue"] - began["checksum"],
    }


async def _put_in_force(
    client: EngineClient, weights: Weights, options: PublishOptions, ends_at: float, began: dict[str, float]
) -> None:
    """Pause, update and compare checksums; notes when each step began."""
    loop, limit_s = asyncio.get_running_loop(), options.publish_timeout_s
    limit = asyncio.timeout_at(ends_at)
    try:
        async with limit:
            began["pause"] = loop.time()
            await client.pause(options.pause_mode, timeout_s=limit_s)
            began["update"] = loop.time()
            await client.update_weights_from_disk(
                weights.model_dir, weights.version, flush_cache=options.flush_cache, timeout_s=limit_s
            )
            began["checksum"] = loop.time()
            actual = await client.checksum(timeout_s=limit_s)
            if actual != weights.checksum:
                raise EngineError(f"its weights have checksum {actual}, the trainer's {weights.checksum}")
            began["continue"] = loop.time()
    except TimeoutError as error:
        if not limit.expired():
            raise
        message = f"{options.path}.publish_timeout_s: {limit_s:g}; it did not end in time; raise it, or see the log"
        raise EngineError(f"{_last(began)} failed: {message}") from error
    except EngineError as error:
        raise EngineError(f"{_last(began)} failed: {error}") from error


def _last(began: dict[str, float]) -> str:
    return next(reversed(began), "pause")


async def _resume(client: EngineClient, options: PublishOptions, failed: BaseException | None) -> None:
    """Continue. Raises `EngineError` that also tells what `failed` before, unless that was the caller's own leaving."""
    limit_s = options.resume_timeout_s
    try:
        await client.resume(timeout_s=limit_s)
    except EngineError as error:
        if failed is not None and not isinstance(failed, EngineError):
            return
        before = "" if failed is None else f"{failed}; "
        key = f"{options.path}.resume_timeout_s: {limit_s:g}"
        raise EngineError(f"{before}continue failed ({key}), generation may stand still there: {error}") from error
