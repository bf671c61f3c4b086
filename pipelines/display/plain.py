"""The display where there is no terminal: plain lines for a log file or a CI job."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TextIO

from pipelines.display.board import Board, Progress
from pipelines.say import say
from pipelines.wording import clean, duration, figure, percent, percent_interval


class PlainDisplay:
    """Writes a line for each change of a stage, each evaluation and each note, and at most one line per step and
    `min_interval_s`; the first and the last step always get theirs. While an evaluation runs, how far it has come is
    told at the same pace. Never an escape sequence. A reader who went away (`| head`) ends the lines, not the run.
    """

    def __init__(self, board: Board, out: TextIO, min_interval_s: float = 2.0) -> None:
        self._board = board
        self._out = out
        self._min_interval_s = min_interval_s
        self._shown_step = 0
        self._shown_s = -min_interval_s
        self._shown_evaluations: set[int | None] = set()
        self._shown_problem = ""
        self._shown_progress = Progress(None, 0, 0, None, 0, None)
        self._shown_progress_s = -min_interval_s

    def stage(self, name: str, state: str, detail: str = "") -> None:
        """A stage changed its state."""
        with self._board.lock:
            known = self._board.stages.get(name)
            self._board.stage(name, state, detail)
            if self._board.stages[name] != known:
                self._line(f"{name}: {state}" + (f" ({clean(detail)})" if detail else ""))

    def status(self, name: str, figures: Mapping[str, Any]) -> None:
        """A stage's heartbeat: shown when there is a new step, a new evaluation, or news of one that runs."""
        board = self._board
        with board.lock:
            board.status(name, figures)
            self._show_evaluations()
            if board.problem not in ("", self._shown_problem):
                self._shown_problem = board.problem
                self._line(board.problem)
            waited_s = board.elapsed_s - self._shown_s
            due = waited_s >= self._min_interval_s or board.step >= board.steps
            if self._has_new_step() and due:
                self._shown_step, self._shown_s = board.step, board.elapsed_s
                self._line(self._step_line())

    def _has_new_step(self) -> bool:
        """A step that an earlier run did is not news."""
        first = self._board.first_step
        return first is not None and self._board.step > max(first, self._shown_step)

    def _show_evaluations(self) -> None:
        board = self._board
        for done in board.evaluations:
            if done.version not in self._shown_evaluations:
                self._shown_evaluations.add(done.version)
                self._line(
                    f"{_named(done.version)}: solve rate {percent(done.solve_rate)} {percent_interval(done.ci95)}"
                )
        now = board.progress
        waited_s = board.elapsed_s - self._shown_progress_s
        if now is None or waited_s < self._min_interval_s:
            return
        seen = self._shown_progress
        if (now.version, now.done, now.infra_failures) != (seen.version, seen.done, seen.infra_failures):
            self._shown_progress, self._shown_progress_s = now, board.elapsed_s
            left = "" if now.left_s is None else f", {duration(now.left_s)} left"
            solved = "" if now.solve_rate is None else f", {percent(now.solve_rate)} solved"
            told = f"{now.done:,} of {now.total:,} episodes{solved}, {now.infra_failures} failures{left}"
            self._line(f"{_named(now.version)}: {told}")

    def note(self, line: str) -> None:
        """Something worth a line."""
        with self._board.lock:
            self._board.note(line)
            self._line(clean(line))

    def close(self) -> None:
        """Show the last step if the pace limit kept it back."""
        with self._board.lock:
            if self._has_new_step():
                self._line(self._step_line())

    def _step_line(self) -> str:
        board = self._board
        parts = [f"step {board.step}/{board.steps}"]
        wanted = {
            "reward": board.metric("rollout/reward_mean"),
            "kl": board.metric("train/train_rollout_kl"),
            "staleness": board.metric("async/staleness_mean"),
            "tokens/s": board.metric("perf/tokens_per_s"),
        }
        parts += [f"{name} {figure(value)}" for name, value in wanted.items() if value is not None]
        if failed := board.of("rollout", "failed"):
            parts.append(f"failed {figure(failed)}")
        if stale := board.of("rollout", "stale"):
            parts.append(f"groups too old {figure(stale)}")
        if slow := board.of("rollout", "waits_for_groups"):
            parts.append(f"waits for {figure(slow)} protected groups")
        if board.left_s is not None:
            parts.append(f"{duration(board.left_s)} of training left")
        return "  ".join(parts)

    def _line(self, text: str) -> None:
        say(f"[{self._board.elapsed_s:7.1f} s] {text.rstrip()}", self._out)


def _named(version: int | None) -> str:
    return "evaluation" if version is None else f"evaluation of version {version}"
