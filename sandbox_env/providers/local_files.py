"""Files into and out of a box, handled inside it, where a path can name nothing of the host.

A command may have left links, folders or locked folders where a file is to go. Nothing here follows a link: what is in
the way of an upload is removed, what is a link on the way of a download is "no such file".
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import shutil
import stat
import tarfile
import time

SYSTEM = frozenset(("bin", "dev", "etc", "lib", "lib32", "lib64", "libx32", "proc", "sbin", "sys", "usr"))
"""Folders at the root that belong to the system: nothing is uploaded there, nothing downloaded."""
OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

NO_FILE = frozenset((errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EACCES, errno.ENXIO, errno.ENAMETOOLONG))
"""What opening a file says when there is none that may be read."""


def unpack(archive: bytes, target: str) -> None:
    """Write the files of the tar `archive` under the absolute folder `target`.

    Only regular files and folders with relative names without `..`; all are checked before the first is written.
    Raises `ValueError` for a bad archive or target, `OSError` when the disk is full.
    """
    parts = _absolute_parts(target)
    try:
        with tarfile.open(fileobj=io.BytesIO(archive), mode="r:") as tar:
            members = [(member, _relative_parts(member)) for member in tar]
            for member, below in members:
                _write_member(tar, member, [*parts, *below])
    except tarfile.TarError as error:
        raise ValueError(f"not a tar archive: {error}") from None
    os.close(_open_folder(parts))


def read_file(path: str, max_bytes: int) -> bytes | None:
    """The regular file at absolute `path`; None if there is none. Raises `ValueError` if it is over `max_bytes`."""
    parts = _absolute_parts(path)
    if not parts or parts[0] in SYSTEM:
        return None
    try:
        fd = _open_file(parts)
    except OSError as error:
        if error.errno in NO_FILE:
            return None
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        return None
    with open(fd, "rb") as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise ValueError(f"{path}: larger than {max_bytes} bytes")
    return content


def _open_file(parts: list[str]) -> int:
    folder = os.open("/", OPEN_FOLDER)
    try:
        for part in parts[:-1]:
            below = os.open(part, OPEN_FOLDER, dir_fd=folder)
            os.close(folder)
            folder = below
        # Without O_NONBLOCK a named pipe would be waited for.
        return os.open(parts[-1], os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    finally:
        os.close(folder)


def _absolute_parts(path: str) -> list[str]:
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if not path.startswith("/") or ".." in parts or "\0" in path:
        raise ValueError(f"{path!r}: not an absolute path without '..'")
    return parts


def _relative_parts(member: tarfile.TarInfo) -> list[str]:
    parts = [part for part in member.name.split("/") if part not in ("", ".")]
    if member.name.startswith("/") or ".." in parts or "\0" in member.name:
        raise ValueError(f"archive member {member.name!r}: not a relative path without '..'")
    if not (member.isreg() or member.isdir()):
        raise ValueError(f"archive member {member.name!r}: neither a regular file nor a folder")
    return parts


def _write_member(tar: tarfile.TarFile, member: tarfile.TarInfo, path: list[str]) -> None:
    if path and path[0] in SYSTEM:
        raise ValueError(f"/{'/'.join(path)}: the system is read-only in a local sandbox")
    if member.isdir():
        folder = _open_folder(path)
        if path:
            os.fchmod(folder, member.mode & 0o777 | 0o700)
        os.close(folder)
        return
    source = tar.extractfile(member)
    if not path or source is None:
        raise ValueError(f"archive member {member.name!r}: a file needs a name")
    folder = _open_folder(path[:-1])
    try:
        _make_way(folder, path[-1])
        fd = os.open(path[-1], os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=folder)
        with open(fd, "wb") as file:
            shutil.copyfileobj(source, file, 1 << 20)
            os.fchmod(fd, member.mode & 0o777)
    finally:
        os.close(folder)


def _open_folder(parts: list[str]) -> int:
    """Open the folder, made if missing, writable if it is the box's own."""
    folder = os.open("/", OPEN_FOLDER)
    for part in parts:
        try:
            below = _make_folder(folder, part)
        finally:
            os.close(folder)
        folder = below
    return folder


def _make_folder(parent: int, name: str) -> int:
    try:
        folder = os.open(name, OPEN_FOLDER, dir_fd=parent)
    except OSError as error:
        if error.errno == errno.EACCES:
            os.chmod(name, 0o755, dir_fd=parent)
        elif error.errno in (errno.ENOTDIR, errno.ELOOP):
            os.unlink(name, dir_fd=parent)
        elif error.errno != errno.ENOENT:
            raise
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, 0o755, dir_fd=parent)
        folder = os.open(name, OPEN_FOLDER, dir_fd=parent)
    mode = os.fstat(folder).st_mode
    if mode & 0o700 != 0o700:
        os.fchmod(folder, stat.S_IMODE(mode) | 0o700)
    return folder


def _make_way(folder: int, name: str) -> None:
    """Remove what is called `name`. A folder is renamed, since one that a command locked cannot be emptied."""
    try:
        os.unlink(name, dir_fd=folder)
    except FileNotFoundError:
        return
    except IsADirectoryError:
        os.rename(name, f".replaced-{name}-{time.monotonic_ns()}", src_dir_fd=folder, dst_dir_fd=folder)
