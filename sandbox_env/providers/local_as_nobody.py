"""A program for root: becomes `nobody`, then bubblewrap. An outer sandbox made by root is no safer for it.

    python local_as_nobody.py <bwrap fd> <interpreter's folder> <bwrap arguments ...>

An interpreter under `/root` is out of reach for `nobody`, so in a mount namespace of its own it is shown in `SHOWN`.
"""

from __future__ import annotations

import ctypes
import os
import sys

NOBODY = 65534
SHOWN = "/tmp/python"
"""Where the interpreter's installation is, as bubblewrap sees it; `/tmp` itself is hidden from it."""
CLONE_NEWNS, MS_BIND, MS_REC, MS_PRIVATE = 0x00020000, 4096, 16384, 1 << 18


def main(bwrap_fd: int, installation: str, arguments: list[str]) -> None:
    """Replace this process by bubblewrap run by `nobody`. Raises `OSError`."""
    libc = ctypes.CDLL(None, use_errno=True)

    def check(result: int, what: str) -> None:
        if result < 0:
            raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")

    check(libc.unshare(CLONE_NEWNS), "unshare")
    check(libc.mount(None, b"/", None, ctypes.c_ulong(MS_REC | MS_PRIVATE), None), "make mounts private")
    # Opened in the new namespace, as a bind mount asks, and before `/tmp`, which may hold it, is hidden.
    source = f"/proc/self/fd/{os.open(installation, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)}".encode()
    check(libc.mount(b"tmpfs", b"/tmp", b"tmpfs", ctypes.c_ulong(0), b"mode=755"), "mount /tmp")
    os.mkdir(SHOWN)
    check(libc.mount(source, SHOWN.encode(), None, ctypes.c_ulong(MS_BIND | MS_REC), None), "show the interpreter")
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    os.execve(bwrap_fd, ["bwrap", *arguments], {})


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
