"""Who works in a folder: a lock that the kernel frees when its holder ends, also by `kill -9`.

A run holds its own folder, and the folder of the run that it goes on from, so that neither is gone on from twice. The
file stays afterwards: to remove it would let two processes each hold one of the same name.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

LOCK_FILE = "lock"
_MAX_BYTES = 8192
_TAKE_TIMEOUT_S = 1.0
_POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class Holder:
    """The process that holds a folder. `elsewhere` is the folder that it works in, empty if it is the held one."""

    pid: int | None
    elsewhere: str = ""


class Busy(Exception):
    """Another process holds the folder."""

    def __init__(self, holder: Holder) -> None:
        super().__init__(f"held by process {holder.pid}")
        self.holder = holder


def holder(folder: Path) -> Holder | None:
    """Who holds `folder` now; None if nobody does. Changes nothing."""
    try:
        descriptor = os.open(folder / LOCK_FILE, os.O_RDONLY)
    except OSError:
        return None
    try:
        # Shared: two that only ask do not see each other, and who takes it waits for longer than this.
        return None if _locked(descriptor, fcntl.LOCK_SH) else _read(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def hold(folder: Path, elsewhere: str = "", *, make: bool = True) -> Generator[None]:
    """Hold `folder` for the time of a `with`; raises `Busy` if another does, for longer than it takes to ask.

    `elsewhere` is for a holder that works in another folder. Without `make`, a folder that has no lock file is not
    held: nobody ever worked in it.
    """
    descriptor = _open(folder / LOCK_FILE, make)
    if descriptor is None:
        yield
        return
    try:
        deadline = time.monotonic() + _TAKE_TIMEOUT_S
        while not _locked(descriptor, fcntl.LOCK_EX):
            if time.monotonic() > deadline:
                raise Busy(_read(descriptor))
            time.sleep(_POLL_S)
        text = f"{os.getpid()}\n{elsewhere}\n".encode()
        with contextlib.suppress(OSError):  # it may be read-only; it is held all the same
            os.pwrite(descriptor, text, 0)
            os.ftruncate(descriptor, len(text))
        yield
    finally:
        os.close(descriptor)


def _open(path: Path, make: bool) -> int | None:
    if make:
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    for mode in (os.O_RDWR, os.O_RDONLY):
        with contextlib.suppress(OSError):
            return os.open(path, mode)
    return None


def _locked(descriptor: int, kind: int) -> bool:
    """Take the lock; False if another has it."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True  # a file system without locks: better a run without one than none
    return True


def _read(descriptor: int) -> Holder:
    pid, _, rest = os.pread(descriptor, _MAX_BYTES, 0).decode(errors="replace").partition("\n")
    return Holder(int(pid) if pid.isdigit() else None, rest.strip())
