"""The sandbox contract: one isolated machine for one episode.

Everything an agent or a verifier does to the world goes through these methods, so that a provider is the only
place that knows how isolation is made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

FailureKind = Literal["throttled", "capacity", "build", "create_timeout", "unreachable", "gone", "auth", "other"]


class SandboxError(Exception):
    """The sandbox's own failure, never the command's: an infrastructure failure, not a reward.

    `kind` is what failures are counted by: `throttled` and `capacity` pass by themselves, `build` and `auth` do not;
    `create_timeout` came too late, `unreachable` answers nothing, `gone` was there before.
    """

    def __init__(self, message: str, *, kind: FailureKind = "other") -> None:
        super().__init__(message)
        self.kind: FailureKind = kind


class IsolationUnavailable(SandboxError):
    """This machine cannot isolate commands. The message names the remedy; nothing was run."""


@dataclass(frozen=True, slots=True)
class ExecResult:
    """What one command did.

    `output` is stdout and stderr in the order written, bounded by the provider while it streams (`truncated` says
    that bytes were dropped). `exit_code` is 124 when `timed_out`, 128 + signal when a signal ended the command.
    """

    exit_code: int
    output: str
    timed_out: bool = False
    truncated: bool = False
    duration_s: float = 0.0


class Sandbox(Protocol):
    """One live isolated machine. Every method raises `SandboxError` when the sandbox itself failed or is gone."""

    @property
    def id(self) -> str:
        """Name of this sandbox, unique within its provider."""
        ...

    async def exec(
        self, command: str, *, timeout_s: float, cwd: str | None = None, env: Mapping[str, str] | None = None
    ) -> ExecResult:
        """Run `command` with bash in `cwd` (default: the task's workdir); on timeout end all that it started."""
        ...

    async def upload(self, archive: bytes, target: str) -> None:
        """Unpack the tar `archive` under the absolute folder `target`, made if missing. Links are refused."""
        ...

    async def download(self, path: str, *, max_bytes: int) -> bytes | None:
        """Content of the regular file at absolute `path`; None if there is none. Links are not followed."""
        ...

    async def close(self) -> None:
        """End every process, remove every file, and verify both. Safe to call twice."""
        ...
