"""minibench: terminal tasks small enough for a policy of a million parameters, and real enough to be Harbor tasks."""

from __future__ import annotations

import hashlib
from functools import cached_property
from pathlib import Path

from sandbox_env.suites.base import Demonstration
from sandbox_env.suites.minibench.demonstrations import draw_demonstrations
from sandbox_env.suites.minibench.plan import Plan, make_plan
from sandbox_env.suites.minibench.writer import materialise
from sandbox_env.task import Task, load_task

SPLITS = ("train69", "eval20", "train8", "all")


class Minibench:
    """89 tasks generated from `seed`, kept under `root` (`~` is expanded) in one folder per seed and generator.

    train69 and eval20 are disjoint; train8 is a part of train69; `all` is train69 and then eval20. Eval has other
    names and numbers than train, and pairs of actions that are neither in train nor in a demonstration
    (`compose.HELD_OUT_COMPOSITIONS`).
    """

    def __init__(self, root: str, seed: int = 0) -> None:
        if seed < 0:
            raise ValueError(f"suite.seed: {seed}; give at least 0")
        self.root = Path(root).expanduser()
        self.seed = seed

    def splits(self) -> tuple[str, ...]:
        """The names that `tasks` knows."""
        return SPLITS

    def tasks(self, split: str) -> list[Task]:
        """The tasks of a split, in the order of the plan. Raises `ValueError` naming the known splits."""
        if split not in SPLITS:
            raise ValueError(f"dataset: {split!r}; minibench has the splits {', '.join(SPLITS)}")
        plan = self._plan
        chosen = {
            "train69": plan.train,
            "eval20": plan.evaluation,
            "train8": plan.narrow,
            "all": (*plan.train, *plan.evaluation),
        }[split]
        return [load_task(self.folder / exercise.name) for exercise in chosen]

    def demonstrations(self, count: int, *, seed: int, mistake_rate: float) -> list[Demonstration]:
        """`count` demonstrations, the share `mistake_rate` of which does not solve its task; 12,000 take a second.

        None has an instruction of the 89 tasks or a held-out composition. Observations are the exact output of the
        command, with its last newline. Raises `ValueError` for a share outside 0 to 1.
        """
        taken = frozenset(exercise.instruction for exercise in (*self._plan.train, *self._plan.evaluation))
        drawn = draw_demonstrations(count, seed=seed, mistake_rate=mistake_rate, exclude=taken)
        return [demonstration for _, demonstration in drawn]

    @cached_property
    def folder(self) -> Path:
        """The folder that holds one folder per task; written on first use."""
        key = f"seed{self.seed}-{generator_version()[:12]}"
        return materialise(self.root, key, (*self._plan.train, *self._plan.evaluation))

    @cached_property
    def _plan(self) -> Plan:
        return make_plan(self.seed)


def generator_version() -> str:
    """sha256 over the sources of this package: a changed generator never reads what another one wrote."""
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()
