"""The last three lines of a run: did it learn, where the report is, what to try next."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from pipelines.errors import ConfigError
from pipelines.resume import read_overrides, resume_of
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
    again = _going_on(result, run_dir)
    if status == "interrupted":
        return again or f"{_command(result)} starts afresh; there is no checkpoint yet"
    see = f"{run_dir / 'log.txt'} tells more"
    return f"{see}; once mended, {again}" if again else see


def _going_on(result: Mapping[str, Any], run_dir: Path) -> str:
    """The command that goes on from the last checkpoint; empty if there is none.

    A resumed run that saved none itself is started again as it was, from what it went on from.
    """
    if any((run_dir / "checkpoints").glob("step-*")):
        return f"{_python(f'resume={run_dir}')} goes on from the last checkpoint"
    words = _words(result)
    earlier: Any = result.get("resumed_from")
    path: Any = cast("Mapping[str, Any]", earlier).get("path") if isinstance(earlier, Mapping) else None
    if not (source := str(_near(Path(path))) if isinstance(path, str) else resume_of(words)):
        return ""
    try:
        known = set(read_overrides(Path(source)) or ())
    except ConfigError:
        known = set[str]()
    changed = [word for word in words if word.lstrip("+").startswith("resume_changed=")]
    more = [word for word in words if word not in known and not _is_own(word, ("faults=", "faults."))]
    return f"{_python(f'resume={source}', *more, *changed)} goes on from where this run did"


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
    keys = tuple(word.partition("=")[0] + "=" for word in more if "=" in word)
    return _python(*(word for word in _words(result) if not _is_own(word, keys)), *more)


def _words(result: Mapping[str, Any]) -> list[str]:
    given: Any = result.get("overrides")
    return [str(word) for word in cast("Sequence[Any]", given)] if isinstance(given, Sequence) else []


def _is_own(word: str, keys: Sequence[str]) -> bool:
    """Does an override belong to one run, or is it of one of `keys`?"""
    return word.lstrip("+").startswith((*OWN_TO_A_RUN, *keys))


def _python(*words: str) -> str:
    return shlex.join(["python", "-m", "pipelines.run", *words])


def _near(path: Path) -> Path:
    """The path as seen from here, if it is below."""
    path, here = path.absolute(), Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path
