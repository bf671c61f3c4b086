"""What a ledger says of a run as a whole: counts, causes, timings."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from pipelines.ledger.reading import GroupRow, LedgerFile, SampleRow
from pipelines.ledger.unfinished import Unfinished, unfinished
from pipelines.wording import clean

STAGES = {"sandbox_failed": "sandbox", "engine_failed": "engine", "verifier_failed": "verifier"}
"""The part of the system that failed, by the outcome."""

_LONGEST_CAUSE = 160
_IDS = re.compile(r"\b(?=[0-9a-f-]*[0-9])(?=[0-9a-f-]*[a-f])[0-9a-f]{6,}(-[0-9a-f]+)*\b|\bg\d+\.\d+\.\d+\b")
_NUMBERS = re.compile(r"(?<!HTTP )(?<!\d)\d+(?:[.,:]\d+)*(?:e[+-]?\d+)?")

Cause = tuple[str, str, str]
"""Task, stage and kind of a failure."""


@dataclass(slots=True)
class Durations:
    """Seconds that something took, once per sample."""

    values: list[float] = field(default_factory=list[float])

    def add(self, start_s: float | None, end_s: float | None) -> None:
        """Count one, if both ends are known and the clock did not go back between them."""
        if start_s is not None and end_s is not None and end_s >= start_s:
            self.values.append(end_s - start_s)

    def figures(self) -> dict[str, float | int | None]:
        """Median, 95th percentile and most; None without values."""
        ordered = sorted(self.values)
        return {
            "num": len(ordered),
            "p50": _quantile(ordered, 0.5),
            "p95": _quantile(ordered, 0.95),
            "max": ordered[-1] if ordered else None,
        }


@dataclass(slots=True)
class Summary:
    """The counts of one ledger. `attempts[k]` is the number of samples that were attempted k times."""

    states: Counter[str] = field(default_factory=Counter[str])
    attempts: Counter[int] = field(default_factory=Counter[int])
    groups: Counter[str] = field(default_factory=Counter[str])
    groups_by_task: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])
    batches: Counter[int] = field(default_factory=Counter[int])
    failures: Counter[Cause] = field(default_factory=Counter[Cause])
    discarded: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])
    leased_again: int = 0
    staleness: Counter[int] = field(default_factory=Counter[int])
    wait: Durations = field(default_factory=Durations)
    running: Durations = field(default_factory=Durations)
    until_trained: Durations = field(default_factory=Durations)
    checkpoints: list[int] = field(default_factory=list[int])
    unfinished: list[Unfinished] = field(default_factory=list[Unfinished])

    @classmethod
    def of(cls, ledger: LedgerFile) -> Summary:
        """Read a whole ledger once."""
        summary, now_s, groups, resumed_s = cls(), ledger.now_s(), ledger.groups(), ledger.resumed_s()
        for group in groups.values():
            summary._add_group(group)
        for group_id, rows in groupby(ledger.samples(), key=lambda row: row.group_id):
            samples = list(rows)
            for _, attempts in groupby(samples, key=lambda row: row.sample_index):
                summary.attempts[len(list(attempts))] += 1
            for sample in samples:
                summary._add(sample, resumed_s)
            group = groups.get(group_id) or GroupRow(group_id, samples[0].task, 0, "", None)
            summary.unfinished += unfinished(group, samples, now_s)
        versions = ledger.database.execute("SELECT version FROM checkpoints ORDER BY version")
        summary.checkpoints = [version for (version,) in versions]
        return summary

    def starving(self) -> list[str]:
        """Tasks of which more groups were dropped as too old than were trained, those that lost most first."""
        lost = {task: n for (task, end), n in self.groups_by_task.items() if end == "stale"}
        tasks = [task for task, n in lost.items() if n > max(1, self.groups_by_task[task, "trained"])]
        return sorted(tasks, key=lambda task: (-lost[task], task))

    def figures(self) -> dict[str, Any]:
        """The summary as plain values, for JSON."""
        return {
            "samples": dict(self.states),
            "attempts_per_sample": {str(number): count for number, count in sorted(self.attempts.items())},
            "leased_again": self.leased_again,
            "groups": dict(self.groups),
            "batches": {str(version): count for version, count in sorted(self.batches.items())},
            "checkpoints": self.checkpoints,
            "failures": [
                {"task": task, "stage": stage, "kind": kind, "count": count}
                for (task, stage, kind), count in self.failures.most_common()
            ],
            "discarded": [
                {"task": task, "reason": reason, "count": count}
                for (task, reason), count in self.discarded.most_common()
            ],
            "starving": self.starving(),
            "staleness": {str(versions): count for versions, count in sorted(self.staleness.items())},
            "timings_s": {
                "wait_for_sandbox": self.wait.figures(),
                "running": self.running.figures(),
                "scored_until_trained": self.until_trained.figures(),
            },
        }

    def _add_group(self, group: GroupRow) -> None:
        end = group.ended or "open"
        self.groups[end] += 1
        self.groups_by_task[group.task, end] += 1
        if group.trained_version is not None:
            self.batches[group.trained_version] += 1

    def _add(self, sample: SampleRow, resumed_s: Sequence[float]) -> None:
        self.states[sample.state] += 1
        self.leased_again += sample.num_leases > 1
        if sample.state == "failed":
            stage = STAGES.get(sample.outcome or "", sample.outcome or "unknown")
            self.failures[sample.task, stage, kind_of(sample.reason, sample.task)] += 1
        if sample.state == "discarded":
            self.discarded[sample.task, sample.reason] += 1
        if sample.trained_version is not None and sample.oldest_version is not None:
            self.staleness[sample.trained_version - sample.oldest_version] += 1
        if sample.num_leases == 1:  # the first admission of others was in another run
            self.wait.add(sample.admitted_s, sample.running_s)
        self.running.add(sample.running_s, sample.ended_s)
        ended_s, trained_s = sample.ended_s, sample.trained_s
        if ended_s is None or trained_s is None or not any(ended_s <= at_s <= trained_s for at_s in resumed_s):
            self.until_trained.add(ended_s, trained_s)  # of others the time between two runs would count


def by_kind(failures: Mapping[Cause, int]) -> list[tuple[str, str, int, Counter[str]]]:
    """Stage, kind, count, and count per task of each kind of failure, most frequent first."""
    tasks: dict[tuple[str, str], Counter[str]] = {}
    for (task, stage, kind), count in failures.items():
        tasks.setdefault((stage, kind), Counter())[task] += count
    rows = [(stage, kind, counts.total(), counts) for (stage, kind), counts in tasks.items()]
    return sorted(rows, key=lambda row: (-row[2], row[0], row[1]))


def kind_of(detail: str, task: str = "") -> str:
    """The first line of a failure's text without what differs from case to case, so that equal causes are one kind.

    Numbers and ids become `#`, the name of the task `TASK`; an HTTP status stays.
    """
    line = next((line for line in detail.splitlines() if line.strip()), "")
    line = clean(line).replace(task, "TASK") if task else clean(line)
    line = _NUMBERS.sub("#", _IDS.sub("#", line))
    return (line if len(line) <= _LONGEST_CAUSE else line[: _LONGEST_CAUSE - 3] + "...") or "no cause was recorded"


def _quantile(ordered: Sequence[float], share: float) -> float | None:
    """The value that `share` of the sorted values do not exceed."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None
