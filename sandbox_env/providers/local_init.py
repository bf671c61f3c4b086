"""The first process of a box: it runs what the host asks for, and outlives every command.

It is forked, not executed, so a box costs no interpreter start. Commands can neither see into it nor signal it
(`local_namespaces`), and inherit nothing of it but their output pipe. When it ends, the kernel ends the box.
"""

from __future__ import annotations

import os
import socket
from typing import Any

from sandbox_env.providers import local_wire
from sandbox_env.providers.local_command import CommandRunner
from sandbox_env.providers.local_files import read_file, unpack
from sandbox_env.providers.local_namespaces import enter_box
from sandbox_env.providers.local_wire import BoxLimits

Answer = tuple[dict[str, Any], bytes]


def run_box(channel: socket.socket, limits: BoxLimits, uid: int, gid: int, cgroup_fds: list[int]) -> None:
    """Make this fresh process a box, say so on `channel`, and serve until the host closes it. Never returns."""
    code = 1
    try:
        # Later, when this process may not be inspected any more, it could not open the file itself.
        oom_score_fd = os.open("/proc/self/oom_score_adj", os.O_RDWR | os.O_CLOEXEC)
        enter_box(uid, gid, limits, cgroup_fds)
        runner = CommandRunner(limits, channel.fileno(), oom_score_fd)
        channel.sendall(local_wire.encode({"python3": os.access("/usr/bin/python3", os.X_OK)}))
        _serve(channel, runner)
        code = 0
    except BrokenPipeError:
        code = 0  # the host gave the box up
    except Exception as error:
        channel.sendall(local_wire.encode({"error": f"{type(error).__name__}: {error}"}))
    finally:
        os._exit(code)


def _serve(channel: socket.socket, runner: CommandRunner) -> None:
    while True:
        runner.wait_for_request()
        request = local_wire.receive(channel)
        if request is None:
            return
        try:
            header, payload = _answer(runner, *request)
        except (OSError, ValueError, MemoryError) as error:
            header, payload = {"error": str(error) or type(error).__name__}, b""
        channel.sendall(local_wire.encode(header, payload))


def _answer(runner: CommandRunner, request: dict[str, Any], payload: bytes) -> Answer:
    if request["op"] == "exec":
        return runner.run(request["argv"], request["cwd"], request["env"], request["timeout_s"])
    if request["op"] == "upload":
        unpack(payload, request["target"])
        return {}, b""
    content = read_file(request["path"], request["max_bytes"])
    return {"found": content is not None}, content or b""
