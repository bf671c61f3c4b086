"""What a local sandbox starts from: a task's Dockerfile turned into archives to unpack and programs to run.

FROM is replaced by the machine's own read-only system. Everything is read once per task, not once per sandbox.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from sandbox_env.archive import ArchiveBuilder
from sandbox_env.dockerfile import BASE_ENV, OTHER_PROVIDER, Copy, MakeFolder, Run, parse_dockerfile
from sandbox_env.providers.local_files import SYSTEM
from sandbox_env.providers.local_namespaces import FOLDERS, SPARE_FOLDERS
from sandbox_env.task import Task, require_supported, resolve_env

LOCAL_ENV = {
    **BASE_ENV,
    "LANG": "C.UTF-8",
    # A box has one user, who is called root but may give files to nobody else; tar would try, and fail.
    "TAR_OPTIONS": "--no-same-owner",
}


@dataclass(frozen=True, slots=True)
class LocalImage:
    """`parts` in order: tars for the root folder, and programs to run. `env` holds for every command afterwards."""

    parts: tuple[bytes | Run, ...]
    env: Mapping[str, str]


def build_image(task: Task) -> LocalImage:
    """Read the task's environment. Raises `ValueError` naming the file, what is wrong, and the remedy."""
    require_supported(task)
    folder = task.path / "environment"
    if not (folder / "Dockerfile").is_file():
        raise ValueError(f"{folder}: only a docker_image ({task.docker_image}); add a Dockerfile or {OTHER_PROVIDER}")
    dockerfile = parse_dockerfile(folder / "Dockerfile")
    layers = _Layers(folder)
    for step in dockerfile.steps:
        if isinstance(step, MakeFolder):
            layers.make_folder(step.path, f"{folder / 'Dockerfile'}: WORKDIR {step.path}")
        elif isinstance(step, Copy):
            layers.copy(step)
        else:
            layers.run(step)
    layers.make_folder(task.workdir, f"{task.path}: workdir {task.workdir}")
    return LocalImage(layers.finish(), {**LOCAL_ENV, **dockerfile.env, **resolve_env(task)})


class _Layers:
    """Gathers what is unpacked together, until a program has to run in between."""

    def __init__(self, folder: Path) -> None:
        self._context = folder
        self._parts: list[bytes | Run] = []
        self._builder = ArchiveBuilder()
        self._known_folders = {f"/{name}" for name in (*FOLDERS, *SPARE_FOLDERS)} | {"/"}

    def make_folder(self, path: str, where: str) -> None:
        """A folder that exists from now on, with those above it."""
        self._require_writable(path, where)
        for folder in (*reversed(PurePosixPath(path).parents), PurePosixPath(path)):
            if str(folder) not in self._known_folders:
                self._known_folders.add(str(folder))
                self._builder.add_folder(folder.relative_to("/"))

    def copy(self, step: Copy) -> None:
        """Files of the environment folder, placed as Docker would."""
        self._require_writable(step.target, f"{step.where}: COPY to {step.target}")
        for name in step.sources:
            source = self._context / name
            if not source.exists():
                raise ValueError(f"{step.where}: COPY {name}; there is no {source}")
            target = PurePosixPath(step.target)
            if source.is_dir():
                self.make_folder(str(target), step.where)
            elif step.into_folder or str(target) in self._known_folders:
                self.make_folder(str(target), step.where)
                target = target / source.name
            self._builder.add_tree(source, target.relative_to("/"))
            if source.is_dir():
                self._note_folders(source, target)

    def run(self, step: Run) -> None:
        """A program to run once what was gathered so far is in place."""
        self._flush()
        self._parts.append(step)

    def finish(self) -> tuple[bytes | Run, ...]:
        """All parts in order."""
        self._flush()
        return tuple(self._parts)

    def _flush(self) -> None:
        archive = self._builder.build()
        if archive.strip(b"\0"):
            self._parts.append(archive)
        self._builder = ArchiveBuilder()

    def _note_folders(self, source: Path, target: PurePosixPath) -> None:
        for path in source.rglob("*"):
            if path.is_dir():
                self._known_folders.add(str(target / path.relative_to(source).as_posix()))

    def _require_writable(self, path: str, where: str) -> None:
        parts = PurePosixPath(path).parts
        if len(parts) > 1 and parts[1] in SYSTEM:
            raise ValueError(f"{where}; the system is read-only here: use another folder or {OTHER_PROVIDER}")
