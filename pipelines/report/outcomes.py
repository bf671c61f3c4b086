"""What became of the samples and groups of a run, and what failed: by task, stage and kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any, cast

from pipelines.ledger.summary import STAGES, kind_of
from pipelines.report.episodes import outcome_table
from pipelines.report.run_folder import RunFolder
from pipelines.wording import percent_exact

MAX_ROWS = 40
OPEN_ROWS = 12
"""A longer table is folded."""
FAILED_BY_TASK, STALE_BY_TASK = "rollout/failed_by_task/", "async/stale_by_task/"
ENDS = {
    "trained": "trained",
    "stale": "dropped: too old to train on",
    "short": "dropped: a member failed for good",
    "open": "open",
}

Failure = tuple[str, str, str]
"""Stage, kind and task."""


def resumed(run: RunFolder) -> str:
    """Which checkpoint the run went on from; empty if it started by itself."""
    origin: Any = run.result.get("resumed_from")
    if not isinstance(origin, Mapping):
        return ""
    told = cast("Mapping[str, Any]", origin)
    path, version = escape(str(told.get("path"))), escape(str(told.get("version")))
    return f"<p class=dim>Resumed from version {version}, <code>{path}</code>; counts go on from there.</p>"


def outcomes(run: RunFolder) -> str:
    """The section on outcomes; empty if nothing was played."""
    if not run.episodes and run.ledger is None:
        return ""
    failed = _failures(run)
    tables = [outcome_table(run)] if run.episodes else []
    tables += [_states(run), _groups(run)]
    parts = [f'<div class="side-by-side">{"".join(tables)}</div>', _unfinished(run)]
    if failed:
        parts += ["<h3>Failures of infrastructure</h3>", _failure_table(run, failed)]
    else:
        parts.append("<p class=dim>No episode failed.</p>")
    parts.append(_stale(run))
    return "".join(parts)


def stale_by_task(run: RunFolder) -> dict[str, int]:
    """Groups of each task that were too old to train on: by the ledger, else by the latest metrics."""
    if run.ledger is not None:
        return {task: n for (task, end), n in run.ledger.groups_by_task.items() if end == "stale"}
    return _latest(run, STALE_BY_TASK)


def _failures(run: RunFolder) -> Counter[tuple[Failure, str]]:
    """Failed attempts by failure and by kind of episode. The ledger knows those of a run that was killed, too."""
    counts: Counter[tuple[Failure, str]] = Counter()
    for episode in run.episodes:
        if not episode.scored and episode.outcome != "cancelled" and (episode.kind == "eval" or run.ledger is None):
            stage = STAGES.get(episode.outcome, episode.outcome)
            counts[(stage, kind_of(episode.detail or "", episode.task), episode.task), episode.kind] += 1
    if run.ledger is not None:
        for (task, stage, kind), count in run.ledger.failures.items():
            counts[(stage, kind, task), "train"] += count
    elif not run.episodes:
        counts.update({(("unknown", "", task), "train"): n for task, n in _latest(run, FAILED_BY_TASK).items()})
    return counts


def _failure_table(run: RunFolder, counts: Counter[tuple[Failure, str]]) -> str:
    causes = {(e.task, kind_of(e.detail or "", e.task)): e.detail for e in run.episodes if not e.scored}
    totals: Counter[Failure] = Counter()
    for (failure, _), count in counts.items():
        totals[failure] += count
    rows = [
        (
            escape(stage),
            escape(kind),
            escape(task),
            *(f"{counts[(stage, kind, task), episodes]:,}" for episodes in ("train", "eval")),
            escape(_short(causes.get((task, kind)) or "")),
        )
        for (stage, kind, task), _ in totals.most_common(MAX_ROWS)
    ]
    head = ("stage", "kind", "task", "train", "eval", "latest cause")
    table = _table(head, rows, numbers=(3, 4), wide=True)
    if len(totals) > MAX_ROWS:
        table += f"<p class=dim>and {len(totals) - MAX_ROWS:,} more; python -m pipelines.ledger tells them all</p>"
    stages: Counter[str] = Counter()
    for (stage, _, _), count in totals.items():
        stages[stage] += count
    told = ", ".join(f"{count:,} by {escape(stage)}" for stage, count in stages.most_common())
    if len(totals) > OPEN_ROWS:
        return f"<details><summary>{totals.total():,} attempts failed: {told}</summary>{table}</details>"
    return f"<p class=dim>{totals.total():,} attempts failed: {told}. They are refilled and never scored.</p>{table}"


def _states(run: RunFolder) -> str:
    if run.ledger is None or not run.ledger.states:
        return ""
    total = run.ledger.states.total()
    rows = [(escape(s), f"{n:,}", percent_exact(n / total)) for s, n in run.ledger.states.most_common()]
    again = [(f"tried {k} times", f"{n:,}", "") for k, n in sorted(run.ledger.attempts.items()) if k > 1]
    return _table(("attempts, by the ledger", "", ""), [*rows, *again], numbers=(1, 2))


def _groups(run: RunFolder) -> str:
    if run.ledger is None or not run.ledger.groups:
        return ""
    total = run.ledger.groups.total()
    ends = sorted(run.ledger.groups, key=lambda end: -run.ledger.groups[end] if run.ledger else 0)
    rows = [
        (escape(ENDS.get(end, end)), f"{run.ledger.groups[end]:,}", percent_exact(run.ledger.groups[end] / total))
        for end in ends
    ]
    return _table(("groups", "", ""), rows, numbers=(1, 2))


def _unfinished(run: RunFolder) -> str:
    if run.ledger is None or not run.ledger.unfinished:
        return ""
    return (
        f"<p>{len(run.ledger.unfinished):,} samples were not in a final state; <code>python -m pipelines.ledger "
        f"{escape(str(run.path))}</code> says what each waited for.</p>"
    )


def _stale(run: RunFolder) -> str:
    """What was dropped as too old, by task, with a warning for tasks that starve."""
    stale = stale_by_task(run)
    if not stale:
        return ""
    trained = _trained_by_task(run)
    rows: list[Sequence[str]] = []
    starving: list[str] = []
    for task, count in sorted(stale.items(), key=lambda item: (-item[1], item[0])):
        starves = count > max(1, trained.get(task, 0))
        starving += [task] if starves else []
        rows.append((escape(task), f"{count:,}", f"{trained.get(task, 0):,}", "starves" if starves else ""))
    warning = ""
    if starving:
        names = ", ".join(escape(task) for task in starving[:5]) + (", ..." if len(starving) > 5 else "")
        warning = (
            f'<div class="error"><b>{len(starving):,} of {len(stale):,} tasks starve</b>: more of their groups were '
            f"too old to train on than were trained ({names}). Raise rollout.max_staleness, or lower "
            "rollout.protect_after so that batches wait for them.</div>"
        )
    table = _table(("task", "groups too old", "groups trained", ""), rows[:MAX_ROWS], numbers=(1, 2))
    table += f"<p class=dim>and {len(rows) - MAX_ROWS:,} more tasks</p>" if len(rows) > MAX_ROWS else ""
    return f"<h3>Dropped as too old, by task</h3>{warning}{table}"


def _trained_by_task(run: RunFolder) -> dict[str, int]:
    if run.ledger is not None:
        return {task: n for (task, end), n in run.ledger.groups_by_task.items() if end == "trained"}
    return dict(Counter(e.task for e in run.episodes if e.kind == "train" and e.scored))


def _latest(run: RunFolder, prefix: str) -> dict[str, int]:
    """The last value of every metric that begins with `prefix`, by what follows it."""
    found: dict[str, int] = {}
    for _, row in sorted(run.metrics.items()):
        found |= {name.removeprefix(prefix): int(v) for name, v in row.items() if name.startswith(prefix) and v}
    return found


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[int], wide: bool = False) -> str:
    """A table of cells that are HTML already; the columns `numbers` are aligned to the right."""

    def row(cells: Sequence[str], tag: str) -> str:
        kinds = [" class=num" if i in numbers else "" for i in range(len(cells))]
        return "".join(
            f"<{'th' if i == 0 else tag}{kind}>{cell}</{'th' if i == 0 else tag}>"
            for i, (cell, kind) in enumerate(zip(cells, kinds, strict=True))
        )

    body = "".join(f"<tr>{row(cells, 'td')}</tr>" for cells in rows)
    style = " class=wide" if wide else ""
    return f"<table{style}><thead><tr>{row(head, 'th')}</tr></thead><tbody>{body}</tbody></table>"


def _short(text: str, most: int = 300) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."
