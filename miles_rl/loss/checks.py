"""Checks of options, each failing with one line: `<config path>: <value>; <remedy>`."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable


class OptionError(ValueError):
    """An option that cannot be meant: the key as the user writes it, its value, and what to do."""

    def __init__(self, path: str, value: object, remedy: str) -> None:
        self.path, self.value, self.remedy = path, value, remedy
        super().__init__(f"{path}: {'null' if value is None else value}; {remedy}")

    def __reduce__(self) -> tuple[type[OptionError], tuple[str, object, str]]:
        return type(self), (self.path, self.value, self.remedy)


def check_choice(path: str, value: str, known: Iterable[str]) -> None:
    """Raise `OptionError` with the nearest known word if `value` is not one of `known`."""
    options = tuple(known)
    if value in options:
        return
    near = difflib.get_close_matches(str(value), options, n=1, cutoff=0.6)
    hint = f"did you mean '{near[0]}'? " if near else ""
    raise OptionError(path, value, f"{hint}have {', '.join(options)}")


def check_number(path: str, value: float | None, *, low: float, high: float = math.inf, above: bool = False) -> None:
    """Raise `OptionError` unless `value` is None or a finite number in [low, high]; `above` excludes `low` itself."""
    if value is None:
        return
    if math.isfinite(value) and low <= value <= high and not (above and value == low):
        return
    floor = f"above {low:g}" if above else f"at least {low:g}"
    ceiling = f" and at most {high:g}" if math.isfinite(high) else ""
    raise OptionError(path, value, f"give a number {floor}{ceiling}")


def check_order(low_path: str, low: float, high_path: str, high: float) -> None:
    """Raise `OptionError` if a lower bound lies above its upper bound."""
    if low > high:
        raise OptionError(low_path, low, f"give at most {high_path}, which is {high}")
