"""Faults of a stage's process: its wall clock jumps, or it is lost."""

from __future__ import annotations

import os
import signal
import time
from typing import Any, Literal

from miles_rl.faults.strike import check_version, struck, when_published


class ClockJump:
    """The wall clock of a stage's process jumps by `jump_s` seconds when the weights of `at_version` are published."""

    def __init__(
        self, seed: int, stage: Literal["rollout", "fleet"] = "rollout", jump_s: float = 3600.0, at_version: int = 2
    ) -> None:
        check_version(at_version)
        self.stage, self._jump_s, self._at_version = stage, jump_s, at_version

    def install(self, component: Any) -> None:
        """See `Fault`."""
        real = time.time

        def strike() -> None:
            struck(f"the wall clock jumps by {self._jump_s:g} s")
            time.time = lambda: real() + self._jump_s

        when_published(component, self.stage, self._at_version, strike)


class WorkerLoss:
    """The Ray worker of a stage is lost when the weights of `at_version` are published."""

    def __init__(self, seed: int, stage: Literal["rollout", "fleet"] = "rollout", at_version: int = 2) -> None:
        check_version(at_version)
        self.stage, self._at_version = stage, at_version

    def install(self, component: Any) -> None:
        """See `Fault`."""

        def strike() -> None:
            struck(f"the worker of stage {self.stage} is lost")
            os.kill(os.getpid(), signal.SIGKILL)

        when_published(component, self.stage, self._at_version, strike)
