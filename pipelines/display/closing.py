"""The last three lines of a run: did it learn, where the report is, what to try next."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from pipelines.wording import Verdict, clean, duration, number

EASY = 0.9
HARD = 0.05


def closing_lines(result: Mapping[str, Any], report: str | Path) -> list[str]:
    """Exactly three lines for a `result.json` as a dict, whatever its status."""
    report = Path(report)
    status = str(result.get("status", "unknown"))
    where = f"Report: {report}" if report.exists() else f"Log: {report.parent / 'log.txt'}"
    if status in ("failed", "interrupted"):
        return [_cause(result, status), where, f"Next: {_next_after_stop(result, status, report.parent)}"]
    metrics: Any = result.get("metrics")
    verdict = Verdict.of(cast("Mapping[str, Any]", metrics) if isinstance(metrics, Mapping) else {})
    return [verdict.sentence(), where, f"Next: {_next_after_end(result, verdict, report.parent)}"]


def _cause(result: Mapping[str, Any], status: str) -> str:
    steps, wall_s = number(result, "steps") or 0, number(result, "wall_s") or 0
    when = f"after {steps:.0f} steps and {duration(wall_s)}"
    error = clean(str(result.get("error") or "").strip().partition("\n")[0])
    if status == "interrupted":
        return f"Interrupted {when}{': ' + error if error else ''}."
    return f"Failed {when}: {error or 'no cause was recorded'}"


def _next_after_stop(result: Mapping[str, Any], status: str, run_dir: Path) -> str:
    resume = f"resume={run_dir} goes on from the last checkpoint"
    has_checkpoint = (run_dir / "checkpoints").is_dir() and any((run_dir / "checkpoints").iterdir())
    if status == "interrupted":
        return resume if has_checkpoint else "run it again; there is no checkpoint to go on from"
    remedy = f"see {run_dir / 'log.txt'}"
    return f"{remedy}; once it is mended, {resume}" if has_checkpoint else f"{remedy}; plan_only=true checks the config"


def _next_after_end(result: Mapping[str, Any], verdict: Verdict, run_dir: Path) -> str:
    if verdict.kind == "learned":
        seeds = f"-m 'seed=range(3)' shows whether other seeds agree; then miles-compare {run_dir.parent}"
        return f"it is near its ceiling, try a harder suite; {seeds}" if (verdict.after or 0) > EASY else seeds
    if verdict.kind == "worse":
        return "look at the KL and staleness curves in the report; halve the learning rate"
    if verdict.kind == "noise":
        if (verdict.before or 0) > EASY:
            return "the tasks are too easy for this policy, there is little left to learn: try a harder suite"
        if (verdict.before or 0) < HARD:
            return "the policy hardly ever earns a reward: give it a longer warm start or easier tasks"
        return f"steps={2 * int(number(result, 'steps') or 50)}, or more evaluation samples for a narrower interval"
    return "evaluate before and after training to know whether it learns"
