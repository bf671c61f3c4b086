"""Checks of options, each failing with one line: `<config path>: <value>; <remedy>`."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable


def check_choice(path: str, value: str, known: Iterable[str]) -> None:
    """Raise `ValueError` with the nearest known word if `value` is not one of `known`."""
    options = tuple(known)
    if value in options:
        return
    near = difflib.get_close_matches(str(value), options, n=1, cutoff=0.6)
    remedy = f"did you mean '{near[0]}'? " if near else ""
    raise ValueError(f"{path}: {value}; {remedy}have {', '.join(options)}")


def check_number(path: str, value: float | None, *, low: float, high: float = math.inf, above: bool = False) -> None:
    """Raise `ValueError` unless `value` is None or a finite number in [low, high]; `above` excludes `low` itself."""
    if value is None:
        return
    if math.isfinite(value) and low <= value <= high and not (above and value == low):
        return
    floor = f"above {low:g}" if above else f"at least {low:g}"
    ceiling = f" and at most {high:g}" if math.isfinite(high) else ""
    raise ValueError(f"{path}: {value}; give a number {floor}{ceiling}")


def check_order(low_path: str, low: float, high_path: str, high: float) -> None:
    """Raise `ValueError` if a lower bound lies above its upper bound."""
    if low > high:
        raise ValueError(f"{low_path}: {low}; give at most {high_path}, which is {high}")
