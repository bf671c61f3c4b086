"""What a person sees of a run while it goes on, and the three lines at its end."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Generator
from pathlib import Path

from rich.console import Console

from pipelines.display.board import Board
from pipelines.display.closing import closing_lines
from pipelines.display.live import live
from pipelines.display.plain import PlainDisplay
from pipelines.observer import Observer
from pipelines.plan import Plan

__all__ = ["closing_lines", "make_display"]


@contextlib.contextmanager
def make_display(plan: Plan, run_dir: str | Path, total_steps: int) -> Generator[Observer]:
    """An observer that shows the run: a live panel on a terminal, plain lines elsewhere (pipe, file, TERM=dumb).

    On leaving, also by an exception, the terminal is as it was and the panel's last state stays on it.
    """
    name, seed = str(plan.config["name"]), int(plan.config["seed"])
    board = Board(name, seed, [stage.name for stage in plan.stages], total_steps)
    resume = plan.config.get("resume")
    goes_on = "" if resume is None else f" - goes on from {resume}"
    console = Console()
    if sys.stdout.isatty() and not console.is_dumb_terminal:
        board.note(f"run folder: {run_dir}{goes_on}")
        with live(board, console):
            try:
                yield board
            finally:
                board.finish()
        return
    plain = PlainDisplay(board, sys.stdout)
    plain.note(f"{name} - seed {seed} - run folder: {run_dir}{goes_on}")
    try:
        yield plain
    finally:
        plain.close()
