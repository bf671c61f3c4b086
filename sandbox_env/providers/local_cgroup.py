"""Control groups that bound the memory and the processes of a box, where this machine lets us make them.

They are made once and used again by later boxes: joining one costs a box a write, and making one costs far more. Where
none can be made (an ordinary user without a delegated tree) the other limits of a box stand alone.
Source: cgroups(7), version 1 and 2.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

MOUNT = Path("/sys/fs/cgroup")
PREFIX = "sandbox-local"
REMOVE_TIMEOUT_S = 2.0
_NUMBERS = itertools.count()
"""Of all cgroups that this process makes, for whatever provider."""


@dataclass(frozen=True, slots=True)
class Cgroup:
    """Where one box is counted: its folders, and the open file in each that a process writes 0 to in order to join."""

    memory_mb: int
    folders: tuple[Path, ...]
    join_fds: tuple[int, ...]
    bounds_memory: bool


class CgroupTree:
    """Cgroups of this run. `take` one per box and `give` it back once the box is gone."""

    def __init__(self, max_processes: int) -> None:
        self._max_processes = max_processes
        self._parents = _find_parents()
        self._free: dict[int, list[Cgroup]] = {}
        self._all: list[Cgroup] = []
        for parent in self._parents:
            _sweep(parent)

    @property
    def usable(self) -> bool:
        """Whether cgroups can be made here."""
        return bool(self._parents)

    def disable(self) -> None:
        """Make no cgroup from now on: this machine lets us make but not join them."""
        self.close()
        self._parents = []

    def take(self, memory_mb: int) -> Cgroup:
        """A cgroup without processes. Where none can be made: one without folders, which bounds nothing."""
        if free := self._free.get(memory_mb):
            return free.pop()
        folders: list[Path] = []
        fds: list[int] = []
        bounds_memory = False
        for parent in self._parents:
            folder = parent / f"{PREFIX}-{os.getpid()}-{next(_NUMBERS)}"
            try:
                folder.mkdir()
                folders.append(folder)
                bounds_memory |= self._bound(folder, memory_mb)
                # `tasks` of version 1 lets one thread move itself, which needs none of the locks of a whole process.
                join = folder / "tasks" if (folder / "tasks").exists() else folder / "cgroup.procs"
                fds.append(os.open(join, os.O_WRONLY | os.O_CLOEXEC))
            except OSError:
                continue
        cgroup = Cgroup(memory_mb, tuple(folders), tuple(fds), bounds_memory)
        self._all.append(cgroup)
        return cgroup

    def give(self, cgroup: Cgroup) -> None:
        """Take back the cgroup of a box that is gone."""
        self._free.setdefault(cgroup.memory_mb, []).append(cgroup)

    def close(self) -> None:
        """Remove all, once no box is left."""
        for cgroup in self._all:
            for fd in cgroup.join_fds:
                os.close(fd)
            for folder in cgroup.folders:
                _remove(folder)
        self._all.clear()
        self._free.clear()

    def _bound(self, folder: Path, memory_mb: int) -> bool:
        """Write the limits that this folder knows. Whether it bounds memory."""
        bounds_memory = False
        # Version 1 wants the bound of memory set before that of memory and swap together.
        for name in ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes", "memory.max"):
            if (folder / name).exists():
                (folder / name).write_text(str(memory_mb << 20))
                bounds_memory = True
        if (folder / "memory.swap.max").exists():
            (folder / "memory.swap.max").write_text("0")
        if (folder / "pids.max").exists():
            (folder / "pids.max").write_text(str(self._max_processes + 1))
        return bounds_memory


def _find_parents() -> list[Path]:
    """Folders in which cgroups can be made that bound memory or processes: one of version 2, or some of version 1."""
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    own = {name: path.lstrip("/") for _, controllers, path in lines for name in controllers.split(",")}
    version_1 = [parent for name in ("memory", "pids") if (parent := _usable(MOUNT / name, own.get(name)))]
    if version_1:
        return version_1
    if "" in own and (MOUNT / "cgroup.controllers").exists():
        # A cgroup with processes may hand no controller down, so look for an ancestor without.
        path = MOUNT / own[""]
        for parent in (path, *path.parents):
            if parent.is_relative_to(MOUNT) and _hands_down(parent):
                return [parent]
    return []


def _usable(mount: Path, own_path: str | None) -> Path | None:
    if own_path is None:
        return None
    for parent in (mount / own_path, mount):
        if parent.is_dir() and os.access(parent, os.W_OK) and (parent / "tasks").exists():
            return parent
    return None


def _hands_down(parent: Path) -> bool:
    """Whether folders made in this one of version 2 bound memory and processes, and this process may fill them."""
    try:
        if not os.access(parent / "cgroup.procs", os.W_OK) or not os.access(parent, os.W_OK):
            return False
        wanted = {"memory", "pids"}
        if not wanted <= set((parent / "cgroup.controllers").read_text().split()):
            return False
        if not wanted <= set((parent / "cgroup.subtree_control").read_text().split()):
            (parent / "cgroup.subtree_control").write_text("+memory +pids")
    except OSError:
        return False
    return True


def _sweep(parent: Path) -> None:
    """Remove what runs that died left here: empty cgroups of ours whose maker is no more."""
    for folder in parent.glob(f"{PREFIX}-*-*"):
        found = re.fullmatch(rf"{PREFIX}-(\d+)-\d+", folder.name)
        if found and not Path("/proc", found[1]).exists():
            with contextlib.suppress(OSError):
                folder.rmdir()


def _remove(folder: Path) -> None:
    # The kernel may count a process for a moment after it was waited for.
    deadline = time.monotonic() + REMOVE_TIMEOUT_S
    while True:
        try:
            folder.rmdir()
            return
        except FileNotFoundError:
            return
        except OSError:
            if time.monotonic() > deadline:
                return
            time.sleep(0.005)
