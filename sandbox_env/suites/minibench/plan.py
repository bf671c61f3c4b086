"""Which exercises the suite has: the 69 for training, the 20 held out, and the 8.

train8 is the narrow set: six of its tasks ask for a long, repetitive line and are solved only now and then, the
condition under which training on few tasks goes wrong. train69 holds the same six among 63 others.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sandbox_env.suites.minibench import archives, counting, data, files, git, process, selection, text
from sandbox_env.suites.minibench.compose import HELD_OUT_COMPOSITIONS, TRAIN_PAIRS, compose
from sandbox_env.suites.minibench.draw import Draw
from sandbox_env.suites.minibench.exercise import ActionBuilder, Exercise, single
from sandbox_env.suites.minibench.look import LOOKS

AREAS: dict[str, tuple[ActionBuilder, ...]] = {
    "files": files.ACTIONS,
    "text": text.ACTIONS,
    "counting": counting.ACTIONS,
    "selection": selection.ACTIONS,
    "archives": archives.ACTIONS,
    "data": data.ACTIONS,
    "git": git.ACTIONS,
    "process": process.ACTIONS,
}
ACTIONS: dict[str, ActionBuilder] = {
    builder.__name__.replace("_", "-"): builder for builders in AREAS.values() for builder in builders
}
NUM_TRAIN, NUM_EVAL, NUM_REPEAT, NUM_TRAIN_PAIRS = 69, 20, 6, 12

EVAL_ACTIONS = (
    "append-word",
    "copy-file",
    "delete-file",
    "replace-word",
    "count-words",
    "sum-column",
    "sort-numbers",
    "first-lines",
    "set-mode",
    "json-get",
    "git-tag",
)
EVAL_LOOKS = ("note-file", "note-word", "note-task", "find-kind", "find-word")
NARROW_EXTRAS = ("count-lines", "note-file")
"""The families of train8 besides repeat-word."""

Make = Callable[[Draw], Exercise]


@dataclass(frozen=True, slots=True)
class Plan:
    """The exercises of one seed, by split."""

    train: tuple[Exercise, ...]
    evaluation: tuple[Exercise, ...]

    @property
    def narrow(self) -> tuple[Exercise, ...]:
        """The 8: all that repeat, and the first of each extra family."""
        repeats = [exercise for exercise in self.train if exercise.family == "repeat-word"]
        extras = [next(e for e in self.train if e.family == family) for family in NARROW_EXTRAS]
        return (*repeats, *extras)


def make_plan(seed: int) -> Plan:
    """The 89 exercises of `seed`; no name and no instruction appears twice."""
    rng = random.Random(f"minibench {seed}")
    names: set[str] = set()
    instructions: set[str] = set()

    def fresh(make: Make) -> Exercise:
        while True:
            exercise = make(Draw(rng))
            if exercise.name not in names and exercise.instruction not in instructions:
                names.add(exercise.name)
                instructions.add(exercise.instruction)
                return exercise

    train = [fresh(make) for make in _train_families(rng)]
    evaluation = [fresh(make) for make in _eval_families(rng)]
    return Plan(tuple(train), tuple(evaluation))


def make_single(family: str) -> Make:
    """How to make an exercise of one action."""
    builder = ACTIONS[family]
    return lambda draw: single(builder(draw))


def make_pair(first: str, second: str) -> Make:
    """How to make an exercise of two actions."""
    return lambda draw: compose(draw, first, second)


def _train_families(rng: random.Random) -> Sequence[Make]:
    singles = [make_single(family) for family in ACTIONS]
    repeats = [make_single("repeat-word")] * (NUM_REPEAT - 1)
    pairs = [make_pair(*pair) for pair in rng.sample(TRAIN_PAIRS, NUM_TRAIN_PAIRS)]
    num_looks = NUM_TRAIN - len(singles) - len(repeats) - len(pairs)
    looks = [LOOKS[index % len(LOOKS)] for index in range(num_looks)]
    return [*singles, *repeats, *looks, *pairs]


def _eval_families(rng: random.Random) -> Sequence[Make]:
    singles = [make_single(family) for family in EVAL_ACTIONS]
    by_name = {look.__name__.replace("_", "-"): look for look in LOOKS}
    looks = [by_name[family] for family in EVAL_LOOKS]
    pairs = [sorted(pair) for pair in HELD_OUT_COMPOSITIONS]
    pairs.append(pairs[0][::-1])
    num_pairs = NUM_EVAL - len(singles) - len(looks)
    return [*singles, *looks, *(make_pair(first, second) for first, second in pairs[:num_pairs])]
