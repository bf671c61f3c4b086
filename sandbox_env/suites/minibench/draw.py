"""The random choices behind one exercise: names, words, numbers.

The vocabulary is small on purpose: a policy of a million parameters has to learn to copy names from an instruction
into a command, and names made of a few syllables are a few tokens each.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

FIRST = ("ka", "lo", "mi", "ne", "pu", "ri", "sa", "te", "vo", "zu", "be", "do")
SECOND = ("stel", "rin", "mak", "dor", "vin", "lup", "tas", "gor")
WORDS = tuple(first + second for first in FIRST for second in SECOND)
EXTENSIONS = ("txt", "log", "csv", "md", "dat")


class Draw:
    """Draws for one exercise from `rng`. A word is given at most once, so names never clash with each other."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self._unused = rng.sample(WORDS, 32)

    def word(self) -> str:
        """A word that this exercise has not used yet."""
        return self._unused.pop()

    def words(self, count: int) -> list[str]:
        """`count` words that this exercise has not used yet."""
        return [self.word() for _ in range(count)]

    def file(self, extension: str | None = None) -> str:
        """The name of a file, of any text extension unless one is given."""
        return f"{self.word()}.{extension or self.pick(*EXTENSIONS)}"

    def pick(self, *options: T) -> T:
        """One of `options`."""
        return options[int(self.rng.random() * len(options))]

    def number(self, low: int, high: int) -> int:
        """A whole number from `low` to `high`, both included."""
        return low + int(self.rng.random() * (high - low + 1))

    def numbers(self, count: int, high: int = 20) -> list[int]:
        """`count` different numbers from 1 to `high`."""
        return self.rng.sample(range(1, high + 1), count)

    def lines(self, low: int = 5, high: int = 8) -> list[str]:
        """Different words, one a line, in an order that is neither sorted nor sorted backwards."""
        lines = self.rng.sample(WORDS, self.number(low, high))
        while lines in (sorted(lines), sorted(lines, reverse=True)):
            self.rng.shuffle(lines)
        return lines

    def shuffled(self, items: Sequence[T]) -> list[T]:
        """`items` in a random order."""
        return self.rng.sample(items, len(items))


def text_of(lines: Sequence[object]) -> str:
    """The content of a text file with these lines."""
    return "".join(f"{line}\n" for line in lines)
