"""A task in Harbor format: a folder with `task.toml`, `instruction.md`, `environment/`, `tests/`, `solution/`.

`load_task` reads one folder, `load_tasks` a folder of them. What the format can say and we do not run (GPUs, several
steps, a verifier in its own environment) is kept in `metadata["harbor"]`, so that a checkout of any age can be listed
and hashed; `require_supported` is the error at use.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from sandbox_env.task_toml import TaskToml, dockerfile_workdir


@dataclass(frozen=True, slots=True)
class Task:
    """One task, read and checked. Timeouts in seconds, memory and storage in MiB. `digest` is the content hash.

    `name` is the folder's name. `env` is as written, with `${VAR:-default}` unresolved (see `resolve_env`), so that no
    value of the host's environment is ever part of a task. `metadata` is the `[metadata]` table, plus the key
    `harbor`: what else task.toml says (`task`, `steps`, `gpus`, `network_mode`, users, healthcheck, unknown keys ...).
    """

    name: str
    path: Path
    instruction: str
    digest: str
    agent_timeout_s: float = 600.0
    verifier_timeout_s: float = 600.0
    workdir: str = "/app"
    docker_image: str | None = None
    cpus: float = 1.0
    memory_mb: int = 2048
    storage_mb: int = 10240
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])


def load_task(path: str | Path) -> Task:
    """Read and check the task folder `path`. Raises `ValueError` naming file, key, value and remedy."""
    folder = Path(path)
    if not (folder / "task.toml").is_file():
        raise ValueError(f"{folder / 'task.toml'}: missing; a task is a folder with a task.toml")
    toml = TaskToml.read(folder / "task.toml")
    _require_parts(folder, toml)
    dockerfile = folder / "environment" / "Dockerfile"
    workdir = toml.workdir or (dockerfile_workdir(dockerfile) if dockerfile.is_file() else None)
    return Task(
        name=folder.resolve().name,
        path=folder,
        instruction=_read_text(folder / "instruction.md").strip() if (folder / "instruction.md").is_file() else "",
        digest=task_digest(folder),
        agent_timeout_s=toml.agent_timeout_s,
        verifier_timeout_s=toml.verifier_timeout_s,
        workdir=workdir or "/app",
        docker_image=toml.docker_image,
        cpus=toml.cpus,
        memory_mb=toml.memory_mb,
        storage_mb=toml.storage_mb,
        env=toml.env,
        metadata={**toml.metadata, "harbor": toml.harbor},
    )


def load_tasks(path: str | Path) -> list[Task]:
    """Every task folder directly under `path`, sorted by name. Raises `ValueError` if there is none."""
    folder = Path(path).expanduser()
    found = sorted(p.parent for p in folder.glob("*/task.toml")) if folder.is_dir() else []
    if not found:
        raise ValueError(f"{folder}: no task in it; name a folder whose subfolders hold a task.toml")
    return [load_task(p) for p in found]


def task_digest(path: str | Path) -> str:
    """sha256 over every file under `path`: relative name, whether it is executable, content. Links count by target."""
    folder = Path(path)
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*"), key=lambda p: p.relative_to(folder).as_posix()):
        name = file.relative_to(folder).as_posix().encode()
        if file.is_symlink():
            kind, content = b"l", os.readlink(file).encode()
        elif file.is_file():
            kind = b"x" if file.stat().st_mode & 0o111 else b"f"
            content = file.read_bytes()
        else:
            continue
        # Lengths first: without them a name could be read as content, and two different folders would agree.
        digest.update(b"%d %s %s %d " % (len(name), name, kind, len(content)))
        digest.update(content)
    return digest.hexdigest()


def task_set_hash(tasks: Iterable[Task]) -> str:
    """sha256 over the names and digests of `tasks`, whatever their order: two runs may be compared if it agrees."""
    lines = sorted(f"{task.name} {task.digest}\n" for task in tasks)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def resolve_env(
    task: Task,
    environ: Mapping[str, str] | None = None,
    *,
    table: Literal["environment", "verifier", "solution"] = "environment",
) -> dict[str, str]:
    """A task's variables with `${VAR}` and `${VAR:-default}` filled in from `environ` (default: this process's own).

    `table` is the one of task.toml that they stand in; those of "environment" are `task.env`. Raises `ValueError`
    naming task and variable if one without a default is not set. Do not log the result: a value may be a secret.
    """
    known = os.environ if environ is None else environ
    env = task.env if table == "environment" else task.metadata.get("harbor", {}).get(f"{table}_env", {})

    def value_of(match: re.Match[str]) -> str:
        name, default = match.group(1), match.group(2)
        if known.get(name):
            return known[name]
        if default is None and name not in known:
            raise ValueError(f"{task.path / 'task.toml'}: {table}.env: ${{{name}}}; set the variable {name}")
        return default or ""

    return {key: re.sub(r"\$\{(\w+)(?::-([^}]*))?\}", value_of, text) for key, text in env.items()}


def require_supported(task: Task) -> None:
    """Raise `ValueError` naming task and key if the task needs something that changes its meaning when left out."""
    harbor: Mapping[str, Any] = task.metadata.get("harbor", {})
    file = task.path / "task.toml"
    if harbor.get("gpus", 0) > 0:
        raise ValueError(f"{file}: environment.gpus: {harbor['gpus']}; sandboxes have no GPU, leave this task out")
    if harbor.get("steps"):
        raise ValueError(f"{file}: steps: {len(harbor['steps'])}; only single-step tasks run, leave this task out")
    if harbor.get("environment_mode", "shared") != "shared":
        raise ValueError(
            f"{file}: verifier.environment_mode: {harbor['environment_mode']!r}; "
            "only 'shared' runs (tests in the agent's sandbox), leave this task out"
        )
    if not (task.path / "environment" / "Dockerfile").is_file() and task.docker_image is None:
        raise ValueError(f"{task.path / 'environment'}: neither a Dockerfile nor a docker_image; add one of them")


def _require_parts(folder: Path, toml: TaskToml) -> None:
    if toml.harbor.get("steps"):
        return  # A multi-step task keeps instruction and tests in its steps' folders.
    for part in ("instruction.md", "tests/test.sh"):
        if not (folder / part).is_file():
            raise ValueError(f"{folder / part}: missing; every task needs it")
    if not _read_text(folder / "instruction.md").strip():
        raise ValueError(f"{folder / 'instruction.md'}: empty; say what the agent is to do")


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 at byte {error.start}; save it as UTF-8") from error
