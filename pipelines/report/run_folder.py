"""What a run folder holds, read tolerantly: a run that failed early, or still goes on, has a report too."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, cast

import pyarrow.parquet as pq  # pyright: ignore[reportMissingTypeStubs]

from pipelines.ledger.reading import LEDGER_FILE, LedgerUnreadable, opened
from pipelines.ledger.summary import Summary

parquet: Any = pq
"""Untyped: pyarrow comes without type stubs."""

CONVERSATION = ("prompt_text", "turns", "versions", "logprobs", "timings")


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """One row of `episodes/*.parquet` without its conversation; `part` and `index` say where that is.

    Times are seconds since the epoch. See `miles_rl.rollout.recorder` for the columns.
    """

    kind: str
    task: str
    group_id: int | None
    sample_id: str
    attempt: int
    version: int | None
    oldest_version: int | None
    newest_version: int | None
    outcome: str
    stop_reason: str
    reward: float | None
    num_turns: int
    num_policy_tokens: int
    detail: str
    started_s: float
    ready_s: float | None
    finished_s: float
    part: Path = field(compare=False)
    index: int = field(compare=False)

    @property
    def label(self) -> str:
        """`solved`, `partial` or `unsolved` for a scored episode, else the outcome that made it a failure."""
        if self.outcome != "scored" or self.reward is None:
            return self.outcome
        return "solved" if self.reward >= 1 else "partial" if self.reward > 0 else "unsolved"

    @property
    def scored(self) -> bool:
        """True if the episode has a reward."""
        return self.outcome == "scored" and self.reward is not None


COLUMNS = [f.name for f in fields(Episode) if f.name not in ("part", "index")]


@dataclass(frozen=True, slots=True)
class RunFolder:
    """A run as its folder tells it. `metrics` maps step to figures, None where a value was not finite. `ledger` is
    None if there is none that can be read.

    `notes` says in one line each what could not be read.
    """

    path: Path
    result: Mapping[str, Any]
    metrics: Mapping[int, Mapping[str, float | None]]
    episodes: Sequence[Episode]
    config: str
    plan: str
    log_tail: str
    notes: Sequence[str]
    ledger: Summary | None = None

    @classmethod
    def read(cls, path: str | Path) -> RunFolder:
        """Read the folder; `FileNotFoundError` if it is none."""
        path = Path(path)
        if not path.is_dir():
            raise FileNotFoundError(f"{path}: no such run folder")
        notes: list[str] = []
        return cls(
            path=path,
            result=_read_result(path / "result.json", notes),
            metrics=_read_metrics(path / "metrics.jsonl", notes),
            episodes=_read_episodes(path / "episodes", notes),
            config=_read_text(path / "resolved.yaml"),
            plan=_read_text(path / "plan.txt"),
            log_tail=_read_text(path / "log.txt")[-8000:],
            notes=notes,
            ledger=_read_ledger(path, notes),
        )

    def series(self, name: str) -> list[tuple[float, float | None]]:
        """The metric `name` over the steps that have it."""
        return [(float(step), row[name]) for step, row in sorted(self.metrics.items()) if name in row]

    def metric_names(self) -> list[str]:
        """Names of all metrics, in the order in which they first came."""
        return list(dict.fromkeys(name for row in self.metrics.values() for name in row))

    def spans(self, name: str) -> list[tuple[float, float]]:
        """Start and end (seconds since the epoch) of everything timed as `time/{name}_start_s` and `_end_s`."""
        ends = [(row.get(f"time/{name}_start_s"), row.get(f"time/{name}_end_s")) for row in self.metrics.values()]
        return sorted((start, end) for start, end in ends if start is not None and end is not None and end >= start)

    def conversations(self, episodes: Iterable[Episode]) -> list[tuple[Episode, Mapping[str, Any]]]:
        """The episodes with their conversation columns, part by part."""
        wanted: dict[Path, list[Episode]] = {}
        for episode in episodes:
            wanted.setdefault(episode.part, []).append(episode)
        found: list[tuple[Episode, Mapping[str, Any]]] = []
        for part, members in wanted.items():
            rows = parquet.read_table(part, columns=list(CONVERSATION)).take([e.index for e in members]).to_pylist()
            found += zip(members, cast("list[dict[str, Any]]", rows), strict=True)
        return found


def _read_text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def _read_ledger(path: Path, notes: list[str]) -> Summary | None:
    if not (path / LEDGER_FILE).is_file():
        return None
    try:
        with opened(path) as ledger:
            return Summary.of(ledger)
    except LedgerUnreadable as error:
        notes.append(str(error))
        return None


def _read_result(path: Path, notes: list[str]) -> Mapping[str, Any]:
    if not path.is_file():
        return {}
    try:
        result: Any = json.loads(_read_text(path))
    except ValueError as error:
        notes.append(f"result.json is not readable: {error}")
        return {}
    return cast("dict[str, Any]", result) if isinstance(result, dict) else {}


def _read_metrics(path: Path, notes: list[str]) -> dict[int, dict[str, float | None]]:
    """In order of step. The file's lines are in the order in which they became known, so a late evaluation's differ."""
    rows: dict[int, dict[str, float | None]] = {}
    torn = 0
    for line in _read_text(path).splitlines():
        try:
            row: Any = json.loads(line)
            figures = {str(k): v for k, v in cast("dict[str, Any]", row).items() if k not in ("step", "non_finite")}
            own = rows.setdefault(int(row["step"]), {})
        except (ValueError, KeyError, TypeError, AttributeError):
            torn += 1
            continue
        own |= {k: v for k, v in figures.items() if v is None or type(v) in (int, float)}
    if torn:
        notes.append(f"metrics.jsonl: {torn} unreadable lines were left out")
    return dict(sorted(rows.items()))


def _read_episodes(folder: Path, notes: list[str]) -> list[Episode]:
    episodes: list[Episode] = []
    for part in sorted(folder.glob("*.parquet")) if folder.is_dir() else []:
        try:
            rows = parquet.read_table(part, columns=COLUMNS).to_pylist()
        except (OSError, ValueError, KeyError) as error:
            notes.append(f"episodes/{part.name} could not be read: {error}")
            continue
        episodes += [Episode(**row, part=part, index=index) for index, row in enumerate(rows)]
    return sorted(episodes, key=lambda episode: episode.finished_s)
