"""Demonstrations for the warm start: the same families with other parameters, some of them mistaken."""

from __future__ import annotations

import random
from collections.abc import Iterator, Set

from sandbox_env.suites.base import Demonstration
from sandbox_env.suites.minibench.compose import TRAIN_PAIRS
from sandbox_env.suites.minibench.draw import Draw
from sandbox_env.suites.minibench.exercise import Exercise
from sandbox_env.suites.minibench.look import LOOKS
from sandbox_env.suites.minibench.plan import ACTIONS, Make, make_pair, make_single

SHARE_SINGLE, SHARE_LOOK = 0.5, 0.28
"""Shares of single actions and of looks; the rest are compositions."""


def draw_demonstrations(
    count: int, *, seed: int, mistake_rate: float, exclude: Set[str]
) -> Iterator[tuple[Exercise, Demonstration]]:
    """`count` demonstrations, each with its exercise; none has an instruction of `exclude`. Deterministic in `seed`."""
    if count < 0:
        raise ValueError(f"demonstrations: count {count}; ask for 0 or more")
    if not 0 <= mistake_rate <= 1:
        raise ValueError(f"demonstrations: mistake_rate {mistake_rate}; give a share from 0 to 1")
    rng = random.Random(f"minibench demonstrations {seed}")
    for _ in range(count):
        exercise = _draw_exercise(rng)
        while exercise.instruction in exclude:
            exercise = _draw_exercise(rng)
        mistaken = rng.random() < mistake_rate
        attempt = rng.choice(exercise.mistakes) if mistaken else exercise.turns
        yield exercise, Demonstration(exercise.family, exercise.instruction, attempt, mistaken)


_SINGLES: tuple[Make, ...] = tuple(make_single(family) for family in ACTIONS)
_PAIRS: tuple[Make, ...] = tuple(make_pair(*pair) for pair in TRAIN_PAIRS)


def _draw_exercise(rng: random.Random) -> Exercise:
    kind = rng.random()
    if kind < SHARE_SINGLE:
        make: Make = rng.choice(_SINGLES)
    elif kind < SHARE_SINGLE + SHARE_LOOK:
        make = rng.choice(LOOKS)
    else:
        make = rng.choice(_PAIRS)
    return make(Draw(rng))
