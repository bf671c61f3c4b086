"""Which curves a report shows, and how to read each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipelines.interval import mean_ci95
from pipelines.report.charts import Point, Series, line_chart, stacked_chart
from pipelines.report.run_folder import RunFolder
from pipelines.wording import figure, percent_exact

BY_TASK = ("rollout/failed_by_task/", "async/stale_by_task/")
"""Counts with a metric for each task: a table tells them, in place of so many charts."""
STEP_TIME = {"perf/wait_s": "wait for a batch", "perf/train_s": "train", "perf/publish_s": "publish"}
SHARES = (0.0, 1.0)


@dataclass(frozen=True, slots=True)
class Curve:
    """One chart: metric names (a trailing `*` takes all that begin so), and whether its values are shares.

    With `if_any` it is only shown if a value is above 0.
    """

    title: str
    note: str
    names: tuple[str, ...]
    share: bool = False
    smooth: bool = True
    if_any: bool = False


CURVES = (
    Curve("Reward", "mean over each batch", ("rollout/reward_mean",), share=True),
    Curve(
        "KL, training to rollout policy",
        "how far the trained weights are from those that wrote the tokens; unclamped, with quantiles per token",
        ("train/train_rollout_kl", "train/train_rollout_kl_*"),
        smooth=False,
    ),
    Curve(
        "Staleness",
        "weight versions between the oldest token and the step that learns from it",
        ("async/staleness_mean", "async/staleness_max"),
        smooth=False,
    ),
    Curve("Gradient norm", "before clipping; spikes come before divergence", ("train/grad_norm",)),
    Curve("Entropy", "per token; a fall to 0 means that exploration ended", ("train/entropy",)),
    Curve("Truncated", "share of episodes or turns cut by a token limit", ("rollout/*truncated_ratio",), share=True),
    Curve("Tokens per second", "trained tokens over the time of the step", ("perf/tokens_per_s",)),
    Curve("Turns", "mean per episode", ("rollout/num_turns_mean",)),
    Curve(
        "Prefix cache", "share of prompt tokens that the engine had already", ("rollout/prefix_cache_hit_rate",), True
    ),
    Curve(
        "Failures of infrastructure",
        "attempts since the start, by outcome; they are refilled and never scored",
        ("rollout/failed", "rollout/*_failed"),
        smooth=False,
        if_any=True,
    ),
    Curve(
        "Dropped as too old",
        "groups since the start that no batch could take any more",
        ("async/stale_groups",),
        smooth=False,
        if_any=True,
    ),
    Curve("Log-probability gap", "mean |trainer - engine| per token", ("train/train_rollout_logprob_abs_diff",)),
)


def solve_rates(run: RunFolder) -> Mapping[int, tuple[float, tuple[float, float] | None]]:
    """Solve rate and 95 % interval per evaluated version: as the run stated it, else from its episodes."""
    stated: dict[int, tuple[float, tuple[float, float] | None]] = {}
    for step, row in run.metrics.items():
        rate, low, high = (row.get(f"eval/solve_rate{end}") for end in ("", "_ci95_low", "_ci95_high"))
        if rate is not None:
            stated[step] = (rate, None if low is None or high is None else (low, high))
    if stated:
        return stated
    return {v: mean_ci95(list(tasks.values())) for v, tasks in task_rates(run).items()}


def task_rates(run: RunFolder) -> Mapping[int, Mapping[str, float]]:
    """Per evaluated version, the share of its scored episodes that solved each task."""
    rewards: dict[int, dict[str, list[float]]] = {}
    for episode in run.episodes:
        if episode.kind == "eval" and episode.scored and episode.version is not None:
            tasks = rewards.setdefault(episode.version, {})
            tasks.setdefault(episode.task, []).append(float(episode.label == "solved"))
    return {
        version: {task: sum(values) / len(values) for task, values in tasks.items()}
        for version, tasks in sorted(rewards.items())
    }


def charts(run: RunFolder) -> str:
    """The charts that a person looks at first."""
    parts = [_solve_rate(run), *(_curve(run, curve) for curve in CURVES), _step_time(run)]
    return "".join(parts)


def other_charts(run: RunFolder) -> str:
    """A small chart of every metric that has none of its own."""
    shown = {name for curve in CURVES for name in _matching(run, curve.names)} | set(STEP_TIME)
    rest = [
        n for n in run.metric_names() if n not in shown and not n.startswith(("time/", "eval/solve_rate", *BY_TASK))
    ]
    return "".join(line_chart(name, "", [Series(name, run.series(name))]) for name in sorted(rest) if name != "time_s")


def _solve_rate(run: RunFolder) -> str:
    rates = sorted(solve_rates(run).items())
    points: list[Point] = [(float(version), rate) for version, (rate, _) in rates]
    series = Series("solve rate", points, [ends for _, (_, ends) in rates], bars=True)
    note = "share of held-out episodes solved, with 95 % intervals over tasks"
    return line_chart("Solve rate", note, [series], y_format=percent_exact, bounds=SHARES)


def _curve(run: RunFolder, curve: Curve) -> str:
    names = _matching(run, curve.names)
    series = [Series(_short(name, names), run.series(name), smooth=curve.smooth) for name in names[:6]]
    values = [y for s in series for _, y in s.points if y is not None]
    if curve.if_any and not any(values):
        return ""
    inside = curve.share and all(0 <= y <= 1 for y in values)
    bounds = SHARES if inside and max(values, default=0) > 0.5 else None
    lost = sum(y is None for s in series for _, y in s.points)
    note = curve.note + (f"; {lost} not finite" if lost else "")
    return line_chart(curve.title, note, series, y_format=percent_exact if inside else figure, bounds=bounds)


def _step_time(run: RunFolder) -> str:
    rows = sorted((step, row) for step, row in run.metrics.items() if row.get("perf/step_s") is not None)
    if not rows:
        return ""
    layers = [[row.get(name) or 0.0 for _, row in rows] for name in STEP_TIME]
    spent = [sum(parts) for parts in zip(*layers, strict=True)]
    rest = [max(0.0, (row.get("perf/step_s") or 0.0) - known) for known, (_, row) in zip(spent, rows, strict=True)]
    names = [*STEP_TIME.values()]
    if sum(rest) > 0.01 * sum(spent):
        layers, names = [*layers, rest], [*names, "other"]
    return stacked_chart("Step time", "seconds, by what the trainer did", names, [float(s) for s, _ in rows], layers)


def _matching(run: RunFolder, patterns: Sequence[str]) -> list[str]:
    known = run.metric_names()
    found: list[str] = []
    for pattern in patterns:
        head, star, tail = pattern.partition("*")
        found += [n for n in known if (n.startswith(head) and n.endswith(tail) if star else n == pattern)]
    return list(dict.fromkeys(found))


def _short(name: str, names: Sequence[str]) -> str:
    """The name without what all names of the chart have in common."""
    if len(names) == 1:
        return name
    words = [n.rpartition("/")[2].split("_") for n in names]
    shared = next((i for i, same in enumerate(zip(*words, strict=False)) if len(set(same)) > 1), min(map(len, words)))
    return "_".join(name.rpartition("/")[2].split("_")[shared:]) or "mean"
