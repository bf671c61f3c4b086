"""New weights on one replica: pause, update, checksum, continue. A failure says which of them it was.

A replica writes no token with weights that were not verified. All happens between pause and continue, and it goes on
only with weights that are known: the new ones once their checksum is right, or the old ones where it did not get as far
as the update or the engine refused that. Else it stays paused, which the next publish that succeeds ends.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from miles_rl.engine.base import EngineError, EngineRefusal
from miles_rl.engine.client import EngineClient

log = logging.getLogger(__name__)
SHOWN = 12  # digits of a checksum, for people
MAX_SENDS = 2
"""A checksum that is wrong can be a bad read, which another read mends. Nothing else is tried twice."""


@dataclass(frozen=True, slots=True)
class Weights:
    """A Hugging Face folder, the version that its weights get, and the trainer's checksum of them."""

    model_dir: str
    version: int
    checksum: str


@dataclass(frozen=True, slots=True)
class PublishOptions:
    """`pause_mode` and `flush_cache` as SGLang has them; config keys begin with `path`.

    All of a publish has `publish_timeout_s`, but for the continuation, which has `resume_timeout_s`.
    """

    pause_mode: str
    flush_cache: bool
    publish_timeout_s: float
    resume_timeout_s: float
    path: str


class Publisher:
    """Publishes to one replica, which runs weights that are known when this is made."""

    def __init__(self, client: EngineClient, options: PublishOptions) -> None:
        self._client, self._options = client, options
        self._step = "pause"
        self.is_known = True
        """Whether it is known which weights are in force. The replica is paused as long as it is not."""

    async def publish(self, weights: Weights, ends_at: float) -> dict[str, float]:
        """Put `weights` in force by `ends_at`, on the event loop's clock.

        They are sent again if their checksum is wrong, `MAX_SENDS` times in all. Returns seconds: `pause_s` from the
        pause to the continuation, of which `update_s` loading and `verify_s` the checksum. Raises `EngineError`, which
        says so where the replica stays paused.
        """
        now = asyncio.get_running_loop().time
        begin, failed = now(), None
        try:
            timings = await self._put_in_force(weights, ends_at)
        except BaseException as error:
            failed = error
            raise
        finally:
            if self.is_known:
                # Also when the caller is cancelled: an engine that stays paused would hang every rollout.
                # bounded: resume_timeout_s, in `_resume`
                await asyncio.shield(asyncio.ensure_future(self._resume(failed)))
        return {"pause_s": now() - begin, **timings}

    async def _put_in_force(self, weights: Weights, ends_at: float) -> dict[str, float]:
        """Pause, update and compare checksums. Errors say which step it was, and whether generation goes on."""
        limit_s, self._step = self._options.publish_timeout_s, "pause"
        limit = asyncio.timeout_at(ends_at)
        try:
            async with limit:
                await self._client.pause(self._options.pause_mode, timeout_s=limit_s)
                return await self._send_until_right(weights)
        except TimeoutError as error:
            if not limit.expired():
                raise
            key = f"{self._options.path}.publish_timeout_s: {limit_s:g}"
            raise EngineError(self._describe(f"{key}; it did not end in time; raise it, or see the log")) from error
        except EngineError as error:
            raise EngineError(self._describe(str(error))) from error

    async def _send_until_right(self, weights: Weights) -> dict[str, float]:
        now = asyncio.get_running_loop().time
        update_s = verify_s = 0.0
        found: list[str] = []
        for _ in range(MAX_SENDS):
            begin = now()
            await self._update(weights)
            updated, self._step = now(), "checksum"
            found.append(await self._client.checksum(timeout_s=self._options.publish_timeout_s))
            update_s, verify_s = update_s + updated - begin, verify_s + now() - updated
            if found[-1] == weights.checksum:
                self.is_known = True
                return {"update_s": update_s, "verify_s": verify_s}
            log.warning(
                "publish of version %d to %s: its weights have checksum %s, the trainer's %s",
                weights.version,
                self._client.base_url,
                found[-1][:SHOWN],
                weights.checksum[:SHOWN],
            )
        raise EngineError(_mismatch(weights, found))

    async def _update(self, weights: Weights) -> None:
        was_known, self.is_known = self.is_known, False
        self._step, options = "update", self._options
        try:
            await self._client.update_weights_from_disk(
                weights.model_dir, weights.version, flush_cache=options.flush_cache, timeout_s=options.publish_timeout_s
            )
        except EngineRefusal:
            self.is_known = was_known  # it has what it had
            raise

    def _describe(self, message: str) -> str:
        stays = "" if self.is_known else "; it stays paused, so that weights that were not verified write nothing"
        return f"{self._step} failed: {message}{stays}"

    async def _resume(self, failed: BaseException | None) -> None:
        """Continue. `EngineError` also tells what `failed` before, unless that was the caller's own leaving."""
        limit_s = self._options.resume_timeout_s
        try:
            await self._client.resume(timeout_s=limit_s)
        except EngineError as error:
            if failed is not None and not isinstance(failed, EngineError):
                return
            before = "" if failed is None else f"{failed}; "
            key = f"{self._options.path}.resume_timeout_s: {limit_s:g}"
            raise EngineError(f"{before}continue failed ({key}), generation may stand still there: {error}") from error


def _mismatch(weights: Weights, found: list[str]) -> str:
    """Names what differs, and where to look: damage that stays lies in the files."""
    if len(set(found)) == 1:
        where = f"the same each time: see the files in {weights.model_dir}, and the dtype that the engine loads them in"
    else:
        where = f"another each time: see the disk of {weights.model_dir} and the memory of the engine"
    sent = f"sent {len(found)} times, {where}"
    return f"its weights have checksum {found[-1][:SHOWN]}, the trainer's {weights.checksum[:SHOWN]}; {sent}"
