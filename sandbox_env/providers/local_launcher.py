"""The host's side of the launcher: starts the outer sandbox, asks it for boxes, and learns of their end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from sandbox_env.providers.local_outer import NOBODY, explain, find_bwrap, outer_command
from sandbox_env.providers.local_wire import BoxLimits
from sandbox_env.sandbox import SandboxError

MAX_MESSAGE_BYTES = 1 << 16
END_TIMEOUT_S = 10.0


class Launcher:
    """One outer sandbox and the boxes in it. When it dies, all its boxes are dead."""

    def __init__(self, process: subprocess.Popen[bytes], control: socket.socket) -> None:
        self._process = process
        self._control = control
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._gone: dict[str, asyncio.Future[str]] = {}
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
        if not gone.done() and self.alive:
            with contextlib.suppress(OSError):
                self._control.send(json.dumps({"op": "kill", "id": box_id}).encode())
        try:
            reason = await asyncio.wait_for(asyncio.shield(gone), END_TIMEOUT_S)
        except TimeoutError:
            raise SandboxError(f"{box_id}: still there {END_TIMEOUT_S:g} s after it was ended") from None
        self._gone.pop(box_id, None)
        return reason

    async def stop(self) -> None:
        """End the outer sandbox and with it every box, and wait until that is done."""
        self._finish("the launcher was stopped")
        assert self._ended is not None
        await self._ended

    def _receive(self) -> None:
        while True:
            try:
                data = self._control.recv(MAX_MESSAGE_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._finish("the sandbox launcher died")
                return
            self._hear(json.loads(data))

    def _hear(self, message: dict[str, Any]) -> None:
        if message["event"] == "ready":
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
        """Wait for bubblewrap, which ends after the launcher's process, which ends after every box."""
        deadline = self._loop.time() + END_TIMEOUT_S
        while self._process.poll() is None:
            if self._loop.time() > deadline:
                self._process.kill()
            await asyncio.sleep(0.005)
        if not self._ready.done():
            self._ready.set_exception(explain(self._errors()))
        for gone in self._gone.values():
            if not gone.done():
                gone.set_result(reason)

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
    opened: list[int] = []
    try:
        interpreter_fd = os.open(sys.base_prefix, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        opened.append(interpreter_fd)
        bwrap_fd = os.open(bwrap, os.O_RDONLY | os.O_CLOEXEC)
        opened.append(bwrap_fd)
        command, file_fds = outer_command(bwrap, theirs.fileno(), interpreter_fd)
        opened.extend(file_fds)
        as_root = os.geteuid() == 0
        # By file descriptor: `nobody` may not be able to reach the path of a virtual environment.
        process = subprocess.Popen(
            command,
            executable=f"/proc/self/fd/{bwrap_fd}",
            pass_fds=[theirs.fileno(), *opened],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={},
            cwd="/",
            start_new_session=True,
            user=NOBODY if as_root else None,
            group=NOBODY if as_root else None,
            extra_groups=[] if as_root else None,
        )
    except OSError as error:
        ours.close()
        raise explain(str(error)) from None
    finally:
        theirs.close()
        for fd in opened:
            os.close(fd)
    ours.setblocking(False)
    launcher = Launcher(process, ours)
    await launcher.wait_ready(timeout_s)
    return launcher
