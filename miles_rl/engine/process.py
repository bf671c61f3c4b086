"""Child processes that cannot outlive the run: engines and the router.

A child is tied to its parent by the kernel (PR_SET_PDEATHSIG), so that it dies even when the parent is killed with
SIGKILL. It gets a session of its own, so that a Ctrl-C in the terminal reaches the run, which stops it in order.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

from miles_rl.engine.base import EngineError

_PR_SET_PDEATHSIG = 1
_LOG_TAIL_BYTES = 2000
_POLL_S = 0.02
_KILL_TIMEOUT_S = 10.0
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when the thread that started it ends. Linux only; exits if it is too late."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        sys.exit("the process that started this one is gone")


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port that nobody listens on now. Another process may take it first: be ready to try again."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def describe_exit(exit_code: int) -> str:
    """How a process ended, in words: `exited with code 1` or `died with signal 9`."""
    return f"died with signal {-exit_code}" if exit_code < 0 else f"exited with code {exit_code}"


def is_frozen(pid: int) -> bool:
    """Whether a signal or a debugger has stopped the process: it lives, and does nothing until it is continued."""
    return _stat(pid)[0] in ("T", "t")


def group_lives(group_id: int) -> bool:
    """Whether a process of the group is left; the dead that nobody has reaped do not count."""
    pids = [int(entry.name) for entry in os.scandir("/proc") if entry.name.isdecimal()]
    return any(group == group_id and state not in "ZX" for state, group in map(_stat, pids))


def _stat(pid: int) -> tuple[str, int]:
    """State and process group, as in `/proc/PID/stat`; `("X", 0)` if it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "X", 0
    return fields[0], int(fields[2])


class ChildProcess:
    """A running `python -m module arguments`, its output in a file. Raises `OSError` if it cannot be started."""

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        *,
        log_path: str | Path,
        env: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
    ) -> None:
        self.log_path = Path(log_path)
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        package_root = str(Path(__file__).resolve().parents[2])
        paths = [package_root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        command = [sys.executable, "-m", "miles_rl.engine.child", str(os.getpid()), module, *arguments]
        with self.log_path.open("ab") as log:
            self._popen = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1", **(env or {})},
                pass_fds=tuple(pass_fds),
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Process id; also the id of its process group."""
        return self._popen.pid

    def exit_code(self) -> int | None:
        """None while it lives, else its exit code, minus the signal that ended it.

        Reaps it. What it started and left behind, like the workers of an engine that crashed, is killed with it.
        """
        if self._popen.returncode is None and self._has_ended():
            self._signal(signal.SIGKILL)  # before it is reaped: until then nobody else can get its number
        return self._popen.poll()

    def log_tail(self) -> str:
        """The last lines that it wrote, on one line."""
        try:
            with self.log_path.open("rb") as log:
                log.seek(max(0, os.fstat(log.fileno()).st_size - _LOG_TAIL_BYTES))
                lines = _COLOURS.sub("", log.read().decode(errors="replace")).split("\n")
        except OSError as error:
            return f"(no log: {error})"
        return " | ".join([line.strip() for line in lines if line.strip()][-8:])

    def death(self) -> str | None:
        """None while it lives, else how it ended and where its log is."""
        code = self.exit_code()
        return None if code is None else f"{describe_exit(code)}; log {self.log_path}: {self.log_tail()}"

    async def wait_ready(
        self, ready: Callable[[], Awaitable[bool]], timeout_s: float, what: str, key: str = "start_timeout_s"
    ) -> None:
        """Poll `ready` until it is true. `EngineError` with the log's end if the process ends or the time runs out.

        `key` is where the config has `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            if (death := self.death()) is not None:
                raise EngineError(f"{what} (pid {self.pid}) {death}")
            if await ready():
                return
            if time.monotonic() > deadline:
                who = f"{what} (pid {self.pid}{', stopped by a signal' if is_frozen(self.pid) else ''})"
                log = f"log {self.log_path}: {self.log_tail()}"
                raise EngineError(f"{key}: {timeout_s:g}; {who} is not ready in time; {log}")
            await asyncio.sleep(0.05)

    async def stop(self, grace_s: float = 5.0) -> None:
        """Ask it to end, then kill its whole group; returns when nothing of it lives. Safe to call twice.

        It is killed without being asked if it is frozen, and at once if this call is cancelled.
        """
        try:
            if self.exit_code() is None and not is_frozen(self.pid):
                self._signal(signal.SIGTERM)
                await self._wait(grace_s)
        finally:
            if self.exit_code() is None:
                self._signal(signal.SIGKILL)
        deadline = time.monotonic() + _KILL_TIMEOUT_S
        while self.exit_code() is None or group_lives(self.pid):
            if time.monotonic() > deadline:
                raise EngineError(
                    f"process {self.pid}, or one that it started, survived SIGKILL for {_KILL_TIMEOUT_S:g} s"
                )
            await asyncio.sleep(_POLL_S)

    async def _wait(self, limit_s: float) -> None:
        """Until it ends, at most `limit_s`."""
        deadline = time.monotonic() + limit_s
        while self.exit_code() is None and time.monotonic() < deadline:
            await asyncio.sleep(_POLL_S)

    def _has_ended(self) -> bool:
        """Whether it is dead and waits to be reaped."""
        try:
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:  # somebody else has reaped it: its number may be another's by now
            return False

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)
