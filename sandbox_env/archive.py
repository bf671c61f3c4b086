"""Folders as tar archives: what travels into a sandbox. The same content gives the same bytes on every machine."""

from __future__ import annotations

import io
import stat
import tarfile
from pathlib import Path, PurePosixPath


class ArchiveBuilder:
    """Collects files and folders for one tar. Order of adding is kept; times, users and groups are left out."""

    def __init__(self) -> None:
        self._buffer = io.BytesIO()
        self._tar = tarfile.open(fileobj=self._buffer, mode="w", format=tarfile.PAX_FORMAT)  # noqa: SIM115
        self._folders: set[str] = set()

    def add_folder(self, name: str | PurePosixPath, mode: int = 0o755) -> None:
        """Add a folder; its mode counts only the first time."""
        if str(name) not in self._folders:
            self._folders.add(str(name))
            self._add(str(name), mode, tarfile.DIRTYPE, b"")

    def add_file(self, name: str | PurePosixPath, content: bytes, mode: int = 0o644) -> None:
        """Add a regular file."""
        self._add(str(name), mode, tarfile.REGTYPE, content)

    def add_tree(self, source: Path, name: str | PurePosixPath = "") -> None:
        """Add the file or folder `source` and all below it as `name`. Raises `ValueError` for links and devices."""
        mode = source.lstat().st_mode
        if stat.S_ISREG(mode):
            self.add_file(name, source.read_bytes(), stat.S_IMODE(mode))
        elif stat.S_ISDIR(mode):
            if str(name):
                self.add_folder(name, stat.S_IMODE(mode))
            for child in sorted(source.iterdir()):
                self.add_tree(child, PurePosixPath(name, child.name))
        else:
            raise ValueError(f"{source}: neither a regular file nor a folder; replace it by a copy of what it names")

    def build(self) -> bytes:
        """The finished tar; nothing can be added afterwards."""
        self._tar.close()
        return self._buffer.getvalue()

    def _add(self, name: str, mode: int, kind: bytes, content: bytes) -> None:
        info = tarfile.TarInfo(name)
        info.type, info.mode, info.size = kind, mode, len(content)
        self._tar.addfile(info, io.BytesIO(content))


def pack(folder: Path) -> bytes:
    """The content of `folder` as a tar with relative names, sorted. `ValueError` if it is no folder or holds a link."""
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder")
    builder = ArchiveBuilder()
    builder.add_tree(folder)
    return builder.build()
