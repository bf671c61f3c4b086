"""How figures are put into words, the same in the display, the closing lines, the report and comparisons."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

_CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def number(figures: Mapping[str, Any], name: str) -> float | None:
    """The figure `name` if it is there and finite; figures come from other processes and may lack anything."""
    value = figures.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)


def interval(figures: Mapping[str, Any], name: str) -> tuple[float, float] | None:
    """The interval `[low, high]` called `name` if both its ends are there and finite."""
    ends: Any = figures.get(name)
    if not isinstance(ends, Sequence) or isinstance(ends, str) or len(cast("Sequence[Any]", ends)) != 2:
        return None
    low, high = (number({"end": end}, "end") for end in cast("Sequence[Any]", ends))
    return None if low is None or high is None else (low, high)


def clean(text: str) -> str:
    """One line of plain text: no escape sequences or control characters, which a log or a model may carry."""
    return " ".join(_CONTROL.sub("", text.replace("\t", " ")).split())


def duration(seconds: float) -> str:
    """`0.4 s`, `8 s`, `2 m 05 s`, `3 h 07 m`, `2 d 04 h`."""
    if 0 < seconds < 1:
        return f"{seconds:.1f} s"
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} m {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} m"
    return f"{whole // 86400} d {whole % 86400 // 3600:02d} h"


def figure(value: float | None) -> str:
    """A figure in at most about seven characters."""
    if value is None:
        return "-"
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 1e6 or size < 1e-3:
        return f"{value:.2g}"
    return f"{value:,.0f}" if size >= 999.5 else f"{value:.3g}"


def percent(share: float | None) -> str:
    """A share in percent."""
    return "-" if share is None else f"{100 * share:.0f} %"


def percent_exact(share: float) -> str:
    """A share in percent, with a decimal where it is small."""
    return percent(share) if share == 0 or abs(share) >= 0.0995 else f"{100 * share:.1f} %"


def percent_interval(ends: tuple[float, float] | None) -> str:
    """The interval of a share, `[33, 49]`, in percent; empty without one."""
    return "" if ends is None else f"[{100 * ends[0]:.0f}, {100 * ends[1]:.0f}]"


def points(difference: float) -> str:
    """A difference of shares in percentage points, signed."""
    return f"{100 * difference:+.0f}" if round(100 * difference) else "0"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the two evaluations of a run say together. Rates in 0..1; None where it was not measured.

    `noise` means that the interval of the difference, paired over tasks, includes 0: no claim either way.
    """

    kind: Literal["learned", "worse", "noise", "unknown"]
    before: float | None
    after: float | None
    delta: float | None
    delta_ci95: tuple[float, float] | None

    @classmethod
    def of(cls, metrics: Mapping[str, Any]) -> Verdict:
        """Judge the metrics of a `result.json`."""
        before = number(metrics, "eval/solve_rate_before")
        after = number(metrics, "eval/solve_rate_after")
        delta = number(metrics, "eval/solve_rate_delta")
        ends = interval(metrics, "eval/solve_rate_delta_ci95")
        if delta is None and before is not None and after is not None:
            delta = after - before
        kind: Literal["learned", "worse", "noise", "unknown"] = "unknown"
        if delta is not None and ends is not None:
            kind = "learned" if ends[0] > 0 else "worse" if ends[1] < 0 else "noise"
        return cls(kind, before, after, delta, ends)

    def sentence(self) -> str:
        """The verdict as one sentence, with its figures."""
        if self.delta is None:
            what = "before" if self.before is None else "after"
            return f"Not judged: there is no evaluation {what} training."
        rates = f"solve rate {percent(self.before)} -> {percent(self.after)}"
        if self.delta_ci95 is None:
            return f"Not judged: {rates}, {points(self.delta)} points, without an interval."
        change = (
            f"{points(self.delta)} points, 95 % interval {points(self.delta_ci95[0])} to {points(self.delta_ci95[1])}"
        )
        if self.kind == "noise":
            return f"No change beyond noise: {rates} ({change})."
        return f"{'It learned' if self.kind == 'learned' else 'It got worse'}: {rates} ({change})."
