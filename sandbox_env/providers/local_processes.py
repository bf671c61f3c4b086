"""Finding and ending processes inside a box, seen from its first process through `/proc`."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from typing import NamedTuple

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
FREEZE_S = 1.0
"""So long we try to tell apart what may live on; then everything in the box ends."""


class Process(NamedTuple):
    """One process: its parent and its state letter."""

    parent: int
    state: str


def all_pids() -> list[int]:
    """Every process of the box but the first."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and name != "1"]


def kill_all() -> None:
    """End every process of the box but the first. The kernel does it in one sweep that no fork escapes."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)


def kill_new(older: frozenset[int]) -> None:
    """End what a command has started, also what it moved to the background; spare the processes in `older`.

    `older` is what was alive before the command. With nothing alive then, everything ends. Else a process belongs to
    the command if the last of its ancestors below the first process is new; older daemons and their children live
    on. Processes are stopped before they are killed, since a tree that forks while it is killed piece by piece may
    never end.
    """
    if not older:
        kill_all()
        return
    deadline = time.monotonic() + FREEZE_S
    while True:
        new = _descended_from_new(older)
        running = [pid for pid, process in new.items() if process.state not in "TZX"]
        if not running:
            break
        if time.monotonic() > deadline:
            kill_all()
            return
        for pid in running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
    for pid in new:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def shed_memory(limit_bytes: int) -> None:
    """End the largest processes until the rest holds at most `limit_bytes`: what a memory cgroup would do."""
    resident: dict[int, int] = {}
    for pid in all_pids():
        with contextlib.suppress(OSError, ValueError):
            _, pages, shared, *_ = _read(f"/proc/{pid}/statm").split()
            resident[pid] = (int(pages) - int(shared)) * PAGE_BYTES
    excess = sum(resident.values()) - limit_bytes
    for pid in sorted(resident, key=resident.__getitem__, reverse=True):
        if excess <= 0:
            return
        excess -= resident[pid]
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _descended_from_new(older: frozenset[int]) -> dict[int, Process]:
    processes = {pid: process for pid in all_pids() if (process := _read_process(pid)) is not None}

    def is_new(pid: int) -> bool:
        while (parent := processes[pid].parent) in processes:
            pid = parent
        return pid not in older

    return {pid: process for pid, process in processes.items() if is_new(pid)}


def _read_process(pid: int) -> Process | None:
    try:
        # The name in parentheses is the process's own choice and may hold anything: read past its end.
        state, parent, *_ = _read(f"/proc/{pid}/stat").rpartition(b")")[2].split()
    except (OSError, ValueError):
        return None
    return Process(int(parent), state.decode())


def _read(path: str) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, 4096)
    finally:
        os.close(fd)
