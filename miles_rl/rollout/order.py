"""The order of the data: which task comes next."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from typing import Any


class TaskOrder:
    """Tasks for ever, epoch by epoch, each epoch shuffled by the seed alone. Re-queued tasks come first."""

    def __init__(self, tasks: Sequence[str], seed: int, drawn: int = 0, requeued: Sequence[str] = ()) -> None:
        if not tasks:
            raise ValueError("dataset: no tasks to train on")
        self._tasks, self._seed = list(tasks), seed
        self._epoch, self._shuffled = -1, list[str]()
        self.drawn = drawn
        self.requeued = deque(requeued)

    def next(self) -> str:
        """Name of the next task."""
        if self.requeued:
            return self.requeued.popleft()
        epoch, position = divmod(self.drawn, len(self._tasks))
        if epoch != self._epoch:
            self._epoch, self._shuffled = epoch, list(self._tasks)
            random.Random(f"{self._seed}/{epoch}").shuffle(self._shuffled)
        self.drawn += 1
        return self._shuffled[position]

    def cursor(self) -> dict[str, Any]:
        """Where the order stands: `drawn` tasks so far, `requeued` ones to come first."""
        return {"drawn": self.drawn, "requeued": list(self.requeued)}
