"""`result.json`, `resolved.yaml` and `plan.txt`: what a run was and how it ended, also when it failed."""

from __future__ import annotations

import hashlib
import json
import math
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import yaml

from pipelines.plan import Plan
from pipelines.supervise import Ending, last_step

_GIT_TIMEOUT_S = 10.0
_NOT_HASHED = ("run_dir", "plan_only", "resume", "resume_changed")
_FACTS_OF_THEIR_OWN = ("task_set_hash", "resumed_from")


def write_result(run_dir: Path, plan: Plan, ending: Ending, wall_s: float, overrides: Sequence[str]) -> dict[str, Any]:
    """Write `result.json` and return what it holds. Figures that are not finite become null."""
    config = plan.config
    facts = {key: value for key, value in ending.facts.items() if key not in _FACTS_OF_THEIR_OWN}
    result = {
        "status": ending.status,
        "error": ending.error,
        "name": config["name"],
        "seed": config["seed"],
        "choices": dict(plan.choices),
        "overrides": list(overrides),
        "commit": commit(),
        "config_hash": config_hash(config),
        "task_set_hash": ending.facts.get("task_set_hash", {}),
        "resumed_from": ending.facts.get("resumed_from"),
        "steps": last_step(ending, plan.driver) or 0,
        "wall_s": round(wall_s, 3),
        "metrics": ending.metrics,
        "facts": facts,
        "warnings": ending.warnings,
    }
    write_atomic(run_dir / "result.json", json.dumps(_finite(result), indent=2, allow_nan=False) + "\n")
    return result


def write_config(run_dir: Path, config: Mapping[str, Any]) -> None:
    """Write `resolved.yaml`: the config with every reference followed, enough to repeat the run."""
    write_atomic(run_dir / "resolved.yaml", yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True))


def write_atomic(path: Path, text: str) -> None:
    """A reader sees the old file or the whole new one, also after a crash."""
    part = path.with_name(f".{path.name}.part")
    with open(part, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def config_hash(config: Mapping[str, Any]) -> str:
    """SHA-256 over the resolved config without where it writes and what it goes on from.

    Equal for runs that do the same with the same seed.
    """
    kept = {key: value for key, value in config.items() if key not in _NOT_HASHED}
    kept["stages"] = {name: {**stage, "run": _hashed(stage["run"])} for name, stage in config["stages"].items()}
    text = json.dumps(kept, sort_keys=True, default=str)
    return hashlib.sha256(text.replace(json.dumps(str(config["run_dir"]))[1:-1], "RUN_DIR").encode()).hexdigest()


def _hashed(run: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in run.items() if key not in _NOT_HASHED}


def commit() -> str | None:
    """Commit of the project, with `-dirty` if its tree has changes; None outside a git checkout."""
    root = Path(__file__).parent.parent
    if not (root / ".git").exists():
        return None
    try:
        head = _git(root, "rev-parse", "HEAD")
        return head + ("-dirty" if _git(root, "status", "--porcelain") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_TIMEOUT_S, check=True)
    return done.stdout.strip()


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _finite(child) for key, child in cast(dict[Any, Any], value).items()}
    if isinstance(value, list | tuple):
        return [_finite(child) for child in cast(Sequence[Any], value)]
    if value is None or isinstance(value, str | int | bool):
        return value
    return _finite(value.item()) if hasattr(value, "item") else str(value)
