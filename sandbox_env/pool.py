"""The stage that owns all sandboxes: others lease one for an episode and work with it through the pool.

A lease that nobody uses any more (its holder died, or never learned its id) is ended after `lease_ttl_s` without an
operation, so a slot can be lost for a while but not for ever.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from sandbox_env.bounded import BoundedSandbox, within
from sandbox_env.closing import Closer
from sandbox_env.leased import LeasedSandbox
from sandbox_env.providers.base import Provider
from sandbox_env.sandbox import ExecResult, SandboxError
from sandbox_env.task import Task

__all__ = ["LeasedSandbox", "SandboxPool", "TaskSource"]

logger = logging.getLogger(__name__)

SWEEP_S = 1.0
MAX_LATENCIES = 1000


class TaskSource(Protocol):
    """What the pool needs of the stage that holds the tasks."""

    async def all_tasks(self) -> list[Task]:
        """Every task that may be leased for."""
        ...


@dataclass(slots=True)
class _Lease:
    sandbox: BoundedSandbox
    task: str
    num_busy: int = 0
    last_used: float = field(default_factory=time.monotonic)
    closing: asyncio.Task[None] | None = None


class SandboxPool:
    """At most `size` sandboxes at once. Every wait has a deadline and every failure is a `SandboxError`.

    `run_id`, with this process's number behind it, labels what the provider makes. `lease_timeout_s` is the wait for
    a lease when the caller names none; `preflight_timeout_s` is for the provider to come up, and for a first sandbox.
    The provider is not trusted with time: an operation ends at most `op_grace_s` after the time that it was given,
    `transfer_timeout_s` for files, and closing a sandbox after `close_timeout_s`.
    """

    def __init__(
        self,
        data: TaskSource,
        provider: Provider,
        size: int,
        *,
        lease_timeout_s: float = 300.0,
        lease_ttl_s: float = 3600.0,
        preflight_timeout_s: float = 120.0,
        op_grace_s: float = 15.0,
        transfer_timeout_s: float = 30.0,
        close_timeout_s: float = 15.0,
        run_id: str = "",
    ) -> None:
        if size < 1:
            raise ValueError(f"sandbox.size: {size}; at least 1")
        times = {"lease_timeout_s": lease_timeout_s, "lease_ttl_s": lease_ttl_s, "close_timeout_s": close_timeout_s}
        times |= {"preflight_timeout_s": preflight_timeout_s, "op_grace_s": op_grace_s}
        times |= {"transfer_timeout_s": transfer_timeout_s}
        for name, value in times.items():
            if value <= 0:
                raise ValueError(f"sandbox.{name}: {value}; give more than 0")
        self._data = data
        self.provider = provider
        self._size = size
        self._lease_timeout_s = lease_timeout_s
        self._lease_ttl_s = lease_ttl_s
        self._preflight_timeout_s = preflight_timeout_s
        self._op_grace_s, self._transfer_timeout_s = op_grace_s, transfer_timeout_s
        self._close_timeout_s = close_timeout_s
        self._run_id = f"{run_id or 'run'}-{os.getpid()}"
        self._slots = asyncio.Semaphore(size)
        self._numbers = itertools.count()
        self._leases: dict[str, _Lease] = {}
        self._closer = Closer(close_timeout_s)
        self._create_ms: deque[float] = deque(maxlen=MAX_LATENCIES)
        self._num_waiting = self._num_created = self._num_closed = self._num_failed = self._num_expired = 0
        self._sweeper: asyncio.Task[None] | None = None
        self._stopped = False

    @staticmethod
    def describe(options: Mapping[str, Any]) -> dict[str, Any]:
        """Sizes for the plan, and what will be started."""
        provider = options["provider"]["_target_"].rsplit(".", 1)[-1]
        return {"size": options["size"], "starts": f"at most {options['size']} sandboxes at once, by {provider}"}

    async def start(self) -> None:
        """Start the provider, check every task, and try one sandbox. Raises what is wrong, with the remedy."""
        work = self.provider.start(self._run_id)
        await within(work, self._preflight_timeout_s, "the sandbox provider did not start")
        tasks = await self._data.all_tasks()
        errors: list[str] = []
        for task in tasks:
            try:
                self.provider.check(task)
            except ValueError as error:
                errors.append(str(error))
        if errors:
            more = f" (and {len(errors) - 1} more tasks)" if len(errors) > 1 else ""
            raise ValueError(errors[0] + more)
        if tasks:
            await self._preflight(tasks[0])
        self._sweeper = asyncio.create_task(self._sweep())

    async def stop(self) -> None:
        """Close every sandbox and the provider, verified. Raises `SandboxError` naming what is left."""
        self._stopped = True
        if self._sweeper is not None:
            self._sweeper.cancel()
        leases = [self.release(lease_id) for lease_id in list(self._leases)]
        results = await asyncio.gather(*leases, return_exceptions=True)  # bounded: each by close_timeout_s
        await self._closer.settle()
        failures = {str(result): None for result in results if isinstance(result, BaseException)}
        try:
            await within(self.provider.stop(), self._close_timeout_s, "the sandbox provider did not stop")
        except SandboxError as error:
            failures[str(error)] = None
        failures.update(dict.fromkeys(self._closer.unclosed))
        if failures:
            raise SandboxError("; ".join(failures))

    async def status(self) -> dict[str, Any]:
        """Counts so far, and how long making a sandbox took (ms, the latest 1000)."""
        if self._sweeper is not None and self._sweeper.done() and not self._stopped:
            self._sweeper.result()  # bounded: it is done
        ordered = sorted(self._create_ms)
        return {
            "size": self._size,
            "in_use": len(self._leases),
            "num_waiting": self._num_waiting,
            "created": self._num_created,
            "closed": self._num_closed,
            "failed": self._num_failed + self._closer.num_failed,
            "expired": self._num_expired,
            "unclosed": len(self._closer.unclosed),
            "create_p50_ms": ordered[len(ordered) // 2] if ordered else 0.0,
            "create_p90_ms": ordered[len(ordered) * 9 // 10] if ordered else 0.0,
        }

    async def lease(self, task: Task, timeout_s: float | None = None) -> str:
        """A sandbox with the environment of `task`; the id to work with it. `timeout_s` covers waiting and making."""
        timeout_s = self._lease_timeout_s if timeout_s is None else timeout_s
        deadline = asyncio.get_running_loop().time() + timeout_s
        self._num_waiting += 1
        try:
            async with asyncio.timeout_at(deadline):
                await self._slots.acquire()
        except TimeoutError:
            raise SandboxError(
                f"{task.name}: no sandbox became free within {timeout_s:g} s; all {self._size} are leased"
            ) from None
        finally:
            self._num_waiting -= 1
        if self._stopped:
            self._slots.release()
            raise SandboxError(f"{task.name}: the pool was stopped")
        return await self._fill_slot(task, timeout_s, deadline)

    async def exec(
        self,
        lease_id: str,
        command: str,
        timeout_s: float,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> ExecResult:
        """Run `command` in the leased sandbox: see `Sandbox.exec`."""
        with _Use(self._get(lease_id)) as sandbox:
            return await sandbox.exec(command, timeout_s=timeout_s, cwd=cwd, env=env)

    async def upload(self, lease_id: str, archive: bytes, target: str) -> None:
        """Unpack a tar in the leased sandbox: see `Sandbox.upload`."""
        with _Use(self._get(lease_id)) as sandbox:
            await sandbox.upload(archive, target)

    async def download(self, lease_id: str, path: str, max_bytes: int) -> bytes | None:
        """Read a file of the leased sandbox: see `Sandbox.download`."""
        with _Use(self._get(lease_id)) as sandbox:
            return await sandbox.download(path, max_bytes=max_bytes)

    async def release(self, lease_id: str) -> None:
        """Close the leased sandbox, verified. Nothing happens for a lease that has ended, however often it is asked."""
        lease = self._leases.get(lease_id)
        if lease is None:
            return
        if lease.closing is None:
            lease.closing = asyncio.create_task(self._end(lease_id, lease))
        await asyncio.shield(lease.closing)  # bounded: by close_timeout_s, in `_end`

    async def _preflight(self, task: Task) -> None:
        lease_id = await self.lease(task, self._preflight_timeout_s)
        try:
            result = await self.exec(lease_id, "echo ready", self._preflight_timeout_s)
        finally:
            await self.release(lease_id)
        if result.output.strip() != "ready":
            raise SandboxError(f"{task.name}: a first `echo ready` gave {result.exit_code} {result.output[:200]!r}")

    async def _fill_slot(self, task: Task, timeout_s: float, deadline: float) -> str:
        """Make a sandbox for a slot that we hold. The slot is given back when there is none, and not before."""
        started = time.monotonic()
        making = asyncio.ensure_future(self._make(task))
        try:
            async with asyncio.timeout_at(deadline):
                sandbox = await asyncio.shield(making)
        except BaseException as error:
            if making.done() and (making.cancelled() or making.exception() is not None):
                self._slots.release()
            else:
                # Given up, but not given back: what is still made, or was made in this moment, is closed first.
                self._closer.give_up(making, self._slots.release)
            if not isinstance(error, Exception):
                raise
            self._num_failed += 1
            if isinstance(error, TimeoutError):
                raise SandboxError(f"{task.name}: the sandbox was not ready within {timeout_s:g} s") from None
            if isinstance(error, SandboxError):
                raise
            raise SandboxError(f"{task.name}: the sandbox could not be made: {error!r}") from error
        if self._stopped:
            await self._closer.discard(sandbox)
            self._slots.release()
            raise SandboxError(f"{task.name}: the pool was stopped")
        self._create_ms.append((time.monotonic() - started) * 1000)
        self._num_created += 1
        lease_id = f"{self._run_id}/{next(self._numbers)}"
        self._leases[lease_id] = _Lease(sandbox, task.name)
        return lease_id

    async def _make(self, task: Task) -> BoundedSandbox:
        sandbox = await self.provider.create(task)
        return BoundedSandbox(sandbox, grace_s=self._op_grace_s, transfer_timeout_s=self._transfer_timeout_s)

    async def _end(self, lease_id: str, lease: _Lease) -> None:
        try:
            await self._closer.close(lease.sandbox)
            self._num_closed += 1
        except SandboxError:
            self._num_failed += 1
            raise
        finally:
            del self._leases[lease_id]
            self._slots.release()

    async def _sweep(self) -> None:
        """End leases that nobody uses any more."""
        while True:
            await asyncio.sleep(min(SWEEP_S, self._lease_ttl_s / 2))
            horizon = time.monotonic() - self._lease_ttl_s
            for lease_id, lease in list(self._leases.items()):
                if lease.num_busy == 0 and lease.last_used < horizon and lease.closing is None:
                    logger.warning(
                        "lease %s (%s) was not used for %g s and is ended", lease_id, lease.task, self._lease_ttl_s
                    )
                    self._num_expired += 1
                    try:
                        await self.release(lease_id)
                    except SandboxError as error:
                        logger.error("lease %s could not be ended: %s", lease_id, error)

    def _get(self, lease_id: str) -> _Lease:
        lease = self._leases.get(lease_id)
        if lease is None or lease.closing is not None:
            raise SandboxError(f"lease {lease_id!r}: unknown, released or expired")
        return lease


class _Use:
    """Marks a lease as busy, so that it does not expire under a long command."""

    def __init__(self, lease: _Lease) -> None:
        self._lease = lease

    def __enter__(self) -> BoundedSandbox:
        self._lease.num_busy += 1
        return self._lease.sandbox

    def __exit__(self, *_: object) -> None:
        self._lease.num_busy -= 1
        self._lease.last_used = time.monotonic()
