"""Student t intervals of means and of differences of means, for a few seeds or tasks."""

from __future__ import annotations

import math
from collections.abc import Sequence

from scipy.special import stdtrit  # pyright: ignore[reportMissingTypeStubs]


def t_quantile(probability: float, freedom: float) -> float:
    """Quantile of Student's t for `freedom` degrees of freedom."""
    return float(stdtrit(freedom, probability))


def mean_ci95(values: Sequence[float]) -> tuple[float, tuple[float, float] | None]:
    """Mean and its 95 % interval, taking the values as independent; no interval for fewer than two."""
    mean = sum(values) / len(values)
    if len(values) < 2:
        return mean, None
    half = t_quantile(0.975, len(values) - 1) * math.sqrt(_variance(values) / len(values))
    return mean, (mean - half, mean + half)


def difference(
    first: Sequence[float], second: Sequence[float], confidence: float = 0.95
) -> tuple[float, tuple[float, float] | None]:
    """Mean of `second` minus mean of `first`, with Welch's interval (unequal variances, independent values).

    No interval with fewer than two values on a side, or when no value differs from its side's mean: then there is
    nothing to judge the noise by.
    """
    delta = sum(second) / len(second) - sum(first) / len(first)
    if len(first) < 2 or len(second) < 2:
        return delta, None
    parts = [_variance(values) / len(values) for values in (first, second)]
    per_freedom = sum(p**2 / (len(v) - 1) for p, v in zip(parts, (first, second), strict=True))
    if per_freedom == 0:  # also where a square underflows
        return delta, None
    freedom = sum(parts) ** 2 / per_freedom
    half = t_quantile(0.5 + confidence / 2, freedom) * math.sqrt(sum(parts))
    return delta, (delta - half, delta + half)


def _variance(values: Sequence[float]) -> float:
    mean = sum(values) / len(values)
    return sum((value - mean) ** 2 for value in values) / (len(values) - 1)
