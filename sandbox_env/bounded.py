"""Deadlines around whatever a provider does: one that hangs is a `SandboxError` in time, even if it ignores that."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Mapping
from typing import Any, TypeVar

from sandbox_env.sandbox import ExecResult, Sandbox, SandboxError

logger = logging.getLogger(__name__)
Result = TypeVar("Result")
_given_up: set[asyncio.Future[Any]] = set()


async def within(work: Awaitable[Result], timeout_s: float, late: str) -> Result:
    """What `work` gives. After `timeout_s` a `SandboxError` that begins with `late`, and `work` is cancelled.

    Does not wait for work that goes on although it was cancelled, as a client of a provider may.
    """
    task = asyncio.ensure_future(work)
    try:
        done, _ = await asyncio.wait({task}, timeout=timeout_s)
    except asyncio.CancelledError:
        _give_up(task)
        raise
    if not done:
        _give_up(task)
        raise SandboxError(f"{late} within {timeout_s:g} s")
    return task.result()  # bounded: it is done


def _give_up(task: asyncio.Future[Any]) -> None:
    task.cancel()
    _given_up.add(task)
    task.add_done_callback(_ended_late)


def _ended_late(task: asyncio.Future[Any]) -> None:
    _given_up.discard(task)
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.info("what was given up ended with %r", error)


class BoundedSandbox:
    """A `Sandbox` whose operations end by a deadline of ours, `grace_s` after the one that the provider was given.

    A transfer, which has no time of its own, gets `grace_s` and `transfer_timeout_s`.
    """

    def __init__(self, sandbox: Sandbox, *, grace_s: float, transfer_timeout_s: float) -> None:
        self._sandbox, self._grace_s = sandbox, grace_s
        self._transfer_s = transfer_timeout_s + grace_s

    @property
    def id(self) -> str:
        """Name of the sandbox."""
        return self._sandbox.id

    async def exec(
        self, command: str, *, timeout_s: float, cwd: str | None = None, env: Mapping[str, str] | None = None
    ) -> ExecResult:
        """See `Sandbox.exec`."""
        work = self._sandbox.exec(command, timeout_s=timeout_s, cwd=cwd, env=env)
        return await within(work, timeout_s + self._grace_s, f"{self.id}: the provider did not end a command")

    async def upload(self, archive: bytes, target: str) -> None:
        """See `Sandbox.upload`."""
        work = self._sandbox.upload(archive, target)
        await within(work, self._transfer_s, f"{self.id}: the provider did not take {len(archive)} bytes")

    async def download(self, path: str, *, max_bytes: int) -> bytes | None:
        """See `Sandbox.download`."""
        work = self._sandbox.download(path, max_bytes=max_bytes)
        return await within(work, self._transfer_s, f"{self.id}: the provider did not give {path}")

    async def close(self) -> None:
        """Close the sandbox. Who calls it bounds it: see `SandboxPool`."""
        await self._sandbox.close()
