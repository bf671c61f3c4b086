"""A run as the system sees it: its processes and its Ray session, to kill it and to see what is left."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

GONE_TIMEOUT_S = 20.0


def descendants(root: int) -> set[int]:
    """Processes below `root`, and `root`."""
    parents: dict[int, int] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                parents[int(entry)] = int(Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[1])
    found = {root}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def alive(pids: set[int]) -> set[int]:
    """Those of `pids` that still run; one that is dead and not yet collected by its parent does not."""
    found: set[int] = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                found.add(pid)
    return found


def kill_tree(root: int) -> set[int]:
    """SIGKILL for `root` and all below it, at once. Returns them."""
    processes = descendants(root)
    for pid in sorted(processes):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return processes


def left_of(processes: set[int]) -> list[str]:
    """Those of a run's processes that still run a while after its end, in words."""
    deadline = time.monotonic() + GONE_TIMEOUT_S
    while (left := alive(processes)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return [f"process {pid} is left: {command_of(pid)}" for pid in sorted(left)]


def sessions(root: int) -> list[str]:
    """Folders of the Ray session of the run whose driver was process `root`, in words."""
    return [f"{path} is left" for path in sorted(Path("/tmp").glob(f"miles-ray-{root}-*"))]


def command_of(pid: int) -> str:
    """The beginning of a process's command line."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:100]
    return "gone"
