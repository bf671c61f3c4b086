"""`task.toml` of the Harbor format, versions 1.0 to 1.4 and the older keys, as typed values.

Source of the keys and defaults: the format of Harbor 0.25, which terminal-bench-2 uses. Every fault is one
`ValueError`: `<file>: <key>: <value>; <remedy>`. A key that we do not know is kept, not refused, so that a newer
checkout can still be read; it is listed under `harbor["unknown_keys"]`.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, cast

SCHEMA_VERSIONS = ("1.0", "1.1", "1.2", "1.3", "1.4")
NETWORK_MODES = ("public", "no-network", "allowlist")
_SIZES_MB = {"K": 1 / 1024, "M": 1.0, "G": 1024.0, "T": 1024.0 * 1024.0}

_KNOWN_KEYS = {
    "": "schema_version version task metadata agent verifier environment solution steps artifacts source "
    "multi_step_reward_strategy",
    "agent": "timeout_sec user network_mode allowed_hosts",
    "verifier": "timeout_sec env user environment_mode environment network_mode allowed_hosts",
    "environment": "build_timeout_sec docker_image cpus memory_mb storage_mb memory storage gpus gpu_types env workdir "
    "healthcheck network_mode allowed_hosts allow_internet mcp_servers skills_dir os tpu",
    "solution": "env",
}


@dataclass(frozen=True, slots=True)
class TaskToml:
    """The values of one `task.toml` that a run needs; all others are in `harbor`. Seconds and MiB."""

    agent_timeout_s: float
    verifier_timeout_s: float
    workdir: str | None
    docker_image: str | None
    cpus: float
    memory_mb: int
    storage_mb: int
    env: dict[str, str]
    metadata: dict[str, Any]
    harbor: dict[str, Any]

    @staticmethod
    def read(path: Path) -> TaskToml:
        """Parse and check the file `path`."""
        try:
            data = tomllib.loads(path.read_text(encoding="utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{path}: not valid TOML ({error}); correct that line") from error
        root = _Table(path, "", data)
        agent, verifier, environment = (root.table(name) for name in ("agent", "verifier", "environment"))
        workdir = environment.text("workdir")
        if workdir is not None and not workdir.startswith("/"):
            raise environment.fault("workdir", workdir, "use an absolute path")
        return TaskToml(
            agent_timeout_s=agent.positive("timeout_sec", 600.0),
            verifier_timeout_s=verifier.positive("timeout_sec", 600.0),
            workdir=workdir,
            docker_image=environment.text("docker_image"),
            cpus=environment.positive("cpus", 1.0),
            memory_mb=environment.size_mb("memory", 2048),
            storage_mb=environment.size_mb("storage", 10240),
            env=environment.text_map("env"),
            metadata=dict(root.table("metadata").values),
            harbor=_harbor_rest(root, agent, verifier, environment),
        )


@dataclass(frozen=True, slots=True)
class _Table:
    """One table of the file, with its name for the messages."""

    file: Path
    name: str
    values: Mapping[str, Any]

    def fault(self, key: str, value: object, remedy: str) -> ValueError:
        where = f"{self.name}.{key}" if self.name else key
        return ValueError(f"{self.file}: {where}: {value!r}; {remedy}")

    def table(self, key: str) -> _Table:
        value = self.values.get(key, {})
        if not isinstance(value, dict):
            raise self.fault(key, value, f"write a table, [{key}]")
        return _Table(self.file, f"{self.name}.{key}" if self.name else key, cast("dict[str, Any]", value))

    def text(self, key: str, choices: tuple[str, ...] = ()) -> str | None:
        value = self.values.get(key)
        if value is not None and (not isinstance(value, str) or not value or "\0" in value):
            raise self.fault(key, value, "write a non-empty string")
        if value is not None and choices and value not in choices:
            raise self.fault(key, value, f"use one of {', '.join(choices)}")
        return value

    def positive(self, key: str, default: float) -> float:
        value = self.values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not (0 < value < math.inf):
            raise self.fault(key, value, "write a finite number above 0")
        return float(value)

    def count(self, key: str) -> int:
        value = self.values.get(key, 0)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self.fault(key, value, "write a whole number, 0 or more")
        return value

    def text_map(self, key: str) -> dict[str, str]:
        table = self.table(key)
        for name, value in table.values.items():
            if not isinstance(value, str):
                raise table.fault(name, value, "write a string, in quotes")
        return dict(table.values)

    def size_mb(self, key: str, default: int) -> int:
        """`<key>_mb = 2048`, or the older `<key> = "2G"`."""
        modern, legacy = self.values.get(f"{key}_mb"), self.values.get(key)
        if modern is not None and (isinstance(modern, bool) or not isinstance(modern, int) or modern < 1):
            raise self.fault(f"{key}_mb", modern, "write a whole number of MiB above 0")
        if legacy is None:
            return default if modern is None else modern
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT])(?:i?B)?", str(legacy).strip(), re.IGNORECASE)
        if match is None or float(match.group(1)) <= 0:
            raise self.fault(key, legacy, f'write a size like "2G", or {key}_mb = 2048')
        size = max(1, math.ceil(float(match.group(1)) * _SIZES_MB[match.group(2).upper()]))
        if modern is not None and modern != size:
            raise self.fault(key, legacy, f"it disagrees with {key}_mb = {modern}; keep one of the two")
        return size


def _harbor_rest(root: _Table, agent: _Table, verifier: _Table, environment: _Table) -> dict[str, Any]:
    """What the file says beyond `TaskToml`'s fields: checked where it changes the meaning, else kept as written."""
    steps = root.values.get("steps", [])
    if not isinstance(steps, list):
        raise root.fault("steps", steps, "write an array of tables, [[steps]]")
    rest: dict[str, Any] = {
        "schema_version": _schema_version(root),
        "build_timeout_s": environment.positive("build_timeout_sec", 600.0),
        "gpus": environment.count("gpus"),
        "network_mode": _network_mode(environment),
        "environment_mode": verifier.text("environment_mode", ("shared", "separate")) or "shared",
        "verifier_env": verifier.text_map("env"),
        "solution_env": root.table("solution").text_map("env"),
        "task": dict(root.table("task").values),
    }
    for table, key, name in (
        (root, "steps", "steps"),
        (root, "artifacts", "artifacts"),
        (agent, "user", "agent_user"),
        (agent, "network_mode", "agent_network_mode"),
        (verifier, "user", "verifier_user"),
        (environment, "allowed_hosts", "allowed_hosts"),
        (environment, "healthcheck", "healthcheck"),
        (environment, "mcp_servers", "mcp_servers"),
    ):
        if table.values.get(key):
            rest[name] = table.values[key]
    unknown = [
        f"{table.name}.{key}" if table.name else key
        for table in (root, agent, verifier, environment)
        for key in table.values
        if key not in _KNOWN_KEYS[table.name].split()
    ]
    return {**rest, "unknown_keys": unknown} if unknown else rest


