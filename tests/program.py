"""Watching a program that a test started, and all that it started."""

import os
import time
from collections.abc import Callable
from pathlib import Path

DEADLINE_S = 90.0


def wait_for(what: Callable[[], object], reason: str) -> None:
    """Until `what()` holds; fails the test after a while."""
    deadline = time.monotonic() + DEADLINE_S
    while not what():
        assert time.monotonic() < deadline, f"{reason} did not happen in {DEADLINE_S} s"
        time.sleep(0.05)


def descendants(root: int) -> set[int]:
    """Processes below `root`, and `root`."""
    parents: dict[int, int] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                parents[int(entry)] = int(Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    found = {root}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def alive(pids: set[int]) -> set[int]:
    """Those of `pids` that still run; one that is dead and only not yet collected by its parent does not."""
    found: set[int] = set()
    for pid in pids:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                found.add(pid)
        except OSError:
            continue
    return found


def sessions(pid: int) -> list[Path]:
    """Folders of the Ray sessions of process `pid`."""
    return list(Path("/tmp").glob(f"miles-ray-{pid}-*"))
