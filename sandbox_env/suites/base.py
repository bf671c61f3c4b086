"""The suite contract: where tasks come from. One class here and one YAML in `conf/suite` add a suite."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from sandbox_env.task import Task


@dataclass(frozen=True, slots=True)
class DemoTurn:
    """One command of a demonstration and what the terminal printed for it (stdout and stderr, "" for nothing)."""

    command: str
    observation: str
    exit_code: int = 0


@dataclass(frozen=True, slots=True)
class Demonstration:
    """How to do one task: the instruction, and the commands turn by turn. `mistaken` ones do not solve it."""

    family: str
    instruction: str
    turns: tuple[DemoTurn, ...]
    mistaken: bool = False


class Suite(Protocol):
    """A folder of tasks in Harbor format with named splits."""

    def tasks(self, split: str) -> list[Task]:
        """The tasks of a split, in a fixed order. Raises `ValueError` naming the known splits."""
        ...

    def demonstrations(self, count: int, *, seed: int, mistake_rate: float) -> Sequence[Demonstration]:
        """`count` demonstrations, none of a task of this suite. Raises `ValueError` if the suite has none to give."""
        ...
