"""Runs and the arms they belong to: the sides of a comparison, found from what the runs were configured with."""

from __future__ import annotations

import glob
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import yaml

from pipelines.origin import children, dotted
from pipelines.wording import interval, number

NOT_A_CHOICE = ("name", "seed", "run_dir", "plan_only", "resume", "resume_changed")

Values = tuple[str | None, ...]
"""One value per run, None where a run has none."""


@dataclass(frozen=True, slots=True)
class Run:
    """One `result.json`. `options` is its resolved config as `path: value`, without what is its own (seed, folder)."""

    path: Path
    result: Mapping[str, Any]
    options: Mapping[str, str]

    @property
    def seed(self) -> str:
        """Seed as text, since it only names."""
        return str(self.result.get("seed"))

    @property
    def status(self) -> str:
        """How the run ended."""
        return str(self.result.get("status", "unknown"))

    @property
    def succeeded(self) -> bool:
        """True if the run did all its work, so that its figures count."""
        return self.status == "success"

    @property
    def choices(self) -> Mapping[str, str]:
        """Config group to chosen option."""
        return _texts(self.result.get("choices"))

    @property
    def task_set_hash(self) -> Mapping[str, str]:
        """Split (`train`, `eval`) to the hash of its tasks."""
        return _texts(self.result.get("task_set_hash"))

    def metric(self, name: str) -> float | None:
        """A final metric."""
        return number(self._metrics, name)

    def interval(self, name: str) -> tuple[float, float] | None:
        """The interval among the final metrics called `name`."""
        return interval(self._metrics, name)

    @property
    def _metrics(self) -> Mapping[str, Any]:
        metrics: Any = self.result.get("metrics")
        return cast("Mapping[str, Any]", metrics) if isinstance(metrics, Mapping) else {}


@dataclass(frozen=True, slots=True)
class Arm:
    """Runs that differ only in their seed. `name` is what sets the arm apart from the others."""

    name: str
    runs: Sequence[Run]

    @property
    def counted(self) -> list[Run]:
        """The runs whose figures count: those that succeeded, one per seed, the latest."""
        latest = {run.seed: run for run in sorted(self.runs, key=lambda run: str(run.path)) if run.succeeded}
        return list(latest.values())

    def values(self, metric: str) -> list[float]:
        """A final metric of the runs that count and have it."""
        return [value for run in self.counted if (value := run.metric(metric)) is not None]


def find_runs(places: Iterable[str]) -> tuple[list[Run], list[str]]:
    """Every run under `places` (run folders, folders above them, result files, patterns), each once, by path.

    Also returns a line for each `result.json` that could not be read.
    """
    files: set[Path] = set()
    for place in places:
        for found in map(Path, glob.glob(place, recursive=True)):
            files |= set(found.rglob("result.json")) if found.is_dir() else {found}
    runs: list[Run] = []
    problems: list[str] = []
    for file in sorted({file.resolve() for file in files if file.name == "result.json"}):
        try:
            result: Any = json.loads(file.read_text(encoding="utf-8"))
            runs.append(Run(_near(file.parent), dict(result), _options(file.parent, str(dict(result).get("seed")))))
        except (OSError, ValueError, TypeError, yaml.YAMLError) as error:
            problems.append(f"{file}: not readable: {str(error).splitlines()[0]}")
    return runs, problems


def arms_of(runs: Sequence[Run]) -> list[Arm]:
    """Group the runs by all that differs between them but seed and name, in the order of their names.

    An arm is named by the choices that differ, as `dataset=train8`, and by the options that differ and are not
    settled by those choices, as `trainer.lr=0.001`. An option that only repeats another is left out of the name.
    """
    choices = [run.choices for run in runs]
    known = {name for c in choices for name in c}
    groups = sorted(name for name in known if len({c.get(name) for c in choices}) > 1)
    chosen = [tuple(c.get(name) for name in groups) for c in choices]
    parts: dict[str, Values] = {name: tuple(c.get(name) for c in choices) for name in groups}
    told: set[Values] = set()
    tops = {option.partition(".")[0] for run in runs for option in run.options}
    anywhere = any(group not in tops for group in groups)  # such a group, as pipeline, may set any option
    options = {option for run in runs for option in run.options}
    settled = {option for option in options if anywhere or option.partition(".")[0] in groups}
    for option in sorted(options, key=lambda path: (path not in settled, path.count("."), path)):
        values = tuple(run.options.get(option) for run in runs)
        if len(set(values)) == 1 or values in told:
            continue
        told.add(values)
        if option not in settled or len(set(zip(chosen, values, strict=True))) > len(set(chosen)):
            parts[option] = values
    members: dict[str, list[Run]] = {}
    for index, run in enumerate(runs):
        name = ", ".join(f"{key}={values[index] or '(unset)'}" for key, values in parts.items())
        members.setdefault(name or str(run.result.get("name", "all runs")), []).append(run)
    return [Arm(name, members[name]) for name in sorted(members)]


def _options(run_dir: Path, seed: str) -> Mapping[str, str]:
    """The leaves of `resolved.yaml`, the run's own folder and seed taken out wherever they are used."""
    file = run_dir / "resolved.yaml"
    config: Any = yaml.safe_load(file.read_text(encoding="utf-8")) if file.is_file() else {}
    own = str(dict(children(config)).get("run_dir") or run_dir)
    options: dict[str, str] = {}
    for path, value in _leaves(config, ()):
        if path[0] not in NOT_A_CHOICE and not (path[-1] == "seed" and str(value) == seed):
            options[dotted(path)] = "null" if value is None else str(value).replace(own, "RUN_DIR")
    return options


def _leaves(node: Any, path: tuple[str | int, ...]) -> Iterable[tuple[tuple[str | int, ...], Any]]:
    inside = list(children(node))
    if not inside and path:
        yield path, node
    for key, child in inside:
        yield from _leaves(child, (*path, key))


def _texts(value: Any) -> Mapping[str, str]:
    return {str(k): str(v) for k, v in cast("Mapping[Any, Any]", value).items()} if isinstance(value, Mapping) else {}


def _near(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
