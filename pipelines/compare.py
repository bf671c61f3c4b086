"""`python -m pipelines.compare runs/a runs/b ...`: arms side by side, with uncertainty over seeds.

Every `result.json` under the given folders (or patterns) is a run; runs that differ only in their seed make an arm,
named by what sets it apart. The solve rate of an arm is the mean over its seeds with a Student t interval, since a
seed is what a repetition would draw anew. Two arms differ if Welch's interval of the difference excludes 0, widened
for the number of pairs that are compared (Bonferroni). One seed an arm is never enough to name a winner.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import combinations
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pipelines.arms import Arm, Run, arms_of, find_runs
from pipelines.interval import difference, mean_ci95
from pipelines.wording import clean, duration, figure, number, percent, percent_interval, points

NOTHING_FOUND = 2
REFUSED = 3
SOLVE_RATE = "eval/solve_rate_after"
MOST_COLUMNS = 4
"""With more arms than this, each is a row."""

FINAL_METRICS = {
    "rollout/reward_mean": "reward",
    "train/train_rollout_kl": "KL to rollout",
    "perf/step_s": "s/step",
    "perf/tokens_per_s": "tokens/s",
}


class DifferentTasks(Exception):
    """The runs were not measured on the same tasks, so their solve rates say nothing about each other."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0 after a comparison, 2 if there is nothing to compare, 3 if the runs must not be compared."""
    parser = argparse.ArgumentParser(prog="miles-compare", description="Arms side by side, with uncertainty.")
    parser.add_argument("runs", nargs="+", help="run folders, folders of runs, result.json files, or patterns of them")
    parser.add_argument(
        "--allow-different-tasks", action="store_true", help="compare even if the tasks are not the same"
    )
    options = parser.parse_args(arguments)
    runs, unreadable = find_runs(options.runs)
    for line in unreadable:
        print(f"warning: {line}", file=sys.stderr)
    if not runs:
        print(f"{' '.join(options.runs)}: no result.json found; give folders of runs that ended", file=sys.stderr)
        return NOTHING_FOUND
    arms = arms_of(runs)
    try:
        check_tasks(arms, options.allow_different_tasks)
    except DifferentTasks as error:
        print(error, file=sys.stderr)
        return REFUSED
    for line in warnings(runs, arms):
        print(f"warning: {line}", file=sys.stderr)
    console = Console()
    console.print(arm_table(arms))
    for line in verdicts(arms):
        console.print(line, highlight=False, soft_wrap=True, markup=False)
    return 0


def check_tasks(arms: Sequence[Arm], allow: bool) -> None:
    """Raise `DifferentTasks` unless all runs have the same held-out tasks, and the runs of an arm the same training
    tasks. Arms may train on different tasks: that is a choice one compares."""
    if allow:
        return
    remedy = "compare runs of the same task set, or say --allow-different-tasks"
    _same_tasks([run for arm in arms for run in arm.runs], "eval", remedy)
    for arm in arms:
        _same_tasks(arm.runs, "train", remedy)


def _same_tasks(runs: Iterable[Run], split: str, remedy: str) -> None:
    first: dict[str, Path] = {}
    for run in runs:
        if (digest := run.task_set_hash.get(split)) is not None:
            first.setdefault(digest, run.path)
    if len(first) > 1:
        (one, one_path), (other, other_path) = list(first.items())[:2]
        told = f"{one[:12]} in {one_path}, {other[:12]} in {other_path}"
        raise DifferentTasks(f"task_set_hash.{split}: {told}; {remedy}")


def warnings(runs: Sequence[Run], arms: Sequence[Arm]) -> list[str]:
    """What a reader of the table should know: code that changed, seeds that count once, runs that do not count."""
    lines: list[str] = []
    commits = {str(run.result.get("commit")) for run in runs}
    if len(commits) > 1:
        lines.append(f"the runs are of different commits: {', '.join(sorted(c[:10] for c in commits))}")
    elif any(commit.endswith("-dirty") for commit in commits):
        lines.append("the runs are of a commit with uncommitted changes, which may differ between them")
    for arm in arms:
        for seed, times in Counter(run.seed for run in arm.runs if run.succeeded).items():
            if times > 1:
                lines.append(f"{arm.name}: {times} runs with seed {seed}; only the latest counts")
        if lost := [run for run in arm.runs if not run.succeeded]:
            lines.append(f"{arm.name}: {len(lost)} of {len(arm.runs)} runs did not end well and do not count")
    return lines


