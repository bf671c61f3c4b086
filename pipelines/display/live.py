"""The display on a terminal: one panel that stays in place while the run goes on."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence
from itertools import pairwise

from rich.box import ROUNDED
from rich.console import Console, Group, RenderableType
from rich.control import Control
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.segment import ControlType
from rich.table import Table
from rich.text import Text

from pipelines.display.board import Board
from pipelines.display.echo import without_echo
from pipelines.wording import duration, figure, percent, percent_interval, points

MARKS = {
    "waiting": ("\u25cb", "dim"),
    "starting": ("\u25d0", "yellow"),
    "up": ("\u25cf", "green"),
    "stopping": ("\u25d1", "yellow"),
    "down": ("\u25a0", "dim"),
    "failed": ("\u2716", "bold red"),
}
ASCII_MARKS = {"waiting": ".", "starting": "~", "up": "*", "stopping": "~", "down": "-", "failed": "x"}
BLOCKS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
ASCII_BLOCKS = "._-=+*%#"
NUM_NOTES = 3
LABEL_WIDTH = len("solve rate")
LEFT_WIDTH = len("59 m 59 s of training left")
"""Kept free also when nothing stands there, so that the bar does not jump."""


@contextlib.contextmanager
def live(board: Board, console: Console) -> Generator[None]:
    """The panel of `board`, drawn anew several times a second; on leaving, also by an error, the terminal is as it was.

    What the program prints meanwhile appears above the panel. What is typed meanwhile is not shown: `^C` or an empty
    line would push the panel down, and a part of it would be left behind.
    """
    with without_echo(), _Resizing(Painter(board, unicode=console.encoding.startswith("utf")), console):
        yield


class _Resizing(Live):
    """A panel that leaves nothing behind when the terminal is made narrower.

    A terminal then wraps each line that stands, so that the panel takes more rows than were drawn, and `Live` goes
    up only as many as were drawn.
    """

    def __init__(self, painter: Painter, console: Console) -> None:
        self._painter, self._drawn_width, self._drawn_height = painter, console.width, 0
        super().__init__(
            console=console,
            get_renderable=self._draw,
            refresh_per_second=6,
            vertical_overflow="ellipsis",
            redirect_stdout=True,
            redirect_stderr=True,
        )

    def refresh(self) -> None:
        """Draw; first remove what a narrower terminal has wrapped."""
        width = self.console.width
        if width < self._drawn_width:
            num_wrapped = self._drawn_height * (-(-self._drawn_width // width) - 1)
            up = ((ControlType.CURSOR_UP, 1), (ControlType.ERASE_IN_LINE, 2)) * num_wrapped
            self.console.control(Control(ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2), *up))
        self._drawn_width = width
        super().refresh()

    def _draw(self) -> RenderableType:
        panel = self._painter.panel()
        num_lines = len(self.console.render_lines(panel, pad=False))
        self._drawn_height = min(num_lines, self.console.height)
        return panel


class Painter:
    """Draws a board. `unicode` is False for terminals that can show ASCII only."""

    def __init__(self, board: Board, unicode: bool = True) -> None:
        self._board = board
        self._unicode = unicode

    def panel(self) -> RenderableType:
        """The whole panel as of now."""
        board = self._board
        with board.lock:
            parts = [self._stages(), Text(), self._progress(), Text(), self._figures()]
            if board.notes:
                parts += [Text(), self._notes()]
            failed = any(state == "failed" for state, _ in board.stages.values())
            seed = "" if board.seed is None else f" - seed {board.seed}"
            title = Text.assemble(" ", (board.name, "bold"), (f"{seed} ", "dim"))
            clock = Text(f" {duration(board.elapsed_s)} ", "dim")
        border = "red" if failed else "cyan"
        return Panel(
            Group(*parts), box=ROUNDED, title=title, title_align="left", subtitle=clock, subtitle_align="right",
            border_style=border, padding=(1, 2),
        )  # fmt: skip

    def _stages(self) -> Text:
        row = Text()
        for name, (state, _) in self._board.stages.items():
            mark, style = MARKS.get(state, ("?", "yellow"))
            mark = mark if self._unicode else ASCII_MARKS.get(state, "?")
            row.append(f"{mark} ", style)
            row.append(f"{name}   ", "bold red" if state == "failed" else "" if state == "up" else "dim")
        for name, (state, detail) in self._board.stages.items():
            if detail and state in ("starting", "stopping", "failed"):
                shown = detail if detail.startswith(f"{name}:") else f"{name}: {detail}"
                row.append(f"\n{shown}", "red" if state == "failed" else "dim")
        return row

    def _notes(self) -> Table:
        """What was worth a line, each with the time at which it was said: it may be long past."""
        table = Table.grid(padding=(0, 2), expand=True)
        table.add_column(style="dim", no_wrap=True, min_width=LABEL_WIDTH)
        table.add_column(style="dim", no_wrap=True, overflow="ellipsis", ratio=1)
        for said_s, note in list(self._board.notes)[-NUM_NOTES:]:
            table.add_row(duration(said_s), Text(note))
        return table

    def _progress(self) -> Table:
        board = self._board
        row = Table.grid(padding=(0, 2), expand=True)
        row.add_column(no_wrap=True)
        row.add_column(ratio=1)
        row.add_column(no_wrap=True, justify="right", min_width=LEFT_WIDTH)
        left = "" if board.left_s is None else f"{duration(board.left_s)} of training left"
        done = Text.assemble("step ", (str(board.step), "bold"), (f" / {board.steps}", "dim"))
        row.add_row(done, ProgressBar(max(1, board.steps), board.step, complete_style="cyan"), Text(left, "dim"))
        return row

    def _figures(self) -> Table:
        table = Table.grid(padding=(0, 2), expand=True)
        table.add_column(style="dim", no_wrap=True, min_width=LABEL_WIDTH)
        table.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
        if not self._board.ended:
            table.add_row("now", self._now())
            table.add_row("evaluation", self._evaluation())
        table.add_row("solve rate", self._solve_rate())
        table.add_row("reward", self._reward())
        table.add_row("episodes", self._episodes())
        table.add_row("policy", self._policy())
        table.add_row("pace", self._pace())
        return table

    def _now(self) -> str:
        phase, evaluating = self._board.phase, self._board.progress
        if evaluating is None or evaluating.version is None or phase.startswith("evaluating"):
            return phase
        told = f"evaluating version {evaluating.version}"
        # The trainer asks for evaluations: it has started, and only not said so yet.
        return told if phase == "starting" else f"{phase}; {told}"

    def _evaluation(self) -> Text:
        now = self._board.progress
        if now is None:
            took_s, episodes = self._board.of("eval", "took_s"), self._board.of("eval", "episodes")
            if took_s is None or episodes is None:
                return Text("-", "dim")
            return Text(f"the last took {duration(took_s)} for {figure(episodes)} episodes", "dim")
        left = "" if now.left_s is None else f", {duration(now.left_s)} left"
        solved = "" if now.solve_rate is None else f"{percent(now.solve_rate)} solved, "
        text = Text(f"{now.done:,} of {now.total:,} episodes, {solved}")
        text.append(f"{now.infra_failures} failures", "red" if now.infra_failures else "dim")
        return text.append(left)

    def _solve_rate(self) -> Text:
        seen = self._board.evaluations
        if not seen:
            return Text("-", "dim")
        first, last = seen[0], seen[-1]
        text = Text.assemble((percent(first.solve_rate), "bold"), (f" {percent_interval(first.ci95)}", "dim"))
        if len(seen) > 1:
            change = last.solve_rate - first.solve_rate
            colour = "green" if change > 0 else "red" if change < 0 else ""
            text.append(" -> ", "dim")
            text.append(percent(last.solve_rate), f"bold {colour}")
            text.append(f" {percent_interval(last.ci95)} ", "dim")
            text.append(f"{points(change)} points", colour)
        return text if last.version is None else text.append(f" at version {last.version}", "dim")

    def _reward(self) -> Text:
        rewards = self._board.rewards
        if not rewards:
            return Text(figure(self._board.of("rollout", "reward_mean")))
        return Text.assemble((figure(rewards[-1]), "bold"), "  ", (self._sparkline(rewards), "green"))

    def _sparkline(self, values: Sequence[float], width: int = 36) -> str:
        blocks = BLOCKS if self._unicode else ASCII_BLOCKS
        count = min(width, len(values))
        ends = [place * len(values) // count for place in range(count + 1)]
        means = [sum(values[i:j]) / (j - i) for i, j in pairwise(ends)]
        low, high = min(means), max(means)
        spread = (high - low) or 1.0
        return "".join(blocks[min(len(blocks) - 1, int((mean - low) / spread * len(blocks)))] for mean in means)

    def _episodes(self) -> Text:
        of = self._board.of
        running, done, failed = of("rollout", "running"), of("rollout", "scored"), of("rollout", "failed") or 0
        if running is None and done is None:
            return Text("-", "dim")
        text = Text("" if self._board.ending else f"{figure(running)} running, ")
        text.append(f"{figure(done)} scored, ")
        text.append(f"{figure(failed)} failed", "red" if failed else "dim")
        if stale := of("rollout", "stale"):
            text.append(f", {figure(stale)} groups too old", "yellow")
        if slow := of("rollout", "waits_for_groups"):
            text.append(f"; waits for {figure(slow)} protected groups", "yellow")
        return text

    def _policy(self) -> Text:
        metric = self._board.metric
        text = _named("KL to rollout policy", metric("train/train_rollout_kl"))
        mean, worst = metric("async/staleness_mean"), metric("async/staleness_max")
        text.append_text(_named("versions behind", f"{figure(mean)} (max {figure(worst)})" if worst else mean))
        text.rstrip()  # what is cut is marked, also if it is a space
        return text

    def _pace(self) -> Text:
        of = self._board.of
        text = _named("tokens/s", self._board.metric("perf/tokens_per_s"))
        text.append_text(_named("s/step", self._board.metric("perf/step_s")))
        size = of("sandboxes", "size")
        if self._board.ending or size is None:
            return text
        return text.append_text(_named("sandboxes in use", f"{figure(of('sandboxes', 'in_use'))} of {figure(size)}"))


def _named(name: str, value: float | str | None) -> Text:
    shown = value if isinstance(value, str) else figure(value)
    return Text.assemble((f"{name} ", "dim"), f"{shown}   ")
