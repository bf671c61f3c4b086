"""Running commands inside a box, one at a time, from its first process.

Every process of the box whose parent is gone becomes a child of the first process, so "is anything left" is "have I
children", and everything that a timed-out command started can be found: its own descendants, and the daemons that
appeared while it ran.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import time
from collections.abc import Mapping, Sequence

from sandbox_env.providers.local_processes import all_pids, kill_all, kill_new, shed_memory
from sandbox_env.providers.local_wire import BoxLimits

READ_BYTES = 1 << 16
"""One read, and the capacity of a pipe."""
MAX_LEFTOVER_PIPES = 32
MAX_LEFTOVER_BYTES = 16 << 20
"""A daemon may go on printing into the pipe of the command that started it: so much is read and thrown away."""
OOM_SCORE_RAISE = 500
"""Commands are this much more likely to be ended by the kernel than the first process is, when memory runs out."""
MEMORY_CHECK_S = 0.2
SIGNALLED = 128
UNLIMITED = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)


class BoundedOutput:
    """The first and the last bytes of a stream; what lies between is counted and dropped."""

    def __init__(self, limit_bytes: int) -> None:
        self._half = limit_bytes // 2
        self._head = bytearray()
        self._tail = bytearray()
        self.total_bytes = 0

    def add(self, data: bytes) -> None:
        """Take the next piece of the stream."""
        self.total_bytes += len(data)
        room = self._half - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        self._tail += data
        if len(self._tail) > 2 * self._half + READ_BYTES:
            del self._tail[: -self._half]

    @property
    def dropped_bytes(self) -> int:
        """Number of bytes that `content` lacks."""
        return max(0, self.total_bytes - 2 * self._half)

    def content(self) -> bytes:
        """Head and tail, with a mark between them if bytes were dropped."""
        if self.dropped_bytes == 0:
            return bytes(self._head + self._tail)
        mark = b"\n[... %d bytes dropped ...]\n" % self.dropped_bytes
        return bytes(self._head) + mark + bytes(self._tail[-self._half :])


class CommandRunner:
    """Runs commands and looks after what earlier ones left behind. Lives in the first process of a box."""

    def __init__(self, limits: BoxLimits, channel_fd: int, oom_score_fd: int) -> None:
        self._limits = limits
        self._channel_fd = channel_fd
        self._oom_score_fd = oom_score_fd
        self._oom_score = int(os.read(oom_score_fd, 16))
        self._leftovers: dict[int, int] = {}
        self._next_memory_check = 0.0
        self._wake_fd, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda _signal, _frame: None)
        self._poll = select.poll()
        self._poll.register(self._wake_fd, select.POLLIN)
        self._poll.register(channel_fd, select.POLLIN)

    def wait_for_request(self) -> None:
        """Reap, drain and watch memory until the host has something to say or is gone."""
        while True:
            self._reap(None)
            watch = not self._limits.memory_by_cgroup and self._has_children()
            if self._channel_fd in self._wait(MEMORY_CHECK_S if watch else None):
                return

    def run(
        self, argv: Sequence[str], cwd: str, env: Mapping[str, str], timeout_s: float
    ) -> tuple[dict[str, object], bytes]:
        """Run `argv` until it ends or time is up; its figures and its output."""
        started = time.monotonic()
        self._reap(None)
        older = frozenset(all_pids() if self._has_children() else ())
        read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(read_fd, False)
        try:
            try:
                pid = self._spawn(argv, cwd, env, write_fd)
            except BlockingIOError:
                # Earlier commands hold every process the box may have: what they left running makes room.
                kill_all()
                self._reap(None)
                older = frozenset[int]()
                pid = self._spawn(argv, cwd, env, write_fd)
        except (OSError, ValueError) as error:
            os.close(read_fd)
            return _figures(126, started), f"cannot start the command: {error}\n".encode(errors="replace")
        finally:
            os.close(write_fd)
        output = BoundedOutput(self._limits.output_bytes)
        status, why = self._attend(pid, read_fd, output, started + timeout_s, older)
        self._drain(read_fd, output)
        if why == "output":
            output.add(b"\n[ended: more than %d MiB of output]\n" % self._limits.max_output_mb)
        code = 124 if why == "time" else _exit_code(status)
        return _figures(code, started, why == "time", output.dropped_bytes > 0), output.content()

    def _attend(
        self, pid: int, read_fd: int, output: BoundedOutput, deadline: float, older: frozenset[int]
    ) -> tuple[int, str]:
        """Read output until process `pid` is over. Its wait status, and what ended it early ("" for nothing)."""
        self._poll.modify(self._channel_fd, 0)  # only "the host is gone" is of interest now
        self._poll.register(read_fd, select.POLLIN)
        reading, why = True, ""
        while (status := self._reap(pid)) is None:
            remaining = deadline - time.monotonic()
            if remaining <= 0 or output.total_bytes > self._limits.max_output_mb << 20:
                why = "time" if remaining <= 0 else "output"
                kill_new(older)
                status = os.waitpid(pid, 0)[1]  # bounded: it is killed; the host waits for GRACE_S only
                break
            ready = self._wait(remaining if self._limits.memory_by_cgroup else min(remaining, MEMORY_CHECK_S))
            if self._channel_fd in ready:
                os._exit(0)
            if reading and read_fd in ready:
                data = os.read(read_fd, READ_BYTES)
                output.add(data)
                if not data:
                    self._poll.unregister(read_fd)
                    reading = False
        if reading:
            self._poll.unregister(read_fd)
        self._poll.modify(self._channel_fd, select.POLLIN)
        return status, why

    def _wait(self, timeout_s: float | None) -> set[int]:
        """Wait for events; those of daemons' pipes and ended children are dealt with here."""
        events = self._poll.poll(None if timeout_s is None else timeout_s * 1000)
        ready = {fd for fd, _ in events}
        if self._wake_fd in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake_fd, 4096)
        for fd in ready & self._leftovers.keys():
            self._discard(fd)
        if not self._limits.memory_by_cgroup and time.monotonic() >= self._next_memory_check:
            shed_memory(self._limits.memory_mb << 20)
            self._next_memory_check = time.monotonic() + MEMORY_CHECK_S
        return ready

    def _reap(self, pid: int | None) -> int | None:
        """Collect every ended child; the wait status of `pid` if it was among them."""
        status = None
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0] != 0:
                if ended[0] == pid:
                    status = ended[1]
        return status

    def _has_children(self) -> bool:
        try:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return False
        return True

    def _drain(self, fd: int, output: BoundedOutput) -> None:
        """Take what an ended command left in its pipe. If a daemon holds the pipe, keep it open for the daemon."""
        for _ in range(16):
            try:
                data = os.read(fd, READ_BYTES)
            except BlockingIOError:
                break
            if not data:
                os.close(fd)
                return
            output.add(data)
        if len(self._leftovers) >= MAX_LEFTOVER_PIPES:
            self._forget(next(iter(self._leftovers)))
        self._leftovers[fd] = 0
        self._poll.register(fd, select.POLLIN)

    def _discard(self, fd: int) -> None:
        try:
            num_bytes = len(os.read(fd, READ_BYTES))
        except BlockingIOError:
            return
        self._leftovers[fd] += num_bytes
        if num_bytes == 0 or self._leftovers[fd] > MAX_LEFTOVER_BYTES:
            self._forget(fd)

    def _forget(self, fd: int) -> None:
        del self._leftovers[fd]
        self._poll.unregister(fd)
        os.close(fd)

    def _spawn(self, argv: Sequence[str], cwd: str, env: Mapping[str, str], write_fd: int) -> int:
        """Start the command. What it inherits is set on this process for the moment, and taken back.

        That way no code of ours runs in the child, which would copy much of this process first.
        """
        try:
            os.chdir(cwd)
        except FileNotFoundError:
            os.makedirs(cwd)
            os.chdir(cwd)
        file_actions = [
            (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
            (os.POSIX_SPAWN_DUP2, write_fd, 1),
            (os.POSIX_SPAWN_DUP2, write_fd, 2),
        ]
        limit = self._limits.cpu_time_s
        # Raising and lowering its own score within its bounds needs no privilege; the same holds for soft limits.
        os.write(self._oom_score_fd, b"%d" % min(1000, self._oom_score + OOM_SCORE_RAISE))
        resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))
        try:
            pid = os.posix_spawn(argv[0], list(argv), env, file_actions=file_actions, setsid=True)
        finally:
            resource.setrlimit(resource.RLIMIT_CPU, UNLIMITED)
            os.write(self._oom_score_fd, b"%d" % self._oom_score)
            os.chdir("/")
        # The hard limit could not be taken back from this process, so it is set on the child, which runs by now. What
        # the child may have started in that moment still has the soft one.
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_CPU, (limit, limit + 1))
        return pid


def _figures(exit_code: int, started: float, timed_out: bool = False, truncated: bool = False) -> dict[str, object]:
    duration_s = time.monotonic() - started
    return {"exit_code": exit_code, "timed_out": timed_out, "truncated": truncated, "duration_s": duration_s}


def _exit_code(status: int) -> int:
    code = os.waitstatus_to_exitcode(status)
    return SIGNALLED - code if code < 0 else code
