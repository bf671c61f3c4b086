"""The host's side of one box. What comes from the box is hostile: its size is bounded and every wait has a deadline."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from sandbox_env.providers import local_wire
from sandbox_env.sandbox import ExecResult, SandboxError

GRACE_S = 10.0
"""What the first process of a box gets on top of a command's own time to end it and to answer."""
TRANSFER_TIMEOUT_S = 60.0
MAX_TIMEOUT_S = 1e6


class BoxEnder(Protocol):
    """What a box needs of the launcher that made it."""

    def kill(self, box_id: str) -> None:
        """Ask for the end of the box."""
        ...

    async def end(self, box_id: str) -> str:
        """End the box and wait until it is gone. Raises `SandboxError` if it stays."""
        ...


class LocalSandbox:
    """One box. Requests go to it one at a time; one that is cut short (cancelled, late, malformed) ends the box."""

    def __init__(
        self,
        box_id: str,
        launcher: BoxEnder,
        channel: socket.socket,
        *,
        workdir: str,
        env: Mapping[str, str],
        output_bytes: int,
        on_close: Callable[[], None],
    ) -> None:
        self._id = box_id
        self._launcher = launcher
        self._channel = channel
        self._workdir = workdir
        self._env = dict(env)
        self._max_answer_bytes = output_bytes + 4096
        self._on_close = on_close
        self._lock = asyncio.Lock()
        self._closing: asyncio.Task[None] | None = None
        self._broken = ""

    @property
    def id(self) -> str:
        """Name of this sandbox, unique on this machine."""
        return self._id

    async def wait_ready(self, timeout_s: float) -> Mapping[str, Any]:
        """Wait until the box is set up; what it says of itself."""
        async with self._lock:  # bounded: the time of the request before
            return (await self._converse(None, 0, timeout_s))[0]

    async def exec(
        self, command: str, *, timeout_s: float, cwd: str | None = None, env: Mapping[str, str] | None = None
    ) -> ExecResult:
        """Run `command` with bash; on timeout end all that it started. A missing `cwd` is made."""
        return await self.run(["/bin/bash", "-c", command], timeout_s=timeout_s, cwd=cwd, env=env)

    async def run(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> ExecResult:
        """Run one program, named by its absolute path, with its arguments."""
        if not 0 < timeout_s <= MAX_TIMEOUT_S:
            raise ValueError(f"timeout_s: {timeout_s}; above 0 and at most {MAX_TIMEOUT_S:g}")
        header = {
            "op": "exec",
            "argv": list(argv),
            "cwd": cwd or self._workdir,
            "env": {**self._env, **(env or {})},
            "timeout_s": timeout_s,
        }
        answer, output = await self._request(header, b"", self._max_answer_bytes, timeout_s + GRACE_S)
        try:
            return ExecResult(
                exit_code=int(answer["exit_code"]),
                output=output.decode(errors="replace"),
                timed_out=bool(answer["timed_out"]),
                truncated=bool(answer["truncated"]),
                duration_s=float(answer["duration_s"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise self._break(f"a malformed answer: {error!r}") from None

    async def upload(self, archive: bytes, target: str) -> None:
        """Unpack the tar `archive` under the absolute folder `target`. What is in the way is replaced."""
        await self._request({"op": "upload", "target": target}, archive, 0, TRANSFER_TIMEOUT_S)

    async def download(self, path: str, *, max_bytes: int) -> bytes | None:
        """Content of the regular file at absolute `path`; None if there is none. `SandboxError` over `max_bytes`."""
        header = {"op": "download", "path": path, "max_bytes": max_bytes}
        answer, content = await self._request(header, b"", max_bytes, TRANSFER_TIMEOUT_S)
        return content if answer.get("found") is True else None

    async def close(self) -> None:
        """End the box, and wait until the kernel has ended every process in it and dropped its file systems."""
        if self._closing is None:
            self._broken = self._broken or "it is closed"
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)  # bounded: END_TIMEOUT_S of the launcher

    async def _close(self) -> None:
        await self._launcher.end(self._id)
        self._channel.close()
        self._on_close()

    async def _request(
        self, header: dict[str, Any], payload: bytes, max_payload_bytes: int, timeout_s: float
    ) -> tuple[dict[str, Any], bytes]:
        try:
            frame = local_wire.encode(header, payload)
        except local_wire.FrameError as error:
            raise SandboxError(f"{self._id}: {error}") from None
        async with self._lock:  # bounded: the time of the request before
            return await self._converse(frame, max_payload_bytes, timeout_s)

    async def _converse(
        self, frame: bytes | None, max_payload_bytes: int, timeout_s: float
    ) -> tuple[dict[str, Any], bytes]:
        """Send a frame and wait for the answer. An answer that says `error` is a `SandboxError`; the box lives on."""
        if self._broken:
            raise SandboxError(f"{self._id}: {self._broken}")
        done = False
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self._exchange(frame, max_payload_bytes)
            done = True
        except TimeoutError:
            raise self._break(f"no answer within {timeout_s:g} s") from None
        except local_wire.FrameError as error:
            raise self._break(str(error)) from None
        except OSError as error:
            raise self._break(f"it died ({error.strerror or error})") from None
        finally:
            if not done:
                self._break("its last request was cut short")
        if "error" in answer[0]:
            raise SandboxError(f"{self._id}: {str(answer[0]['error'])[:500]}")
        return answer

    async def _exchange(self, frame: bytes | None, max_payload_bytes: int) -> tuple[dict[str, Any], bytes]:
        loop = asyncio.get_running_loop()
        if frame is not None:
            await loop.sock_sendall(self._channel, frame)  # bounded: the time of the request, in `_converse`
        prefix = await self._receive_exactly(local_wire.PREFIX.size)
        header_bytes, payload_bytes = local_wire.decode_prefix(prefix, max_payload_bytes)
        body = await self._receive_exactly(header_bytes + payload_bytes)
        return local_wire.decode_header(body[:header_bytes]), body[header_bytes:]

    async def _receive_exactly(self, num_bytes: int) -> bytes:
        loop = asyncio.get_running_loop()
        content = bytearray()
        while len(content) < num_bytes:
            # bounded: the time of the request, in `_converse`
            part = await loop.sock_recv(self._channel, min(num_bytes - len(content), 1 << 20))
            if not part:
                raise ConnectionResetError(0, "its first process is gone")
            content += part
        return bytes(content)

    def _break(self, reason: str) -> SandboxError:
        """Note why the box is of no more use, and end it: what it would still say cannot be told apart."""
        if not self._broken:
            self._broken = reason
            self._launcher.kill(self._id)
        return SandboxError(f"{self._id}: {self._broken}")
