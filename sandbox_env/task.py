"""A task in Harbor format: a folder with `task.toml`, `instruction.md`, `environment/`, `tests/`, `solution/`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Task:
    """One task, read and checked. Timeouts in seconds, memory and storage in MiB. `digest` is the content hash."""

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
    env: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
