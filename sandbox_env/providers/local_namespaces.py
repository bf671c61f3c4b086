"""The system calls that make a box out of a fresh process, in the order in which they are done.

    clone_into_namespaces()     new user, pid, mount, network, ipc and uts namespaces
    enter_box(...)              identity, limits, file system, loopback; then every privilege is given up for good

It runs inside the outer bubblewrap sandbox of the launcher, so even a box that went wrong would see no more than a
read-only system without network. What makes a box final: no capability in any set, none to be had by exec
(`no_new_privs`, locked securebits, empty bounding set), no new user namespace (`max_user_namespaces` is 0 in the
box's own one), and a first process that nothing inside may trace or signal.
Source: user_namespaces(7), capabilities(7), pivot_root(2); bubblewrap's `--disable-userns`.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import resource
import signal
import socket
import struct

from sandbox_env.providers import local_seccomp
from sandbox_env.providers.local_wire import BoxLimits

# PyDLL keeps the interpreter's lock: `clone` must not return into a process where another thread would hold it.
_LIBC = ctypes.PyDLL(None, use_errno=True)

SYSCALLS = {"x86_64": {"clone": 56, "pivot_root": 155}, "aarch64": {"clone": 220, "pivot_root": 41}}
"""Numbers of the system calls that the C library does not wrap, by machine."""

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
ALL_NAMESPACES = CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNET

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
MNT_DETACH = 2
PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_SECUREBITS, PR_SET_NO_NEW_PRIVS = 4, 24, 28, 38
SECUREBITS_LOCKED = 0xEF
"""No capabilities for uid 0, no fix-up on setuid, no keeping, no ambient ones; all locked."""
CAPABILITY_VERSION_3 = 0x20080522
SIOCSIFFLAGS, IFF_UP, IFF_RUNNING = 0x8914, 1, 64

ROOT, SPARE, ETC = "/box", "/spare", "/box-etc"
"""Mount points in the outer sandbox: the box's root, its second tmpfs, and the `/etc` that every box sees."""
SYSTEM_LINKS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
FOLDERS = ("app", "root", "home", "tmp", "var", "var/tmp", "run", "run/shm", "opt", "srv", "mnt", "media")
SPARE_FOLDERS = ("tests", "logs", "solution")
STICKY = ("tmp", "var/tmp", "run/shm")


def clone_into_namespaces() -> int:
    """Like `os.fork`, with the child in new namespaces of every kind, as their first process. 0 in the child.

    One `clone` and not `fork` + `unshare` + `fork`: the caller is the parent of the box's first process and may wait
    for it, and when that wait returns the kernel has ended every process of the box.
    """
    _LIBC.PyOS_BeforeFork()
    number = SYSCALLS[os.uname().machine]["clone"]
    pid = int(_LIBC.syscall(number, ctypes.c_ulong(ALL_NAMESPACES | signal.SIGCHLD), 0, 0, 0, 0))
    error = ctypes.get_errno()
    if pid == 0:
        _LIBC.PyOS_AfterFork_Child()
    else:
        _LIBC.PyOS_AfterFork_Parent()
    if pid < 0:
        raise OSError(error, f"clone into new namespaces: {os.strerror(error)}")
    return pid


def enter_box(uid: int, gid: int, limits: BoxLimits, cgroup_fds: list[int]) -> None:
    """Turn this fresh first process into one that is fit to run a stranger's commands. Raises `OSError`.

    `uid` and `gid`: who this process is in the outer sandbox. `limits`: see `local_wire`. `cgroup_fds`:
    open `tasks` or `cgroup.procs` files to join.
    """
    for fd in cgroup_fds:
        os.write(fd, b"0")
        os.close(fd)
    _write("/proc/self/setgroups", "deny")
    _write("/proc/self/uid_map", f"0 {uid} 1")
    _write("/proc/self/gid_map", f"0 {gid} 1")
    _build_root(limits.storage_mb, limits.scoring_storage_mb)
    _check(_LIBC.sethostname(b"sandbox", 7), "sethostname")
    _raise_loopback()
    _write("/proc/sys/user/max_user_namespaces", "0")
    _mount("/proc/sys", "/proc/sys", None, MS_BIND | MS_REC)
    _mount(None, "/proc/sys", None, MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC)
    _set_limits(limits)
    _drop_privileges()
    _check(local_seccomp.install(_LIBC, limits.memory_by_cgroup), "seccomp")