def _schema_version(root: _Table) -> str:
    key = "schema_version" if "schema_version" in root.values else "version"
    version = root.values.get(key, SCHEMA_VERSIONS[-1])
    if version not in SCHEMA_VERSIONS:
        raise root.fault(key, version, f'use one of "{SCHEMA_VERSIONS[0]}" to "{SCHEMA_VERSIONS[-1]}"')
    return version


def _network_mode(environment: _Table) -> str:
    mode = environment.text("network_mode", NETWORK_MODES)
    allow = environment.values.get("allow_internet")
    if allow is not None and not isinstance(allow, bool):
        raise environment.fault("allow_internet", allow, "write true or false, or network_mode instead")
    if mode is not None and allow is not None and allow != (mode != "no-network"):
        raise environment.fault("allow_internet", allow, f"it disagrees with network_mode = {mode!r}; drop it")
    return mode or ("no-network" if allow is False else "public")


def dockerfile_workdir(path: Path) -> str | None:
    """The working directory after the last stage of the Dockerfile `path`; None if it sets none.

    Relative WORKDIRs build on the one before, a stage inherits from the stage that it is FROM, and `$NAME` is filled
    in from ENV and ARG of the file. Raises `ValueError` for a name that the file does not define.
    """
    stages: dict[str, str | None] = {}
    workdir: str | None = None
    stage = ""
    variables: dict[str, str] = {}
    text = re.sub(r"(?m)^\s*#.*\n?", "", path.read_text(encoding="utf-8", errors="replace"))
    for line in re.sub(r"\\[ \t]*\n", " ", text).splitlines():
        instruction, _, rest = line.strip().partition(" ")
        words = rest.split()
        match instruction.upper():
            case "FROM" if words:
                stages[stage] = workdir
                base = next((word for word in words if not word.startswith("--")), "")
                workdir = stages.get(base.lower())
                stage = words[-1].lower() if len(words) > 2 and words[-2].upper() == "AS" else ""
            case "ENV" | "ARG":
                variables |= _assignments(rest)
            case "WORKDIR":
                target = _expanded(rest.strip().strip("\"'"), variables, path)
                workdir = str(PurePosixPath(workdir or "/") / target)
            case _:
                pass
    return workdir


def _assignments(rest: str) -> dict[str, str]:
    pairs = re.findall(r"""(\w+)=("[^"]*"|'[^']*'|\S*)""", rest)
    if not pairs and " " in rest.strip():
        pairs = [tuple(rest.strip().split(None, 1))]  # The old form, ENV NAME value.
    return {name: value.strip("\"'") for name, value in pairs}


def _expanded(text: str, variables: Mapping[str, str], path: Path) -> str:
    def value_of(match: re.Match[str]) -> str:
        name = match.group(1) or match.group(2)
        if name not in variables:
            raise ValueError(f"{path}: WORKDIR: {text!r}; set environment.workdir in task.toml")
        return variables[name]

    return re.sub(r"\$(?:\{(\w+)\}|(\w+))", value_of, text)
