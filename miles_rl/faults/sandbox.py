"""Faults of sandboxes: some cannot be made, some commands never return, the verifier cannot start."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping
from typing import Any

from miles_rl.faults.strike import check_rate, struck
from sandbox_env.providers.base import Provider
from sandbox_env.sandbox import ExecResult, Sandbox, SandboxError
from sandbox_env.task import Task

BROKEN_TEST = "echo 'pip: command not found' >&2; mkdir -p /logs/verifier; echo 0 > /logs/verifier/reward.txt"
SHORT_S = 30.0


class SandboxFault:
    """A share `create_failure_rate` of sandboxes is not made; a share `exec_hang_rate` of commands never returns; and
    after `verifier_breaks_after` scorings no test can start and 0 is written all the same (None: never).
    """

    stage = "sandboxes"

    def __init__(
        self,
        seed: int,
        create_failure_rate: float = 0.0,
        exec_hang_rate: float = 0.0,
        verifier_breaks_after: int | None = None,
    ) -> None:
        check_rate("create_failure_rate", create_failure_rate)
        check_rate("exec_hang_rate", exec_hang_rate)
        self._draws = random.Random(seed)
        self._create_failure_rate, self._exec_hang_rate = create_failure_rate, exec_hang_rate
        self._scorings_left = verifier_breaks_after

    def install(self, component: Any) -> None:
        """See `Fault`."""
        component.provider = _FaultyProvider(component.provider, self)

    def strikes_create(self) -> bool:
        """Whether the next sandbox is not made."""
        return self._draws.random() < self._create_failure_rate

    def strikes_exec(self) -> bool:
        """Whether the next command hangs."""
        return self._draws.random() < self._exec_hang_rate

    def strikes_verifier(self) -> bool:
        """Whether the next scoring is broken."""
        if self._scorings_left is None:
            return False
        self._scorings_left -= 1
        return self._scorings_left < 0


class _FaultyProvider:
    """The provider, but for what the fault does."""

    def __init__(self, inner: Provider, fault: SandboxFault) -> None:
        self._inner, self._fault = inner, fault
        self.start: Callable[..., Any] = inner.start
        self.check: Callable[..., Any] = inner.check
        self.stop: Callable[..., Any] = inner.stop

    async def create(self, task: Task) -> Sandbox:
        """See `Provider`."""
        if self._fault.strikes_create():
            struck(f"a sandbox of {task.name} is not made")
            raise SandboxError(f"{task.name}: injected: the sandbox could not be made")
        return _FaultySandbox(await self._inner.create(task), self._fault, task.name)


class _FaultySandbox:
    """A sandbox, but for what the fault does."""

    def __init__(self, inner: Sandbox, fault: SandboxFault, task: str) -> None:
        self._inner, self._fault = inner, fault
        self._told = f"{inner.id} of {task}"
        self.download: Callable[..., Any] = inner.download
        self.close: Callable[..., Any] = inner.close

    @property
    def id(self) -> str:
        """See `Sandbox`."""
        return self._inner.id

    async def exec(
        self, command: str, *, timeout_s: float, cwd: str | None = None, env: Mapping[str, str] | None = None
    ) -> ExecResult:
        """See `Sandbox`."""
        if self._fault.strikes_exec():
            struck(f"a command in {self._told} never returns")
            await asyncio.Event().wait()  # bounded: by nothing, that is the fault
        return await self._inner.exec(command, timeout_s=timeout_s, cwd=cwd, env=env)

    async def upload(self, archive: bytes, target: str) -> None:
        """See `Sandbox`."""
        await self._inner.upload(archive, target)
        if target == "/tests" and self._fault.strikes_verifier():
            struck(f"the verifier in {self._told} cannot start")
            await self._inner.exec(f"printf '%s' \"{BROKEN_TEST}\" > /tests/test.sh", timeout_s=SHORT_S, cwd="/")
