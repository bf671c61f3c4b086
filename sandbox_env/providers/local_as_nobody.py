"""A program for root: becomes `nobody`, then bubblewrap. An outer sandbox made by root is no safer for it.

    python local_as_nobody.py <bwrap fd> <folder of its libraries> <interpreter's folder> <bwrap arguments ...>

What lies under `/root` is out of reach for `nobody`, and `/tmp` is hidden, so in a mount namespace of its own the
interpreter is shown in `SHOWN`, and the libraries that the packaged bubblewrap brings in `SHOWN_LIBRARIES`.
"""

from __future__ import annotations

import ctypes
import os
import sys

NOBODY = 65534
SHOWN = "/tmp/python"
"""Where the interpreter's installation is, as bubblewrap sees it; `/tmp` itself is hidden from it."""
SHOWN_LIBRARIES = "/tmp/libraries"
CLONE_NEWNS, MS_BIND, MS_REC, MS_PRIVATE = 0x00020000, 4096, 16384, 1 << 18


def main(bwrap_fd: int, libraries: str, installation: str, arguments: list[str]) -> None:
    """Replace this process by bubblewrap run by `nobody`. Raises `OSError`."""
    libc = ctypes.CDLL(None, use_errno=True)

    def check(result: int, what: str) -> None:
        if result < 0:
            raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")

    check(libc.unshare(CLONE_NEWNS), "unshare")
    check(libc.mount(None, b"/", None, ctypes.c_ulong(MS_REC | MS_PRIVATE), None), "make mounts private")
    # Opened in the new namespace, as a bind mount asks, and before `/tmp`, which may hold it, is hidden.
    sources = {
        shown: f"/proc/self/fd/{os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)}"
        for shown, folder in ((SHOWN, installation), (SHOWN_LIBRARIES, libraries))
    }
    check(libc.mount(b"tmpfs", b"/tmp", b"tmpfs", ctypes.c_ulong(0), b"mode=755"), "mount /tmp")
    for shown, source in sources.items():
        os.mkdir(shown)
        flags = ctypes.c_ulong(MS_BIND | MS_REC)
        check(libc.mount(source.encode(), shown.encode(), None, flags, None), f"show {shown}")
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    os.execve(bwrap_fd, ["bwrap", *arguments], {"LD_LIBRARY_PATH": SHOWN_LIBRARIES})


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4:])
