"""Exercises as task folders on disk, and the cache of a whole suite.

A suite is written beside its final name and renamed when it is whole, under a lock, so two runs that start at once
agree. A manifest of every task's digest shows whether a folder found there is whole; a torn one is written again.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import tempfile
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sandbox_env.suites.minibench.exercise import Exercise
from sandbox_env.suites.minibench.scoring import test_script
from sandbox_env.task import task_digest

LOCK_TIMEOUT_S = 120.0
MANIFEST = "manifest.json"

_TASK_TOML = """schema_version = "1.4"

[task]
name = "minibench/{name}"

[metadata]
family = "{family}"
num_turns = {num_turns}

[agent]
timeout_sec = 60.0

[verifier]
timeout_sec = 30.0

[environment]
build_timeout_sec = 120.0
cpus = 1
memory_mb = 512
storage_mb = 64
network_mode = "no-network"
workdir = "/app"
"""


def write_task(exercise: Exercise, folder: Path) -> None:
    """Write the task folder of `exercise`; `folder` must not exist."""
    environment = folder / "environment"
    copy = "COPY files/ /app/\n" if exercise.files else ""
    _write(environment / "Dockerfile", f"FROM {exercise.image}\nWORKDIR /app\n{copy}")
    for name, content in exercise.files.items():
        _write(environment / "files" / name, content)
    toml = _TASK_TOML.format(name=exercise.name, family=exercise.family, num_turns=len(exercise.turns))
    _write(folder / "task.toml", toml)
    _write(folder / "instruction.md", f"{exercise.instruction}\n")
    _write(folder / "tests" / "test.sh", test_script(exercise.checks), executable=True)
    commands = "\n".join(turn.command for turn in exercise.turns)
    _write(folder / "solution" / "solve.sh", f"#!/bin/bash\ncd /app || exit\n{commands}\n", executable=True)


def _write(path: Path, content: str | bytes, *, executable: bool = False) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    # Modes are part of the digest and of the tasks about permissions: they must not depend on the user's umask.
    path.chmod(0o755 if executable else 0o644)


def materialise(root: Path, key: str, exercises: Sequence[Exercise]) -> Path:
    """The folder `root/key` with a whole task for every exercise, written if it is missing or torn.

    Raises `TimeoutError` if another process holds the lock for two minutes, and `OSError` if `root` is not writable.
    """
    folder = root / key
    if is_whole(folder, exercises):
        return folder
    root.mkdir(parents=True, exist_ok=True)
    with _locked(root / ".lock"):
        if not is_whole(folder, exercises):
            _replace(folder, exercises)
    return folder


def is_whole(folder: Path, exercises: Sequence[Exercise]) -> bool:
    """True if the manifest of `folder` names exactly these tasks, and each has the content that was written."""
    try:
        manifest: Mapping[str, Any] = json.loads((folder / MANIFEST).read_text())
        names = {entry.name for entry in folder.iterdir()} - {MANIFEST}
        if not names == set(manifest) == {exercise.name for exercise in exercises}:
            return False
        return all(task_digest(folder / name) == digest for name, digest in manifest.items())
    except (OSError, ValueError):
        return False


def _replace(folder: Path, exercises: Sequence[Exercise]) -> None:
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        whole = scratch / "new"
        for exercise in exercises:
            write_task(exercise, whole / exercise.name)
        manifest = {exercise.name: task_digest(whole / exercise.name) for exercise in exercises}
        _write(whole / MANIFEST, json.dumps(manifest, indent=1) + "\n")
        if folder.exists() or folder.is_symlink():
            folder.rename(scratch / "torn")
        whole.rename(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


@contextmanager
def _locked(path: Path) -> Generator[None]:
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    message = f"{path}: locked for {LOCK_TIMEOUT_S:.0f} s; end the process that holds it"
                    raise TimeoutError(message) from None
                time.sleep(0.05)
        yield
    finally:
        os.close(lock)
