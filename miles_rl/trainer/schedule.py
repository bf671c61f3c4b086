"""Learning-rate schedules, as functions of the number of optimizer steps done."""

from __future__ import annotations

import math
from typing import Literal

LrSchedule = Literal["constant", "linear", "cosine"]


def lr_factor(schedule: LrSchedule, step: int, warmup_steps: int, total_steps: int | None) -> float:
    """What the peak rate is multiplied by in optimizer step `step`, counted from 0. Never 0 inside the schedule.

    Rises linearly over `warmup_steps`, then stays, or falls to 0 at `total_steps`. Raises `ValueError` past the end of
    a schedule that falls: steps at rate 0 would teach nothing and say nothing.
    """
    if schedule != "constant" and (total_steps is None or step >= total_steps):
        raise ValueError(
            f"trainer.lr_schedule: {schedule}; it has ended after {total_steps} optimizer steps: run fewer"
        )
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if schedule == "constant" or total_steps is None:
        return 1.0
    done = (step - warmup_steps) / (total_steps - warmup_steps)
    return 1 - done if schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
