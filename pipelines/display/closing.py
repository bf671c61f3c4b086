"""The last three lines of a run: did it learn, where the report is, what to try next."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from pipelines.wording import Verdict, clean, duration, number

EASY = 0.9
HARD = 0.05
OWN_TO_A_RUN = ("run_dir=", "resume=", "resume_changed=")


def closing_lines(result: Mapping[str, Any], report: str | Path) -> list[str]:
    """Exactly three lines for a `result.json` as a dict, whatever its status."""
    report = Path(report)
    status = str(result.get("status", "unknown"))
    run_dir = _near(report.parent)
    where = f"Report: {_near(report)}" if report.exists() else f"Log: {run_dir / 'log.txt'}"
    if status in ("failed", "interrupted"):
        return [_cause(result, status), where, f"Next: {_next_after_stop(result, status, run_dir)}"]
    metrics: Any = result.get("metrics")
    verdict = Verdict.of(cast("Mapping[str, Any]", metrics) if isinstance(metrics, Mapping) else {})
    return [verdict.sentence(), where, f"Next: {_next_after_end(result, verdict)}"]


def _cause(result: Mapping[str, Any], status: str) -> str:
    steps, wall_s = number(result, "steps") or 0, number(result, "wall_s") or 0
    when = f"after {steps:.0f} steps and {duration(wall_s)}"
    error = clean(str(result.get("error") or "").strip().partition("\n")[0])
    if status == "interrupted":
        return f"Interrupted {when}."
    return f"Failed {when}: {error or 'no cause was recorded'}"


def _next_after_stop(result: Mapping[str, Any], status: str, run_dir: Path) -> str:
    checkpoints = run_dir / "checkpoints"
    has_checkpoint = checkpoints.is_dir() and any(checkpoints.iterdir())
    earlier: Any = result.get("resumed_from")
    source = run_dir
    if not has_checkpoint and isinstance(earlier, Mapping):
        source, has_checkpoint = _near(Path(str(cast("Mapping[str, Any]", earlier).get("path")))), True
    again = shlex.join(["python", "-m", "pipelines.run", f"resume={source}"])
    goes_on = f"{again} goes on from the last checkpoint"
    if status == "interrupted":
        return goes_on if has_checkpoint else f"{_command(result)} starts afresh; there is no checkpoint yet"
    see = f"{run_dir / 'log.txt'} tells more"
    return f"{see}; once mended, {goes_on}" if has_checkpoint else see


def _next_after_end(result: Mapping[str, Any], verdict: Verdict) -> str:
    if verdict.kind == "learned":
        return f"{_command(result, '-m', 'seed=range(3)')} shows whether other seeds agree (compare: miles-compare)"
    if verdict.kind == "worse":
        return "look at KL and staleness in the report, then try half of trainer.lr"
    if verdict.kind == "noise":
        if (verdict.before or 0) > EASY:
            return "the tasks are too easy for this policy, little is left to learn: try a harder suite"
        if (verdict.before or 0) < HARD:
            return "the policy hardly ever earns a reward: give it a longer warm start or easier tasks"
        more_steps = f"steps={2 * int(number(result, 'steps') or 50)}"
        return f"{_command(result, more_steps)} trains twice as long"
    return "evaluate before and after training to know whether it learns"


def _command(result: Mapping[str, Any], *more: str) -> str:
    """The command of this run with other words at its end."""
    given: Any = result.get("overrides")
    words = [str(w) for w in cast("Sequence[Any]", given)] if isinstance(given, Sequence) else []
    keys = tuple(word.partition("=")[0] + "=" for word in more if "=" in word)
    kept = [word for word in words if not word.startswith((*OWN_TO_A_RUN, *keys))]
    return shlex.join(["python", "-m", "pipelines.run", *kept, *more])


def _near(path: Path) -> Path:
    """The path as seen from here, if it is below."""
    path, here = path.absolute(), Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path