def _build_root(storage_mb: int, scoring_storage_mb: int) -> None:
    """A tmpfs as root, with the system bound in read-only.

    What scoring writes has a tmpfs of its own, so that an agent which fills its disk is still scored.
    """
    _mount(None, "/", None, MS_REC | MS_PRIVATE)
    _mount("tmpfs", ROOT, "tmpfs", MS_NOSUID | MS_NODEV, f"size={storage_mb}m,nr_inodes={256 * storage_mb},mode=755")
    _mount("tmpfs", SPARE, "tmpfs", MS_NOSUID | MS_NODEV, f"size={scoring_storage_mb}m,nr_inodes=16384,mode=755")
    os.chdir(ROOT)
    for name in ("usr", "etc", "dev", "proc", "old-root", *FOLDERS, *SPARE_FOLDERS):
        os.mkdir(name)
    for name in STICKY:
        os.chmod(name, 0o1777)
    for name in SYSTEM_LINKS:
        if os.path.islink(f"/{name}"):
            os.symlink(os.readlink(f"/{name}"), name)
        elif os.path.isdir(f"/{name}"):
            os.mkdir(name)
            _mount(f"/{name}", name, None, MS_BIND | MS_REC)
    for name in SPARE_FOLDERS:
        os.mkdir(f"{SPARE}/{name}")
        _mount(f"{SPARE}/{name}", name, None, MS_BIND)
    _mount("/usr", "usr", None, MS_BIND | MS_REC)
    _mount(ETC, "etc", None, MS_BIND)
    _mount(None, "etc", None, MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID | MS_NODEV)
    _mount("/dev", "dev", None, MS_BIND | MS_REC)
    _mount("run/shm", "dev/shm", None, MS_BIND)
    _mount("devpts", "dev/pts", "devpts", MS_NOSUID | MS_NOEXEC, "newinstance,ptmxmode=0666,mode=0620")
    _mount("proc", "proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    _check(_LIBC.syscall(SYSCALLS[os.uname().machine]["pivot_root"], b".", b"old-root"), "pivot_root")
    _check(_LIBC.umount2(b"/old-root", MNT_DETACH), "umount of the old root")
    os.chdir("/")
    os.rmdir("old-root")
    os.umask(0o022)


def _raise_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", IFF_UP | IFF_RUNNING))


def _set_limits(limits: BoxLimits) -> None:
    """What every process of the box inherits. CPU time is set per command: see `local_command`."""
    max_file_bytes, memory_bytes = limits.max_file_mb << 20, limits.memory_mb << 20
    resource.setrlimit(resource.RLIMIT_FSIZE, (max_file_bytes, max_file_bytes))
    if not limits.memory_by_cgroup:
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 4096))
    # The first process is counted too. The count is per user namespace (Linux 5.14), so boxes do not share it.
    num_processes = limits.max_processes + 1
    resource.setrlimit(resource.RLIMIT_NPROC, (num_processes, num_processes))


def _drop_privileges() -> None:
    _check(_LIBC.prctl(PR_SET_SECUREBITS, SECUREBITS_LOCKED, 0, 0, 0), "securebits")
    for capability in range(64):
        if _LIBC.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) < 0:
            break  # past the last capability that this kernel knows
    _check(_LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    _check(_LIBC.capset(struct.pack("Ii", CAPABILITY_VERSION_3, 0), bytes(24)), "capset")
    # Ends access to this process through ptrace and /proc/1 (memory, file descriptors, environment).
    _check(_LIBC.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0), "dumpable")
    if _LIBC.unshare(CLONE_NEWUSER) == 0:
        raise OSError("a new user namespace could be made inside the box")


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    encoded = [None if text is None else text.encode() for text in (source, target, kind, data)]
    result = _LIBC.mount(encoded[0], encoded[1], encoded[2], ctypes.c_ulong(flags), encoded[3])
    _check(result, f"mount on {target}")


def _check(result: int, what: str) -> None:
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")


def _write(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)
