"""Outlives a run that was killed outright, for as long as it takes to clear up after it.

Started as a program of its own with the folder of a Ray session. It waits until the run lets go of its standard
input, however the run ended, then kills what still has files of the session open, and removes the folder. Most of
Ray dies with the run by itself; its two agents would stay for about a minute.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time

_LEAVE_S = 3.0  # time for Ray's workers to notice by themselves, and to end what they started
_GRACE_S = 10.0
_POLL_S = 0.1


def users(folder: str, spared: set[int]) -> list[int]:
    """Processes, but those `spared`, that have a file below `folder` open or name it on their command line."""
    found: list[int] = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) not in spared:
            with contextlib.suppress(OSError):
                descriptors = f"/proc/{entry}/fd"
                links = (os.readlink(f"{descriptors}/{number}") for number in os.listdir(descriptors))
                with open(f"/proc/{entry}/cmdline", "rb") as file:
                    command = file.read().decode(errors="replace")
                if folder in command or any(link.startswith(folder + "/") for link in links):
                    found.append(int(entry))
    return found


def clear(folder: str, spared: set[int]) -> None:
    """Wait for the users of `folder` to leave, then kill them, then remove it; gives up after a while."""
    begin = time.monotonic()
    while (left := users(folder, spared)) and time.monotonic() < begin + _GRACE_S:
        if time.monotonic() > begin + _LEAVE_S:
            for pid in left:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL_S)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    spared = {os.getpid(), os.getppid()}  # the run itself may be alive and go on to another session
    sys.stdin.buffer.read()  # ends when the session does
    clear(sys.argv[1], spared)
