"""Random numbers with long tails: what latencies and lengths of real episodes look like."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """Positive numbers: a log-normal of `median` and `sigma`, constant for sigma 0; with probability `tail_share` a
    Pareto number instead, of at least `tail_from` and exponent `tail_alpha` (mean infinite for 1 or less). Nothing is
    above `most`. `ValueError` for values that make no distribution.
    """

    median: float
    sigma: float = 0.0
    tail_share: float = 0.0
    tail_from: float = 0.0
    tail_alpha: float = 2.0
    most: float | None = None

    def __post_init__(self) -> None:
        for name, least in (("median", 0.0), ("sigma", 0.0), ("tail_share", 0.0), ("tail_from", 0.0), ("most", 0.0)):
            value = getattr(self, name)
            if value is not None and not value >= least:
                raise ValueError(f"{name}: {value}; give at least {least:g}")
        if self.tail_share > 1 or self.tail_alpha <= 0:
            raise ValueError(f"tail_share, tail_alpha: {self.tail_share}, {self.tail_alpha}; give 0 to 1, and above 0")

    def draw(self, rng: random.Random) -> float:
        """The next number; takes the same amount of randomness whatever comes out, so that draws stay paired."""
        normal, tail, size = rng.gauss(0.0, 1.0), rng.random(), 1.0 - rng.random()
        if tail < self.tail_share:
            value = self.tail_from * size ** (-1.0 / self.tail_alpha)
        else:
            value = self.median * math.exp(self.sigma * normal) if self.sigma else self.median
        return value if self.most is None else min(value, self.most)
