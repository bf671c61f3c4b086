"""The launcher's process: it waits inside the outer sandbox, and forks a box whenever the host asks for one.

Forking a small waiting interpreter is what makes a box cheap: no program starts, no module is read. It has one thread
and no privilege; a new user namespace gives each box the rights to set itself up. It is the first process of the
outer sandbox: when it ends, so does every box.

Control messages are JSON on a SEQPACKET socket. Host to here: `create` (id, limits; file descriptors: the box's
channel, then cgroup files to join) and `kill` (id). Here to host: `ready`, and `gone` (id, status, error) once a box
has ended with everything in it.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import os
import select
import signal
import socket
import tarfile
from typing import Any

from sandbox_env.providers.local_init import run_box
from sandbox_env.providers.local_namespaces import ETC, clone_into_namespaces
from sandbox_env.providers.local_wire import BoxLimits

MAX_MESSAGE_BYTES = 1 << 16
MAX_FDS = 8


class Zygote:
    """Forks boxes, ends them on request, and reports their end."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._ids: dict[int, str] = {}
        self._uid, self._gid = os.getuid(), os.getgid()
        self._wake_fd, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda _signal, _frame: None)

    def serve(self) -> None:
        """Serve until the host is gone."""
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        poll.register(self._wake_fd, select.POLLIN)
        self._say({"event": "ready"})
        while True:
            ready = {fd for fd, _ in poll.poll()}
            if self._wake_fd in ready:
                os.read(self._wake_fd, 4096)
                self._reap()
            if self._control.fileno() in ready:
                data, fds, _, _ = socket.recv_fds(self._control, MAX_MESSAGE_BYTES, MAX_FDS)
                if not data:
                    return
                self._obey(json.loads(data), fds)

    def _obey(self, message: dict[str, Any], fds: list[int]) -> None:
        if message["op"] == "create":
            self._create(message["id"], BoxLimits(**message["limits"]), fds)
            return
        for pid, box_id in self._ids.items():
            if box_id == message["id"]:
                os.kill(pid, signal.SIGKILL)

    def _create(self, box_id: str, limits: BoxLimits, fds: list[int]) -> None:
        try:
            pid = clone_into_namespaces()
            if pid == 0:
                try:
                    self._become_box(limits, fds)
                finally:
                    os._exit(1)
            self._ids[pid] = box_id
        except OSError as error:
            self._say({"event": "gone", "id": box_id, "status": -1, "error": str(error)})
        finally:
            for fd in fds:
                os.close(fd)

    def _become_box(self, limits: BoxLimits, fds: list[int]) -> None:
        for fd in (self._control.detach(), self._wake_fd, self._wake_write):
            os.close(fd)
        for fd in fds:
            os.set_inheritable(fd, False)
        run_box(socket.socket(fileno=fds[0]), limits, self._uid, self._gid, fds[1:])

    def _reap(self) -> None:
        while self._ids:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            self._say({"event": "gone", "id": self._ids.pop(pid), "status": status, "error": ""})

    def _say(self, message: dict[str, Any]) -> None:
        self._control.send(json.dumps(message).encode())


def _unpack_etc(archive: bytes) -> None:
    """Write the `/etc` of all boxes. The archive is the host's own; its links may point anywhere, and are links."""
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:") as tar:
        for member in tar:
            path = f"{ETC}/{member.name}"
            os.makedirs(os.path.dirname(path), exist_ok=True)
            if member.issym():
                os.symlink(member.linkname, path)
            elif member.isdir():
                os.makedirs(path, exist_ok=True)
            elif (source := tar.extractfile(member)) is not None:
                with open(path, "wb") as file:
                    file.write(source.read())


def main(control_fd: int, etc_path: str) -> None:
    """Serve on `control_fd`; `etc_path` is a tar of what `/etc` shows in a box."""
    # A first process is immune to signals that it does not handle; commands inherit none that is ignored or blocked.
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        with contextlib.suppress(OSError):
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    with open(etc_path, "rb") as file:
        _unpack_etc(file.read())
    control = socket.socket(fileno=control_fd)
    control.set_inheritable(False)
    # A collection in a forked child would touch, and so copy, every page that holds an object.
    gc.disable()
    gc.collect()
    gc.freeze()
    Zygote(control).serve()
