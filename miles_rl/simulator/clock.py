"""Virtual time: an event loop whose clock jumps to the next timer as soon as nothing is ready.

Everything of asyncio works on it unchanged (`sleep`, `timeout`, events, tasks), in the same order as on a real loop
with infinitely fast code; an hour of waiting takes no time. `loop.time()` is the virtual clock; `time.monotonic()` is
not, so programs for both kinds of loop ask the loop. Work in threads is not waited for: the clock runs on beside it.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, Literal, TypeVar

T = TypeVar("T")
Time = Literal["virtual", "real"]
LONGEST_S = 1e7
"""Later the floats of the clock are coarser than asyncio's own resolution, and its timers would never be due."""


class Deadlock(Exception):
    """Nothing can happen any more: everybody waits, and nobody is left who could end a wait. The message says who."""


class OutOfTime(ValueError):
    """Virtual time came to `LONGEST_S`. The message says what to change."""


class _JumpingSelector(selectors.DefaultSelector):
    """Never waits: what it would have waited is added to `elapsed_s`."""

    def __init__(self) -> None:
        super().__init__()
        self.elapsed_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        if timeout is None:
            raise Deadlock("no timer is set and nothing is ready: every task waits for another")
        self.elapsed_s += max(0.0, timeout)
        if self.elapsed_s > LONGEST_S:
            raise OutOfTime(
                f"the simulation came to {LONGEST_S:g} virtual seconds; give fewer steps, or a `most` to long tails"
            )
        return ready


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop in virtual time, which starts at 0. A wait that nothing can end raises `Deadlock`."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._jumping.elapsed_s


def run(main: Coroutine[Any, Any, T], time: Time) -> T:
    """`main` to its end, in virtual or real time, and whatever it left behind cancelled."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop if time == "virtual" else None) as runner:
        return runner.run(main)
