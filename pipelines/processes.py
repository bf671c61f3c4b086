"""Which processes a run started, also those whose parent is gone, so that none outlives it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.05


class Offspring:
    """The processes below this one that appeared after this object. Linux only; a no-op elsewhere.

    This process becomes the adopter of its orphaned descendants, so that a process whose parent was killed is still
    found below it.
    """

    def __init__(self) -> None:
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._before = set(below(os.getpid()))

    def alive(self) -> dict[int, str]:
        """Process id to command line of all that run now; those that ended are reaped."""
        found: dict[int, str] = {}
        for pid, (parent, state) in below(os.getpid()).items():
            if pid in self._before:
                continue
            if state != "Z":
                found[pid] = _command(pid)
            elif parent == os.getpid():
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
        return found

    def end(self, grace_s: float) -> list[str]:
        """Wait `grace_s` for all to end, then kill those that did not. Returns their command lines."""
        deadline = time.monotonic() + grace_s
        while (left := self.alive()) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        killed = list(left.values())
        deadline = time.monotonic() + max(grace_s, 1.0)
        while left and time.monotonic() < deadline:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(_POLL_S)
            left = self.alive()
        return killed


def below(root: int) -> dict[int, tuple[int, str]]:
    """Descendants of `root`: process id to parent and one letter for the state, as in `ps`."""
    parents: dict[int, tuple[int, str]] = {}
    for entry in os.listdir("/proc") if os.path.isdir("/proc") else []:
        if entry.isdigit():
            with contextlib.suppress(OSError, IndexError):
                state, parent = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[:2]
                parents[int(entry)] = (int(parent), state)
    found: dict[int, tuple[int, str]] = {}
    frontier = {root}
    while frontier:
        level = {pid: row for pid, row in parents.items() if row[0] in frontier and pid not in found}
        found |= level
        frontier = set(level)
    return found


def _command(pid: int) -> str:
    try:
        text = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        text = ""
    return f"{pid} {text[:120]}"