def arm_table(arms: Sequence[Arm]) -> Table:
    """Arms side by side. Intervals are over seeds; with one seed, over that run's held-out tasks (marked with *)."""
    titles = ["seeds", "status", "solve rate before", "solve rate after", "change", "wall"]
    shown = {name: title for name, title in FINAL_METRICS.items() if any(arm.values(name) for arm in arms)}
    columns = [_cells(arm, shown) for arm in arms]
    table = Table(caption="95 % intervals over seeds; * one seed: over its held-out tasks", caption_justify="left")
    if len(arms) > MOST_COLUMNS:
        for title in ("arm", *titles, *shown.values()):
            table.add_column(title, overflow="fold")
        for arm, cells in zip(arms, columns, strict=True):
            table.add_row(Text(arm.name), *cells)
        return table
    for title in ("", *(arm.name for arm in arms)):
        table.add_column(Text(title), overflow="fold")
    for title, *cells in zip([*titles, *shown.values()], *columns, strict=True):
        table.add_row(title, *cells)
    return table


def _cells(arm: Arm, shown: Iterable[str]) -> list[str]:
    walls = [w for run in arm.counted if (w := number(run.result, "wall_s")) is not None]
    statuses = Counter(run.status for run in arm.runs)
    return [
        str(len(arm.counted)),
        clean(", ".join(f"{n} {status}" for status, n in sorted(statuses.items()))),
        _rate(arm, "eval/solve_rate_before"),
        _rate(arm, SOLVE_RATE),
        _change(arm),
        duration(sum(walls) / len(walls)) if walls else "-",
        *(figure(_mean(arm.values(name))) for name in shown),
    ]


def verdicts(arms: Sequence[Arm]) -> list[str]:
    """A line per pair of arms, and one that names the best arm if it stands out from every other."""
    pairs = list(combinations(arms, 2))
    if not pairs:
        return ["One arm: nothing to compare it with."]
    confidence = 1 - 0.05 / len(pairs)
    lines: list[str] = []
    ahead: Counter[str] = Counter()
    for first, second in pairs:
        sides = first.values(SOLVE_RATE), second.values(SOLVE_RATE)
        line, winner = _verdict(first, second, sides, confidence)
        lines.append(line)
        if winner is not None:
            ahead[winner.name] += 1
    if len(pairs) > 1:
        lines.append(f"Intervals are widened for {len(pairs)} pairs, so that all of them hold together with 95 %.")
    best = [arm.name for arm in arms if ahead[arm.name] == len(arms) - 1]
    lines.append(f"Best: {best[0]}." if best else "No arm stands out from all others.")
    return lines


def _verdict(
    first: Arm, second: Arm, sides: tuple[list[float], list[float]], confidence: float
) -> tuple[str, Arm | None]:
    names = f"{second.name} vs {first.name}"
    if not all(sides):
        return f"{names}: no solve rate to compare.", None
    delta, ends = difference(*sides, confidence)
    if ends is None:
        why = "needs two seeds a side" if min(map(len, sides)) < 2 else "seeds do not differ, so noise is unknown"
        return f"{names}: {points(delta)} points, no interval ({why}).", None
    told = f"{names}: {points(delta)} points [{points(ends[0])}, {points(ends[1])}]"
    if ends[0] <= 0 <= ends[1]:
        return f"{told}: within noise.", None
    winner = second if delta > 0 else first
    return f"{told}: {winner.name} is better.", winner


def _rate(arm: Arm, metric: str) -> str:
    values = arm.values(metric)
    if not values:
        return "-"
    mean, ends = mean_ci95(values)
    if ends is None:
        ends = arm.counted[0].interval(f"{metric}_ci95")
        return f"{percent(mean)} {percent_interval(ends)}" + ("*" if ends else "")
    return f"{percent(mean)} {percent_interval((max(0.0, ends[0]), min(1.0, ends[1])))}"


def _change(arm: Arm) -> str:
    values = arm.values("eval/solve_rate_delta")
    if not values:
        return "-"
    mean, ends = mean_ci95(values)
    mark = "" if ends else "*"
    ends = ends or arm.counted[0].interval("eval/solve_rate_delta_ci95")
    return f"{points(mean)} [{points(ends[0])}, {points(ends[1])}]{mark}" if ends else points(mean)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


if __name__ == "__main__":
    sys.exit(main())
