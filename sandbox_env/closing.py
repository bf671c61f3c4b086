"""Closing sandboxes in time, also those that come when nobody waits for them any more; and knowing which stayed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from sandbox_env.bounded import BoundedSandbox
from sandbox_env.sandbox import SandboxError

logger = logging.getLogger(__name__)
_UNNAMED = "a sandbox that was being made"


class Closer:
    """Closes sandboxes, each within `timeout_s`. What takes longer goes on, and is named until it ends."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._late: set[asyncio.Task[None]] = set()
        self._unclosed: dict[asyncio.Future[Any], str] = {}
        self.num_failed = 0

    @property
    def unclosed(self) -> list[str]:
        """A line for each sandbox that should be closed and is not."""
        return [self._line(name) for name in self._unclosed.values()]

    async def close(self, sandbox: BoundedSandbox) -> None:
        """Close it, verified. Raises `SandboxError` if that fails or takes too long."""
        closing = asyncio.ensure_future(sandbox.close())
        await asyncio.wait({closing}, timeout=self._timeout_s)
        if not closing.done():
            self._keep(closing, sandbox.id)
            raise SandboxError(self._line(sandbox.id))
        closing.result()  # bounded: it is done

    async def discard(self, sandbox: BoundedSandbox) -> None:
        """Close one that nobody asked to close: a failure is counted and logged."""
        try:
            await self.close(sandbox)
        except SandboxError as error:
            self.num_failed += 1
            logger.error("a sandbox could not be closed: %s", error)

    def give_up(self, making: asyncio.Future[BoundedSandbox], then: Callable[[], object]) -> None:
        """Cancel `making`, close what comes of it all the same, and call `then` once that is over."""
        making.cancel()
        self._in_background(self._close_late(making, then))

    async def settle(self) -> None:
        """Wait for what is closed in the background."""
        if self._late:
            await asyncio.wait(self._late, timeout=2 * self._timeout_s)

    async def _close_late(self, making: asyncio.Future[BoundedSandbox], then: Callable[[], object]) -> None:
        try:
            await asyncio.wait({making}, timeout=self._timeout_s)
            if making.done():
                await self.discard(making.result())  # bounded: it is done
            else:
                self._keep(making, _UNNAMED)
                making.add_done_callback(self._made_at_last)
        except (SandboxError, asyncio.CancelledError) as error:
            logger.info("%s was not made: %s", _UNNAMED, error)
        finally:
            then()

    def _made_at_last(self, making: asyncio.Future[BoundedSandbox]) -> None:
        self._unclosed.pop(making, None)
        if not making.cancelled() and making.exception() is None:
            self._in_background(self.discard(making.result()))  # bounded: it is done

    def _in_background(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._late.add(task)
        task.add_done_callback(self._late.discard)

    def _keep(self, work: asyncio.Future[Any], name: str) -> None:
        def forget(work: asyncio.Future[Any]) -> None:
            if not work.cancelled() and work.exception() is None:
                self._unclosed.pop(work, None)

        self._unclosed[work] = name
        work.add_done_callback(forget)

    def _line(self, name: str) -> str:
        return f"{name}: not closed within {self._timeout_s:g} s"
