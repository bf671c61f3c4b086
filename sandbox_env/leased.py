"""A leased sandbox, used through the pool that owns it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from sandbox_env.sandbox import ExecResult


class PoolHandle(Protocol):
    """A `SandboxPool`, or a handle of one in another process."""

    async def exec(
        self, lease_id: str, command: str, timeout_s: float, cwd: str | None, env: Mapping[str, str] | None
    ) -> ExecResult: ...

    async def upload(self, lease_id: str, archive: bytes, target: str) -> None: ...

    async def download(self, lease_id: str, path: str, max_bytes: int) -> bytes | None: ...

    async def release(self, lease_id: str) -> None: ...


class LeasedSandbox:
    """The `Sandbox` of one lease, over a pool that may live in another process."""

    def __init__(self, pool: PoolHandle, lease_id: str) -> None:
        self._pool = pool
        self._lease_id = lease_id

    @property
    def id(self) -> str:
        """The lease's id."""
        return self._lease_id

    async def exec(
        self, command: str, *, timeout_s: float, cwd: str | None = None, env: Mapping[str, str] | None = None
    ) -> ExecResult:
        """See `Sandbox.exec`."""
        return await self._pool.exec(self._lease_id, command, timeout_s, cwd, env)

    async def upload(self, archive: bytes, target: str) -> None:
        """See `Sandbox.upload`."""
        await self._pool.upload(self._lease_id, archive, target)

    async def download(self, path: str, *, max_bytes: int) -> bytes | None:
        """See `Sandbox.download`."""
        return await self._pool.download(self._lease_id, path, max_bytes)

    async def close(self) -> None:
        """Release the lease; see `Sandbox.close`."""
        await self._pool.release(self._lease_id)
