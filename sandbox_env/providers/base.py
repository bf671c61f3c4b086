"""The provider contract: who makes sandboxes. One class here and one YAML in `conf/sandbox` add a provider."""

from __future__ import annotations

from typing import Protocol

from sandbox_env.sandbox import Sandbox
from sandbox_env.task import Task


class Provider(Protocol):
    """Makes sandboxes for one run. Constructed from config, then `start`ed once before the first `create`."""

    async def start(self, run_id: str) -> None:
        """Check that isolation works, else raise `IsolationUnavailable` with the remedy; label all with `run_id`."""
        ...

    def check(self, task: Task) -> None:
        """Raise `ValueError` naming the task and the remedy if this provider cannot build the task's environment."""
        ...

    async def create(self, task: Task) -> Sandbox:
        """A new sandbox with the task's environment built in. Raises `SandboxError`."""
        ...

    async def stop(self) -> None:
        """Delete every sandbox of this run that is left, and verify it."""
        ...
